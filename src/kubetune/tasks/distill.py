"""Distillation: a language model learns the probabilities that a teacher gives each token of an answer.

The divergence from the teacher is in kernels/divergence. Its sum is divided by the tokens of the whole global batch, so
that loss and gradient do not depend on how a step is split. An evaluation is that of a language model on given answers.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from kubetune.config.metric_names import DISTILL_MEASURES
from kubetune.distributed.process_group import sum_numbers, wait_for_device
from kubetune.kernels.divergence import (
    KeptTeacher,
    LocalTeacher,
    Teacher,
    likeliest_ids,
    linear_divergence,
)
from kubetune.models import fsdp, quantization
from kubetune.models.attention_hooks import packed
from kubetune.tasks.causal_lm import CausalLM, head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kubetune.batching.batch import Batch
    from kubetune.config.schema import DistillConfig
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner
    from kubetune.models.model_spec import ModelSpec

    # What waits for the answers of servers. It gets the way to the ids that the student finds likeliest.
    Waiting = Callable[[Callable[[], Tensor]], KeptTeacher]


class Distill(CausalLM):
    """Train a language model on the probabilities of a teacher."""

    step_metrics = DISTILL_MEASURES

    def learner_of(self, model: nn.Module, spec: ModelSpec) -> Learner:
        """Choose how sequences go through a loaded model, with the settings of its distillation; its teacher comes later."""
        return replace(super().learner_of(model, spec), distill=spec.distill, grpo=spec.grpo)

    def backward(self, learner: Learner, batch: Batch, scale: float) -> Tensor:
        """Add the gradient of one micro-batch to the parameters; return loss and measures, scaled, detached."""
        teacher = _teacher_before(learner, batch)
        with packed(batch.cu_seqlens, batch.rows, parents=batch.parents):
            value, sums = fsdp.inside(learner.lm, _summed_loss, learner, batch, teacher, scale)
            # Inside of `packed`: recomputed activations attend once more.
            learner.routing.backward(value, scale)
        return torch.cat([value.detach()[None], sums * scale])

    @torch.no_grad()
    def evaluate(self, learner: Learner, batch: Batch) -> Any:
        """Return the `Sums` over one micro-batch, with its divergence if the teacher can say something of it."""
        sums = super().evaluate(learner, batch)
        teachers = (batch.teacher, learner.teacher, learner.served_teacher)
        if all(teacher is None for teacher in teachers):
            return sums
        teacher = _teacher_before(learner, batch)
        with packed(batch.cu_seqlens, parents=batch.parents):
            _, measures = fsdp.inside(learner.lm, _summed_loss, learner, batch, teacher, 1.0)
        divergence = float(measures[0])
        if math.isnan(divergence):
            return sums  # a stop came while a server was waited for
        return sums._replace(divergence=divergence, num_compared=sums.num_labels)

    def metrics(self, learner: Learner, parts: Sequence[Any], world: World) -> dict[str, float]:
        """Return the metrics of a language model, and the mean divergence from the teacher where it is known."""
        values = super().metrics(learner, parts, world)
        divergence = sum((part.divergence for part in parts), 0.0)
        labels = sum((part.num_compared for part in parts), 0.0)
        divergence, labels = sum_numbers([divergence, labels], world)
        if labels:
            values["eval_divergence"] = divergence / labels
        return values


TASK: Final = Distill()


def settings_of(learner: Learner) -> DistillConfig:
    """Return the settings that a learner is built for."""
    assert learner.distill is not None, "what is distilled has its settings"
    return learner.distill


def _teacher_before(learner: Learner, batch: Batch) -> Waiting | Teacher:
    """Return what the teacher knows of a micro-batch, or how to wait for it while servers and the model compute."""
    served = learner.served_teacher
    settings = settings_of(learner)
    # Servers answer at 1.
    temperature = 1.0 if served is None else settings.temperature
    if batch.teacher is not None:
        return KeptTeacher(batch.teacher, temperature=temperature)
    device = batch.input_ids.device
    if served is None:
        wait_for_device(device)
        began = time.perf_counter()
        teacher = teacher_of(learner, batch)
        wait_for_device(device)
        _count_seconds(learner, began)
        return teacher
    read = batch.read_by_teacher or batch
    if settings.support == "teacher_k":
        answer = served.ask(read, None)
        return lambda _: KeptTeacher(answer().to(device), temperature=temperature)

    def answered(likeliest: Callable[[], Tensor]) -> KeptTeacher:
        numbers = served.ask(read, likeliest())()
        return KeptTeacher(numbers.to(device), of_student=True, temperature=temperature)

    return answered


def _count_seconds(learner: Learner, began: float) -> None:
    """Add what a teacher took."""
    before = learner.seconds.get("teacher_seconds", 0.0)
    learner.seconds["teacher_seconds"] = before + time.perf_counter() - began


@torch.no_grad()
def teacher_of(learner: Learner, batch: Batch) -> LocalTeacher:
    """Return what a teacher in memory knows of the labels of a micro-batch."""
    read = batch.read_by_teacher or batch
    teacher = learner.teacher
    if teacher is None:
        return _of_itself(learner, read)
    with packed(read.cu_seqlens, parents=read.parents):
        hidden = _of_labels(teacher.hidden(teacher, read), read)
    temperature = settings_of(learner).temperature
    return LocalTeacher(hidden, head_of(teacher), temperature, learner.compared_tokens)


def _of_itself(learner: Learner, batch: Batch) -> LocalTeacher:
    """Return what the model says with its adapter off. Its head is whole only where the model itself runs."""
    model: Any = learner.model
    with (
        learner.asked(),
        model.disable_adapter(),
        packed(batch.cu_seqlens, parents=batch.parents),
        quantization.multiplying_as_in_training(learner.lm),
    ):
        hidden = fsdp.inside(learner.lm, learner.hidden, learner, batch)
    return LocalTeacher(_of_labels(hidden, batch), None, settings_of(learner).temperature)


def _of_labels(hidden: Tensor, batch: Batch) -> Tensor:
    """Return the hidden state before each label, row after row; what rows share comes once for each of them."""
    before = hidden[batch.rows]
    return before if batch.tree is None else before[batch.tree.places[batch.tree.entries]]


def _summed_loss(
    learner: Learner, batch: Batch, teacher: Waiting | Teacher, scale: float
) -> tuple[Tensor, Tensor]:
    """Return `scale` × the summed loss of the labels of a micro-batch, and the sums of their measures."""
    hidden = _of_labels(learner.hidden(learner, batch), batch)
    labels = batch.labels if batch.tree is None else batch.labels[batch.tree.entries]
    head = head_of(learner)
    if isinstance(teacher, LocalTeacher) and teacher.head is None:
        teacher = replace(teacher, head=head)
    settings = settings_of(learner)
    if callable(teacher):
        wait_for_device(hidden.device)
        began = time.perf_counter()
        teacher = teacher(
            partial(likeliest_ids, hidden, head, settings.top_k, learner.compared_tokens)
        )
        _count_seconds(learner, began)
    if batch.drawn is not None:
        # Cross-entropy would only make the model surer of what it drew.
        settings = settings.model_copy(update={"sft_weight": 0.0})
    tokens = learner.compared_tokens
    return linear_divergence(hidden, labels, head, teacher, settings, scale, tokens)
