"""A frozen linear layer in bitsandbytes' 4 bits with its LoRA adapter, in as many tensors as a plain one needs.

PEFT copies what the layer gives, for fear of views, and adds the adapter's part to it in three more tensors as large.
Between those that autograd keeps, what is given back leaves holes as large as all that is kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from kubetune.kernels.lora import Adapters, Layer, flattened, lora_backward, lora_forward


def _times(state: Any, rows: Tensor, bias: Tensor | None, codes: Tensor) -> Tensor:
    from bitsandbytes.autograd._functions import matmul_4bit

    return cast(Tensor, matmul_4bit(rows, codes, quant_state=state, bias=None if bias is None else bias.to(rows.dtype)))


def _times_transposed(state: Any, total: Tensor | None, d_y: Tensor, codes: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(codes, state).to(d_y.dtype)
    return d_y @ weight if total is None else total.addmm_(d_y, weight)


class _LoraLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adapters: Adapters, state: Any, *flat: Tensor | None) -> tuple[Tensor, ...]:
        ctx.state = state
        return lora_forward(ctx, partial(_times, state), x, adapters, *flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        d_x, d_adapters, *others = lora_backward(ctx, partial(_times_transposed, ctx.state), grads)
        return d_x, d_adapters, None, *others


def lora_linear(x: Tensor, layer: Layer, adapters: Adapters, state: Any) -> Tensor:
    """Output of a layer whose `frozen` are codes that `state` says how to read."""
    (found,) = _LoraLinear.apply(x, adapters, state, *flattened([layer]))  # type: ignore[no-untyped-call]
    return cast(Tensor, found)
