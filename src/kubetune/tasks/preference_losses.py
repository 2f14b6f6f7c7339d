"""Losses of preference tuning as functions of log-probabilities: which of two answers is better, or how good one is.

They are plain, differentiable torch on a few numbers a row. Where the papers leave something open it is as TRL has it;
tests compare with TRL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from kubetune.config.schema import PreferenceConfig
    from kubetune.config.schema.preference import Loss


class ScoredAnswers(NamedTuple):
    """The answers of some rows.

    Of a pair the chosen answer is in column 0. Of judged answers column 1 is another row's answer to this row's
    question, which stands for any answer.
    """

    logps: Tensor  # [rows, 2] summed log-probability of the answer's labels
    reference: Tensor  # [rows, 2] the same under the reference
    labels: Tensor  # [rows, 2] number of labels
    targets: Tensor | None = None  # [rows] 1 for a judged answer that is good, else 0

    def detached(self) -> ScoredAnswers:
        """Return the answers without the graph that made them."""
        return self._replace(logps=self.logps.detach())


class BatchTotals(NamedTuple):
    """Sums and means over a whole global batch, which the loss of one of its rows may need."""

    rows: float
    chosen_labels: float = 0.0  # labels of all chosen answers
    good: float = 0.0  # number of judged answers that are good
    kl: float = 0.0  # mean gain of answers to questions that are not theirs


def sft_weight(settings: PreferenceConfig) -> float:
    """Return the weight of the chosen answer's own cross-entropy, which ORPO always has."""
    return 1.0 if settings.loss == "orpo" else settings.sft_weight


def gains(
    settings: PreferenceConfig,
    answers: ScoredAnswers,
    *,
    per_label: bool,
) -> Tensor:
    """Return what a loss compares answers by, `[rows, 2]`: their log-probability, or its gain over the reference.

    It is the sum over an answer's labels, or with `per_label` their mean.
    """
    value = answers.logps
    if settings.traits.compares:
        value = value - answers.reference
    if per_label:
        value = value / answers.labels.clamp(min=1)
    return value


def losses(
    settings: PreferenceConfig,
    answers: ScoredAnswers,
    totals: BatchTotals,
) -> Tensor:
    """Return the loss of each row `[rows]`. Their sum over the global batch, divided by its rows, is the batch's loss."""
    if settings.traits.judges:
        return judged_losses(settings, answers, max(totals.kl, 0.0))

    values = pair_losses(settings, answers)
    weight = sft_weight(settings)
    if weight:
        # The chosen answers' own cross-entropy is a mean over labels, not over pairs. With 4 pairs in the global batch,
        # whose chosen answers have 100 labels, a row adds -logp × 4 / 100, so that the sum over 4 is Σ -logp / 100.
        weight = weight * totals.rows / max(totals.chosen_labels, 1.0)
        values = values - answers.logps[:, 0] * weight

    return values


def pair_losses(settings: PreferenceConfig, answers: ScoredAnswers) -> Tensor:
    """Return the loss of each pair `[rows]`, without the chosen answer's own cross-entropy."""
    chosen, rejected = gains(settings, answers, per_label=settings.traits.per_label).unbind(1)
    return FORMULAS[settings.loss](settings, chosen, rejected)


# The formulas. With m the margin, the chosen answer's gain minus the rejected one's, σ the logistic function and ε the
# smoothing. The numbers are for m = 1.5, β = 0.1 and ε = 0.1; for ORPO and SimPO, of mean log-probabilities -0.5 and -1.2.


