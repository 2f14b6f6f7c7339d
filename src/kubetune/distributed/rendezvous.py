"""A notice board where ranks meet and find out who is missing. It works before collectives do, and after they fail.

The board is one key-value store, on rank 0 or in torchrun's agent:

    start     which start of the run the board belongs to, if agents have named it
    here/3    host of rank 3, when it has come                phase/3   what rank 3 is about to do
    missing   ranks that never came, by rank 0                heard/3   rank 3 has read that list
    alive/3   rank 3 lives, after a collective has failed

Tensors are for process_group.py.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.rundir import waits
from kubetune.supervisor.rank_environment import START_ID

# Time beyond the timeout, for ranks that wait for rank 0's list of missing ranks.
MARGIN_SECONDS = 5.0

# With two ranks the other one is lost, unless it says at once that it lives.
_ONE_PEER_SECONDS = 1.0


class Absent(errors.EnvironmentFault):
    """A rank did not come in time, or belongs to another start."""


@dataclass(frozen=True)
class Rendezvous:
    """The board as one rank sees it."""

    rank: int
    size: int  # number of ranks
    ranks_per_node: int
    timeout_seconds: float
    address: str  # HOST:PORT of the store, for messages
    store: Store

    def begin(self, phase: str) -> None:
        """Say on the board that this rank is about to do `phase`."""
        self.store.set(f"phase/{self.rank}", phase)
        fault_injection.reach(phase)

    def find_lost(self) -> str:
        """Return a message that names the lost ranks, after a collective has failed here.

        Every rank says that it lives, and rank 0 waits for all of them.
        """
        try:
            self.store.set(f"alive/{self.rank}", "")
            if self.rank != 0:
                return f"rank {self.rank} lost another rank; rank 0 says which"
            # With more ranks, one that does not talk to the lost one notices only by its own timeout.
            seconds = self.timeout_seconds + MARGIN_SECONDS
            if self.size == 2:
                seconds = _ONE_PEER_SECONDS
            losses = []
            for rank in self._missing("alive", seconds):
                host = self._read(f"here/{rank}")
                losses.append(
                    f"{self._name(rank)} on {host} died or hangs, last seen at {self._phase(rank)}"
                )
            return "; ".join(losses)
        except dist.DistError:
            return f"rank 0 at {self.address} died or cannot be reached any more"

    def _phase(self, rank: int) -> str:
        key = f"phase/{rank}"
        return self._read(key) if self.store.check([key]) else "the start"

    def _read(self, key: str) -> str:
        return bytes(self.store.get(key)).decode()

    def _name(self, rank: int) -> str:
        name = f"rank {rank}"
        if self.size > self.ranks_per_node:
            name += f" (node {rank // self.ranks_per_node})"
        return name

    def _missing(self, topic: str, seconds: float) -> list[int]:
        """Return the ranks that have not written `topic/RANK` within `seconds`."""
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return []

    def require_start(self, start: str | None) -> None:
        """Raise Absent if the board belongs to another start than this rank's. None: nobody has named the start."""
        if start is None:
            return
        # The first rank writes, all others compare.
        of_board = bytes(self.store.compare_set("start", "", start)).decode()
        if of_board != start:
            raise Absent(
                f"rank {self.rank} belongs to start {start} of the run, but the board at {self.address} belongs to start "
                f"{of_board}: a node was started again meanwhile"
            )

    def call_roll(self) -> None:
        """Wait until all ranks have come. Raise Absent on every rank that has come, and names those that have not."""
        self.store.set(f"here/{self.rank}", socket.gethostname())
        if self.rank == 0:
            missing = self._missing("here", self.timeout_seconds)
            self.store.set("missing", json.dumps(missing))
        else:
            self.store.wait(["missing"], timedelta(seconds=self.timeout_seconds + MARGIN_SECONDS))
            missing = json.loads(self._read("missing"))
        if not missing:
            return
        # Every rank ends with the same message.
        explanation = self._explain(missing)
        self.store.set(f"heard/{self.rank}", "")
        if self.rank == 0:
            # The board ends with rank 0, so the others must have read it.
            here = [f"heard/{rank}" for rank in range(self.size) if rank not in missing]
            with suppress(dist.DistStoreError):
                self.store.wait(here, timedelta(seconds=MARGIN_SECONDS))
        raise Absent(explanation)

    def _explain(self, missing: Collection[int]) -> str:
        names = ", ".join(self._name(rank) for rank in missing)
        here = []
        for rank in range(self.size):
            if rank not in missing:
                here.append(f"rank {rank} on {self._read(f'here/{rank}')}")
        everybody = f"{self.size} ranks"
        return waits.never_came(names, everybody, self.address, self.timeout_seconds, here)


