"""The loss of answers that were drawn and rewarded: plain, differentiable torch on a few numbers a token.

Answers lie end to end, as in a packed batch. Two answers of three and one tokens:

    logps        a a a b        each number that belongs to a token is `[labels]`
    counts       3 1            each number that belongs to an answer is `[rows]`
    owners       0 0 0 1        the answer of each token

`losses` adds up over any split of the answers into micro-batches and ranks. What the sum is divided by, `divisor`, is a
number of the whole step, so that no loss type depends on how a step is split. Arithmetic and defaults are those of
TRL 1.16; the tests compare with TRL. Where TRL divides by a micro-batch's own tokens or rows (bnpo, grpo, dr_grpo,
sapo, luspo), it agrees for a step that is one micro-batch, and depends on the split otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kubetune.config.schema.grpo import GrpoConfig

# Bounds of the logarithms of ratios in `vespo`, as TRL has them.
_LOWEST_LOG: Final = math.log(1e-8)
_HIGHEST_LOG: Final = 20.0


@dataclass(frozen=True)
class Answers:
    """Answers of a micro-batch: what the training says of their tokens, and what was known of them before."""

    logps: Tensor  # fp32 [labels] with their graph
    counts: Tensor  # int64 [rows] tokens of each answer, at least 1
    advantages: Tensor  # fp32 [rows]
    # fp32 [labels] of the weights that drew the answers; None: of these weights.
    old: Tensor | None = None
    sampled: Tensor | None = None  # fp32 [labels] as the sampler had them; NaN where it had none
    reference: Tensor | None = None  # fp32 [labels] of the model before training

    @property
    def owners(self) -> Tensor:
        """Return the answer of each token, int64 `[labels]`."""
        rows = torch.arange(len(self.counts), device=self.counts.device)
        return rows.repeat_interleave(self.counts)

    @property
    def old_logps(self) -> Tensor:
        """Return the log-probabilities under the weights that drew the answers, `[labels]`."""
        return self.logps.detach() if self.old is None else self.old


def row_sums(values: Tensor, answers: Answers) -> Tensor:
    """Return the sum of numbers of tokens `[labels]` over each answer, `[rows]`."""
    sums = values.new_zeros(len(answers.counts))
    return sums.index_add(0, answers.owners, values)


def ratios(settings: GrpoConfig, answers: Answers) -> Tensor:
    """Return how much likelier the weights make each token than those that drew it, `[labels]`.

    By `importance_sampling_level: sequence` the tokens of an answer share the geometric mean of their ratios.
    """
    logs = answers.logps - answers.old_logps  # 0 on policy, but with a gradient
    if settings.importance_sampling_level == "sequence":
        means = row_sums(logs, answers) / answers.counts
        logs = means[answers.owners]
    return logs.exp()


def divergences(settings: GrpoConfig, answers: Answers) -> Tensor:
    """Return the estimated divergence of each token from the model before training, `[labels]`."""
    assert answers.reference is not None, "what is compared with the reference has its numbers"
    difference = answers.reference - answers.logps
    match settings.kl_estimator:
        case "k1":
            return -difference
        case "abs":
            return difference.abs()
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.exp() - difference - 1
        case unknown:
            assert_never(unknown)


def policy_losses(settings: GrpoConfig, answers: Answers, ratio: Tensor) -> Tensor:
    """Return the loss of each token without divergence and corrections, `[labels]`."""
    advantage = answers.advantages[answers.owners]
    match settings.loss_type:
        case "cispo":
            # The ratio only weights the log-probability; no token loses its gradient by being clipped.
            bounded = ratio.clamp(max=settings.high).detach()
            return -bounded * advantage * answers.logps
        case "vespo":
            return -gamma_weights(settings, answers) * advantage * answers.logps
        case "sapo":
            temperature = torch.where(
                advantage > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg
            )
            # A smooth gate in place of the clip; its slope at a ratio of 1 is that of the ratio itself.
            gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
            return -gate * advantage
        case "grpo" | "dr_grpo" | "dapo" | "bnpo" | "luspo":
            # The smaller of both: a token that is clipped has no gradient, unless it went the wrong way.
            clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.high)
            if settings.delta is not None:
                ratio = ratio.clamp(max=settings.delta)
            return -torch.min(ratio * advantage, clipped * advantage)
        case unknown:
            assert_never(unknown)


@torch.no_grad()
def gamma_weights(settings: GrpoConfig, answers: Answers) -> Tensor:
    """Return the weight that `vespo` gives all tokens of an answer, `[labels]`.

    w^k × e^(λ - λw) of the answer's ratio w, the product of its tokens'. With k = 2 and λ = 3, of good answers:

        w         0.5    0.9    1    1.5    2
        weight    1.12   1.09   1    0.50   0.20

    The correction of the sampler is a part of w.
    """
    logs = (answers.logps - answers.old_logps).clamp(-_HIGHEST_LOG, _HIGHEST_LOG)
    of_answers = row_sums(logs, answers)
    if settings.importance_sampling_correction != "none":
        of_sampler = corrections(settings, answers).log().clamp(_LOWEST_LOG, _HIGHEST_LOG)
        of_answers = of_answers + row_sums(of_sampler, answers)
    of_answers = of_answers.clamp(_LOWEST_LOG, _HIGHEST_LOG)
    is_good = answers.advantages >= 0
    power = torch.where(is_good, settings.vespo_k_pos, settings.vespo_k_neg)
    decay = torch.where(is_good, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    decay = decay.clamp(min=1e-4)
    weights = (decay + power * of_answers - decay * of_answers.exp()).exp()
    weights = weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return weights[answers.owners]


def corrections(settings: GrpoConfig, answers: Answers) -> Tensor:
    """Return the weight of each token by how far the sampler's probabilities are from the training's, `[labels]`.

    A token that the sampler has no probability of counts as equally likely.
    """
    assert answers.sampled is not None, "what is corrected has the sampler's numbers"
    level, _, form = settings.importance_sampling_correction.partition("_")
    # Log of the ratio of training to sampling.
    logs = (answers.old_logps - answers.sampled).nan_to_num(nan=0.0)
    if level != "token":
        sums = row_sums(logs, answers)
        if level == "geometric":
            # The product of a thousand ratios of 1.001 is 2.7, their geometric mean is 1.001.
            sums = sums / answers.counts
        logs = sums[answers.owners]
    weights = logs.exp()
    lowest = settings.importance_sampling_clip_min
    highest = settings.importance_sampling_clip_max
    if form == "truncate":
        return weights.clamp(lowest, highest)
    is_outside = torch.zeros_like(weights, dtype=torch.bool)
    if lowest is not None:
        is_outside |= weights < lowest
    if highest is not None:
        is_outside |= weights > highest
    return weights.masked_fill(is_outside, 0.0)


def losses(settings: GrpoConfig, answers: Answers) -> Tensor:
    """Return the loss of each token `[labels]`. Their sum over the step, divided by `divisor`, is the step's loss."""
    ratio = ratios(settings, answers)
    values = policy_losses(settings, answers, ratio)
    corrects = settings.importance_sampling_correction != "none"
    if corrects and settings.loss_type != "vespo":
        values = values * corrections(settings, answers)
    if settings.beta:
        divergence = divergences(settings, answers)
        if settings.use_bias_correction_kl:
            # The gradient of the ratio counts even where the ratio is 1.
            divergence = divergence * ratio
        values = values + settings.beta * divergence
    if settings.loss_type in ("grpo", "sapo"):
        # Each answer counts alike, however long it is.
        values = values / answers.counts[answers.owners]
    return values


