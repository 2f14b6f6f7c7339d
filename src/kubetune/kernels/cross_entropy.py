"""Cross-entropy of a language model without ever holding `[tokens, vocabulary]` logits.

Only rows that predict a label reach the head, a few hundred at a time, and their gradient is made in the forward:
two matrix products per chunk, while autograd needs three and a copy of everything. For one row with the logits 2, 1, 0
and the label 0:

    p = softmax(2, 1, 0) = 0.67, 0.24, 0.09        loss = -log 0.67 = 0.41
    gradient of the logits = p - (1, 0, 0) = -0.33, 0.24, 0.09, in the memory of the logits

On a CPU all that is as wide as the vocabulary is made in place, in buffers that every chunk of a run uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from kubetune.base.cpu import heap
from kubetune.kernels import pointwise
from kubetune.kernels.pointwise import Kernels, chunk_rows

# So many numbers of a head's gradient are made before they are added to it: few enough for a processor's cache.
STRIPE = 2**22


@dataclass(frozen=True)
class LogitRule:
    """Function of a model's raw logits: `cap * tanh(multiplier * logits / cap)`; a cap of 0 means none."""

    multiplier: float = 1.0
    cap: float = 0.0

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits `[…, vocabulary]` multiplied and then capped."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


class GradientSum(Protocol):
    """Sum of one parameter's gradients in fp32, which an optimizer keeps (adamw.Collected)."""

    def opened(self) -> Tensor:
        """Return the sum, of the parameter's shape, to be added to."""


class Head(NamedTuple):
    """An output head, and what follows its product."""

    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor | None  # [vocabulary]
    rule: LogitRule
    kernels: Kernels  # the form, plain or compiled, of what is computed
    # Where the optimizer adds up the gradients of weight and bias, if it does.
    weight_sum: GradientSum | None = None
    bias_sum: GradientSum | None = None


def _logits(x: Tensor, head: Head, room: Tensor) -> Tensor:
    """Return the logits of the rows `x` before the head's rule, in the first rows of `room`."""
    logits = torch.mm(x, head.weight.t(), out=room[: len(x)])
    if head.bias is not None:
        logits.add_(head.bias)
    return logits


