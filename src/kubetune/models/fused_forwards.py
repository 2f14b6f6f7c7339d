"""Fused forwards for modules of an unmodified Hugging Face + PEFT model. Names, parameters and saving stay.

    what is swapped          how it is recognised                       pays
    LoRA layers              by class; tests compare them with PEFT's   always
    RMSNorm, SwiGLU, rotary  by structure, then tried on random input   once their kernels are compiled
    the last layer's MLP     by name, computes only rows with a label   always

Anything else stays as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kubetune.kernels import few_bits, pointwise
from kubetune.kernels.pointwise import Kernels
from kubetune.models import fsdp, patches
from kubetune.models.adapters import shared_input
from kubetune.models.attention_hooks import CURRENT
from kubetune.models.mixtures.stacked_experts import routers_of
from kubetune.models.padding_free import decoder_layers, unwrap

Forward = Callable[..., Tensor]


class NormForm(NamedTuple):
    """How a class computes RMSNorm: `x / rms(x) * (weight + offset)`."""

    offset: float  # Gemma and its kin store the weight minus 1
    late_cast: bool  # True if the product with the weight is in fp32 too, and rounded once


# Llama's, OLMo 2's and Gemma's.
NORM_FORMS = (NormForm(0.0, False), NormForm(0.0, True), NormForm(1.0, True))


def swap_forwards(
    model: nn.Module,
    kernels: Kernels | None,
    undo: ExitStack,
    *,
    skip_rows: bool = True,
) -> Counter[str]:
    """Swap what can be swapped. Return how many forwards of each kind were.

    `kernels`: also swap what pays only when it is compiled, to run by these. `skip_rows`: sequences go through in
    packed batches with known labels, and the last layer ends the forward (Route.ends_in_last_layer). `undo` takes
    back what was swapped for all models of an architecture.
    """
    swapped: Counter[str] = Counter()
    swapped["lora"] += shared_input.swap(model)
    swapped["lora"] += _swap_quantized_lora(model)
    if kernels is not None:
        swapped["norm"] += _swap_norms(model, kernels)
        swapped["swiglu"] += _swap_swiglu(model, kernels)
        swapped["rotary"] += _swap_rotary(unwrap(model), kernels, undo)
    if skip_rows:
        swapped["rows"] += _skip_unlabelled_rows(model)
    swapped["embeddings"] += _make_embedding_gradients_sparse(model)
    return +swapped  # without the kinds that the model lacks


def _swap_quantized_lora(model: nn.Module) -> int:
    number = 0
    for module in model.modules():
        forward = _quantized_lora_forward(module)
        if forward is not None:
            module.forward = MethodType(forward, module)
            number += 1
    return number


def _quantized_lora_forward(module: Any) -> Forward | None:
    """Return the forward of PEFT's LoRA around a layer of bitsandbytes; None for another module."""
    # Not imported here: if nothing has imported it, there is no such layer.
    peft_layers = sys.modules.get("peft.tuners.lora.bnb")
    if peft_layers is None:
        return None

    # By its very class: a subclass may compute in another way.
    is_four_bit = type(module) is getattr(peft_layers, "Linear4bit", None)
    is_eight_bit = type(module) is getattr(peft_layers, "Linear8bitLt", None)
    if not (is_four_bit or is_eight_bit) or not shared_input.is_simple(module):
        return None
    base = module.base_layer
    if is_eight_bit:
        # On a GPU inputs are rounded to 8 bits as well, and multiplied in these.
        is_known = type(base).__name__ == "Linear8bitLt" and _is_on_cpu(base.weight)
        return _eight_bit_forward if is_known else None

    state = getattr(base.weight, "quant_state", None)
    # Weights that are packed for inference on a CPU let no gradient through.
    is_packed = getattr(state, "packing_format_for_cpu", False)
    will_be_packed = getattr(base, "support_avx512bf16_for_cpu", False)
    if type(base).__name__ != "Linear4bit" or state is None or is_packed or will_be_packed:
        return None
    return _four_bit_forward


def _four_bit_forward(module: Any, x: Tensor) -> Tensor:
    base = module.base_layer
    codes = base.weight
    is_other = not hasattr(codes, "quant_state") or base.compute_dtype not in (None, x.dtype)
    if is_other or module.disable_adapters or module.merged:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _in_few_bits(module, x, few_bits.FourBits(codes, codes.quant_state))