def divisor(settings: GrpoConfig, rows: int, tokens: int) -> int:
    """Return what the losses of a step are divided by.

    `rows`: all answers of the step, also those that nothing is learnt from. `tokens`: of answers that are not masked.
    """
    match settings.loss_type:
        case "grpo" | "sapo" | "luspo":
            return max(rows, 1)
        case "dr_grpo":
            return max(rows, 1) * settings.max_completion_length
        case "dapo" | "bnpo" | "cispo" | "vespo":
            return max(tokens, 1)
        case unknown:
            assert_never(unknown)


@torch.no_grad()
def measures(settings: GrpoConfig, answers: Answers) -> Tensor:
    """Return MEASURES of each token, `[labels, measures]`, NaN for what this run does not have."""
    ratio = ratios(settings, answers)
    advantage = answers.advantages[answers.owners]
    nothing = torch.full_like(ratio, torch.nan)
    divergence = nothing
    if answers.reference is not None:
        divergence = divergences(settings, answers)
    is_low = torch.zeros_like(ratio, dtype=torch.bool)
    match settings.loss_type:
        case "vespo":
            is_high = is_low  # no ratio is clipped
        case "cispo":
            is_high = (ratio > settings.high) & (advantage > 0)
        case "grpo" | "dr_grpo" | "dapo" | "bnpo" | "sapo" | "luspo":
            is_low = (ratio < 1 - settings.epsilon) & (advantage < 0)
            is_high = (ratio > 1 + settings.high) & (advantage > 0)
        case unknown:
            assert_never(unknown)
    difference = nothing
    if answers.sampled is not None:
        difference = (answers.old_logps - answers.sampled).abs().nan_to_num(nan=0.0)
    return torch.stack([divergence, is_low.float(), is_high.float(), difference], 1)
