"""Several processes that train one model: who am I, and the few things ranks do together.

DDP here is one all-reduce of the flat gradient per optimizer step. With one process nothing is initialised and every
function is the identity.
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
    """The place of this process among the others."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """Rank 0, which writes and speaks for all."""
        return self.rank == 0


ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The distributed environment as found, for the log."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}


@contextmanager
def join(
    environ: Mapping[str, str] = os.environ, timeout_seconds: float = 600.0
) -> Iterator[World]:
    """Take part in the run that torchrun's variables describe; leave it at the end.

    The group is destroyed only after success: after an error the other ranks must see a broken connection, not wait.
    """
    size = int(environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
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
        del (
            board
        )  # not before: rank 0's serves them all until torch's own, at the same address, is there
    yield World(rank, local_rank, size, device)
    if size > 1:
        dist.destroy_process_group()


def _meet(environ: Mapping[str, str], timeout_seconds: float) -> object:
    """Call the roll before torch does, which would not say who is missing."""
    from kubetune.distributed import rendezvous

    try:
        # As long again as the roll takes: it opens only when rank 0 has come, which may be late itself.
        with heartbeat.waiting(timeout_seconds + rendezvous.MARGIN_SECONDS * 2):
            return rendezvous.meet(environ, timeout_seconds)
    except rendezvous.Absent as absent:
        raise errors.LostPeer(str(absent)) from absent


def side_group(world: World, timeout_seconds: float) -> Group:
    """A second way between the ranks, through the CPU, for a thread beside the loop. All ranks call it."""
    if world.size == 1:
        return None
    with peers():
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )
    return group


@contextmanager
def peers(group: Group = None) -> Iterator[None]:
    """Wait for the other ranks, and tell the watchdog so; turn a broken or timed-out collective into LostPeer.

    On a `group` of its own another thread than the loop's waits, which is none of the watchdog's business.
    """
    with noticing_losses(), nullcontext() if group is not None else heartbeat.waiting():
        yield


@contextmanager
def noticing_losses() -> Iterator[None]:
    """Turn a broken or timed-out collective into LostPeer, also one inside a library."""
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
    # gloo begins with a place in its own source and goes on with good wishes.
    said = re.sub(r"^\[[^]]*] ", "", errors.first_line(error)).partition(". ")[0]
    return errors.LostPeer(f"lost another rank: {said}")


def local(parameter: Tensor) -> Tensor:
    """This rank's slice of a sharded parameter, sharing its memory; any other one as it is. Without its history."""
    parameter = parameter.detach()
    return (
        parameter.to_local() if hasattr(parameter, "to_local") else parameter
    )  # importing DTensor is slow


def sum_(tensor: Tensor, world: World) -> Tensor:
    """Add a tensor over all ranks, in place."""
    if world.size > 1:
        with peers():
            fault_injection.reach("all-reduce")
            dist.all_reduce(tensor)
    return tensor


def sum_numbers(numbers: Sequence[float], world: World) -> list[float]:
    """Add a few numbers over all ranks, in fp64, in one message."""
    if world.size == 1:
        return [float(n) for n in numbers]
    # gloo and NCCL both reduce fp64; the sum of counts stays exact to 2^53.
    return sum_(
        torch.tensor(list(numbers), dtype=torch.float64, device=world.device), world
    ).tolist()


def agree(flag: bool, world: World) -> bool:
    """A logical or over the ranks: true on every one as soon as it is on one."""
    return sum_numbers([float(flag)], world)[0] > 0


def gather(value: Any, world: World, group: Group = None) -> list[Any]:
    """A small picklable value of every rank, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    with peers(group):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, world: World, group: Group = None) -> Any:
    """Rank 0's value on every rank."""
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
    """Kernels are started ahead of time; a clock must be read after they are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
