"""Adapter files for the servers, and what is loaded on them. Rank 0 alone uses this.

Each version of the weights has a folder of its own in the run directory, and a name that no other version has, as vLLM
keeps what it computed under an adapter's name. Two versions of a run that lags by one step:

    adapters/kubetune-1f0a9c3d-000004-7be2d1aa    after 4 steps; drew what is learnt from now
    adapters/kubetune-1f0a9c3d-000005-02c4e8f1    after 5 steps; draws what is learnt from next
             run               steps  SHA-256 of the tensors
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kubetune import errors
from kubetune.base import files, logs, whole_folder
from kubetune.rundir import heartbeat
from kubetune.training.rollouts.servers.vllm_client import Refused, Server, ServerTrouble
from kubetune.training.saving import saved_model
from kubetune.training.saving.full_disk import explained_full_disk

FOLDER: Final = "adapters"

# Time before a server is asked again.
_PAUSE_SECONDS: Final = 1.0

# To unload is a courtesy to the server, so that a run does not wait long for it.
_UNLOAD_SECONDS: Final = 10.0

_DIGEST_CHARACTERS: Final = 8


@dataclass(frozen=True)
class Adapter:
    """One version of the weights as servers know it."""

    name: str
    folder: str  # absolute; servers see it at the same place
    step: int  # the weights are those after so many steps


@dataclass
class AdapterFiles:
    """The versions of a run, on disk and on all servers."""

    run_dir: Path
    model: Any  # with its adapter, a PEFT model
    servers: Sequence[Server]
    seconds: float  # that a server may take to load one
    run: str  # digest that tells runs apart
    is_stopping: Callable[[], bool]
    loaded: list[Adapter] = field(default_factory=list)

    def find(self, step: int) -> Adapter | None:
        """Return the version after so many steps if an earlier start left its file."""
        begin = f"{self._prefix}{step:06d}-"
        folders = sorted((self.run_dir / FOLDER).glob(f"{begin}*"), key=_written_at)
        return self._adapter(folders[-1].name, step) if folders else None

    def write(self, step: int) -> Adapter:
        """Write the adapter as it is now, whole or not at all, and return it."""
        tensors = saved_model.adapter_tensors(self.model)
        adapter = self._adapter(f"{self._prefix}{step:06d}-{_digest(tensors)}", step)
        folder = Path(adapter.folder)
        # The same weights were written before, by a start that was killed after that.
        if not folder.is_dir():
            with files.explained_writes(folder):
                folder.parent.mkdir(exist_ok=True)
            with whole_folder.written(folder, "adapter") as partial, explained_full_disk(folder):
                saved_model.adapter_with(self.model, tensors).write(partial)
                whole_folder.share_like(partial, partial / "adapter_config.json")
        return adapter

    def load(self, adapter: Adapter) -> bool:
        """Load a version on every server; False if a stop was asked for meanwhile.

        Raise EnvironmentFault if a server does not load it in time. Then no server keeps it.
        """
        if adapter in self.loaded:
            return True
        is_first = not self.loaded
        deadline = time.monotonic() + self.seconds
        given_up = threading.Event()
        outcomes: dict[str, str | None] = {}  # by address; None for a server that has loaded it

        def load(server: Server) -> None:
            if is_first:
                self._forget_earlier(server, adapter)
            outcomes[server.url] = _loaded(server, adapter, deadline, given_up)

        # All at the same time, as each reads the file and copies it to its GPU.
        threads = _each(self.servers, load)
        while any(thread.is_alive() for thread in threads) and not self.is_stopping():
            heartbeat.beat("sync")
            for thread in threads:
                thread.join(0.1)
        given_up.set()

        is_whole = len(outcomes) == len(self.servers)
        refusals = {url: reason for url, reason in outcomes.items() if reason is not None}
        if is_whole and not refusals:
            self.loaded.append(adapter)
            return True
        # All or none: a server that has it would hold a place for what nobody asks for.
        self._unload_everywhere([adapter.name])
        if not is_whole:
            return False
        (url, reason) = next(iter(refusals.items()))
        raise errors.EnvironmentFault(
            f"sync: rank 0: server {url} did not load the adapter {adapter.folder}, and no server keeps it: it {reason}. "
            "Servers need --enable-lora, a --max-lora-rank of at least lora.r, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and "
            "the run directory at the same path"
        )

    def drop(self, before: int, *, files_before: int) -> None:
        """Unload the versions of fewer steps than `before` everywhere, and delete files of fewer than `files_before`."""
        unused = [adapter for adapter in self.loaded if adapter.step < before]
        self.loaded = [adapter for adapter in self.loaded if adapter.step >= before]
        self._unload_everywhere([adapter.name for adapter in unused])
        for folder in (self.run_dir / FOLDER).glob(f"{self._prefix}*"):
            number = folder.name.removeprefix(self._prefix).partition("-")[0]
            if number.isdigit() and int(number) < files_before:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Unload everything. Files stay: a start that goes on may need them."""
        self._unload_everywhere([adapter.name for adapter in self.loaded])
        self.loaded.clear()

    def _unload_everywhere(self, names: Sequence[str]) -> None:
        """Unload adapters from all servers, from those that answer soon."""

        def unload(server: Server) -> None:
            for name in names:
                _unload(server, name)

        if names:
            deadline = time.monotonic() + _UNLOAD_SECONDS
            for thread in _each(self.servers, unload):
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def _prefix(self) -> str:
        return f"kubetune-{self.run}-"

    def _adapter(self, name: str, step: int) -> Adapter:
        return Adapter(name, str((self.run_dir / FOLDER / name).absolute()), step)

    def _forget_earlier(self, server: Server, wanted: Adapter) -> None:
        """Unload what a start of this run that was killed has left on a server."""
        try:
            names = server.models(time.monotonic() + _UNLOAD_SECONDS)
        except (ServerTrouble, TimeoutError):
            return  # it may be starting still; loading waits for it
        for name in names:
            if name.startswith(self._prefix) and name != wanted.name:
                _unload(server, name)


