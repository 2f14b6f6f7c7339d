"""Is this run still sound: the wish to stop, seen by all ranks, and numbers that must be finite.

Imports no torch at module level: the signal handler has to be in place before the slow imports begin.
"""

from __future__ import annotations

import math
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kubetune.config.schema import TrainingConfig
    from kubetune.distributed.process_group import World
    from kubetune.rundir.checkpoints import State


class StopRequest:
    """SIGTERM or Ctrl-C, remembered until the loop reaches the end of a step.

    Before the loop runs there is nothing to save, so the request ends the process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._installed = False

    def install(self) -> StopRequest:
        """Catch the signals from now on (a no-op outside the main thread, where Python forbids it)."""
        if threading.current_thread() is threading.main_thread():
            self._installed = True
            self._set(self._on_signal)
        return self

    def leave_to_kernel(self) -> None:
        """Until `defer` the kernel itself ends this process: no handler runs while C++ waits for other ranks."""
        if self._installed:
            self._set(signal.SIG_DFL)

    def _set(self, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def defer(self) -> None:
        """From now on the loop looks at `requested` itself; a request that came before is honoured now."""
        self._deferred = True
        if self._installed:
            self._set(self._on_signal)
        if self.requested:
            raise errors.Preempted(0)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            raise errors.Preempted(0)


def require_finite(
    loss: float,
    gradient_norm: float,
    step: int,
    micro_losses: Sequence[tuple[tuple[int, ...], Tensor]],
    world: World,
    origin: Callable[[Sequence[int]], str],
) -> None:
    """Raise Diverged, on every rank and before weights move, unless loss and gradient are finite.

    Both numbers are sums over all ranks, so all ranks decide alike. `micro_losses`: this rank's (samples, loss);
    `origin` names the records that samples were made of.
    """
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return
    from kubetune.distributed.process_group import gather

    mine = sorted({sample for samples, value in micro_losses if not math.isfinite(float(value)) for sample in samples})
    suspects = {rank: found for rank, found in enumerate(gather(mine, world)) if found}
    where = "; ".join(
        f"rank {rank}: prepared rows {found[:20]}, which are {origin(found[:20])}" for rank, found in suspects.items()
    )
    raise errors.Diverged(
        f"step {step + 1}: loss {loss}, gradient norm {gradient_norm}; the weights were not touched. "
        + (f"Non-finite loss on {where}. " if where else "Every loss was finite, the gradient was not. ")
        + "Lower training.learning_rate, or look at these rows, and run again from the last checkpoint."
    )


def steps_above_threshold(loss: float, state: State, training: TrainingConfig) -> int:
    """How many steps in a row have had a loss above `training.loss_watchdog_threshold`, this one with them.

    Raises Diverged, on every rank and before weights move, where there have been too many.
    """
    threshold, patience = training.loss_watchdog_threshold, training.loss_watchdog_patience
    if threshold is None or loss <= threshold:
        return 0
    count = state.steps_above_threshold + 1
    if count >= patience:
        kept = f"the checkpoint of step {state.saved_step:,} is kept" if state.saved_step else "there is no checkpoint"
        raise errors.Diverged(
            f"step {state.step + 1}: loss {loss:.4g} lies above training.loss_watchdog_threshold ({threshold:g}), as "
            f"in {patience:,} steps in a row (training.loss_watchdog_patience); {kept}. Lower training.learning_rate, "
            "or raise the threshold, and run again."
        )
    logs.TRAIN.warning(
        "step %d: loss %.4g lies above training.loss_watchdog_threshold (%g): %d of %d steps in a row end the run",
        state.step + 1, loss, threshold, count, patience,
    )  # fmt: skip
    return count