def meet(environ: Mapping[str, str], timeout_seconds: float) -> Rendezvous:
    """Open the board that torchrun's variables describe, and wait until all ranks have come.

    Raise ConfigError if a variable is missing or no number, Absent if a rank does not come, and EnvironmentFault if rank
    0 cannot listen.
    """
    size = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0)
    # Wrong variables are reported before anything waits.
    if rank >= size:
        raise errors.ConfigError(
            f"RANK is {rank}, but WORLD_SIZE is {size}; expected 0 to {size - 1}"
        )
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if size > 1 and absent:
        raise errors.ConfigError(
            f"WORLD_SIZE is {size}, but {' and '.join(absent)} not set; torchrun sets them"
        )
    _number(environ, "LOCAL_RANK", 0)
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    port = _number(environ, "MASTER_PORT", 0)
    address = f"{host}:{port}"
    # torchrun's agent keeps the store in most set-ups; else rank 0 does.
    is_served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Store = HashStore()
        if size > 1:
            serves = rank == 0 and not is_served_by_agent
            opened = _open_store(rank, size, host, port, timeout_seconds, serves=serves)
            store = PrefixStore("kubetune.distributed.rendezvous", opened)
        ranks_per_node = _number(environ, "LOCAL_WORLD_SIZE", size)
        board = Rendezvous(rank, size, ranks_per_node, timeout_seconds, address, store)
        board.require_start(environ.get(START_ID))
        board.call_roll()
    except dist.DistError as error:
        raise _not_found(rank, address, timeout_seconds, errors.first_line(error)) from error
    return board


def _open_store(
    rank: int, size: int, host: str, port: int, timeout_seconds: float, *, serves: bool
) -> TCPStore:
    """Return the store at an address. With `serves` this process keeps it.

    Raise Absent if nobody answers in time, and EnvironmentFault if this process should keep it and cannot.
    """
    outcome: list[TCPStore | dist.DistError] = []

    def open_it() -> None:
        try:
            # Without waiting for the others: the board is there to say which of them are missing.
            wait = timedelta(seconds=timeout_seconds)
            outcome.append(
                TCPStore(host, port, size, serves, wait, multi_tenant=True, wait_for_workers=False)
            )
        except dist.DistError as error:
            outcome.append(error)

    # In a thread: torch waits for ever if something accepts the connection and stays silent, such as a stopped process.
    opening = threading.Thread(target=open_it, name="opening the store", daemon=True)
    opening.start()
    opening.join(timeout_seconds + MARGIN_SECONDS)
    error: dist.DistError | None = None
    if not outcome:
        reason = _why_silent(host, port)
    elif isinstance(outcome[0], TCPStore):
        return outcome[0]
    else:
        error = outcome[0]
        reason = errors.first_line(error)
    address = f"{host}:{port}"
    if serves:
        raise errors.EnvironmentFault(
            f"rank {rank} cannot listen at {address}: {reason.rstrip('.')}. Set MASTER_PORT to a free port"
        ) from error
    raise _not_found(rank, address, timeout_seconds, reason) from error


def _why_silent(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), MARGIN_SECONDS):
            return waits.SILENT
    except OSError as error:
        return error.strerror or str(error)


def _not_found(rank: int, address: str, timeout_seconds: float, reason: str) -> Absent:
    """Return the error for a store that could not be reached."""
    here = f"rank {rank} on {socket.gethostname()}"
    return Absent(waits.not_found(here, "rank 0", address, timeout_seconds, reason))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise errors.ConfigError(
            f"{name} is {text!r}; expected a whole number, as torchrun sets it"
        )
    return int(text)
