"""Divergence of a model from its teacher, token by token, without ever holding `[tokens, vocabulary]` logits.

Three tokens with a probability of .5, .3 and .2 in the student S, and of .7, .2 and .1 in the teacher T:

    beta 0     KL(T ‖ S) = Σ T log T/S = .085      gradient of the student's logits S - T = -.2, .1, .1
    beta 1     KL(S ‖ T) = Σ S log S/T = .092      S (log S/T - .092) = -.214, .094, .120
    between    beta KL(T ‖ M) + (1 - beta) KL(S ‖ M) with M = beta T + (1 - beta) S

Where only some tokens are compared, the others are one more event, the tail, or they are left out. With the two likeliest
tokens of the teacher:

    tail           S .5 .3 (.2)    T .7 .2 (.1)     the gradient of the tail is dealt out by the probability of each token
    renormalise    S .625 .375     T .778 .222      tokens outside have no gradient

As in cross_entropy.py rows go through the head a few hundred at a time, and their gradient is made in the forward. What
is as wide as the vocabulary besides, such as the teacher's probabilities, is held of ROWS_AT_ONCE rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kubetune.kernels.cross_entropy import Head, LogitRule, linear_loss, logit_tiles

if TYPE_CHECKING:
    from kubetune.config.schema import DistillConfig

# Numbers of each token besides its loss: `config/metric_names.DISTILL_MEASURES` names them.
NUM_MEASURES: Final = 6
# Rows that are compared at a time: a dozen numbers of each token of the vocabulary are held meanwhile, in fp32. With
# fewer rows a teacher's head would be read more often than its arithmetic takes.
ROWS_AT_ONCE: Final = 128


class Events(NamedTuple):
    """What a model says of some tokens of the vocabulary, in fp32."""

    ids: Tensor  # int64 [rows, k]
    logps: Tensor  # [rows, k]
    rest: Tensor  # [rows] log-probability of all other tokens together


class Teacher(Protocol):
    """What knows the teacher's log-probabilities, at the temperature of the run, for rows of a micro-batch."""

    def whole(self, span: slice) -> Tensor:
        """Return the log-probabilities of all tokens, fp32 `[rows, vocabulary]`."""

    def likeliest(self, span: slice, number: int) -> Events | None:
        """Return the likeliest tokens, in falling order; None where they are not known."""

    def at(self, span: slice, ids: Tensor) -> Events:
        """Return the log-probabilities of these tokens, int64 `[rows, k]`."""


@dataclass(frozen=True)
class LocalTeacher:
    """A teacher in memory, of which the final hidden states are known."""

    hidden: Tensor  # [labels, width of the teacher]
    head: Head | None  # None: that of the model which learns, to be put in its place
    temperature: float
    tokens: int | None = None  # those that are compared; None: all

    def whole(self, span: slice) -> Tensor:
        """Return the log-probabilities of all tokens, fp32 `[rows, vocabulary]`."""
        assert self.head is not None, "a model that is its own teacher has its head by now"
        logits = F.linear(self.hidden[span], self.head.weight, self.head.bias).float()
        compared = self.head.rule.apply(logits)[:, : self.tokens]
        return torch.log_softmax(compared / self.temperature, -1)

    def likeliest(self, span: slice, number: int) -> Events:
        """Return the likeliest tokens, in falling order."""
        logps = self.whole(span)
        return events_of(logps, logps.topk(number).indices)

    def at(self, span: slice, ids: Tensor) -> Events:
        """Return the log-probabilities of these tokens, int64 `[rows, k]`."""
        return events_of(self.whole(span), ids)