def _eight_bit_forward(module: Any, x: Tensor) -> Tensor:
    base = module.base_layer
    state: Any = getattr(base, "state", None)
    # The codes exist from the layer's first product on. In evaluation bitsandbytes rounds the inputs too.
    can_train = state is not None and state.CB is not None and base.training
    if not can_train or module.disable_adapters or module.merged:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _in_few_bits(module, x, few_bits.EightBits(state.CB, state.SCB))


def _in_few_bits(
    module: Any,
    x: Tensor,
    bits: few_bits.Bits,
) -> Tensor:
    (layer,), adapters = shared_input.arguments([module], [()], None)
    return few_bits.lora_linear(x, layer, adapters, bits)


def _swap_norms(model: nn.Module, kernels: Kernels) -> int:
    number = 0
    forwards: dict[type, Forward | None] = {}  # of each class, proved at its first module
    for module in model.modules():
        if not _is_rms_norm(module):
            continue
        if type(module) not in forwards:
            forwards[type(module)] = _proved_norm_forward(module, kernels)
        forward = forwards[type(module)]
        if forward is not None:
            module.forward = MethodType(forward, module)
            number += 1

    return number


def _is_rms_norm(module: nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    # One weight for each number: a norm of a matrix is something else.
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1


def _proved_norm_forward(module: Any, kernels: Kernels) -> Forward | None:
    """Return the forward in the one of NORM_FORMS that gives what the module does; None if no form does."""
    if _epsilon(module) is None:
        return None
    weight = module.weight.data
    original = weight.clone()
    # With weights that are all 1, two of the forms would give the same.
    weight.normal_(generator=torch.Generator(weight.device).manual_seed(0))
    try:
        for form in NORM_FORMS:
            forward = _norm_forward(form, kernels)
            if _gives_the_same(module, forward, _example(weight.numel(), like=weight)):
                return forward
    finally:
        weight.copy_(original)

    return None


def _norm_forward(form: NormForm, kernels: Kernels) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        # The module's own epsilon: vision tower and language model may share the class and differ in it.
        epsilon = _epsilon(self)
        return pointwise.rms_norm(
            kernels,
            x,
            self.weight,
            epsilon,
            form.offset,
            form.late_cast,
        )

    return forward


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _swap_swiglu(model: nn.Module, kernels: Kernels) -> int:
    def forward(self: Any, x: Tensor) -> Tensor:
        # By the module's own layers, which may have adapters.
        gated = pointwise.swiglu(kernels, self.gate_proj(x), self.up_proj(x))
        return self.down_proj(gated)  # type: ignore[no-any-return]

    # Those of the embeddings: the weights of the module itself may be codes of a quantiser.
    arithmetic = next(model.parameters())
    number = 0
    module: Any
    for module in model.modules():
        if not _is_swiglu(module):
            continue
        fsdp.borrow(model, module)
        x = _example(module.gate_proj.in_features, like=arithmetic)
        if _gives_the_same(module, forward, x):
            module.forward = MethodType(forward, module)
            number += 1
    return number


def _is_swiglu(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= children.keys():
        return False
    # A module in place of a linear layer may have no size, which the trial needs.
    is_linear = isinstance(getattr(children["gate_proj"], "in_features", None), int)
    return is_linear and "silu" in type(children["act_fn"]).__name__.lower()


def _example(features: int, like: Tensor) -> Tensor:
    """Return random input of the dtype and device of `like`."""
    return torch.randn(1, 6, features, generator=torch.Generator().manual_seed(0)).to(like)


@torch.no_grad()
def _gives_the_same(
    module: Any,
    forward: Forward,
    x: Tensor,
) -> bool:
    """True if `forward` gives what the module does, up to rounding."""
    # Norms divide sums and MLPs add up thousands of products, so results are compared as a whole, not number by number.
    expected = module(x).float()
    result = forward(module, x).float()
    tolerance = 1e-6 if x.dtype == torch.float32 else 4e-3
    return bool((expected - result).norm() <= tolerance * expected.norm())


def _swap_rotary(lm: Any, kernels: Kernels, undo: ExitStack) -> int:
    """Swap the rotary embedding of a model's source file, which all layers of the model call. Return 1 if it was."""
    source = sys.modules[type(lm).__module__]
    stock = getattr(source, patches.ROTARY.name, None)
    if stock is None or stock.__module__ == __name__:
        return 0

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Partial embeddings, other axes and the like are left to the model.
        if args or kwargs or cos.shape[-1] != q.shape[-1] or cos.dim() != 3:
            return stock(q, k, cos, sin, *args, **kwargs)
        return pointwise.rotary(
            kernels,
            q,
            k,
            cos.unsqueeze(1),
            sin.unsqueeze(1),
        )

    if not _rotates_alike(stock, apply):
        return 0
    undo.enter_context(patches.rotary_by(source, apply))
    return 1


def _rotates_alike(stock: Callable[..., Any], apply: Callable[..., Any]) -> bool:
    """True if two rotary embeddings give the same for random queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 5, 8, generator=generator)  # [batch, heads, tokens, dim]
    k = torch.randn(1, 2, 5, 8, generator=generator)
    cos = torch.randn(1, 5, 8, generator=generator)
    sin = torch.randn(1, 5, 8, generator=generator)
    try:
        expected_q, expected_k = stock(q, k, cos, sin)
        rotated_q, rotated_k = apply(q, k, cos, sin)
        is_same_q = torch.allclose(expected_q, rotated_q, atol=1e-5)
        return is_same_q and torch.allclose(expected_k, rotated_k, atol=1e-5)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another signature or layout than the common one


def _skip_unlabelled_rows(model: nn.Module) -> int:
    """Leave out, after the last attention, the rows that predict no label. Return how many forwards were swapped.

    Nothing after it mixes rows, so this is exact by construction. Example with 5 tokens, 2 of which predict a label:

        last attention     0 1 2 3 4      all tokens: others look at their keys and values
        its output, MLP    . . 2 . 4      zeros elsewhere, which nobody reads
    """
    layers = decoder_layers(model)
    if not layers:
        return 0
    last: Any = layers[-1]
    if routers_of(last):
        return 0  # a router balances over all rows that it sees

    # The wrapped modules keep their parameters and names: only which rows they see changes.
    modules = [getattr(last, name, None) for name in ("mlp", "ffn")]
    # The projection works on each row by itself, as the MLP does.
    modules.append(_output_projection(last))
    number = 0
    for module in modules:
        if module is not None:
            module.forward = _of_labelled_rows(module.forward)
            number += 1

    # BERT and its kin have feed-forward, residual and norm in a method.
    if hasattr(last, "feed_forward_chunk"):
        last.feed_forward_chunk = _of_labelled_rows(last.feed_forward_chunk)
        number += 1
    return number


def _output_projection(layer: nn.Module) -> Any:
    """Return the module that makes a layer's attention into hidden states; None if it has another name."""
    for name, child in layer.named_children():
        if "att" in name and "norm" not in name:
            for projection in ("o_proj", "dense", "c_proj"):
                module = getattr(child, projection, None)
                if module is not None:
                    return module
            return None
    return None


def _of_labelled_rows(stock: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        rows = CURRENT.rows
        # The self-check of padding-free attention runs without rows.
        if rows is None or x.dim() != 3:
            return stock(x)
        # [1, tokens, dim] again, like the residual that it is added to.
        y = stock(x[:, rows])
        return y.new_zeros(1, x.shape[1], y.shape[-1]).index_copy(1, rows, y)

    return forward


def _make_embedding_gradients_sparse(model: nn.Module) -> int:
    """Give embeddings a gradient of only the tokens that occur, for FlatAdamW to add up. Return how many have it."""
    number = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding) and _is_collected_sparse(module):
            module.sparse = True
            number += 1
    return number


def _is_collected_sparse(table: nn.Embedding) -> bool:
    weight = table.weight
    if table.scale_grad_by_freq or not weight.requires_grad:
        return False
    # A GPU adds up rows in no fixed order. FlatAdamW collects no gradients of fp32 weights.
    return weight.element_size() < 4 and _is_on_cpu(weight)


def _is_on_cpu(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.device.type == "cpu"
