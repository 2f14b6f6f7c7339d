"""PEFT's LoRA layers as kernels/lora computes them: those that get the same input in one, for fewer and larger
products; their adapters in the dtype of the arithmetic are made once a step, and not in every forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from kubetune.kernels.cross_entropy import GradientSum
from kubetune.kernels.lora import Adapters, Layer, Rounded, lora_linears

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Names of layers that mostly get the same input, in the order they are called in."""

Compute = Callable[[Sequence[Any], Tensor, Rounded | None], tuple[Tensor, ...]]


def compute(layers: Sequence[Any], x: Tensor, rounded: Rounded | None) -> tuple[Tensor, ...]:
    """Outputs of LoRA layers for the same input."""
    weights = [layer.base_layer.weight for layer in layers]
    frozen = [
        (w if is_transposed(layer) else w.t(),) for layer, w in zip(layers, weights, strict=True)
    ]
    return lora_linears(x, *arguments(layers, frozen, rounded))


def arguments(
    layers: Sequence[Any], frozen: Sequence[tuple[Tensor, ...]], rounded: Rounded | None
) -> tuple[list[Layer], Adapters]:
    """Layers, and what else is known of their adapters, as kernels/lora takes them."""
    given = [
        Layer(*weights_of(one), one.base_layer.bias, own)
        for one, own in zip(layers, frozen, strict=True)
    ]
    return given, Adapters(scaling_of(layers[0]), _dropout(layers[0]), len(given), rounded)


