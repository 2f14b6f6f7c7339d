"""Several processes that train one model: which rank this is, and the few things that ranks do together.

DDP is one all-reduce of the flat gradient for each optimizer step. With one process nothing is initialised, and every
function returns what it is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.rundir import heartbeat

Group = dist.ProcessGroup | None

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """Which of the processes this one is."""

    rank: int = 0  # among all processes
    local_rank: int = 0  # among those of this node
    size: int = 1  # number of all processes
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """True for rank 0, which writes files and logs for all."""
        return self.rank == 0


ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of torchrun that are set, for the log."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}


@contextmanager
def join(
    environ: Mapping[str, str] = os.environ, timeout_seconds: float = 600.0
) -> Iterator[World]:
    """Join the run that torchrun's variables describe, and leave it at the end of the block.

    After an error the group is not destroyed: the other ranks must see a broken connection, and not wait.
    """
    size = int(environ.get("WORLD_SIZE", "1"))
    rank = int(environ.get("RANK", "0"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        raise errors.EnvironmentFault(
            f"rank {rank} wants GPU {local_rank}, but this node has {torch.cuda.device_count()}; "
            "set compute.gpus_per_node to that number"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size > 1:
        board = _meet(environ, timeout_seconds)
        heartbeat.beat("rendezvous")
        with peers():
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                timeout=timedelta(seconds=timeout_seconds),
                device_id=device if cuda else None,
            )
        # Only now: rank 0's store serves all ranks until torch's store is at the same address.
        del board
    yield World(rank, local_rank, size, device)
    if size > 1:
        dist.destroy_process_group()


def _meet(environ: Mapping[str, str], timeout_seconds: float) -> object:
    """Wait for all ranks before torch does, since torch does not say who is missing."""
    from kubetune.distributed import rendezvous

    try:
        # Rank 0 may be late, and only then does the wait for the others begin: so twice the time, and a margin.
        with heartbeat.waiting(timeout_seconds + rendezvous.MARGIN_SECONDS * 2):
            return rendezvous.meet(environ, timeout_seconds)
    except rendezvous.Absent as absent:
        raise errors.LostPeer(str(absent)) from absent


def side_group(world: World, timeout_seconds: float) -> Group:
    """Return a second group of all ranks, over the CPU, for a thread beside the loop. All ranks must call this."""
    if world.size == 1:
        return None
    with peers():
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )
    return group


def copy_of(world: World, size: int) -> tuple[World, Group]:
    """Return this rank's place among the `size` neighbours that share a copy, and their group. All ranks must call this.

    ranks 0 1    one copy
    ranks 2 3    another; rank 3 is the second of these two
    """
    if size == world.size:
        return world, None
    with peers():
        group, _ = dist.new_subgroups(size)
    return World(world.rank % size, world.local_rank, size, world.device), group


@contextmanager
def peers(group: Group = None) -> Iterator[None]:
    """Tell the watchdog that this rank waits for others while the block runs. Raise LostPeer for a broken collective.

    A `group` is used by another thread than the loop's, which the watchdog does not watch.
    """
    with noticing_losses(), nullcontext() if group is not None else heartbeat.waiting():
        yield


@contextmanager
def noticing_losses() -> Iterator[None]:
    """Turn a broken or timed-out collective into LostPeer, also if a library called it."""
    try:
        yield
    except (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError) as error:
        raise _lost_peer(error) from error
    except RuntimeError as error:
        # gloo reports a closed connection or a time-out as a plain RuntimeError.
        if not re.search("gloo|Connection (closed|reset)|Timed out|pair closure", str(error)):
            raise
        raise _lost_peer(error) from error


def _lost_peer(error: Exception) -> errors.LostPeer:
    # gloo's messages begin with a line of its source, "[/…/pair.cc:534] ", and end with general advice.
    reason = re.sub(r"^\[[^]]*] ", "", errors.first_line(error)).partition(". ")[0]
    return errors.LostPeer(f"lost another rank: {reason}")


def local(parameter: Tensor) -> Tensor:
    """Return a detached parameter that shares memory: of a sharded one this rank's slice, of any other one all of it."""
    parameter = parameter.detach()
    # Not isinstance: importing DTensor takes long.
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def sum_(tensor: Tensor, world: World) -> Tensor:
    """Add a tensor over all ranks, in place."""
    if world.size > 1:
        with peers():
            fault_injection.reach("all-reduce")
            dist.all_reduce(tensor)
    return tensor


def sum_numbers(numbers: Sequence[float], world: World) -> list[float]:
    """Return the sums of a few numbers over all ranks, in fp64, by one message."""
    if world.size == 1:
        return [float(number) for number in numbers]
    # gloo and NCCL both reduce fp64, in which sums of counts are exact up to 2^53.
    tensor = torch.tensor(list(numbers), dtype=torch.float64, device=world.device)
    return sum_(tensor, world).tolist()


def agree(flag: bool, world: World) -> bool:
    """Return True on every rank if the flag is true on at least one."""
    return sum_numbers([float(flag)], world)[0] > 0


def gather(value: Any, world: World, group: Group = None) -> list[Any]:
    """Return a small picklable value of every rank, in the order of ranks, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    with peers(group):
        dist.all_gather_object(values, value, group=group)
    return values


def gather_parts(parts: Sequence[Any], world: World) -> list[Any]:
    """Return the small picklable parts of all ranks, in the order of ranks, on every rank."""
    of_all_ranks = []
    for of_rank in gather(list(parts), world):
        of_all_ranks += of_rank
    return of_all_ranks


def broadcast(value: Any, world: World, group: Group = None) -> Any:
    """Return rank 0's value on every rank."""
    if world.size == 1:
        return value
    box = [value]
    with peers(group):
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.size > 1:
        with peers():
            dist.barrier()


def wait_for_device(device: torch.device) -> None:
    """Wait until all kernels are done, before a clock is read: a GPU runs them later than they are started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
