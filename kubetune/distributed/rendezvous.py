"""A notice board where ranks find each other and say who is missing: it works before and after collectives do.

One key-value store, on rank 0 or in torchrun's agent. Not for tensors (process_group.py).
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

MARGIN_SECONDS = 5.0
"""Time for those who only wait to hear what rank 0 found out."""

# Of two ranks the other one is the lost one, unless it says at once that it is not.
_ONE_PEER_SECONDS = 1.0


class Absent(errors.EnvironmentFault):
    """Somebody who was waited for did not come."""


@dataclass(frozen=True)
class Rendezvous:
    """The board as one rank sees it. Ranks write their host's name when they come, and what they are about to do.

    `who` meets: ranks, or the first processes of nodes.
    """

    rank: int
    size: int
    ranks_per_node: int
    timeout_seconds: float
    address: str
    store: Store
    who: str = "rank"

    def begin(self, phase: str) -> None:
        """This rank is about to do `phase`."""
        self.store.set(f"phase/{self.rank}", phase)
        fault_injection.reach(phase)

    def find_lost(self) -> str:
        """Names of ranks that broke off, after a collective failed here. Rank 0 hears all, others say they live."""
        try:
            self.store.set(f"alive/{self.rank}", "")
            if self.rank != 0:
                return f"rank {self.rank} lost another rank; rank 0 says which"
            # Far from the one that is lost ranks notice only when their own patience ends.
            patience = (
                _ONE_PEER_SECONDS if self.size == 2 else self.timeout_seconds + MARGIN_SECONDS
            )
            silent = self._missing("alive", patience)
            return "; ".join(
                f"{self._name(rank)} on {self._read(f'here/{rank}')} died or hangs, last seen at {self._phase(rank)}"
                for rank in silent
            )
        except dist.DistError:
            return f"rank 0 at {self.address} died or cannot be reached any more"

    def _phase(self, rank: int) -> str:
        return self._read(f"phase/{rank}") if self.store.check([f"phase/{rank}"]) else "the start"

    def _read(self, key: str) -> str:
        return bytes(self.store.get(key)).decode()

    def _name(self, rank: int) -> str:
        return f"{self.who} {rank}" + (
            f" (node {rank // self.ranks_per_node})" if self.size > self.ranks_per_node else ""
        )

    def _missing(self, topic: str, seconds: float) -> list[int]:
        """Ranks that have not written about `topic` when `seconds` are over."""
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return []

    def call_roll(self) -> None:
        """Wait until all ranks are here. Raises Absent on all that are, naming those that never came."""
        self.store.set(f"here/{self.rank}", socket.gethostname())
        if self.rank == 0:
            missing = self._missing("here", self.timeout_seconds)
            self.store.set("missing", json.dumps(missing))
        else:
            self.store.wait(["missing"], timedelta(seconds=self.timeout_seconds + MARGIN_SECONDS))
            missing = json.loads(self._read("missing"))
        if not missing:
            return
        explanation = self._explain(missing)
        self.store.set(f"heard/{self.rank}", "")
        if self.rank == 0:  # whose end is the end of the board
            here = [f"heard/{rank}" for rank in range(self.size) if rank not in missing]
            with suppress(dist.DistStoreError):
                self.store.wait(here, timedelta(seconds=MARGIN_SECONDS))
        raise Absent(explanation)

    def _explain(self, missing: Collection[int]) -> str:
        names = ", ".join(self._name(rank) for rank in missing)
        hosts = {
            rank: self._read(f"here/{rank}") for rank in range(self.size) if rank not in missing
        }
        here = ", ".join(f"{self.who} {rank} on {host}" for rank, host in hosts.items())
        return (
            f"{names} never came: {self.size} {self.who}s were to meet at {self.address} within "
            f"{self.timeout_seconds:g} s, here are {here}. Look whether their processes run, and whether they reach "
            "that address and port"
        )


def meet(environ: Mapping[str, str], timeout_seconds: float) -> Rendezvous:
    """Open the board that torchrun's variables describe, and wait there for all ranks.

    Raises ConfigError when a variable is missing or no number, Absent when somebody does not come, and EnvironmentFault
    when rank 0 cannot listen.
    """
    size, rank = _number(environ, "WORLD_SIZE", 1), _number(environ, "RANK", 0)
    if rank >= size:
        raise errors.ConfigError(
            f"RANK is {rank}, but WORLD_SIZE is {size}; expected 0 to {size - 1}"
        )
    if size > 1 and (
        absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    ):
        raise errors.ConfigError(
            f"WORLD_SIZE is {size}, but {' and '.join(absent)} not set; torchrun sets them"
        )
    _number(environ, "LOCAL_RANK", 0)
    host, port = environ.get("MASTER_ADDR", "127.0.0.1"), _number(environ, "MASTER_PORT", 0)
    address = f"{host}:{port}"
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if size > 1:
            opened = open_store(
                "rank", rank, size, host, port, timeout_seconds, serves=rank == 0 and not by_agent
            )
        store = PrefixStore("kubetune.distributed.rendezvous", opened) if size > 1 else HashStore()
        found = Rendezvous(
            rank, size, _number(environ, "LOCAL_WORLD_SIZE", size), timeout_seconds, address, store
        )
        found.call_roll()
    except dist.DistError as error:
        raise _not_found(
            "rank", rank, address, timeout_seconds, errors.first_line(error)
        ) from error
    return found


def open_store(
    who: str, number: int, size: int, host: str, port: int, timeout_seconds: float, *, serves: bool
) -> TCPStore:
    """The store at an address, kept by this process where it `serves`. Raises Absent where nobody answers in time, and
    EnvironmentFault where serving is not possible.
    """
    opened: list[TCPStore | dist.DistError] = []

    def open_it() -> None:
        try:
            # Not waiting for workers: the board is there to tell which of them are missing.
            wait = timedelta(seconds=timeout_seconds)
            opened.append(
                TCPStore(host, port, size, serves, wait, multi_tenant=True, wait_for_workers=False)
            )
        except dist.DistError as error:
            opened.append(error)

    # torch waits for ever for who takes a connection and then is silent, as a stopped process or another program is.
    opening = threading.Thread(target=open_it, name="opening the store", daemon=True)
    opening.start()
    opening.join(timeout_seconds + MARGIN_SECONDS)
    found = opened[0] if opened else _why_silent(host, port)
    if isinstance(found, TCPStore):
        return found
    address, reason = (
        f"{host}:{port}",
        found if isinstance(found, str) else errors.first_line(found),
    )
    error = None if isinstance(found, str) else found
    if serves:
        raise errors.EnvironmentFault(
            f"{who} {number} cannot listen at {address}: {reason.rstrip('.')}. Set MASTER_PORT to a free port"
        ) from error
    raise _not_found(who, number, address, timeout_seconds, reason) from error


def _why_silent(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), MARGIN_SECONDS):
            return "something there takes connections and does not answer; it is stopped, or another program"
    except OSError as error:
        return error.strerror or str(error)


def _not_found(who: str, number: int, address: str, timeout_seconds: float, reason: str) -> Absent:
    """Error for when the one that holds the board could not be reached."""
    return Absent(
        f"{who} {number} on {socket.gethostname()} did not find {who} 0 at {address} within {timeout_seconds:g} s: "
        f"{reason.rstrip('.')}. Look whether it runs, and whether MASTER_ADDR and MASTER_PORT lead to it"
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise errors.ConfigError(
            f"{name} is {text!r}; expected a whole number, as torchrun sets it"
        )
    return int(text)
