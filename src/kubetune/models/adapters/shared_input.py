"""PEFT's LoRA layers computed by kernels/lora: those with the same input together, in fewer and larger products.

Copies of the adapters in the dtype of the arithmetic are made once a step, not in every forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from kubetune.kernels.cross_entropy import GradientSum
from kubetune.kernels.lora import AdapterCopies, Adapters, Layer, lora_linears

# Names of layers that mostly get the same input, in the order in which models call them.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)

Compute = Callable[[Sequence[Any], Tensor, AdapterCopies | None], tuple[Tensor, ...]]


def compute(
    layers: Sequence[Any],
    x: Tensor,
    copies: AdapterCopies | None,
) -> tuple[Tensor, ...]:
    """Return the outputs of LoRA layers for the same input."""
    frozen = []
    for layer in layers:
        weight = layer.base_layer.weight
        # As `[in, out]`, which is a view of the weight either way.
        if not is_transposed(layer):
            weight = weight.t()
        frozen.append((weight,))

    return lora_linears(x, *arguments(layers, frozen, copies))


def arguments(
    layers: Sequence[Any],
    frozen: Sequence[tuple[Tensor, ...]],
    copies: AdapterCopies | None,
) -> tuple[list[Layer], Adapters]:
    """Return layers, and what their adapters have in common, as kernels/lora takes them."""
    plain_layers = []
    for layer, weight in zip(layers, frozen, strict=True):
        a, b = weights_of(layer)
        plain_layers.append(Layer(a, b, layer.base_layer.bias, weight))

    # Layers that are computed together have these in common (`_kind`).
    first = layers[0]
    return plain_layers, Adapters(
        scaling_of(first),
        _dropout(first),
        len(layers),
        copies,
    )


def weights_of(lora: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of a LoRA layer."""
    name = lora.active_adapters[0]
    return lora.lora_A[name].weight, lora.lora_B[name].weight


def scaling_of(lora: Any) -> float:
    """Return the factor of a LoRA layer's adapter."""
    return cast(float, lora.scaling[lora.active_adapters[0]])


def _dropout(lora: Any) -> float:
    if not lora.training:
        return 0.0
    return getattr(lora.lora_dropout[lora.active_adapters[0]], "p", 0.0)


@dataclass(eq=False)
class SharedInput:
    """LoRA layers that get the same input. All are computed when the first is called.

    The others then return what was computed for them, if they are called with the very same tensor.
    """

    # Calls of q, k and v:
    #
    #     q(x)   computes q, k and v of x; returns q's, `waiting` holds those of k and v
    #     k(x)   returns k's; `waiting` holds v's
    #     v(x)   returns v's; nothing waits
    #
    #     q(x)   as above
    #     k(z)   z is another tensor: `goes_alone` from now on, each layer computes only its own output

    layers: tuple[Any, ...]  # in the order in which the model calls them
    goes_alone: bool = False
    copies: AdapterCopies | None = None  # of all layers together
    copies_of_each: dict[nn.Module, AdapterCopies] = field(default_factory=dict)
    compute: Compute = compute  # fp8.py puts its own here
    waiting: dict[nn.Module, Tensor] = field(default_factory=dict)  # outputs not yet asked for
    input: Tensor | None = None  # what `waiting` was computed from
    with_grad: bool = False  # whether autograd recorded `waiting`

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Return the output of one of the layers."""
        # 1. The output that was computed for this call is handed out.
        if self.waiting:
            is_same = self.input is x and self.with_grad is torch.is_grad_enabled()
            if is_same and layer in self.waiting:
                output = self.waiting.pop(layer)
                if not self.waiting:
                    self.input = None  # lets go of its memory
                return output
            self.goes_alone = True
            self.waiting = {}
            self.input = None

        # 2. One layer by itself. With dropout each draws a mask of its own, as PEFT's layers do.
        is_first = layer is self.layers[0]
        if not is_first or self.goes_alone or len(self.layers) == 1 or _dropout(layer):
            return self.compute([layer], x, self.copies_of_each.get(layer))[0]

        # 3. The first of several: all are computed, and the others' outputs wait.
        outputs = self.compute(self.layers, x, self.copies)
        self.waiting = dict(zip(self.layers[1:], outputs[1:], strict=True))
        self.input = x
        self.with_grad = torch.is_grad_enabled()
        return outputs[0]

    def keep(
        self, sums: Mapping[nn.Parameter, GradientSum]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each adapter's parameters with their copies, which the optimizer is to keep equal to them.

        `sums` are that optimizer's sums of gradients. Nothing is copied if it lacks one of the parameters.
        """
        pairs = [weights_of(layer) for layer in self.layers]
        for pair in pairs:
            if not all(parameter in sums for parameter in pair):
                return

        dtype = self.layers[0].base_layer.weight.dtype
        # The A matrices of q, k and v see the same input, so they are stacked and multiplied once:
        #     down = [A_q; A_k; A_v]    rows 0:r, r:2r, 2r:3r
        if dtype == torch.float32 and len(pairs) == 1:
            down = pairs[0][0].detach()  # the parameter's own memory
        else:
            down = torch.cat([a.detach().to(dtype) for a, _ in pairs])

        # The copies of each layer are views of the copies of all layers, so that one write keeps both.
        ups: list[Tensor] = []
        all_sums: list[GradientSum] = []
        first_row = 0
        for layer, (a, b) in zip(self.layers, pairs, strict=True):
            copy_of_a = down[first_row : first_row + len(a)]
            copy_of_b = b.detach().to(dtype)
            first_row += len(a)
            ups.append(copy_of_b)
            all_sums += [sums[a], sums[b]]
            self.copies_of_each[layer] = AdapterCopies(copy_of_a, (copy_of_b,), (sums[a], sums[b]))
            for parameter, copy in ((a, copy_of_a), (b, copy_of_b)):
                if copy.data_ptr() != parameter.data_ptr():  # else it is the parameter itself
                    yield parameter, copy

        self.copies = AdapterCopies(down, tuple(ups), tuple(all_sums))


