"""Cross-entropy of a language model without ever holding `[tokens, vocabulary]` logits.

Only rows that predict a label reach the head, a few hundred at a time, and their gradient is made in the forward:
two matrix products per chunk where autograd needs three and a copy of everything. On a CPU all that is as wide as the
vocabulary is made in place, in rooms that every chunk of a run uses again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from kubetune.base import cpu
from kubetune.kernels import pointwise
from kubetune.kernels.pointwise import Kernels, chunk_rows

STRIPE = 2**22
"""Numbers of a head's gradient that are made before they are added to it: so few that they stay in the cache."""


@dataclass(frozen=True)
class LogitRule:
    """Function of a model's raw logits: `cap * tanh(multiplier * logits / cap)`; a cap of 0 means none."""

    multiplier: float = 1.0
    cap: float = 0.0

    def apply(self, logits: Tensor) -> Tensor:
        """Logits, `[…, vocabulary]`, multiplied and then capped."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


class GradientSum(Protocol):
    """Sum of one parameter's gradients in fp32, which an optimizer keeps (adamw.Collected)."""

    def opened(self) -> Tensor:
        """The sum, of the parameter's shape, to be added to."""


class Head(NamedTuple):
    """An output head: `weight` `[vocabulary, hidden]`, `bias` `[vocabulary]` or None, and what follows the product.

    `kernels`: the form of what is computed. `weight_sum` and `bias_sum`: where the gradients of weight and bias are
    added up, if the optimizer does so.
    """

    weight: Tensor
    bias: Tensor | None
    rule: LogitRule
    kernels: Kernels
    weight_sum: GradientSum | None = None
    bias_sum: GradientSum | None = None


def _logits(x: Tensor, head: Head, room: Tensor) -> Tensor:
    """Logits of the rows `x` before the head's rule, in the first rows of `room`."""
    found = torch.mm(x, head.weight.t(), out=room[: len(x)])
    return found if head.bias is None else found.add_(head.bias)


