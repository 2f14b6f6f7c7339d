"""Preference tuning of a language model: which of two answers is better, or how good each one is.

The losses are in preference_losses.py. The reference is the model before training. Its log-probability of every answer
is computed once, before the first step, by training/reference. A row is two sequences, one after the other:

    pairs             prompt + chosen answer    prompt + rejected answer
    judged answers    prompt + answer           prompt + another row's answer, for KTO's estimate of the gain of any answer
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kubetune.batching.batch import Batch, collate
from kubetune.config.metric_names import PREFERENCE_MEASURES
from kubetune.distributed.process_group import World, gather_parts, sum_numbers
from kubetune.kernels.log_probabilities import linear_log_probabilities
from kubetune.models import fsdp, quantization
from kubetune.models.attention_hooks import packed
from kubetune.tasks.causal_lm import CausalLM, head_of, score_labels
from kubetune.tasks.preference_losses import (
    BatchTotals,
    ScoredAnswers,
    gains,
    losses,
    measures,
    sft_weight,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.feed import Work
    from kubetune.config.schema import PreferenceConfig
    from kubetune.models.learner import Learner
    from kubetune.models.model_spec import ModelSpec


class Scores(NamedTuple):
    """The answers of one batch of an evaluation, as arrays: they are gathered from all ranks."""

    samples: NDArray[np.int64]  # [rows]
    logps: NDArray[np.float64]  # [rows, 2]
    reference: NDArray[np.float64]  # [rows, 2]
    labels: NDArray[np.float64]  # [rows, 2]
    targets: NDArray[np.float32] | None  # [rows]


class Preference(CausalLM):
    """Train a language model on pairs of answers, or on answers that are judged good or bad."""

    step_metrics = PREFERENCE_MEASURES

    def learner_of(self, model: nn.Module, spec: ModelSpec) -> Learner:
        """Choose how sequences go through a loaded model, which learns with the settings of its preference."""
        return replace(super().learner_of(model, spec), preference=spec.preference)

    def with_batch_totals(
        self,
        learner: Learner,
        work: Work,
        world: World,
    ) -> Work:
        """Divide the work by its rows, and give its batches what their losses need of the whole global batch."""
        settings = settings_of(learner)
        batches = work.batches
        chosen_labels = 0.0
        good = 0.0
        gain = 0.0
        if settings.traits.judges:
            # KTO's estimate needs one forward over the answers to other questions. After it they are dropped.
            for batch in batches:
                gain += _gain_of_unrelated(learner, batch.to(world.device))
                if batch.targets is not None:
                    good += float((batch.targets > 0).sum())
            batches = [_every_second(batch, 0) for batch in batches]
        elif sft_weight(settings):
            for batch in batches:
                # The chosen answer of a pair comes first.
                chosen_labels += sum(batch.label_counts[::2])

        # Ranks need not meet where no loss needs any of these.
        if settings.traits.judges or sft_weight(settings):
            chosen_labels, good, gain = sum_numbers([chosen_labels, good, gain], world)

        totals = BatchTotals(
            rows=float(work.samples),
            chosen_labels=chosen_labels,
            good=good,
            kl=gain / max(work.samples, 1),
        )
        batches = [replace(batch, totals=totals) for batch in batches]
        return replace(work, divisor=work.samples, batches=batches)

    def backward(
        self,
        learner: Learner,
        batch: Batch,
        scale: float,
    ) -> Tensor:
        """Add the gradient of one micro-batch to the parameters; return loss and measures, scaled, detached."""
        settings = settings_of(learner)
        with packed(batch.cu_seqlens, batch.rows, parents=batch.parents):
            logps = fsdp.inside(
                learner.lm,
                _log_probabilities_of_labels,
                learner,
                batch,
            )
            answers = _answers(batch, logps)
            totals = batch.totals
            if not isinstance(totals, BatchTotals):
                totals = _totals(settings, answers)  # a trial before the first step
            value = losses(settings, answers, totals).sum()
            learner.routing.backward(value * scale, scale)

        # One tensor, so that the ranks add up loss and measures in one call.
        measured = measures(settings, answers.detached(), totals).sum(0)
        return torch.cat([value.detach()[None], measured]) * scale

    def evaluate(self, learner: Learner, batch: Batch) -> Scores:
        """Return the answers of one micro-batch."""
        answers = _without_gradient(learner, batch)
        return Scores(
            samples=np.asarray(batch.samples, np.int64),
            logps=answers.logps.cpu().numpy(),
            reference=answers.reference.cpu().numpy(),
            labels=answers.labels.cpu().numpy(),
            targets=None if answers.targets is None else answers.targets.cpu().numpy(),
        )

    def metrics(
        self,
        learner: Learner,
        parts: Sequence[Scores],
        world: World,
    ) -> dict[str, float]:
        """Return loss and measures over all rows of all ranks, each row once."""
        settings = settings_of(learner)
        # In the order of their ids, so that sums are the same however rows were spread over ranks.
        _, answers = _joined(gather_parts(parts, world))
        totals = _totals(settings, answers)

        metrics = {"eval_loss": float(losses(settings, answers, totals).mean())}
        means = measures(settings, answers, totals).mean(0).tolist()
        for name, mean in zip(PREFERENCE_MEASURES, means, strict=True):
            if not np.isnan(mean):  # what this loss does not measure
                metrics[f"eval_{name}"] = mean
        return metrics

    def sample_losses(
        self,
        learner: Learner,
        parts: Sequence[Scores],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return ids of this rank's samples and the loss of each, which counts as that of one label."""
        settings = settings_of(learner)
        samples, answers = _joined(parts)
        row_losses = losses(settings, answers, _totals(settings, answers)).numpy()
        return samples, row_losses, np.ones(len(samples))


