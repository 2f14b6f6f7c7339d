"""Cross-entropy of a language model without ever holding `[tokens, vocabulary]` logits.

Only rows that predict a label reach the head, a few hundred at a time, and their gradient is made in the forward:
two matrix products per chunk where autograd needs three and a copy of everything.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from kubetune import kernels
from kubetune.flat import LogitRule


class Head(NamedTuple):
    """An output head: `weight` `[vocabulary, hidden]`, `bias` `[vocabulary]` or None, and what follows the product."""

    weight: Tensor
    bias: Tensor | None
    rule: LogitRule


def chunk_rows(vocabulary: int) -> int:
    """Rows scored at once: about 32 M logits, which fit caches and memory at any vocabulary."""
    return min(512, max(128, 2**25 // vocabulary))


def _collected(parameter: Tensor | None) -> Any:
    """What the optimizer collects the gradient of a parameter in, where it does (optim.Collected)."""
    return getattr(parameter, "collected", None)


class FusedLinearCrossEntropy(Function):
    """Sum of cross-entropies of `hidden @ weight.T + bias`, times `scale`, as an fp32 scalar.

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
        rule: LogitRule,
    ) -> Tensor:
        d_hidden = torch.empty_like(hidden)
        # A trained head collects its gradient in fp32: hundreds of chunks would be rounded away in bf16.
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            collected = _collected(weight)
            d_weight = torch.zeros(weight.shape, device=weight.device) if collected is None else collected.opened()
        if bias is not None and ctx.needs_input_grad[2]:
            collected = _collected(bias)
            d_bias = torch.zeros(bias.shape, device=bias.device) if collected is None else collected.opened()
        loss = torch.zeros((), device=hidden.device)
        rows = chunk_rows(len(weight))
        buffer = hidden.new_empty(min(rows, len(hidden)), len(weight))
        for start in range(0, len(hidden), rows):
            x = hidden[start : start + rows]
            logits = torch.mm(x, weight.t(), out=buffer[: len(x)])
            if bias is not None:
                logits += bias
            chunk_loss, d_logits = kernels.fused("cross_entropy")(
                logits, labels[start : start + rows], scale, rule.multiplier, rule.cap
            )
            loss += chunk_loss
            torch.mm(d_logits, weight, out=d_hidden[start : start + rows])
            if d_weight is not None:
                d_weight += d_logits.t() @ x
            if d_bias is not None:
                d_bias += d_logits.float().sum(0)
        ctx.save_for_backward(
            d_hidden,
            d_weight if _collected(weight) is None else None,
            d_bias if _collected(bias) is None else None,
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
            None,
            None,
            None,
        )


def linear_cross_entropy(hidden: Tensor, labels: Tensor, head: Head, scale: float = 1.0) -> Tensor:
    """Training loss: `scale × Σ cross-entropy` of rows `[labels, hidden]` against `labels` `[labels]`, fp32 scalar."""
    loss = FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, labels, scale, head.rule
    )
    return cast(Tensor, loss)


@torch.no_grad()
def score(hidden: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Evaluation: (summed cross-entropy, number of labels the model would have said), as fp64 scalars."""
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    right = torch.zeros((), dtype=torch.float64, device=hidden.device)
    rows = chunk_rows(len(head.weight))
    for start in range(0, len(hidden), rows):
        logits = head.rule.apply(F.linear(hidden[start : start + rows], head.weight, head.bias).float())
        chunk = labels[start : start + rows]
        loss += F.cross_entropy(logits, chunk, reduction="sum").double()
        right += (logits.argmax(-1) == chunk).sum().double()
    return loss, right