@dataclass(frozen=True)
class KeptTeacher:
    """What a teacher said before of some tokens: by `kept_numbers`, or on a server."""

    numbers: Tensor  # fp32 [labels, 2 k + 1]
    of_student: bool = False  # True: of the student's likeliest tokens; else of the teacher's
    # What the numbers are still to be divided by. Another one than 1 leaves the rest unknown, and a summand of each label.
    temperature: float = 1.0

    def whole(self, span: slice) -> Tensor:
        """Return the log-probabilities of all tokens, where all were asked for."""
        events = self._events(span)
        return torch.empty_like(events.logps).scatter_(1, events.ids, events.logps)

    def likeliest(self, span: slice, number: int) -> Events | None:
        """Return the likeliest tokens, in falling order; None where others were asked for."""
        return None if self.of_student else self._events(span)

    def at(self, span: slice, ids: Tensor) -> Events:
        """Return the log-probabilities of the tokens that were asked for, which are these."""
        return self._events(span)

    def _events(self, span: slice) -> Events:
        of_rows = self.numbers[span]
        number = of_rows.shape[1] // 2
        ids = of_rows[:, :number].contiguous().view(torch.int32).long()
        rest = of_rows[:, -1]
        if self.temperature != 1:
            rest = torch.full_like(rest, math.nan)
        return Events(ids, of_rows[:, number:-1] / self.temperature, rest)


def kept_numbers(teacher: Teacher, labels: int, number: int) -> Tensor:
    """Return ids as bits of fp32, log-probabilities and the rest of the likeliest tokens, `[labels, 2 number + 1]`."""
    parts = []
    for start in range(0, labels, ROWS_AT_ONCE):
        events = teacher.likeliest(slice(start, start + ROWS_AT_ONCE), number)
        assert events is not None, "it is asked of a model"
        ids = events.ids.int().view(torch.float32)
        # -inf where no other token is left. What is kept has to be finite, and nothing reads it then.
        rest = events.rest.clamp(min=torch.finfo(torch.float32).min)
        parts.append(torch.cat([ids, events.logps, rest[:, None]], 1))
    return torch.cat(parts)


def events_of(logps: Tensor, ids: Tensor) -> Events:
    """Return what log-probabilities `[rows, vocabulary]` say of some tokens."""
    # Summed over the others themselves: 1 - Σ would have no digits left where the others are unlikely.
    rest = logps.scatter(1, ids, -math.inf).logsumexp(1)
    return Events(ids, logps.gather(1, ids), rest)


@torch.no_grad()
def likeliest_ids(hidden: Tensor, head: Head, number: int, tokens: int | None) -> Tensor:
    """Return the likeliest of `tokens` for rows `[rows, hidden]`, int64 `[rows, number]`; all where they are fewer."""
    number = min(number, tokens or len(head.weight))
    parts = [torch.empty((0, number), dtype=torch.int64, device=hidden.device)]
    for _, logits in logit_tiles(hidden, head):
        bent = head.rule.apply(logits.float())[:, :tokens]
        parts.append(bent.topk(number).indices)
    return torch.cat(parts)


