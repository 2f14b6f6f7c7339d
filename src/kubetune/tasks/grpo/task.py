"""Learning by reward (GRPO): a language model learns from answers that it drew itself, by how they were rewarded.

What the answers are and how each compares with its group comes with the batch (`Batch.drawn`), from
training/rollouts. The loss is in objective.py. An evaluation is that of a language model on the right answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from kubetune.config.metric_names import GRPO_MEASURES
from kubetune.kernels.cross_entropy import Head, LogitRule, score
from kubetune.kernels.log_probabilities import linear_log_probabilities
from kubetune.models import fsdp, quantization
from kubetune.models.attention_hooks import packed
from kubetune.tasks.causal_lm import CausalLM, head_of
from kubetune.tasks.grpo.objective import Answers, losses, measures

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.config.schema import GrpoConfig
    from kubetune.models.learner import Learner
    from kubetune.models.model_spec import ModelSpec


class Grpo(CausalLM):
    """Train a language model on its own answers, by their rewards."""

    step_metrics = GRPO_MEASURES

    def learner_of(self, model: nn.Module, spec: ModelSpec) -> Learner:
        """Choose how sequences go through a loaded model, with the settings of its sampling and loss."""
        return replace(super().learner_of(model, spec), grpo=spec.grpo)

    def backward(self, learner: Learner, batch: Batch, scale: float) -> Tensor:
        """Add the gradient of one micro-batch to the parameters; return loss and measures, scaled, detached."""
        settings = settings_of(learner)
        drawn = batch.drawn
        assert drawn is not None, "batches of drawn answers know their advantages"
        with packed(batch.cu_seqlens, batch.rows, parents=batch.parents):
            logps = fsdp.inside(
                learner.lm, _of_labels, learner, batch, settings.temperature, _with_gradient
            )
            answers = Answers(
                logps, drawn.counts, drawn.advantages, drawn.old, drawn.sampled, drawn.reference
            )
            value = losses(settings, answers).sum()
            # Inside of `packed`: recomputed activations attend once more.
            learner.routing.backward(value * scale, scale)
        # Measures are means over the computed tokens of the step, whatever its loss is divided by.
        share = drawn.divisor / max(drawn.computed_labels, 1)
        # The loop multiplies by 1 / divisor, so that is taken back here.
        measured = measures(settings, replace(answers, logps=logps.detach())).sum(0) * share
        return torch.cat([value.detach()[None], measured]) * scale


TASK: Final = Grpo()


def settings_of(learner: Learner) -> GrpoConfig:
    """Return the settings that a learner is built for."""
    assert learner.grpo is not None, "what learns by reward has its settings"
    return learner.grpo


@torch.no_grad()
def log_probabilities(learner: Learner, batch: Batch, *, without_adapter: bool = False) -> Tensor:
    """Return the log-probability of each label, fp32 `[labels]`, without a gradient.

    `without_adapter`: of the base of a model with an adapter. The model must be in evaluation mode.
    """
    model: Any = learner.model
    temperature = settings_of(learner).temperature
    with (
        model.disable_adapter() if without_adapter else nullcontext(),
        packed(batch.cu_seqlens, parents=batch.parents),
        quantization.multiplying_as_in_training(learner.lm),
    ):
        logps: Tensor = fsdp.inside(
            learner.lm, _of_labels, learner, batch, temperature, _without_gradient
        )
        return logps


def tempered(head: Head, temperature: float) -> Head:
    """Return a head whose logits are divided by a temperature after all else.

    cap / t * tanh(m * x / cap)  is  (cap / t) * tanh((m / t) * x / (cap / t)), so the head's rule can say it.
    """
    if temperature == 1.0:
        return head
    rule = LogitRule(head.rule.multiplier / temperature, head.rule.cap / temperature)
    return head._replace(rule=rule)


def _of_labels(
    learner: Learner,
    batch: Batch,
    temperature: float,
    compute: Callable[[Tensor, Tensor, Head], Tensor],
) -> Tensor:
    """Return what `compute` makes of the hidden state before each label, `[labels]`, row after row."""
    hidden = learner.hidden(learner, batch)[batch.rows]
    head = tempered(head_of(learner), temperature)
    if batch.tree is None:
        return compute(hidden, batch.labels, head)
    shared = compute(hidden[batch.tree.places], batch.labels, head)
    return shared[batch.tree.entries]


def _with_gradient(hidden: Tensor, labels: Tensor, head: Head) -> Tensor:
    return linear_log_probabilities(hidden, labels, head)


def _without_gradient(hidden: Tensor, labels: Tensor, head: Head) -> Tensor:
    return -score(hidden, labels, head)[2]
