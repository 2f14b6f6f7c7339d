"""Reward models: a head with one output scores answers, trained on pairs (Bradley and Terry).

The model is one of sequence_classification for regression: the last token of an answer is scored. A row is two
sequences, prompt + chosen answer and prompt + rejected answer.
"""

from __future__ import annotations

import os
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
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World, gather_parts
from kubetune.models import fsdp
from kubetune.models.classifier_pooling import read_at_end
from kubetune.models.learner import lone_sequences
from kubetune.plan.model_shapes import read_config
from kubetune.tasks.sequence_classification import SequenceClassification, logits, running

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.feed import Work
    from kubetune.config.schema import TrainingConfig
    from kubetune.models.acceleration import Workload
    from kubetune.models.learner import Learner
    from kubetune.models.model_spec import ModelSpec

# What config.json of such a model names its only output.
REWARD: Final = Labels("regression", ("reward",))


class Scores(NamedTuple):
    """Rewards of the pairs of one batch of an evaluation."""

    samples: NDArray[np.int64]  # [pairs] row ids
    rewards: NDArray[np.float64]  # [pairs, 2] of the chosen and of the rejected answer
    losses: NDArray[np.float64]  # [pairs]


class RewardModel(SequenceClassification):
    """Train a head with one output on pairs of answers."""

    step_metrics = REWARD_MEASURES

    def build(
        self,
        spec: ModelSpec,
        training: TrainingConfig,
        world: World,
        workload: Workload,
    ) -> Learner:
        """Return a classifier with one output, ready to train."""
        learner = super().build(
            spec,
            training,
            world,
            replace(workload, labels=REWARD),
        )
        read_at_end(learner.model, load_tokenizer(spec.model).eos_id)
        return replace(learner, preference=spec.preference)

    def load(
        self,
        spec: ModelSpec,
        folder: Path,
        device: torch.device,
    ) -> Learner:
        """Return the trained model of a checkpoint folder, to be evaluated."""
        learner = super().load(spec, folder, device)
        return replace(learner, preference=spec.preference)

    def load_settings(self, spec: ModelSpec, folder: Path) -> dict[str, Any]:
        """Return what loads the head of a checkpoint folder, with the padding that `build` gave its model."""
        settings = super().load_settings(spec, folder)
        facts = read_config(spec.model.path, os.environ) or {}
        if facts.get("pad_token_id") == load_tokenizer(spec.model).eos_id:
            settings["pad_token_id"] = None  # as `read_at_end` does
        return settings

    def labels_of(self, folder: Path) -> None:
        """Return None: a reward model tells no labels apart."""

    def with_batch_totals(
        self,
        learner: Learner,
        work: Work,
        world: World,
    ) -> Work:
        """Divide the work of a step by its pairs."""
        return replace(work, divisor=work.samples)

    def backward(
        self,
        learner: Learner,
        batch: Batch,
        scale: float,
    ) -> Tensor:
        """Add the gradient of one micro-batch to the parameters; return loss and measures, scaled, detached."""
        with running(learner, batch):
            rewards = rewards_of(learner, batch)
            value = pair_losses(learner, batch, rewards).sum()
            learner.routing.backward(value * scale, scale)

        # One tensor, so that the ranks add up loss and measures in one call.
        measured = _measures(rewards.detach()).sum(0)
        return torch.cat([value.detach()[None], measured]) * scale

    @torch.no_grad()
    def evaluate(self, learner: Learner, batch: Batch) -> Scores:
        """Return rewards and losses of one micro-batch."""
        with running(learner, batch):
            rewards = rewards_of(learner, batch).double()
        losses = pair_losses(learner, batch, rewards)
        samples = np.asarray(batch.samples, np.int64)
        return Scores(samples, rewards.cpu().numpy(), losses.cpu().numpy())

    def metrics(
        self,
        learner: Learner,
        parts: Sequence[Scores],
        world: World,
    ) -> dict[str, float]:
        """Return loss and measures over all pairs of all ranks, each pair once."""
        pairs = _joined(gather_parts(parts, world))
        metrics = {"eval_loss": float(pairs.losses.mean())}

        means = _measures(torch.from_numpy(pairs.rewards)).mean(0).tolist()
        for name, mean in zip(REWARD_MEASURES, means, strict=True):
            metrics[f"eval_{name}"] = mean
        return metrics

    def sample_losses(
        self,
        learner: Learner,
        parts: Sequence[Scores],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return ids of this rank's pairs and the loss of each, which counts as that of one label."""
        pairs = _joined(parts)
        return pairs.samples, pairs.losses, np.ones(len(pairs.samples))

    def predictions(
        self,
        learner: Learner,
        parts: Sequence[Any],
        rows: Any,
    ) -> None:
        """Return None: a reward model predicts no labels."""

    def confusion(self, learner: Learner, parts: Sequence[Any]) -> None:
        """Return None: there are no classes."""


TASK: Final = RewardModel()


def rewards_of(learner: Learner, batch: Batch) -> Tensor:
    """Return fp32 rewards of both answers of each pair, `[pairs, 2]`. Call it and `.backward()` inside `running`."""
    # One output for each sequence:    0.3  -0.1 | 1.2  0.4    gives rewards [[0.3, -0.1], [1.2, 0.4]]
    num_pairs = len(batch.samples)
    outputs: Tensor = fsdp.inside(learner.lm, _outputs, learner, batch)
    # Behind the answers may be a sequence without a row, which keeps a rank without work in step with the others.
    return outputs[: 2 * num_pairs, 0].view(num_pairs, 2)


def _outputs(learner: Learner, batch: Batch) -> Tensor:
    if learner.route.padding_free:
        return logits(learner, batch)
    # The model's own code knows no borders between sequences, so it sees each alone.
    return torch.cat([logits(learner, sequence) for sequence in lone_sequences(batch)])


def pair_losses(
    learner: Learner,
    batch: Batch,
    rewards: Tensor,
) -> Tensor:
    """Return the loss of each pair `[pairs]`: the better answer's reward is to be higher, by its margin if it has one."""
    # -log σ(r₀ - r₁ - margin) (Bradley and Terry 1952; margins as in Llama 2, arXiv 2307.09288). Rewards that are both
    # shifted give the same loss; c (r₀ + r₁)² keeps them around 0 (arXiv 2312.09244).
    #
    #     rewards 1.2 and 0.4, no margin    -log σ(0.8) = 0.371          with c = 0.01: + 0.01 × 1.6² = 0.397
    #     the same, margin 1                -log σ(-0.2) = 0.798
    settings = learner.preference
    assert settings is not None, "reward models have them"
    margins = 0.0 if batch.targets is None else batch.targets[:, 0]
    losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
    if settings.center_coefficient is not None:
        losses = losses + settings.center_coefficient * rewards.sum(1).square()
    return losses


def _measures(rewards: Tensor) -> Tensor:
    """Return REWARD_MEASURES of each pair, `[pairs, measures]`."""
    chosen, rejected = rewards.unbind(1)
    margin = chosen - rejected
    # Counted as 0 or 1 for each pair, so that its mean is the accuracy. A tie is no success.
    is_right = (margin > 0).to(margin)
    return torch.stack([is_right, margin, chosen, rejected], 1)


def _joined(parts: Sequence[Scores]) -> Scores:
    """Return all pairs in the order of their ids, whichever rank ran them."""
    if not parts:
        return Scores(np.empty(0, np.int64), np.empty((0, 2)), np.empty(0))
    samples = np.concatenate([part.samples for part in parts])
    rewards = np.concatenate([part.rewards for part in parts])
    losses = np.concatenate([part.losses for part in parts])
    order = np.argsort(samples, kind="stable")
    return Scores(samples[order], rewards[order], losses[order])


def score(learner: Learner, batches: Sequence[Batch]) -> list[float]:
    """Return the rewards of answers, one sequence each, in the order of their sample ids."""
    rewards: dict[int, float] = {}
    for batch in batches:
        with torch.no_grad(), running(learner, batch):
            outputs = logits(learner, batch)[:, 0].tolist()
        rewards.update(zip(batch.samples, outputs, strict=True))
    # Batches were put together by length, so their answers came in another order.
    return [rewards[sample] for sample in sorted(rewards)]
