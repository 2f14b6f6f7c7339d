"""Fused forwards for modules of an unmodified Hugging Face + PEFT model. Names, parameters and saving stay.

LoRA layers are known by their class, and tests hold them to PEFT's own; norms, SwiGLU and rotary embeddings are
recognised by their structure and proved equal on the model at hand before they are swapped. Anything else stays as it
is. LoRA layers and dropped rows pay everywhere; the others pay when their kernels are compiled.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kubetune.kernels import few_bits, pointwise
from kubetune.kernels.pointwise import Kernels
from kubetune.models import patches
from kubetune.models.adapters import shared_input
from kubetune.models.attention_hooks import CURRENT
from kubetune.models.mixtures.experts import routers_of
from kubetune.models.padding_free import decoder_layers, unwrap

Forward = Callable[..., Tensor]


def swap_forwards(
    model: nn.Module, kernels: Kernels | None, undo: ExitStack, *, packed: bool = True
) -> Counter[str]:
    """Swap what can be swapped; with `kernels` also what pays only when compiled. Returns how many of each kind.

    `packed`: sequences go through in packed batches, whose rows are known. `undo` takes back what was swapped for all
    models of an architecture.
    """
    done: Counter[str] = Counter()
    norms: dict[type, Forward | None] = {}
    done["lora"] += shared_input.swap(model)
    for module in model.modules():
        for kind, forward in _candidates(module, norms, kernels):
            module.forward = MethodType(forward, module)
            done[kind] += 1
    if kernels is not None:
        done["rotary"] += _swap_rotary(unwrap(model), kernels, undo)
    if packed:
        done["rows"] += _skip_unlabelled_rows(model)
    done["embeddings"] += _leave_out_absent_tokens(model)
    return +done


def _candidates(
    module: Any, norms: dict[type, Forward | None], kernels: Kernels | None
) -> Iterator[tuple[str, Forward]]:
    if (quantized := _quantized_lora(module)) is not None:
        yield "lora", quantized
    elif kernels is None:
        return
    elif _is_rms_norm(module):
        if type(module) not in norms:
            norms[type(module)] = _prove_norm(module, kernels)
        if (forward := norms[type(module)]) is not None:
            yield "norm", forward
    elif _is_swiglu(module):

        def forward(self: Any, x: Tensor) -> Tensor:
            gated = pointwise.swiglu(kernels, self.gate_proj(x), self.up_proj(x))
            return self.down_proj(gated)  # type: ignore[no-any-return]

        if _is_same(module, forward, module.gate_proj.in_features):
            yield "swiglu", forward


def _quantized_lora(module: Any) -> Forward | None:
    """Forward of PEFT's LoRA around a layer in 4 or 8 bits of bitsandbytes, laid out for gradients to pass through."""
    layers = sys.modules.get("peft.tuners.lora.bnb")
    kinds = getattr(layers, "Linear4bit", None), getattr(layers, "Linear8bitLt", None)
    if layers is None or type(module) not in kinds or not shared_input.is_simple(module):
        return None
    base = module.base_layer
    if type(module) is kinds[1]:
        # On a GPU inputs are rounded to 8 bits as well, and products made of those.
        return (
            _eight_bit_forward
            if type(base).__name__ == "Linear8bitLt" and _is_on_cpu(base.weight)
            else None
        )
    state = getattr(base.weight, "quant_state", None)
    may_be_packed = getattr(state, "packing_format_for_cpu", False) or getattr(
        base, "support_avx512bf16_for_cpu", False
    )
    is_known = type(base).__name__ == "Linear4bit" and state is not None and not may_be_packed
    return _four_bit_forward if is_known else None


def _four_bit_forward(module: Any, x: Tensor) -> Tensor:
    base = module.base_layer
    codes = base.weight
    is_other = not hasattr(codes, "quant_state") or base.compute_dtype not in (None, x.dtype)
    if is_other or module.disable_adapters or module.merged:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _in_few_bits(module, x, few_bits.FourBits(codes, codes.quant_state))


def _eight_bit_forward(module: Any, x: Tensor) -> Tensor:
    """Out of training, and before its first product, the layer is bitsandbytes' own: it rounds its inputs there."""
    base = module.base_layer
    state = getattr(base, "state", None)
    if (
        state is None
        or state.CB is None
        or not base.training
        or module.disable_adapters
        or module.merged
    ):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _in_few_bits(module, x, few_bits.EightBits(state.CB, state.SCB))


def _in_few_bits(module: Any, x: Tensor, bits: few_bits.Bits) -> Tensor:
    (layer,), adapters = shared_input.arguments([module], [()], None)
    return few_bits.lora_linear(x, layer, adapters, bits)


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, nn.Parameter)
        and weight.dim() == 1
    )