def _room(
    number: int,
    like: Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return memory `[rows, width]` on `like`'s device.

    On a CPU all calls with the same number and width get the same memory.
    """
    if like.device.type != "cpu":
        return like.new_empty(rows, width, dtype=dtype)
    return _kept_room(number, chunk_rows(width, like.device), width, dtype)[:rows]


@lru_cache(maxsize=4)
def _kept_room(
    number: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    # Outside the heap: there, blocks as large as this would leave holes between those that are kept.
    room = torch.frombuffer(heap.outside_heap(rows * width * dtype.itemsize), dtype=dtype)
    return room.view(rows, width)


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    head: Head,
) -> tuple[Tensor, Tensor]:
    """Return what `pointwise.cross_entropy` does, by the form that takes the least memory here."""
    form = head.kernels["cross_entropy"]
    rule = head.rule
    if form is pointwise.cross_entropy and logits.device.type == "cpu":
        return cross_entropy_in_place(logits, labels, scale, rule)
    return cast(tuple[Tensor, Tensor], form(logits, labels, scale, rule.multiplier, rule.cap))


def cross_entropy_in_place(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    rule: LogitRule,
) -> tuple[Tensor, Tensor]:
    """Return what `pointwise.cross_entropy` does, to the last bit, in at most two rooms of fp32."""
    # 1. The rule, cap · tanh(multiplier · logits / cap).
    bent = logits
    if logits.dtype != torch.float32:
        bent = _room(1, logits, len(logits), logits.shape[1], torch.float32).copy_(logits)
    if rule.multiplier != 1.0:
        bent.mul_(rule.multiplier)
    if rule.cap:
        bent.div_(rule.cap).tanh_().mul_(rule.cap)
    room = bent
    if rule.cap:
        # `bent` is needed again: the slope of tanh is 1 - tanh².
        room = _room(2, logits, len(logits), logits.shape[1], torch.float32)

    # 2. The loss, and the gradient of what the rule gave: softmax minus 1 at the label.
    log_probabilities = torch.log_softmax(bent, -1, out=room)
    column = labels[:, None]
    loss = -log_probabilities.gather(1, column)[:, 0]
    minus_one = log_probabilities.new_full((1, 1), -1.0).expand_as(column)
    gradient = log_probabilities.exp_().scatter_add_(1, column, minus_one)

    # 3. Back through the rule.
    if rule.cap:
        gradient.mul_(bent.div_(rule.cap).square_().neg_().add_(1))
    gradient.mul_(scale * rule.multiplier)
    if gradient is not logits:
        logits.copy_(gradient)
    return loss, logits


def logit_tiles(hidden: Tensor, head: Head) -> Iterator[tuple[slice, Tensor]]:
    """Yield stretches of rows with their logits before the head's rule, in memory that the next ones take."""
    rows = chunk_rows(len(head.weight), hidden.device)
    buffer = _room(
        0,
        hidden,
        min(rows, len(hidden)),
        len(head.weight),
        hidden.dtype,
    )
    for start in range(0, len(hidden), rows):
        span = slice(start, start + rows)
        yield span, _logits(hidden[span], head, buffer)


def chunks(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    scale: float,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield stretches of rows, the loss of each row, and `scale` × gradient of their raw logits.

    The gradient holds until the next stretch is asked for.
    """
    for span, logits in logit_tiles(hidden, head):
        losses, d_logits = _cross_entropy(logits, labels[span], scale, head)
        yield span, losses, d_logits


def add_product(total: Tensor, d_logits: Tensor, x: Tensor) -> None:
    """Add `d_logits.T @ x` to `total`, a stripe of the vocabulary at a time.

    So `[vocabulary, hidden]` never exists twice.
    """
    # 4 Mi numbers of fp32 are 16 MiB.
    rows = max(1, STRIPE // x.shape[1])
    for start in range(0, len(total), rows):
        total[start : start + rows] += d_logits[:, start : start + rows].t() @ x


class HeadGradients:
    """Gradients of rows, weight and bias of a head, added up chunk by chunk: dX = dL W and dW += dLᵀ X.

    `learns` is `ctx.needs_input_grad` of a function whose first arguments are rows, weight and bias.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        learns: Sequence[bool],
    ) -> None:
        self._hidden = hidden
        self._weight = weight
        self._head = head
        self._d_hidden = torch.empty_like(hidden)
        self._d_weight = _opened(weight, head.weight_sum) if learns[1] else None
        self._d_bias = None
        if bias is not None and learns[2]:
            self._d_bias = _opened(bias, head.bias_sum)

    def add(self, span: slice, d_logits: Tensor) -> None:
        """Add those of a chunk of rows, from the gradient of their logits `[labels, vocabulary]`."""
        torch.mm(d_logits, self._weight, out=self._d_hidden[span])
        if self._d_weight is not None:
            add_product(self._d_weight, d_logits, self._hidden[span])
        if self._d_bias is not None:
            self._d_bias += d_logits.float().sum(0)

    def for_autograd(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return them, in fp32 for weight and bias. What is in the optimizer's sums must not be added again: it is None."""
        d_weight = self._d_weight if self._head.weight_sum is None else None
        d_bias = self._d_bias if self._head.bias_sum is None else None
        return self._d_hidden, d_weight, d_bias


def _opened(parameter: Tensor, collected: GradientSum | None) -> Tensor:
    """Return the fp32 sum that gradients of a parameter are added to: the collected one, or zeros."""
    if collected is not None:
        return collected.opened()
    # In fp32: what hundreds of chunks add would be rounded away in bf16.
    return torch.zeros(parameter.shape, device=parameter.device)


# Makes of rows `[labels, hidden]` what `chunks` yields.
Tiles = Callable[[Tensor], Iterable[tuple[slice, Tensor, Tensor]]]


class FusedLinearLoss(Function):
    """Sum of a loss of `hidden @ weight.T + bias` `[labels, vocabulary]`, times `scale`, as an fp32 scalar.

    A head that is trained by FlatAdamW has its gradient added to the optimizer's buffer in the forward, which spares
    a second `[vocabulary, hidden]` in fp32: call it to be differentiated, once, by a gradient of 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tiles: Tiles,
        scale: float,
        head: Head,
    ) -> Tensor:
        # Chunk by chunk, the gradient of logits takes their place and is used up at once. Nothing is computed twice; the
        # price is that gradients are made unasked, with `scale` known here.
        gradients = HeadGradients(hidden, weight, bias, head, ctx.needs_input_grad)
        loss = torch.zeros((), device=hidden.device)
        for span, losses, d_logits in tiles(hidden):
            loss += losses.sum()
            gradients.add(span, d_logits)
        ctx.save_for_backward(*gradients.for_autograd())
        ctx.dtype = weight.dtype
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The gradients are made: only what follows the loss, a factor, is still to come.
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        if d_weight is not None:
            d_weight = (d_weight * grad).to(ctx.dtype)
        if d_bias is not None:
            d_bias = (d_bias * grad).to(ctx.dtype)
        return d_hidden * grad.to(d_hidden.dtype), d_weight, d_bias, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    scale: float = 1.0,
) -> Tensor:
    """Return `scale` × the summed cross-entropy of rows `[labels, hidden]`, an fp32 scalar."""
    return linear_loss(hidden, head, partial(chunks, labels=labels, head=head, scale=scale), scale)


def linear_loss(hidden: Tensor, head: Head, tiles: Tiles, scale: float) -> Tensor:
    """Return `scale` × the summed losses that `tiles` makes of rows `[labels, hidden]`, an fp32 scalar.

    The gradients that it makes are those of the raw logits times `scale`.
    """
    weight = head.weight
    bias = head.bias
    if not torch.is_grad_enabled():
        # Autograd says of parameters that they need a gradient here too. An evaluation's would be added to a step's.
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
    loss = FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        tiles,
        scale,
        head,
    )
    return cast(Tensor, loss)


@torch.no_grad()
def score(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross-entropy, whether labels are the likeliest tokens, and their losses.

    The sum is an fp64 scalar, the others are bool and fp32 `[labels]`.
    """
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    losses = torch.empty(len(hidden), device=hidden.device)
    is_likeliest = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    for span, raw in logit_tiles(hidden, head):
        logits = head.rule.apply(raw.float())
        log_probabilities = F.log_softmax(logits, -1)
        loss += F.nll_loss(log_probabilities, labels[span], reduction="sum").double()
        of_labels = log_probabilities.gather(1, labels[span, None])[:, 0]
        torch.neg(of_labels, out=losses[span])
        is_likeliest[span] = logits.argmax(-1) == labels[span]

    return loss, is_likeliest, losses