TASK: Final = Preference()


def settings_of(learner: Learner) -> PreferenceConfig:
    """Return the settings of the preference that a learner is built for."""
    assert learner.preference is not None, "what learns preferences has their settings"
    return learner.preference


def log_probabilities(learner: Learner, batch: Batch) -> NDArray[np.float64]:
    """Return summed log-probabilities of the answers of each row, `[rows, 2]`, with the adapter off if there is one."""
    # A base without its adapter is the reference; a model that is trained whole is so before its first step.
    model: Any = learner.model
    has_adapter = learner.lm is not model
    with model.disable_adapter() if has_adapter else nullcontext():
        logps: NDArray[np.float64] = _without_gradient(learner, batch).logps.cpu().numpy()
    return logps


def _answers(batch: Batch, logps_of_labels: Tensor) -> ScoredAnswers:
    """Return the answers of a batch from the log-probabilities `[labels]` of their labels, added up in fp64."""
    # Of 2 rows, whose answers have 3, 2, 1 and 2 labels (label_counts):
    #
    #     logps_of_labels    -1 -2 -1 | -3 -1 | -2 | -1 -1
    #     logps              [[-4, -4], [-2, -2]]         labels  [[3, 2], [1, 2]]
    num_rows = len(batch.samples)
    # Two answers a row, or one where KTO has dropped the unrelated ones.
    width = len(batch.label_counts) // num_rows if num_rows else 2
    # A rank without a row of a step still runs a sequence, which has no labels.
    num_answers = num_rows * width

    # fp64: a long answer's sum in fp32 would lose the digits in which two answers differ.
    sums = [part.sum() for part in logps_of_labels.double().split(batch.label_counts)]
    logps = torch.stack(sums)[:num_answers].view(num_rows, width)

    counts = torch.tensor(
        batch.label_counts[:num_answers], dtype=logps.dtype, device=logps.device
    ).view_as(logps)

    # Losses without a reference are written for all batches alike, with zeros in its place.
    if batch.reference is None:
        reference = torch.zeros_like(counts)
    else:
        reference = batch.reference.view_as(logps)

    targets = None if batch.targets is None else batch.targets[:, 0]
    return ScoredAnswers(logps, reference, counts, targets)