def _prove_norm(module: Any, kernels: Kernels) -> Forward | None:
    """Form of RMSNorm that this class has, of those known, tried with a random weight; None for another."""
    if _eps(module) is None:
        return None
    kept = module.weight.data.clone()
    module.weight.data.normal_(generator=torch.Generator(module.weight.device).manual_seed(0))
    try:
        for offset, late_cast in ((0.0, False), (0.0, True), (1.0, True)):

            def forward(
                self: Any, x: Tensor, offset: float = offset, late_cast: bool = late_cast
            ) -> Tensor:
                # Its own: vision tower and language model may share the class and differ in this.
                return pointwise.rms_norm(kernels, x, self.weight, _eps(self), offset, late_cast)

            if _is_same(module, forward, module.weight.numel()):
                return forward
    finally:
        module.weight.data.copy_(kept)
    return None


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _is_swiglu(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= parts.keys():
        return False
    is_linear = isinstance(getattr(parts["gate_proj"], "in_features", None), int)
    return is_linear and "silu" in type(parts["act_fn"]).__name__.lower()


@torch.no_grad()
def _is_same(module: Any, forward: Forward, features: int) -> bool:
    """Equality of `forward` and the module, on random input."""
    parameter = next(module.parameters())
    x = torch.randn(1, 6, features, generator=torch.Generator().manual_seed(0)).to(parameter)
    theirs, ours = module(x).float(), forward(module, x).float()
    tolerance = 1e-6 if parameter.dtype == torch.float32 else 4e-3
    return bool((theirs - ours).norm() <= tolerance * theirs.norm())


def _swap_rotary(lm: Any, kernels: Kernels, undo: ExitStack) -> int:
    """Rotary embedding is a function of the model's source file, so one swap serves all its layers."""
    source = sys.modules[type(lm).__module__]
    stock = getattr(source, "apply_rotary_pos_emb", None)
    if stock is None or stock.__module__ == __name__ or not patches.ROTARY.is_known():
        return 0

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or cos.shape[-1] != q.shape[-1] or cos.dim() != 3:
            return stock(q, k, cos, sin, *args, **kwargs)
        return pointwise.rotary(kernels, q, k, cos.unsqueeze(1), sin.unsqueeze(1))

    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*s, generator=generator)
        for s in ((1, 4, 5, 8), (1, 2, 5, 8), (1, 5, 8), (1, 5, 8))
    )
    try:
        pairs = list(zip(stock(q, k, cos, sin), apply(q, k, cos, sin), strict=True))
        equal = all(torch.allclose(theirs, ours, atol=1e-5) for theirs, ours in pairs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return 0  # another signature or layout than the common one: leave it alone
    if equal:
        undo.enter_context(patches.rotary_by(source, apply))
    return int(equal)


def _leave_out_absent_tokens(model: nn.Module) -> int:
    """Give embeddings a gradient of the tokens that occur alone, where FlatAdamW collects it (adamw.Collected)."""
    tables = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and not m.scale_grad_by_freq
    ]
    # Not on a GPU, where adding up rows takes them in no fixed order; nor in fp32, which is not collected.
    found = [
        m
        for m in tables
        if m.weight.requires_grad and m.weight.element_size() < 4 and _is_on_cpu(m.weight)
    ]
    for table in found:
        table.sparse = True
    return len(found)


def _is_on_cpu(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.device.type == "cpu"


def _skip_unlabelled_rows(model: nn.Module) -> int:
    """After the last attention only rows that predict a label matter: leave the others out of what follows.

    The self-check runs without rows, so this is exact by construction: nothing after attention mixes rows.
    """
    layers = decoder_layers(model)
    if not layers:
        return 0
    last: Any = layers[-1]
    if routers_of(last):
        return 0  # a router balances over all rows it sees
    attention = next((m for n, m in last.named_children() if "att" in n and "norm" not in n), None)
    outputs = (getattr(attention, name, None) for name in ("o_proj", "dense", "c_proj"))
    swapped = 0
    feeds: Iterator[Any] = (getattr(last, name, None) for name in ("mlp", "ffn"))
    for module in (*feeds, next((m for m in outputs if m is not None), None)):
        if module is None:
            continue
        module.forward = _rows_only(module.forward)
        swapped += 1
    if hasattr(
        last, "feed_forward_chunk"
    ):  # BERT and its kin: feed-forward, residual and norm in a method
        last.feed_forward_chunk = _rows_only(last.feed_forward_chunk)
        swapped += 1
    return swapped


def _rows_only(stock: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        if CURRENT.rows is None or x.dim() != 3:
            return stock(x)
        y = stock(x[:, CURRENT.rows])
        return y.new_zeros(1, x.shape[1], y.shape[-1]).index_copy(1, CURRENT.rows, y)

    return forward