def divergence(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row, and its gradient by the student's logits `[rows, events]`.

    `log_s`, `log_t`: log-probabilities of student and teacher.
    """
    student = log_s.exp()
    teacher = log_t.exp()
    if beta == 0.0:
        return _divergence(teacher, log_t, log_s).sum(1), student - teacher
    if beta == 1.0:
        terms = _divergence(student, log_s, log_t)
        losses = terms.sum(1)
        return losses, terms - student * losses[:, None]

    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    terms = _divergence(student, log_s, log_m)
    of_student = terms.sum(1)
    of_teacher = _divergence(teacher, log_t, log_m).sum(1)
    gradient = (terms - student * of_student[:, None]) * (1 - beta)
    return beta * of_teacher + (1 - beta) * of_student, gradient


def _divergence(weight: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the terms of KL(p ‖ q); what p gives no probability adds nothing, whatever q says."""
    return (weight * (log_p - log_q)).masked_fill_(weight == 0, 0.0)


def tile(
    logits: Tensor,
    labels: Tensor,
    span: slice,
    teacher: Teacher,
    settings: DistillConfig,
    rule: LogitRule,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses `[rows]`, the gradient of the raw logits `[rows, vocabulary]`, and measures `[rows, NUM_MEASURES]`.

    `tokens`: those that are compared, where the vocabularies of the two are padded otherwise; None: all.
    """
    bent = rule.apply(logits.float())
    log_s = torch.log_softmax(bent[:, :tokens] / settings.temperature, -1)
    if settings.support == "all" or settings.top_k >= log_s.shape[1]:
        log_t = teacher.whole(span)
        losses, gradient = divergence(log_s, log_t, settings.beta)
        agrees = (log_s.argmax(1) == log_t.argmax(1)).float()
        nothing = torch.full_like(losses, math.nan)
        compared = [nothing, nothing, nothing]
    else:
        losses, gradient, agrees, compared = _on_support(log_s, span, teacher, settings)

    # Cross-entropy is that of plain training, whatever the temperature.
    log_p = torch.log_softmax(bent, -1)
    entropies = F.nll_loss(log_p, labels, reduction="none")
    measures = torch.stack([losses, agrees, *compared, entropies], 1)
    gradient = gradient / settings.temperature
    if tokens is not None:
        gradient = F.pad(gradient, (0, bent.shape[1] - tokens))
    if settings.sft_weight:
        losses = losses + settings.sft_weight * entropies
        gradient += settings.sft_weight * log_p.exp()
        minus = gradient.new_full((len(labels), 1), -settings.sft_weight)
        gradient.scatter_add_(1, labels[:, None], minus)

    # Back through the rule: the slope of tanh is 1 - tanh².
    if rule.cap:
        gradient *= 1 - (bent / rule.cap).square()
    return losses, gradient * rule.multiplier, measures


def _on_support(
    log_s: Tensor, span: slice, teacher: Teacher, settings: DistillConfig
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return what compares `top_k` tokens: losses, gradient, whether the likeliest is the same, masses and overlap."""
    number = settings.top_k
    student_ids = log_s.topk(number).indices
    likeliest = teacher.likeliest(span, number)
    theirs = likeliest
    if theirs is None or settings.support == "student_k":
        theirs = teacher.at(span, student_ids)
    ours = events_of(log_s, theirs.ids)
    if settings.rest == "renormalise":
        of_student = torch.log_softmax(ours.logps, 1)
        losses, slopes = divergence(of_student, torch.log_softmax(theirs.logps, 1), settings.beta)
        gradient = torch.zeros_like(log_s).scatter_(1, theirs.ids, slopes)
    else:
        of_student = torch.cat([ours.logps, ours.rest[:, None]], 1)
        of_teacher = torch.cat([theirs.logps, theirs.rest[:, None]], 1)
        losses, slopes = divergence(of_student, of_teacher, settings.beta)
        gradient = (log_s - ours.rest[:, None]).exp_() * slopes[:, -1:]
        gradient.scatter_(1, theirs.ids, slopes[:, :-1])

    # By the others, as of a server at another temperature only these are not known.
    masses = [-torch.expm1(theirs.rest), -torch.expm1(ours.rest)]
    agrees = torch.full_like(losses, math.nan)
    overlap = agrees
    if likeliest is not None:
        agrees = (student_ids[:, 0] == likeliest.ids[:, 0]).float()
        is_common = (student_ids[:, :, None] == likeliest.ids[:, None, :]).any(2)
        overlap = is_common.float().mean(1)
    return losses, gradient, agrees, [*masses, overlap]


def linear_divergence(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    teacher: Teacher,
    settings: DistillConfig,
    scale: float = 1.0,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `scale` × the summed loss of rows `[labels, hidden]`, an fp32 scalar, and the sums of their measures."""
    sums = torch.zeros(NUM_MEASURES, device=hidden.device)
    tiles = partial(
        _tiles,
        labels=labels,
        head=head,
        teacher=teacher,
        settings=settings,
        scale=scale,
        sums=sums,
        tokens=tokens,
    )
    return linear_loss(hidden, head, tiles, scale), sums


def _tiles(
    hidden: Tensor,
    *,
    labels: Tensor,
    head: Head,
    teacher: Teacher,
    settings: DistillConfig,
    scale: float,
    sums: Tensor,
    tokens: int | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield what `cross_entropy.chunks` does, and add the measures to `sums`."""
    for span, logits in logit_tiles(hidden, head):
        losses = []
        for first, part in zip(
            range(span.start, len(hidden), ROWS_AT_ONCE), logits.split(ROWS_AT_ONCE), strict=False
        ):
            here = slice(first, first + len(part))
            of_part, gradient, measures = tile(
                part, labels[here], here, teacher, settings, head.rule, tokens
            )
            sums += measures.sum(0)
            losses.append(of_part)
            # The gradient takes the place of the logits.
            part.copy_(gradient.mul_(scale))
        yield span, torch.cat(losses), logits
