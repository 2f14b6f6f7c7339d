"""Losses of preference tuning as functions of log-probabilities: which answer of two is better, or how good one is.

Plain torch on a few numbers a row, differentiable; log-probabilities.py makes them, and preference.py divides. What the
papers leave open is taken as TRL takes it, which tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kubetune.config.schema.preference import COMPARED

if TYPE_CHECKING:
    from kubetune.config.schema import PreferenceConfig

PER_TOKEN: Final = ("ipo", "simpo", "orpo")
"""Losses of the mean over an answer's labels; the others take the sum."""

REWARD_PER_TOKEN: Final = ("simpo", "orpo")
"""Losses whose rewards are such means too."""


class Answers(NamedTuple):
    """Answers of some rows, `[rows, 2]` each: `logps`, the summed log-probability of their labels, that under the
    `reference`, and the number of `labels`. Of pairs the chosen one comes first; of judged answers the second is
    another row's, which stands for any answer. `targets` `[rows]`: 1 for a judged answer that is good, else 0."""

    logps: Tensor
    reference: Tensor
    labels: Tensor
    targets: Tensor | None = None


class Whole(NamedTuple):
    """Numbers of a whole global batch: its rows, the labels of its chosen answers, its good answers where they are
    judged, and the mean gain of answers to questions that are not theirs."""

    rows: float
    chosen_labels: float = 0.0
    good: float = 0.0
    kl: float = 0.0


def sft_weight(settings: PreferenceConfig) -> float:
    """Weight of the chosen answer's own cross-entropy, which ORPO always has."""
    return 1.0 if settings.loss == "orpo" else settings.sft_weight


def gains(settings: PreferenceConfig, answers: Answers, means: Sequence[str] = PER_TOKEN) -> Tensor:
    """Log-probability that a loss compares answers by, or its gain, `[rows, 2]`; a mean per label in losses `means`."""
    found = answers.logps - answers.reference if settings.loss in COMPARED else answers.logps
    return found / answers.labels.clamp(min=1) if settings.loss in means else found


def pair_losses(settings: PreferenceConfig, answers: Answers) -> Tensor:
    """Loss of each pair `[rows]`, without the chosen answer's own cross-entropy."""
    chosen, rejected = gains(settings, answers).unbind(1)
    loss, beta, smoothing, margin = (
        settings.loss,
        settings.beta,
        settings.label_smoothing,
        chosen - rejected,
    )
    if loss == "hinge":
        return F.relu(1 - beta * margin)
    if loss == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if loss == "orpo":
        return -beta * F.logsigmoid(margin - _log_1m_exp(chosen) + _log_1m_exp(rejected))
    certain = beta * margin - (1.0 if settings.gamma is None else settings.gamma) * (
        loss == "simpo"
    )
    right, wrong = F.logsigmoid(certain), F.logsigmoid(-certain)
    if loss == "robust":
        return ((1 - smoothing) * -right + smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * -right - smoothing * wrong


def _log_1m_exp(x: Tensor) -> Tensor:
    """`log(1 - exp(x))` of negative numbers, exact near both ends (Mächler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # The branch not taken must not make NaN of the gradient.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


def judged_losses(settings: PreferenceConfig, answers: Answers, kl: float) -> Tensor:
    """KTO's loss of each judged answer `[rows]`; `kl`: the mean gain of unrelated answers, at least 0."""
    assert answers.targets is not None, "judged answers have them"
    gain = gains(settings, answers)[:, 0] - kl
    good = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * gain))
    bad = settings.undesirable_weight * (1 - torch.sigmoid(-settings.beta * gain))
    return torch.where(answers.targets > 0, good, bad)


def losses(settings: PreferenceConfig, answers: Answers, whole: Whole) -> Tensor:
    """Loss of each row `[rows]`, such that the sum over the global batch, divided by its rows, is the batch's.

    The chosen answers' own cross-entropy is a mean over labels, not over pairs: it has a divisor of its own.
    """
    if settings.loss == "kto":
        return judged_losses(settings, answers, max(whole.kl, 0.0))
    found = pair_losses(settings, answers)
    if weight := sft_weight(settings):
        found = found - answers.logps[:, 0] * (weight * whole.rows / max(whole.chosen_labels, 1.0))
    return found


def measures(settings: PreferenceConfig, answers: Answers, whole: Whole) -> Tensor:
    """PREFERENCE_MEASURES of each row, `[rows, measures]`, whose mean over the global batch is the batch's.

    What is not measured is NaN.

    Rewards are β times what the loss compares, but in IPO by the sum over labels.
    """
    rewards = settings.beta * gains(settings, answers, REWARD_PER_TOKEN)
    logps = (
        answers.logps / answers.labels.clamp(min=1)
        if settings.loss in REWARD_PER_TOKEN
        else answers.logps
    )
    if answers.targets is None:
        margin = rewards[:, 0] - rewards[:, 1]
        nothing = torch.full_like(margin, torch.nan)
        return torch.stack(
            [(margin > 0).to(margin), margin, *rewards.unbind(1), *logps.unbind(1), nothing], 1
        )
    kl, is_good = max(whole.kl, 0.0), answers.targets > 0
    reward, logp = rewards[:, 0], logps[:, 0]
    # Means over the good and over the bad answers: each has a divisor of its own.
    good = is_good.to(reward) * (whole.rows / whole.good if whole.good else torch.nan)
    bad = (~is_good).to(reward) * (
        whole.rows / (whole.rows - whole.good) if whole.rows > whole.good else torch.nan
    )
    right = ((reward > settings.beta * kl) == is_good).to(reward)
    columns = [
        right,
        reward * good - reward * bad,
        reward * good,
        reward * bad,
        logp * good,
        logp * bad,
    ]
    return torch.stack([*columns, torch.full_like(reward, kl)], 1)