def _dpo(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    # arXiv 2305.18290: (1 - ε) · -log σ(βm) + ε · -log σ(-βm) = 0.636; 0.621 without ε
    return _smoothed(settings.beta * (chosen - rejected), settings.label_smoothing)


def _robust(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    # arXiv 2403.00409: ((1 - ε) · -log σ(βm) - ε · -log σ(-βm)) / (1 - 2ε) = 0.602
    logit = settings.beta * (chosen - rejected)
    right = F.logsigmoid(logit)
    wrong = F.logsigmoid(-logit)
    smoothing = settings.label_smoothing
    return ((1 - smoothing) * -right + smoothing * wrong) / (1 - 2 * smoothing)


def _hinge(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    # arXiv 2305.10425: max(0, 1 - βm) = 0.85
    return F.relu(1 - settings.beta * (chosen - rejected))


def _ipo(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    # arXiv 2310.12036: (m - 1 / 2β)² = 12.25, of means over labels
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


def _simpo(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    # arXiv 2405.14734: -log σ(βm - γ) = 0.513 with β = 2 and γ = 1
    gamma = 1.0 if settings.gamma is None else settings.gamma
    return _smoothed(settings.beta * (chosen - rejected) - gamma, settings.label_smoothing)


def _orpo(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    # arXiv 2403.07691: -β log σ(log odds p - log odds q) = 0.0247, with p = e^-0.5, q = e^-1.2, odds p = p / (1 - p)
    log_odds_ratio = chosen - rejected - _log_1m_exp(chosen) + _log_1m_exp(rejected)
    return -settings.beta * F.logsigmoid(log_odds_ratio)


# Loss → its formula on pairs. CPO (arXiv 2401.08417) is DPO whose gains know no reference. KTO judges answers one by one.
FORMULAS: Final[dict[Loss, Callable[[PreferenceConfig, Tensor, Tensor], Tensor]]] = {
    "dpo": _dpo,
    "cpo": _dpo,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}


def _smoothed(logit: Tensor, smoothing: float) -> Tensor:
    """Return -log σ of a logit, where a share of the pairs is assumed to be the wrong way round."""
    return (1 - smoothing) * -F.logsigmoid(logit) - smoothing * F.logsigmoid(-logit)


def _log_1m_exp(x: Tensor) -> Tensor:
    """Return `log(1 - exp(x))` of negative numbers, exact near both ends (Mächler 2012)."""
    # Near 0, 1 - exp(x) cancels: expm1 has the digits. Far below, exp(x) is tiny: log1p has them. They meet at -log 2.
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near_zero = x > -0.6931471805599453
    # `where` also differentiates the branch that it does not take, so each branch gets numbers that it can bear.
    from_expm1 = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    from_log1p = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, from_expm1, from_log1p)


def judged_losses(
    settings: PreferenceConfig,
    answers: ScoredAnswers,
    kl: float,
) -> Tensor:
    """Return KTO's loss of each judged answer `[rows]` (arXiv 2402.01306).

    `kl` is the mean gain of unrelated answers, at least 0.
    """
    # A good answer is to gain more than answers gain in general, a bad one less. With β = 0.1, a gain of 1.5, kl = 0.2:
    #
    #     good   1 - σ(β (1.5 - 0.2)) = 0.468         bad   1 - σ(-β (1.5 - 0.2)) = 0.532
    assert answers.targets is not None, "judged answers have targets"
    gain = gains(settings, answers, per_label=False)[:, 0] - kl
    good = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * gain))
    bad = settings.undesirable_weight * (1 - torch.sigmoid(-settings.beta * gain))
    return torch.where(answers.targets > 0, good, bad)


def measures(
    settings: PreferenceConfig,
    answers: ScoredAnswers,
    totals: BatchTotals,
) -> Tensor:
    """Return PREFERENCE_MEASURES of each row, `[rows, measures]`, NaN for what the loss does not measure.

    Their mean over the global batch is the batch's. Rewards are β times what the loss compares, but for IPO by the sum
    over labels.
    """
    per_label = settings.traits.rewards_per_label
    rewards = settings.beta * gains(settings, answers, per_label=per_label)

    logps = answers.logps
    if per_label:
        logps = logps / answers.labels.clamp(min=1)
    if answers.targets is None:
        return _measures_of_pairs(rewards, logps)
    return _measures_of_judged(
        settings.beta,
        rewards[:, 0],
        logps[:, 0],
        answers.targets,
        totals,
    )


def _measures_of_pairs(rewards: Tensor, logps: Tensor) -> Tensor:
    chosen, rejected = rewards.unbind(1)
    margin = chosen - rejected
    is_right = (margin > 0).to(margin)
    # Only KTO estimates how far the model has moved.
    kl = torch.full_like(margin, torch.nan)
    return torch.stack([is_right, margin, chosen, rejected, *logps.unbind(1), kl], 1)


def _measures_of_judged(
    beta: float,
    reward: Tensor,
    logp: Tensor,
    targets: Tensor,
    totals: BatchTotals,
) -> Tensor:
    # Means over the good and over the bad answers have divisors of their own. The caller divides by all rows: of 4 rows,
    # 3 of them good, a good one counts 4 / 3, a bad one 4 / 1.
    num_bad = totals.rows - totals.good
    weight_of_good = totals.rows / totals.good if totals.good else torch.nan
    weight_of_bad = totals.rows / num_bad if num_bad > 0 else torch.nan

    is_good = targets > 0
    good = is_good.to(reward) * weight_of_good
    bad = (~is_good).to(reward) * weight_of_bad

    # An answer is told apart rightly if it gains more than answers in general and is good, or less and is bad.
    kl = max(totals.kl, 0.0)
    is_right = ((reward > beta * kl) == is_good).to(reward)
    columns = [
        is_right,
        reward * good - reward * bad,
        reward * good,
        reward * bad,
        logp * good,
        logp * bad,
        torch.full_like(reward, kl),
    ]
    return torch.stack(columns, 1)
