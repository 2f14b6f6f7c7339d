"""What a checkpoint of a run holds, and how a run goes on from one.

`checkpoint.py` knows folders and checksums; this file knows models and optimizers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kubetune import checkpoint, errors, faults, files, logs, parallel, watchdog
from kubetune.checkpoint import State
from kubetune.data.tokenizer import Tokenizer
from kubetune.optim import FlatAdamW
from kubetune.parallel import World

OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class Snapshots:
    """Saves and restores one run. All ranks call; rank 0 writes, since every rank holds the same."""

    run_dir: Path
    world: World
    model: Any
    optimizer: FlatAdamW
    tokenizer: Tokenizer
    keep: int
    labelled: bool = False

    def save(self, state: State) -> State:
        """Commit a checkpoint of this state, move the links, prune. Returns on all ranks when it is durable."""
        watchdog.beat("save", state.step)
        state = replace(state, saved_step=state.step)
        failure: errors.KubetuneError | None = None
        if self.world.is_main:
            try:
                checkpoint.commit(self.run_dir, state, self._write)
                self._tidy(state)
            except errors.KubetuneError as error:
                failure = error
        # Every rank hears how it went: one that went on alone would wait in the next collective for a dead rank 0.
        failure = parallel.broadcast(failure, self.world)
        if failure is not None:
            raise failure
        logs.STEP.info("saved checkpoint %s", checkpoint.folder_of(self.run_dir, state.step).name)
        return state

    def require_room(self) -> None:
        """Raise EnvironmentFault, before hours are spent, when the checkpoints still to come do not fit the disk."""
        trained = (p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        each = sum(trained) + sum(t.numel() * t.element_size() for t in self.optimizer.state().values())
        # One more than are kept: the new one is whole before an old one goes.
        missing = max(1, self.keep + 1 - len(checkpoint.steps(self.run_dir)))
        free = parallel.broadcast(files.free_bytes(self.run_dir), self.world)
        if free < missing * each:
            raise errors.EnvironmentFault(
                f"{self.run_dir}: {missing} checkpoints of {each:,} bytes need {missing * each:,} bytes, {free:,} are "
                "free; free some space, or lower training.save_total_limit, and run the same command again"
            )

    def link(self, state: State) -> None:
        """Point `last` and `best` at their checkpoints."""
        if self.world.is_main:
            checkpoint.link(self.run_dir, "last", state.saved_step)
            if state.best_step is not None and checkpoint.folder_of(self.run_dir, state.best_step).is_dir():
                checkpoint.link(self.run_dir, "best", state.best_step)

    def _tidy(self, state: State) -> None:
        self.link(state)
        if self.world.is_main:
            checkpoint.prune(self.run_dir, self.keep, {state.best_step or 0})

    def _write(self, folder: Path) -> None:
        try:
            self.model.save_pretrained(folder)
            if self.labelled and hasattr(self.model, "get_base_model"):
                # An adapter of a classifier is of no use without the names and number of its classes.
                self.model.get_base_model().config.save_pretrained(folder)
            self.tokenizer.save(folder)
            faults.reach("commit.weights")
            save_file(self.optimizer.state(), folder / OPTIMIZER)
        except SafetensorError as error:
            # A full disk, told in words of its own: "… I/O error: No space left on device (os error 28)".
            if found := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
            raise

    def restore(self, mode: str, data_fingerprint: str, global_batch_size: int) -> State:
        """Go on from the newest whole checkpoint, or start at step 0.

        `mode` is training.resume. Raises ConfigError when a checkpoint must or must not be there, or was made from
        other data.
        """
        found = parallel.broadcast(self._find() if self.world.is_main else None, self.world)
        if isinstance(found, Exception):
            raise found
        if found is None:
            if mode == "must":
                raise errors.ConfigError(f"training.resume is must, but {self.run_dir} has no checkpoint")
            return State(data_fingerprint=data_fingerprint, global_batch_size=global_batch_size)
        if mode == "never":
            raise errors.ConfigError(
                f"training.resume is never, but {self.run_dir} has {found.name}; choose another `output`"
            )
        state = checkpoint.load_state(found)
        then, now = (state.data_fingerprint, state.global_batch_size), (data_fingerprint, global_batch_size)
        if then != now:
            raise errors.ConfigError(
                f"{found} was made from data {then[0]} with global_batch_size {then[1]}, this run has data {now[0]} "
                f"with {now[1]}: going on would repeat or skip samples. Choose another `output`, or put back what "
                "changed"
            )
        try:
            self.optimizer.load(load_file(found / OPTIMIZER, device=str(self.world.device)))
        except ValueError as error:
            raise errors.ConfigError(
                f"{found}: {error}; was `model` or `lora` changed since? Use another `output`"
            ) from error
        self._tidy(state)  # the start before may have died between a checkpoint's commit and its links
        logs.STEP.info("resumed from %s", found.name)
        return state

    def _find(self) -> Path | Exception | None:
        try:
            checkpoint.clean(self.run_dir)
            return checkpoint.find(self.run_dir)
        except errors.KubetuneError as error:
            return error
