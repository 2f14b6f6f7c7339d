"""Content of a checkpoint of a run, when it is written, and how a run goes on from one.

`rundir/checkpoints` knows folders and checksums, training/optimizer/shards the optimizer's file; this file knows models and
optimizers.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kubetune import errors
from kubetune.base import fault_injection, files, logs, whole_folder
from kubetune.base.humanize import pause
from kubetune.config import consent
from kubetune.data.prepared.identity import Check
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp
from kubetune.models.padding_free import unwrap
from kubetune.rundir import checkpoints as checkpoint
from kubetune.rundir import heartbeat, metrics
from kubetune.rundir.checkpoints import State
from kubetune.training.full_disk import explained_full_disk, require_free
from kubetune.training.host_copies import Held, HostCopies
from kubetune.training.optimizer import shards
from kubetune.training.optimizer.adamw import FlatAdamW


@dataclass
class Checkpointer:
    """Saves and restores one run; all ranks call.

    Where every rank holds the same, rank 0 writes it; of a sharded optimizer each rank writes its slices and rank 0
    puts the model together from them. `background`: tensors are copied, and written while the loop goes on. `base`, on
    rank 0: what the run is made from, which is recorded before the first checkpoint and compared before going on.
    """

    run_dir: Path
    world: World
    model: Any
    optimizer: FlatAdamW
    tokenizer: Tokenizer
    keep: int
    labelled: bool = False
    background: bool = False
    brings_code: bool = (
        False  # its checkpoints hold code of the model, which runs when they are loaded
    )
    timeout_seconds: float = 1800.0
    base: Check | None = None
    _writing: Future[errors.KubetuneError | None] | None = field(default=None, init=False)
    _state: State = field(default_factory=State, init=False)
    _copies: HostCopies = field(default_factory=HostCopies, init=False)
    _bytes: int = field(default=0, init=False)
    _stall_seconds: float = field(default=0.0, init=False)
    _rehearses: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._is_whole = self.optimizer.size == self.optimizer.master.numel()
        # A thread's collectives must not mix with the loop's, so it has a group of its own.
        self._group = (
            None if self._is_whole else process_group.side_group(self.world, self.timeout_seconds)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is being written, also when all ranks end for a reason they agree on."""
        if error is None:
            self.finish()
        elif (
            isinstance(error, errors.KubetuneError)
            and not isinstance(error, errors.LostPeer)
            and self._writing
        ):
            self._writing.result()

    def save(self, state: State) -> State:
        """Commit a checkpoint of this state, move the links, prune.

        Returns on all ranks when it is durable; in the background, when it is copied. One is written at a time.
        """
        self.finish()
        heartbeat.beat("save", state.step)
        began = time.perf_counter()
        self._state = state = replace(state, saved_step=state.step)
        if self.background:
            self._writing = self._thread.submit(
                self._attempt,
                state,
                self._copies.take(self.model, self.optimizer, is_whole=self._is_whole),
            )
            self._stall_seconds = time.perf_counter() - began
        else:
            failure = self._attempt(state, Held(self.optimizer.state()))
            self._stall_seconds = time.perf_counter() - began
            self._settle(failure)
        return state

    def rehearse(self, state: State) -> int:
        """Write a checkpoint as `save` does and remove it again; returns its bytes.

        It lies where the start after a kill clears away what was half written.
        """
        folder, run_dir = (
            files.temporary_sibling(self.run_dir / "checkpoints" / "preflight"),
            self.run_dir,
        )
        self._state, self.run_dir = state, process_group.broadcast(folder, self.world)
        self._rehearses = True
        try:
            held = (
                self._copies.take(self.model, self.optimizer, is_whole=self._is_whole)
                if self.background
                else Held(self.optimizer.state())
            )
            self._require_all(self._attempt(state, held))
            written = (self.run_dir / "checkpoints").rglob("*")
            return sum(
                path.stat().st_size for path in written if path.is_file() and not path.is_symlink()
            )
        finally:
            process_group.barrier(self.world)
            if self.world.is_main and self.run_dir.exists():
                whole_folder.remove(self.run_dir)
            self.run_dir, self._rehearses = run_dir, False

    @property
    def has_failed(self) -> bool:
        """Known failure of the checkpoint in the background; `finish` says why."""
        return (
            self._writing is not None
            and self._writing.done()
            and self._writing.result() is not None
        )

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if there is one; raises what went wrong with it."""
        if self._writing is None:
            return
        heartbeat.beat("save")
        began = time.perf_counter()
        failure = self._writing.result()
        self._stall_seconds += time.perf_counter() - began
        self._writing = None
        self._settle(failure)

    def _require_all(self, failure: errors.KubetuneError | None) -> None:
        """Raise on every rank what failed on any."""
        if isinstance(failure, errors.LostPeer):
            raise failure  # asking the same ranks again would only take as long once more
        # Every rank hears how it went: one that went on alone would wait in the next collective for a dead rank 0.
        if failures := [
            found for found in process_group.gather(failure, self.world) if found is not None
        ]:
            raise failures[0]

    def _settle(self, failure: errors.KubetuneError | None) -> None:
        self._require_all(failure)
        name = checkpoint.folder_of(self.run_dir, self._state.step).name
        logs.STEP.info("saved checkpoint %s%s", name, pause(self._stall_seconds))
        if self.world.is_main:
            metrics.record_event(
                self.run_dir, "save", step=self._state.step, seconds=self._stall_seconds
            )

    def _attempt(self, state: State, held: Held) -> errors.KubetuneError | None:
        """Write, commit and tidy up; returns what failed instead of raising it, for `_require_all`."""
        try:
            if self.base is not None:
                self.base.record()
            if not self._is_whole:
                self._commit_parts(state, held)
            elif self.world.is_main:
                self._require_place()
                checkpoint.commit(self.run_dir, state, lambda folder: self._write(folder, held))
            self._tidy(state)
            self._allow_code(state)
        except errors.KubetuneError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in files.DISK_FULL:
                return errors.EnvironmentFault(f"{error}; a checkpoint takes {self._bytes:,} bytes")
            return error
        return None

    def _allow_code(self, state: State) -> None:
        """Write down that the code in a checkpoint is that which the user has this run train with."""
        if self.world.is_main and self.brings_code:
            consent.allow([consent.of_folder(checkpoint.folder_of(self.run_dir, state.step))])

    def _require_place(self) -> None:
        """Raise EnvironmentFault without room for a checkpoint; make a rehearsal's folder, but no run directory."""
        require_free(self.run_dir, 1, self._bytes)
        if self._rehearses:
            with files.explained_writes(self.run_dir):
                self.run_dir.parent.mkdir(exist_ok=True)
                self.run_dir.mkdir()

    def require_room(self) -> None:
        """Raise EnvironmentFault, before hours are spent, when the checkpoints still to come do not fit the disk."""
        held = [*self.optimizer.state().values(), *self._trained()]
        mine = sum(t.numel() * t.element_size() for t in held)
        self._bytes = (
            mine if self._is_whole else int(process_group.sum_numbers([mine], self.world)[0])
        )
        # One more than are kept: the new one is whole before an old one goes.
        missing = max(1, self.keep + 1 - len(checkpoint.steps(self.run_dir)))
        require_free(
            self.run_dir,
            missing,
            self._bytes,
            process_group.broadcast(files.free_bytes(self.run_dir), self.world),
        )

    def _trained(self) -> list[Tensor]:
        """This rank's part of what is trained."""
        return [process_group.local(p) for p in self.model.parameters() if p.requires_grad]

    def _link(self, state: State) -> None:
        """Point `last` and `best` at their checkpoints."""
        if self.world.is_main:
            checkpoint.link(self.run_dir, "last", state.saved_step)
            if (
                state.best_step is not None
                and checkpoint.folder_of(self.run_dir, state.best_step).is_dir()
            ):
                checkpoint.link(self.run_dir, "best", state.best_step)

    def _tidy(self, state: State) -> None:
        self._link(state)
        if self.world.is_main:
            checkpoint.prune(self.run_dir, self.keep, {state.best_step or 0})

    def _write(self, folder: Path, held: Held) -> None:
        with explained_full_disk(folder):
            (card := folder / "README.md").write_text(
                "---\nlibrary_name: peft\n---\n"
            )  # or PEFT compiles one
            self.model.save_pretrained(folder, state_dict=held.weights)
            card.unlink()  # a form with nothing filled in
            if self.labelled and (lm := unwrap(self.model)) is not self.model:
                # An adapter of a classifier is of no use without the names and number of its classes.
                lm.config.save_pretrained(folder)
            self.tokenizer.save(folder)
            fault_injection.reach("commit.weights")
            save_file(held.optimizer, folder / shards.OPTIMIZER)

    def _commit_parts(self, state: State, held: Held) -> None:
        """Every rank writes its slices into the folder that rank 0 makes, completes, seals and names."""
        if not self.world.is_main:
            folder = process_group.broadcast(None, self.world, self._group)
            if folder is not None:
                self._write_part(folder, held)
            return
        told = False

        def write(folder: Path) -> None:
            nonlocal told
            told = True
            process_group.broadcast(folder, self.world, self._group)
            self._write_part(folder, held)
            with explained_full_disk(folder):
                self._write_model(folder)

        try:
            self._require_place()
            checkpoint.commit(self.run_dir, state, write)
        finally:
            if not told:  # there is no folder: let the others not wait for one
                process_group.broadcast(None, self.world, self._group)

    def _write_part(self, folder: Path, held: Held) -> None:
        """This rank's slices; raises on every rank what went wrong on any."""
        failure: errors.KubetuneError | None = None
        path = folder / shards.part_name(self.world.rank, self.world.size)
        try:
            with files.explained_writes(path), explained_full_disk(folder):
                shards.write_part(path, held.optimizer, self.optimizer.shards)
                fault_injection.reach("commit.part")
        except errors.EnvironmentFault as error:
            failure = error
        for found in process_group.gather(failure, self.world, self._group):
            if found is not None:
                raise found

    def _write_model(self, folder: Path) -> None:
        config = self.model.config
        beside = fsdp.saved_beside(self.model)
        shards.write_weights(folder, self.optimizer.layout, config.dtype, beside)
        config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)
        self.tokenizer.save(folder)
        fault_injection.reach("commit.weights")

    def restore(self, mode: str, first: State) -> State:
        """Go on from the newest whole checkpoint, or start with `first`, which tells the data and the global batch.

        `mode` is training.resume. Raises ConfigError when a checkpoint must or must not be there, or was made from
        other data.
        """
        found = process_group.broadcast(self._find() if self.world.is_main else None, self.world)
        if isinstance(found, Exception):
            raise found
        if found is None:
            if mode == "must":
                raise errors.ConfigError(
                    f"training.resume is must, but {self.run_dir} has no checkpoint"
                )
            return first
        if mode == "never":
            raise errors.ConfigError(
                f"training.resume is never, but {self.run_dir} has {found.name}; choose another `output`"
            )
        heartbeat.beat("resuming")
        state = checkpoint.load_state(found)
        then, now = (
            f"data {s.data_fingerprint} with "
            + (f"global_batch_tokens {s.global_batch_tokens}, " if s.global_batch_tokens else "")
            + f"global_batch_size {s.global_batch_size}"
            for s in (state, first)
        )
        if then != now:
            raise errors.ConfigError(
                f"{found} was made from {then}, this run has {now}: going on would repeat or skip samples. Choose "
                "another `output`, or put back what changed"
            )
        try:
            with shards.Buffers(found) as buffers:
                self.optimizer.load(buffers.state(self.optimizer.shards, self.optimizer.size))
        except SafetensorError as error:
            raise errors.ConfigError(
                f"{found}: its optimizer state is no safetensors file ({error})"
            ) from error
        except ValueError as error:
            raise errors.ConfigError(
                f"{found}: {error}; was `model` or `lora` changed since? Use another `output`"
            ) from error
        self._tidy(
            state
        )  # the start before may have died between a checkpoint's commit and its links
        logs.STEP.info("resumed from %s", found.name)
        return state

    def _find(self) -> Path | Exception | None:
        try:
            checkpoint.clean(self.run_dir)
            found = checkpoint.find(self.run_dir)
            if found is not None and self.base is not None:
                self.base.require_same()
            return found
        except errors.KubetuneError as error:
            return error