def swap(model: nn.Module) -> int:
    """Swap the forwards of all plain LoRA layers of a model. Return how many there are."""
    number = 0
    for parent in model.modules():
        plain = {name: child for name, child in parent.named_children() if is_plain_lora(child)}
        number += len(plain)
        # Siblings share their input if their adapters are alike. Every other layer is computed separately.
        for names in SIBLINGS:
            siblings = [plain.pop(name) for name in names if name in plain]
            if len({_kind(layer) for layer in siblings}) == 1:
                _share(siblings)
            else:
                for layer in siblings:
                    _share([layer])

        for layer in plain.values():
            _share([layer])

    return number


def _share(layers: Sequence[Any]) -> None:
    """Compute layers together from now on, which get the same input."""
    shared = SharedInput(tuple(layers))
    for layer in layers:
        # An attribute of the module, not bound into its forward: a compiled forward is the same for all modules.
        layer.shared_input = shared
        layer.forward = MethodType(_forward, layer)


def _kind(lora: Any) -> tuple[Any, ...]:
    """Return the facts that layers must have in common to be computed together."""
    # The scale of the adapter, the width of the input, and the dtype of the arithmetic.
    return scaling_of(lora), weights_of(lora)[0].shape[1], lora.base_layer.weight.dtype


def shared_inputs(layers: Iterable[Any]) -> list[SharedInput]:
    """Return each SharedInput of some layers once, in their order. Layers without one are left out."""
    # q, k and v have the same one. A dict keeps the order of the first of each.
    shared = [layer.shared_input for layer in layers if hasattr(layer, "shared_input")]
    return list(dict.fromkeys(shared))


def copies(
    model: nn.Module, sums: Mapping[nn.Parameter, GradientSum]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield `SharedInput.keep` of all LoRA layers of a model."""
    for shared in shared_inputs(model.modules()):
        yield from shared.keep(sums)


def _forward(layer: Any, x: Tensor) -> Tensor:
    if layer.disable_adapters or layer.merged:
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return compute([layer], x, None)[0]
    return cast(SharedInput, layer.shared_input).forward(layer, x)


def is_plain_lora(module: Any) -> bool:
    """True for PEFT's LoRA around one frozen linear layer, or its weight, without variants or biases.

    Classes made from `nn.Linear` may round their factors first, as the layers of quantised models do. They are not plain.
    """
    from transformers.pytorch_utils import Conv1D

    # Not imported here: if nothing has imported it, there are no adapters. The import takes seconds, and loads
    # bitsandbytes and more.
    peft_layers = sys.modules.get("peft.tuners.lora.layer")
    if peft_layers is None or type(module) not in (peft_layers.Linear, peft_layers.ParamWrapper):
        return False
    if type(module.base_layer).forward not in (nn.Linear.forward, Conv1D.forward):
        return False
    return is_simple(module) and cast(Tensor, module.base_layer.weight).is_floating_point()


def is_simple(lora: Any) -> bool:
    """True for a frozen layer with one adapter, which has neither a variant nor biases."""
    if len(lora.active_adapters) != 1 or lora.base_layer.weight.requires_grad:
        return False
    name = lora.active_adapters[0]
    has_bias = lora.lora_A[name].bias is not None or lora.lora_B[name].bias is not None
    return not lora.lora_variant and not has_bias


def is_transposed(lora: Any) -> bool:
    """True if the weight under an adapter is stored as `[in, out]`."""
    # A wrapped weight lacks the second attribute.
    return lora.fan_in_fan_out or getattr(lora, "is_target_conv_1d_layer", False)
