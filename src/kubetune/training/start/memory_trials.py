"""Say what would help when memory runs out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kubetune import errors
from kubetune.base.humanize import size
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.training.start.memory_budget import SHARE_AFTER_WRONG_FORECAST, MemoryBudget


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out: on a GPU, or on a CPU when the kernel refuses more."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # PyTorch has no class for it on a CPU.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextmanager
def explaining_shortage(budget: MemoryBudget, rank: int) -> Iterator[None]:
    """Turn the error when memory runs out within the block into one that says what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise errors.OutOfMemory(
            f"rank {rank} ran out of memory ({errors.first_line(error)}); there are {size(budget.device_bytes)} "
            f"({budget.owner}); {budget.advice(SHARE_AFTER_WRONG_FORECAST)}. What was saved is good: after such a "
            "change the same command goes on. training.preflight tries the longest batch before step 1"
        ) from error


@dataclass
class Trials:
    """Times what is tried, and raises errors that say what does not fit."""

    learner: Learner
    world: World
    budget: MemoryBudget
    seconds: dict[str, float] = field(default_factory=dict)  # name -> how long it took

    @contextmanager
    def trial(self, name: str, what: str) -> Iterator[None]:
        """Time the block. If memory runs out on any rank, raise OutOfMemory on all."""
        began = time.perf_counter()
        # Rank 0 alone could not know whether another rank had too little.
        shortage = ""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = errors.first_line(error)

        # Outside of the handler, whose traceback would keep the tensors alive. Ranks of a sharded model run out of memory
        # within a collective, where the others cannot be asked any more.
        shortages = [shortage]
        if not fsdp.is_sharded(self.learner.model):
            shortages = process_group.gather(shortage, self.world)
        for text in shortages:
            if text:
                raise self.budget.fault(what, f"ran out of memory ({text})")
        self.seconds[name] = time.perf_counter() - began