def _each(servers: Sequence[Server], function: Callable[[Server], None]) -> list[threading.Thread]:
    """Call a function with every server at the same time. Nobody waits for these threads at the end of the process."""
    threads = []
    for server in servers:
        thread = threading.Thread(target=function, args=[server], name="adapters", daemon=True)
        thread.start()
        threads.append(thread)
    return threads


def _loaded(
    server: Server,
    adapter: Adapter,
    deadline: float,
    given_up: threading.Event,
) -> str | None:
    """Load an adapter on a server, and ask again until the deadline. Return why it did not; None if it did."""
    reason = "the run was stopped"
    was_said = False
    while not given_up.is_set():
        try:
            server.load(adapter.name, adapter.folder, deadline)
            return None
        except Refused as error:
            return str(error)
        except ServerTrouble as error:
            # Storage may show a file late on another machine, and a server may still start.
            if not was_said:
                was_said = True
                left = deadline - time.monotonic()
                logs.DATA.warning(
                    "server %s is asked for %.0f s to load the adapter, as it %s",
                    server.url,
                    left,
                    error,
                )
            reason = str(error)
        except TimeoutError:
            return reason
        if time.monotonic() + _PAUSE_SECONDS >= deadline:
            return reason
        given_up.wait(_PAUSE_SECONDS)
    return reason


def _unload(server: Server, name: str) -> None:
    try:
        server.unload(name, time.monotonic() + _UNLOAD_SECONDS)
    except (ServerTrouble, TimeoutError) as error:
        logs.DATA.info("server %s keeps the adapter %s: %s", server.url, name, error)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        # As bytes, since numpy has no bfloat16.
        content = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _written_at(folder: Path) -> float:
    return folder.stat().st_mtime
