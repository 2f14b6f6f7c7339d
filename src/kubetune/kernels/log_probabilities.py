"""Log-probability of each label, to be differentiated by any function of them, without `[tokens, vocabulary]` logits.

A loss of preferences is a function of the sum over an answer's labels. So g, the gradient of
the loss by one label's log-probability, is known only after all labels have been through the head:

                    forward                                            backward
    frozen head     d_hidden of each row, with a weight of 1           × g of the row: two products per chunk in all
    head learns     log-probabilities only                             the logits again, × g, then d_hidden and d_weight
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from kubetune.kernels.cross_entropy import Head, HeadGradients, chunks


class LinearLogProbabilities(Function):
    """`log_softmax(hidden @ weight.T + bias)` at the labels, fp32 `[labels]`.

    The gradient of a head that is trained by FlatAdamW is added to the optimizer's buffer in the backward: once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
    ) -> Tensor:
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        slopes = None if learns else torch.empty_like(hidden)
        log_probabilities = torch.empty(len(hidden), device=hidden.device)

        # `chunks` gives losses, -log p, and their gradients times the scale: times -1 they are the gradients of log p.
        for span, losses, d_logits in chunks(hidden, labels, head, -1.0):
            torch.neg(losses, out=log_probabilities[span])
            if slopes is not None:
                torch.mm(d_logits, weight, out=slopes[span])

        if slopes is not None:
            ctx.save_for_backward(slopes)
        else:
            # The weight's gradient takes g too, so logits are made again when it is known.
            ctx.save_for_backward(hidden, weight, bias, labels)

        ctx.head = head
        return log_probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if len(ctx.saved_tensors) == 1:  # the head is frozen
            (slopes,) = ctx.saved_tensors
            return (slopes * grad[:, None]).to(slopes.dtype), *(None,) * 4

        hidden, weight, bias, labels = ctx.saved_tensors
        head = ctx.head
        gradients = HeadGradients(hidden, weight, bias, head, ctx.needs_input_grad)
        # Each row of the gradient of the logits, times its g.
        for span, _, d_logits in chunks(hidden, labels, head, -1.0):
            d_logits.mul_(grad[span, None])
            gradients.add(span, d_logits)
        d_hidden, d_weight, d_bias = gradients.for_autograd()
        return d_hidden, _in(weight.dtype, d_weight), _in(weight.dtype, d_bias), None, None


def _in(dtype: torch.dtype, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.to(dtype)


def linear_log_probabilities(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
) -> Tensor:
    """Return the log-probability of each of `labels`, fp32 `[labels]`.

    `hidden` `[labels, hidden]` are the rows that predict them.
    """
    log_probabilities = LinearLogProbabilities.apply(  # type: ignore[no-untyped-call]
        hidden,
        head.weight,
        head.bias,
        labels,
        head,
    )
    return cast(Tensor, log_probabilities)
