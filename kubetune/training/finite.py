"""Numbers of a step that weights may move by: finite on every rank, and a loss that has not run away."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs
from kubetune.distributed.process_group import gather

if TYPE_CHECKING:
    from torch import Tensor

    from kubetune.config.schema import Config, TrainingConfig
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.distributed.process_group import World
    from kubetune.rundir.checkpoints import State


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
    mine = sorted(
        {
            sample
            for samples, value in micro_losses
            if not math.isfinite(float(value))
            for sample in samples
        }
    )
    suspects = {rank: found for rank, found in enumerate(gather(mine, world)) if found}
    where = "; ".join(
        f"rank {rank}: prepared rows {found[:20]}, which are {origin(found[:20])}"
        for rank, found in suspects.items()
    )
    raise errors.Diverged(
        f"step {step + 1}: loss {loss}, gradient norm {gradient_norm}; the weights were not touched. "
        + (
            f"Non-finite loss on {where}. "
            if where
            else "Every loss was finite, the gradient was not. "
        )
        + "Lower training.learning_rate, or look at these rows, and run again from the last checkpoint."
    )


def steps_above_threshold(loss: float, state: State, training: TrainingConfig) -> int:
    """Number of steps in a row that have had a loss above `training.loss_watchdog_threshold`, this one with them.

    Raises Diverged, on every rank and before weights move, where there have been too many.
    """
    threshold, patience = training.loss_watchdog_threshold, training.loss_watchdog_patience
    if threshold is None or loss <= threshold:
        return 0
    count = state.steps_above_threshold + 1
    if count >= patience:
        kept = (
            f"the checkpoint of step {state.saved_step:,} is kept"
            if state.saved_step
            else "there is no checkpoint"
        )
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


def origin(data: Prepared, config: Config, samples: Sequence[int]) -> str:
    """Origin of rows, as their owner knows them: `train.jsonl records 3, 17`, counted from 1."""
    rows, records = data.train, dict[int, list[int]]()
    for sample in samples:
        records.setdefault(int(rows.source[sample]), []).append(int(rows.record[sample]) + 1)
    named = (
        (config.data.train[source].path, sorted(found)) for source, found in sorted(records.items())
    )
    return "; ".join(f"{path} records {', '.join(map(str, found))}" for path, found in named)
