"""Reward models: a head with one output that scores answers, trained on pairs (Bradley and Terry).

The model is sequence_classification's, of the kind of a regression: the last token of an answer is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kubetune.batching.batch import Batch
from kubetune.config.metric_names import REWARD_MEASURES
from kubetune.data.text.labels import Labels
from kubetune.distributed.process_group import World, gather
from kubetune.models import fsdp
from kubetune.models.learner import lone_sequences
from kubetune.tasks import sequence_classification
from kubetune.tasks.causal_lm import confusion, labels_of, predictions
from kubetune.tasks.sequence_classification import (
    AUTO_CLASS,
    load_settings,
    logits,
    plain_logits,
    running,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.feed import Work
    from kubetune.config.schema import Config
    from kubetune.models.acceleration import Workload
    from kubetune.models.learner import Learner

__all__ = [
    "AUTO_CLASS", "STEP_METRICS", "backward", "build", "completed", "confusion", "evaluate", "labels_of", "load",
    "load_settings", "metrics", "plain_logits", "predictions", "sample_losses",
]  # fmt: skip

STEP_METRICS = REWARD_MEASURES

REWARD: Final = Labels("regression", ("reward",))


def build(config: Config, world: World, workload: Workload) -> Learner:
    """A classifier with one output, ready to train."""
    learner = sequence_classification.build(config, world, replace(workload, labels=REWARD))
    return replace(learner, preference=config.preference)


def load(config: Config, folder: Path, device: torch.device) -> Learner:
    """The trained model of a checkpoint folder, to be evaluated."""
    return replace(
        sequence_classification.load(config, folder, device), preference=config.preference
    )


def completed(_: Learner, work: Work, __: World) -> Work:
    """The work of a step, divided by its pairs."""
    return replace(work, divisor=work.samples)


def rewards(learner: Learner, batch: Batch) -> Tensor:
    """fp32 rewards of both answers of each row, `[rows, 2]`. Call it, and `.backward()`, inside `running`."""
    found = fsdp.inside(learner.lm, _outputs, learner, batch)
    return found[: 2 * len(batch.samples), 0].view(len(batch.samples), 2)


def _outputs(learner: Learner, batch: Batch) -> Tensor:
    if learner.route.padding_free:
        return logits(learner, batch)
    return torch.cat([logits(learner, one) for one in lone_sequences(batch)])


def losses(learner: Learner, said: Tensor, margins: Tensor | None) -> Tensor:
    """Loss of each pair `[rows]`: the better answer's reward is to be higher, by its margin where it has one."""
    settings = learner.preference
    assert settings is not None, "reward models have them"
    found = -F.logsigmoid(said[:, 0] - said[:, 1] - (0.0 if margins is None else margins))
    if settings.center_coefficient is not None:
        found = found + settings.center_coefficient * said.sum(1).square()
    return found


def _measures(said: Tensor) -> Tensor:
    margin = said[:, 0] - said[:, 1]
    return torch.stack([(margin > 0).to(margin), margin, *said.unbind(1)], 1)


def _margins(batch: Batch) -> Tensor | None:
    return None if batch.targets is None else batch.targets[:, 0]


def backward(learner: Learner, batch: Batch, scale: float) -> Tensor:
    """Add the gradient of one micro-batch to the parameters; return loss and STEP_METRICS, scaled, detached."""
    with running(learner, batch):
        said = rewards(learner, batch)
        value = losses(learner, said, _margins(batch)).sum()
        learner.routing.balanced(value * scale, scale).backward()
    return torch.cat([value.detach()[None], _measures(said.detach()).sum(0)]) * scale


class Scores(NamedTuple):
    """Rewards of one batch of an evaluation: ids of the rows, `[n, 2]` rewards and the loss of each."""

    samples: NDArray[np.int64]
    rewards: NDArray[np.float64]
    losses: NDArray[np.float64]


@torch.no_grad()
def evaluate(learner: Learner, batch: Batch) -> Scores:
    """Rewards and losses of one micro-batch."""
    with running(learner, batch):
        said = rewards(learner, batch).double()
    each = losses(learner, said, _margins(batch))
    return Scores(np.asarray(batch.samples, np.int64), said.cpu().numpy(), each.cpu().numpy())


def _joined(parts: Sequence[Scores]) -> Scores:
    """All rows of some batches in the order of their ids, whoever ran them."""
    nothing = Scores(np.empty(0, np.int64), np.empty((0, 2)), np.empty(0))
    samples, said, each = (np.concatenate(column) for column in zip(nothing, *parts, strict=True))
    order = np.argsort(samples, kind="stable")
    return Scores(samples[order], said[order], each[order])


def metrics(_: Learner, parts: Sequence[Scores], world: World) -> dict[str, float]:
    """Evaluation metrics of all rows of all ranks, each once."""
    everything = _joined([part for share in gather(list(parts), world) for part in share])
    means = _measures(torch.from_numpy(everything.rewards)).mean(0).tolist()
    measured = {f"eval_{name}": mean for name, mean in zip(REWARD_MEASURES, means, strict=True)}
    return {"eval_loss": float(everything.losses.mean()), **measured}


def sample_losses(
    _: Learner, parts: Sequence[Scores]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Ids of this rank's samples, with the loss of each, which counts as that of one label."""
    samples, _rewards, each = _joined(parts)
    return samples, each, np.ones(len(samples))


def score(learner: Learner, batches: Sequence[Batch]) -> list[float]:
    """Rewards of the answers of some batches, in the order of their samples; one sequence a sample."""
    found: dict[int, float] = {}
    for batch in batches:
        with torch.no_grad(), running(learner, batch):
            found.update(zip(batch.samples, logits(learner, batch)[:, 0].tolist(), strict=True))
    return [found[sample] for sample in sorted(found)]