def _room(number: int, like: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`[rows, width]` on `like`'s device. On a CPU it is that of all others of this number and width."""
    if like.device.type != "cpu":
        return like.new_empty(rows, width, dtype=dtype)
    return _kept_room(number, chunk_rows(width, like.device), width, dtype)[:rows]


@lru_cache(maxsize=4)
def _kept_room(number: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    room = torch.frombuffer(cpu.outside_heap(rows * width * dtype.itemsize), dtype=dtype)
    return room.view(rows, width)


def _cross_entropy(
    logits: Tensor, labels: Tensor, scale: float, head: Head
) -> tuple[Tensor, Tensor]:
    """`pointwise.cross_entropy` in the form that takes the least memory where it runs."""
    form, rule = head.kernels["cross_entropy"], head.rule
    if form is pointwise.cross_entropy and logits.device.type == "cpu":
        return cross_entropy_in_place(logits, labels, scale, rule)
    return cast(tuple[Tensor, Tensor], form(logits, labels, scale, rule.multiplier, rule.cap))


def cross_entropy_in_place(
    logits: Tensor, labels: Tensor, scale: float, rule: LogitRule
) -> tuple[Tensor, Tensor]:
    """Result of `pointwise.cross_entropy`, to the last bit, but in at most two more rooms of fp32."""
    bent = logits
    if logits.dtype != torch.float32:
        bent = _room(1, logits, len(logits), logits.shape[1], torch.float32).copy_(logits)
    if rule.multiplier != 1.0:
        bent.mul_(rule.multiplier)
    if rule.cap:
        bent.div_(rule.cap).tanh_().mul_(rule.cap)
    sloped = _room(2, logits, len(logits), logits.shape[1], torch.float32) if rule.cap else bent
    log_probabilities = torch.log_softmax(bent, -1, out=sloped)
    column = labels[:, None]
    loss = -log_probabilities.gather(1, column)[:, 0]
    minus_one = log_probabilities.new_full((1, 1), -1.0).expand_as(column)
    gradient = log_probabilities.exp_().scatter_add_(1, column, minus_one)
    if rule.cap:
        gradient.mul_(bent.div_(rule.cap).square_().neg_().add_(1))
    gradient.mul_(scale * rule.multiplier)
    return loss, gradient if gradient is logits else logits.copy_(gradient)


def chunks(
    hidden: Tensor, labels: Tensor, head: Head, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Stretches of rows, the loss of each row, and `scale` × gradient of their raw logits, until the next is asked."""
    rows = chunk_rows(len(head.weight), hidden.device)
    buffer = _room(0, hidden, min(rows, len(hidden)), len(head.weight), hidden.dtype)
    for start in range(0, len(hidden), rows):
        span = slice(start, start + rows)
        yield span, *_cross_entropy(_logits(hidden[span], head, buffer), labels[span], scale, head)


def add_product(total: Tensor, d_logits: Tensor, x: Tensor) -> None:
    """`total += d_logits.T @ x`, a stripe of the vocabulary at a time: `[vocabulary, hidden]` never exists twice."""
    rows = max(1, STRIPE // x.shape[1])
    for start in range(0, len(total), rows):
        total[start : start + rows] += d_logits[:, start : start + rows].t() @ x


def opened(parameter: Tensor, collected: GradientSum | None) -> Tensor:
    """The fp32 sum that gradients of a parameter are added to: the collected one, or zeros."""
    # In fp32: hundreds of chunks would be rounded away in bf16.
    return (
        torch.zeros(parameter.shape, device=parameter.device)
        if collected is None
        else collected.opened()
    )


class FusedLinearCrossEntropy(Function):
    """Sum of cross-entropies of `hidden @ weight.T + bias` `[labels, vocabulary]`, times `scale`, as an fp32 scalar.

    A head that is trained by FlatAdamW has its gradient added to the optimizer's buffer in the forward, which spares
    a second `[vocabulary, hidden]` in fp32: call it to be differentiated, once, by a gradient of 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        head: Head,
    ) -> Tensor:
        # Chunk by chunk, the gradient of logits takes their place and is used up at once: dX = dL W, dW += dLᵀ X.
        # Nothing is computed twice; the price is that gradients are made unasked, with `scale` known here.
        weight_sum, bias_sum = head.weight_sum, head.bias_sum
        d_hidden = torch.empty_like(hidden)
        d_weight = opened(weight, weight_sum) if ctx.needs_input_grad[1] else None
        d_bias = opened(bias, bias_sum) if bias is not None and ctx.needs_input_grad[2] else None
        loss = torch.zeros((), device=hidden.device)
        for span, losses, d_logits in chunks(hidden, labels, head, scale):
            loss += losses.sum()
            torch.mm(d_logits, weight, out=d_hidden[span])
            if d_weight is not None:
                add_product(d_weight, d_logits, hidden[span])
            if d_bias is not None:
                d_bias += d_logits.float().sum(0)
        ctx.save_for_backward(
            d_hidden,
            d_weight if weight_sum is None else None,
            d_bias if bias_sum is None else None,
        )
        ctx.dtype = weight.dtype
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        return (
            d_hidden * grad.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * grad).to(ctx.dtype),
            None if d_bias is None else (d_bias * grad).to(ctx.dtype),
            *(None,) * 3,
        )


def linear_cross_entropy(hidden: Tensor, labels: Tensor, head: Head, scale: float = 1.0) -> Tensor:
    """Training loss: `scale × Σ cross-entropy` of rows `[labels, hidden]` against `labels` `[labels]`, fp32 scalar."""
    loss = FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, labels, scale, head
    )
    return cast(Tensor, loss)


@torch.no_grad()
def score(hidden: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy, fp64 scalar; `[labels]`: bool, the likeliest ones, and fp32, the cross-entropy of each."""
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    each = torch.empty(len(hidden), device=hidden.device)
    right = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    rows = chunk_rows(len(head.weight), hidden.device)
    buffer = _room(0, hidden, min(rows, len(hidden)), len(head.weight), hidden.dtype)
    for start in range(0, len(hidden), rows):
        x = hidden[start : start + rows]
        logits = head.rule.apply(_logits(x, head, buffer).float())
        chunk = labels[start : start + rows]
        log_probabilities = F.log_softmax(logits, -1)
        loss += F.nll_loss(log_probabilities, chunk, reduction="sum").double()
        torch.neg(log_probabilities.gather(1, chunk[:, None])[:, 0], out=each[start : start + rows])
        right[start : start + rows] = logits.argmax(-1) == chunk
    return loss, right, each