def _totals(settings: PreferenceConfig, answers: ScoredAnswers) -> BatchTotals:
    """Return the totals of a global batch. All its answers must be on this rank."""
    good = 0.0 if answers.targets is None else float((answers.targets > 0).sum())
    kl = 0.0
    if settings.traits.judges and len(answers.logps):
        kl = float(gains(settings, answers, per_label=False)[:, 1].mean())
    return BatchTotals(
        float(len(answers.logps)),
        float(answers.labels[:, 0].sum()),
        good,
        kl,
    )


def _every_second(batch: Batch, first: int) -> Batch:
    """Keep every second sequence of a batch that has two a row: the answers (0), or the unrelated ones (1)."""
    if not batch.samples:
        return batch

    # Back to what `collate` takes: the tokens of each sequence, and which of them are trained.
    ids = batch.input_ids.cpu().numpy().astype(np.uint32)
    trained = np.zeros(batch.num_tokens, bool)
    trained[batch.rows.cpu().numpy() + 1] = True  # a row of hidden states predicts the next token

    # Of 2 rows with sequences 0 1 | 2 3, `first` 0 keeps 0 and 2, `first` 1 keeps 1 and 3.
    spans = [slice(start, stop) for start, stop in pairwise(batch.cu_seqlens)]
    sequences = [(ids[span], trained[span]) for span in spans[first::2]]

    half = collate(sequences, batch.samples).to(batch.input_ids.device)

    # What is beside the tokens is cut in the same way.
    reference = None
    if batch.reference is not None:
        reference = batch.reference[:, first : first + 1]
    pictures = None
    if batch.pictures is not None:
        pictures = batch.pictures.of(range(first, len(spans), 2), batch.cu_seqlens)
    return replace(
        half,
        targets=batch.targets,
        reference=reference,
        pictures=pictures,
    )


def _gain_of_unrelated(learner: Learner, batch: Batch) -> float:
    """Return the summed gain over the reference of the answers of a batch that belong to other rows."""
    # Without dropout: it estimates how far the model has moved.
    with learner.asked():
        answers = _without_gradient(learner, _every_second(batch, 1))
    return float(gains(settings_of(learner), answers, per_label=False).sum())


def _log_probabilities_of_labels(learner: Learner, batch: Batch) -> Tensor:
    """Return the log-probability of each label `[labels]`, row after row."""
    hidden = learner.hidden(learner, batch)[batch.rows]
    if batch.tree is None:
        return linear_log_probabilities(hidden, batch.labels, head_of(learner))

    # Rows that share a beginning share its labels, which are computed once and then given to each row.
    shared = linear_log_probabilities(hidden[batch.tree.places], batch.labels, head_of(learner))
    return shared[batch.tree.entries]


@torch.no_grad()
def _without_gradient(learner: Learner, batch: Batch) -> ScoredAnswers:
    """Return the answers of a batch, computed without a gradient."""
    with (
        packed(batch.cu_seqlens, parents=batch.parents),
        quantization.multiplying_as_in_training(learner.lm),
    ):
        _, _, label_losses = fsdp.inside(
            learner.lm,
            score_labels,
            learner,
            batch,
        )
        return _answers(batch, -label_losses)


def _joined(parts: Sequence[Scores]) -> tuple[NDArray[np.int64], ScoredAnswers]:
    """Return the ids and answers of all rows in the order of their ids, whichever rank ran them."""
    if not parts:
        empty = torch.empty(0, 2, dtype=torch.float64)
        return np.empty(0, np.int64), ScoredAnswers(empty, empty, empty)
    samples = np.concatenate([part.samples for part in parts])
    order = np.argsort(samples, kind="stable")

    def in_order(name: str) -> Tensor:
        arrays = [getattr(part, name) for part in parts]
        return torch.from_numpy(np.concatenate(arrays)[order])

    answers = ScoredAnswers(
        logps=in_order("logps"), reference=in_order("reference"), labels=in_order("labels")
    )

    # Parts without rows have no targets, also where answers are judged.
    targets = [part.targets for part in parts if part.targets is not None]
    if targets:
        answers = answers._replace(targets=torch.from_numpy(np.concatenate(targets)[order]))
    return samples[order], answers
