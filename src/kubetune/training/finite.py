"""Check a step's numbers before weights move: they are finite on every rank, and the loss has not run away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs
from kubetune.distributed.process_group import gather

if TYPE_CHECKING:
    from torch import Tensor

    from kubetune.config.schema import TrainingConfig
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.distributed.process_group import World
    from kubetune.rundir.checkpoints import State

MOST_ROWS_NAMED = 20  # of each rank


def require_finite(
    loss: float,
    gradient_norm: float,
    step: int,
    micro_losses: Sequence[tuple[tuple[int, ...], Tensor]],
    world: World,
    data: Prepared,
) -> None:
    """Raise Diverged, on every rank and before weights move, unless loss and gradient are finite.

    `micro_losses`: (samples, loss) of this rank's micro-batches.
    """
    # Both are sums over all ranks, so all ranks decide alike.
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return

    # Look for the rows that the loss is not finite on.
    suspects: set[int] = set()
    for samples, value in micro_losses:
        if not math.isfinite(float(value)):
            suspects.update(samples)
    # Each rank knows only its own rows, but all raise the same error.
    places = []
    for rank, samples in enumerate(gather(sorted(suspects), world)):
        if samples:
            # A batch may have thousands of rows; some are enough to look at.
            some = samples[:MOST_ROWS_NAMED]
            places.append(f"rank {rank}: prepared rows {some}, which are {_origin(data, some)}")

    # A gradient may overflow though every loss is finite.
    if places:
        cause = f"Non-finite loss on {'; '.join(places)}."
    else:
        cause = "Every loss was finite, the gradient was not."

    raise errors.Diverged(
        f"step {step + 1}: loss {loss}, gradient norm {gradient_norm}; the weights were not touched. {cause} "
        "Lower training.learning_rate, or look at these rows, and run again from the last checkpoint."
    )


def steps_above_threshold(
    loss: float,
    state: State,
    training: TrainingConfig,
) -> int:
    """Return how many steps in a row, up to this one, had a loss above `training.loss_watchdog_threshold`.

    Raise Diverged, on every rank and before weights move, if these are too many.
    """
    # All ranks know the same loss, so all count alike.
    threshold = training.loss_watchdog_threshold
    patience = training.loss_watchdog_patience
    if threshold is None or loss <= threshold:
        return 0

    # The count is part of the state: a resumed run goes on counting.
    count = state.steps_above_threshold + 1
    if count >= patience:
        checkpoint = "there is no checkpoint"
        if state.saved_step:
            checkpoint = f"the checkpoint of step {state.saved_step:,} is kept"
        raise errors.Diverged(
            f"step {state.step + 1}: loss {loss:.4g} is above training.loss_watchdog_threshold ({threshold:g}), as "
            f"in {patience:,} steps in a row (training.loss_watchdog_patience); {checkpoint}. Lower "
            "training.learning_rate, or raise the threshold, and run again."
        )

    logs.TRAIN.warning(
        "step %d: loss %.4g is above training.loss_watchdog_threshold (%g): %d of %d steps in a row end the run",
        state.step + 1, loss, threshold, count, patience,
    )  # fmt: skip
    return count


def _origin(data: Prepared, samples: Sequence[int]) -> str:
    """Name the records of rows as their owner knows them: `train.jsonl records 3, 17`, counted from 1."""
    records: dict[int, list[int]] = {}
    for sample in samples:
        source = int(data.train.source[sample])
        number = int(data.train.record[sample]) + 1
        records.setdefault(source, []).append(number)

    sources = data.spec.data.train
    texts = []
    for source, numbers in sorted(records.items()):
        listed = ", ".join(str(number) for number in sorted(numbers))
        texts.append(f"{sources[source].path} records {listed}")
    return "; ".join(texts)