def weights_of(lora: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B of a LoRA layer."""
    name = lora.active_adapters[0]
    return lora.lora_A[name].weight, lora.lora_B[name].weight


def scaling_of(lora: Any) -> float:
    """Factor of a LoRA layer's adapter."""
    return cast(float, lora.scaling[lora.active_adapters[0]])


def _dropout(lora: Any) -> float:
    return getattr(lora.lora_dropout[lora.active_adapters[0]], "p", 0.0) if lora.training else 0.0


@dataclass(eq=False)
class SharedInput:
    """LoRA layers that get the same input: what all of them make of it is computed when the first is called.

    The others find theirs `ready` where they are called with the very same tensor. If one is not, each layer goes
    alone from then on. `rounded`: the adapters of each, and last those of all.
    """

    layers: tuple[Any, ...]
    goes_alone: bool = False
    rounded: tuple[Rounded | None, ...] = ()
    compute: Compute = compute
    ready: dict[nn.Module, Tensor] = field(default_factory=dict)
    given: tuple[Tensor, bool] | None = None

    def __post_init__(self) -> None:
        self.rounded = (None,) * (len(self.layers) + 1)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Forward of one of the layers."""
        if self.ready:
            grad = torch.is_grad_enabled()
            if (
                self.given is not None
                and self.given[0] is x
                and self.given[1] is grad
                and module in self.ready
            ):
                return self._taken(module)
            self.goes_alone, self.given, self.ready = True, None, {}
        number = self.layers.index(module)
        if number or self.goes_alone or len(self.layers) == 1 or _dropout(module):
            return self.compute([module], x, self.rounded[number])[0]
        found = self.compute(self.layers, x, self.rounded[-1])
        self.given, self.ready = (
            (x, torch.is_grad_enabled()),
            dict(zip(self.layers[1:], found[1:], strict=True)),
        )
        return found[0]

    def _taken(self, module: nn.Module) -> Tensor:
        found = self.ready.pop(module)
        if not self.ready:
            self.given = None
        return found

    def keep(
        self, sums: Mapping[nn.Parameter, GradientSum]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Take adapters and their gradients' sums from an optimizer that has all of them: parameters, and copies of
        them that are to be kept equal to them."""
        pairs = [weights_of(layer) for layer in self.layers]
        if not all(weight in sums for pair in pairs for weight in pair):
            return
        dtype = self.layers[0].base_layer.weight.dtype
        if dtype == torch.float32 and len(pairs) == 1:
            down = pairs[0][0].detach()
        else:
            down = torch.cat([a.detach().to(dtype) for a, _ in pairs])
        ups = tuple(b.detach().to(dtype) for _, b in pairs)
        spans = [
            slice(*span) for span in pairwise(accumulate((len(a) for a, _ in pairs), initial=0))
        ]
        each = tuple((sums[a], sums[b]) for a, b in pairs)
        alone = (
            Rounded(down[span], (up,), own) for span, up, own in zip(spans, ups, each, strict=True)
        )
        self.rounded = (*alone, Rounded(down, ups, tuple(kept for own in each for kept in own)))
        for (a, b), span, up in zip(pairs, spans, ups, strict=True):
            yield from (
                (weight, copy)
                for weight, copy in ((a, down[span]), (b, up))
                if not _is_view(weight, copy)
            )


def _is_view(weight: Tensor, copy: Tensor) -> bool:
    return weight.data_ptr() == copy.data_ptr()


def swap(model: nn.Module) -> int:
    """Swap the forwards of all plain LoRA layers of a model; returns how many there are."""
    number = 0
    for parent in model.modules():
        plain = {name: child for name, child in parent.named_children() if is_plain_lora(child)}
        number += len(plain)
        for names in (*SIBLINGS, *((name,) for name in plain)):
            layers = [plain.pop(name) for name in names if name in plain]
            if len({_kind(layer) for layer in layers}) > 1:
                found = [SharedInput((layer,)) for layer in layers]
            else:
                found = [SharedInput(tuple(layers))] if layers else []
            for shared in found:
                for layer in shared.layers:
                    # Hung on the module, not bound into its forward, which is the same for all where it is compiled.
                    layer.shared_input, layer.forward = shared, MethodType(_forward, layer)
    return number


def _kind(lora: Any) -> tuple[Any, ...]:
    """Facts that layers must have in common to be computed together."""
    return scaling_of(lora), weights_of(lora)[0].shape[1], lora.base_layer.weight.dtype


def copies(
    model: nn.Module, sums: Mapping[nn.Parameter, GradientSum]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """`SharedInput.keep` of all LoRA layers of a model."""
    found: dict[int, Any] = {
        id(m.shared_input): m.shared_input for m in model.modules() if hasattr(m, "shared_input")
    }
    for shared in found.values():
        yield from shared.keep(sums)


def _forward(module: Any, x: Tensor) -> Tensor:
    if module.disable_adapters or module.merged:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return compute([module], x, None)[0]
    return cast(SharedInput, module.shared_input).forward(module, x)


def is_plain_lora(module: Any) -> bool:
    """Test for PEFT's LoRA around one frozen linear layer, or its weight, without variants, biases or second adapters.

    Classes made from `nn.Linear` may round their factors first, as those of quantised models do: these are not it.
    """
    from transformers.pytorch_utils import Conv1D

    # Not imported for this: where nobody has, there are no adapters, and it takes seconds, bitsandbytes and more along.
    peft_layers = sys.modules.get("peft.tuners.lora.layer")
    kinds = () if peft_layers is None else (peft_layers.Linear, peft_layers.ParamWrapper)
    if type(module) not in kinds or type(module.base_layer).forward not in (
        nn.Linear.forward,
        Conv1D.forward,
    ):
        return False
    return is_simple(module) and cast(Tensor, module.base_layer.weight).is_floating_point()


def is_simple(lora: Any) -> bool:
    """A frozen layer with one adapter, which has neither a variant nor biases."""
    if len(lora.active_adapters) != 1 or lora.base_layer.weight.requires_grad:
        return False
    name = lora.active_adapters[0]
    return (
        not lora.lora_variant and lora.lora_A[name].bias is None and lora.lora_B[name].bias is None
    )


def is_transposed(lora: Any) -> bool:
    """Storage of the weight under an adapter as `[in, out]`."""
    return lora.fan_in_fan_out or getattr(
        lora, "is_target_conv_1d_layer", False
    )  # a wrapped weight lacks the latter
