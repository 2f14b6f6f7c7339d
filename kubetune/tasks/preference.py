"""Preference tuning of a language model: which of two answers is better, or how good each is, trained on records.

The losses stand in preference_losses.py; the model, its adapters and its files are causal_lm's. What the reference, the
model before training, says of every answer is found before the first step, by training/start/reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kubetune.batching.batch import Batch, collate
from kubetune.config.metric_names import PREFERENCE_MEASURES
from kubetune.distributed.process_group import World, gather, sum_numbers
from kubetune.kernels.log_probabilities import linear_log_probabilities
from kubetune.models import fsdp, quantization
from kubetune.models.attention_hooks import packed
from kubetune.tasks import causal_lm
from kubetune.tasks.causal_lm import (
    AUTO_CLASS,
    confusion,
    head_of,
    labels_of,
    load_settings,
    plain_logits,
    predictions,
    scored,
)
from kubetune.tasks.preference_losses import Answers, Whole, gains, losses, measures, sft_weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.feed import Work
    from kubetune.config.schema import Config, PreferenceConfig
    from kubetune.models.acceleration import Workload
    from kubetune.models.learner import Learner

__all__ = [
    "AUTO_CLASS", "STEP_METRICS", "backward", "build", "completed", "confusion", "evaluate", "labels_of", "load",
    "load_settings", "log_probabilities", "metrics", "plain_logits", "predictions", "sample_losses",
]  # fmt: skip

STEP_METRICS = PREFERENCE_MEASURES


def build(config: Config, world: World, workload: Workload) -> Learner:
    """A language model ready to train, with the preference that it is to learn."""
    return replace(causal_lm.build(config, world, workload), preference=config.preference)


def load(config: Config, folder: Path, device: torch.device) -> Learner:
    """The trained model of a checkpoint folder, to be evaluated."""
    return replace(causal_lm.load(config, folder, device), preference=config.preference)


def _settings(learner: Learner) -> PreferenceConfig:
    assert learner.preference is not None, "what learns preferences has them"
    return learner.preference


def _answers(batch: Batch, each: Tensor) -> Answers:
    """Answers of a batch, in fp64, by the log-probability of `each` label."""
    rows = len(batch.samples)
    width = len(batch.label_counts) // rows if rows else 2
    # Ranks that have no row of a step still run a sequence without labels.
    sums = torch.stack([part.sum() for part in each.double().split(batch.label_counts)])
    logps = sums[: rows * width].view(rows, width)
    labels = torch.tensor(
        batch.label_counts[: rows * width], dtype=logps.dtype, device=logps.device
    ).view_as(logps)
    reference = (
        torch.zeros_like(labels) if batch.reference is None else batch.reference.view_as(logps)
    )
    return Answers(logps, reference, labels, None if batch.targets is None else batch.targets[:, 0])


def _whole(settings: PreferenceConfig, answers: Answers) -> Whole:
    """The numbers of a global batch that is all there."""
    good = 0.0 if answers.targets is None else float((answers.targets > 0).sum())
    kl = (
        float(gains(settings, answers)[:, 1].mean())
        if settings.loss == "kto" and len(answers.logps)
        else 0.0
    )
    return Whole(float(len(answers.logps)), float(answers.labels[:, 0].sum()), good, kl)


def completed(learner: Learner, work: Work, world: World) -> Work:
    """The work of a step, divided by its rows, whose batches know what they need of the whole global batch.

    For KTO that is what the model says of answers to other questions, which takes a forward of its own.
    """
    settings, batches = _settings(learner), work.batches
    labels = good = gain = 0.0
    if settings.loss == "kto":
        gain = sum(_gain_of_others(learner, batch.to(world.device)) for batch in batches)
        good = sum(
            float((batch.targets > 0).sum()) for batch in batches if batch.targets is not None
        )
        batches = [_every_second(batch, 0) for batch in batches]
    elif sft_weight(settings):
        labels = float(sum(sum(batch.label_counts[::2]) for batch in batches))
    if settings.loss == "kto" or labels or sft_weight(settings):
        labels, good, gain = sum_numbers([labels, good, gain], world)
    whole = Whole(float(work.samples), labels, good, gain / max(work.samples, 1))
    return replace(
        work, divisor=work.samples, batches=[replace(batch, whole=whole) for batch in batches]
    )


def _every_second(batch: Batch, first: int) -> Batch:
    """Every second sequence of a batch that has two a row."""
    if not batch.samples:
        return batch
    ids, trained = batch.input_ids.cpu().numpy(), np.zeros(batch.num_tokens, bool)
    trained[batch.rows.cpu().numpy() + 1] = True
    spans = list(pairwise(batch.cu_seqlens))
    chosen = range(len(spans))[first::2]
    sequences = [
        (ids[slice(*spans[i])].astype(np.uint32), trained[slice(*spans[i])]) for i in chosen
    ]
    kept = collate(sequences, batch.samples).to(batch.input_ids.device)
    reference = None if batch.reference is None else batch.reference[:, first : first + 1]
    pictures = batch.pictures and batch.pictures.of(chosen, batch.cu_seqlens)
    return replace(kept, targets=batch.targets, reference=reference, pictures=pictures)


def _gain_of_others(learner: Learner, batch: Batch) -> float:
    """Summed gain over the reference of the answers of a batch that belong to other rows."""
    learner.model.eval()
    try:
        found = _scored(learner, _every_second(batch, 1))
    finally:
        fsdp.close(learner.lm)
        learner.model.train()
    return float(gains(_settings(learner), found).sum())


def backward(learner: Learner, batch: Batch, scale: float) -> Tensor:
    """Add the gradient of one micro-batch to the parameters; return loss and STEP_METRICS, scaled, detached."""
    settings = _settings(learner)
    with packed(batch.cu_seqlens, batch.rows, parents=batch.parents):
        answers = _answers(batch, fsdp.inside(learner.lm, _log_probabilities, learner, batch))
        whole = batch.whole if isinstance(batch.whole, Whole) else _whole(settings, answers)
        value = losses(settings, answers, whole).sum()
        learner.routing.balanced(value * scale, scale).backward()
    detached = Answers(*(None if part is None else part.detach() for part in answers))  # type: ignore[arg-type]
    return torch.cat([value.detach()[None], measures(settings, detached, whole).sum(0)]) * scale


def _log_probabilities(learner: Learner, batch: Batch) -> Tensor:
    hidden, tree = learner.hidden(learner, batch)[batch.rows], batch.tree
    if tree is None:
        return linear_log_probabilities(hidden, batch.labels, head_of(learner))
    return linear_log_probabilities(hidden[tree.places], batch.labels, head_of(learner))[
        tree.entries
    ]


@torch.no_grad()
def _scored(learner: Learner, batch: Batch) -> Answers:
    """Answers of a batch, without a gradient."""
    with (
        packed(batch.cu_seqlens, parents=batch.parents),
        quantization.multiplying_as_in_training(learner.lm),
    ):
        return _answers(batch, -fsdp.inside(learner.lm, scored, learner, batch)[2])


def log_probabilities(learner: Learner, batch: Batch) -> NDArray[np.float64]:
    """Summed log-probability of the answers of each row, `[rows, 2]`, with the adapter off, where there is one."""
    model: Any = learner.model
    with nullcontext() if learner.lm is model else model.disable_adapter():
        found: NDArray[np.float64] = _scored(learner, batch).logps.cpu().numpy()
    return found


class Scores(NamedTuple):
    """Answers of one batch of an evaluation, as arrays: ids of the rows, and what `Answers` has."""

    samples: NDArray[np.int64]
    logps: NDArray[np.float64]
    reference: NDArray[np.float64]
    labels: NDArray[np.float64]
    targets: NDArray[np.float32] | None


def evaluate(learner: Learner, batch: Batch) -> Scores:
    """Answers of one micro-batch."""
    found = (None if part is None else part.cpu().numpy() for part in _scored(learner, batch))
    return Scores(np.asarray(batch.samples, np.int64), *found)  # type: ignore[arg-type]


def _joined(parts: Sequence[Scores]) -> tuple[NDArray[np.int64], Answers]:
    """All rows of some batches in the order of their ids, whoever ran them."""
    samples = np.concatenate([np.empty(0, np.int64), *(part.samples for part in parts)])
    order = np.argsort(samples, kind="stable")
    columns = zip(*(part[1:] for part in parts), strict=True)
    found = (
        None if column[0] is None else torch.from_numpy(np.concatenate(column)[order])
        for column in columns
    )
    nothing = torch.empty(0, 2, dtype=torch.float64)
    return samples[order], Answers(*found) if parts else Answers(nothing, nothing, nothing)  # type: ignore[arg-type]


def metrics(learner: Learner, parts: Sequence[Scores], world: World) -> dict[str, float]:
    """Evaluation metrics of all rows of all ranks, each once."""
    settings = _settings(learner)
    _, answers = _joined([part for share in gather(list(parts), world) for part in share])
    whole = _whole(settings, answers)
    means = measures(settings, answers, whole).mean(0).tolist()
    found = {
        f"eval_{name}": mean
        for name, mean in zip(PREFERENCE_MEASURES, means, strict=True)
        if mean == mean
    }
    return {"eval_loss": float(losses(settings, answers, whole).mean()), **found}


def sample_losses(
    learner: Learner, parts: Sequence[Scores]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Ids of this rank's samples, with the loss of each, which counts as that of one label."""
    samples, answers = _joined(parts)
    found = losses(_settings(learner), answers, _whole(_settings(learner), answers)).numpy()
    return samples, found, np.ones(len(samples))
