"""Experts of a mixture as transformers stacks them, and their adapters run without being merged into the weights.

transformers describes how its experts compute by a few attributes of their class (`use_experts_implementation`). Any
family that has them is run here. PEFT merges the adapters of all experts into their weights in every forward; what is
saved and loaded stays PEFT's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from kubetune.kernels.experts import (
    Factors,
    combine,
    dispatch,
    grouped_linear,
    sort_by_expert,
    weighted_swiglu,
)

# Names of modules that send tokens to experts and lie next to them.
ROUTERS = ("gate", "router")
# Names that mean it also if transformers stacks no experts next to them (JetMoE, Doge).
ALWAYS_ROUTERS = ("router", "router_gate")


def is_described(module: nn.Module) -> bool:
    """True if transformers describes how the experts in this module compute."""
    names = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    return all(hasattr(module, name) for name in names)


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold all experts of a layer in stacked tensors, by their whole names."""
    stacks = {}
    for name, module in model.named_modules():
        if not is_described(module) and name.rpartition(".")[2] != "experts":
            continue
        # Matrices of all experts are one tensor: [experts, …, …].
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            stacks[name.replace(".base_layer", "")] = module
    return stacks


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that send tokens to experts, by their whole names."""
    parents = {name.rpartition(".")[0] for name in stacks_of(model)}
    routers = {}
    for name, module in model.named_modules():
        parent, _, last_part = name.rpartition(".")
        is_beside_experts = parent in parents and last_part in ROUTERS
        if is_beside_experts or last_part in ALWAYS_ROUTERS:
            routers[name] = module
    return routers


def swap_experts(model: nn.Module) -> int:
    """Run the adapters of described experts by grouped products. Return in how many layers."""
    # Not imported here: if nothing has imported it, there are no adapters.
    peft_layers = sys.modules.get("peft.tuners.lora.layer")
    if peft_layers is None:
        return 0

    wrappers: list[Any] = []
    inner: set[nn.Module] = set()  # wrappers inside another one
    module: Any
    for module in model.modules():
        if isinstance(module, peft_layers.ParamWrapper):
            wrappers.append(module)
            inner.add(module.base_layer)

    number = 0
    for module in wrappers:
        # The outermost wrapper is what the layer calls.
        if module not in inner and is_plain(module):
            module.forward = MethodType(_forward, module)
            number += 1

    return number


def is_plain(outer: Any) -> bool:
    """True if the adapters around described experts are such as `_forward` runs: one on each of some frozen tensors."""
    base = outer.get_base_layer()
    if not is_described(base) or type(base).forward.__name__ != "forward":
        return False
    names = (_first_name(base), "down_proj")
    return all(_is_plain_wrapper(wrapper, names) for wrapper in _wrappers(outer))


def _is_plain_wrapper(wrapper: Any, names: tuple[str, ...]) -> bool:
    if wrapper.parameter_name not in names or len(wrapper.active_adapters) != 1:
        return False
    weight = wrapper.get_param()
    # 8-bit floats are floating-point too, but not for products.
    return not weight.requires_grad and weight.is_floating_point() and weight.element_size() > 1


def _wrappers(outer: Any) -> Iterator[Any]:
    """Yield PEFT's wrappers around experts, from the outermost on; each is of one tensor."""
    while hasattr(outer, "parameter_name"):
        yield outer
        outer = outer.base_layer


def _first_name(experts: Any) -> str:
    """Return the name of the tensor of the experts' first product."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _forward(
    outer: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return what transformers' `grouped_mm_experts_forward` does, with adapters added to both of its products.

    hidden_states is `[tokens, hidden]`, the other two are `[tokens, choices]`.
    """
    if outer.disable_adapters or outer.merged:
        return type(outer).forward(outer, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    # Wrappers lie in each other; all of a layer are run at once, by the tensors that they are on.
    experts = outer.get_base_layer()
    factors = {wrapper.parameter_name: _factors(wrapper) for wrapper in _wrappers(outer)}
    routing = sort_by_expert(top_k_index, experts.num_experts)

    def project(x: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        return grouped_linear(
            x,
            weight,
            routing,
            factors.get(name),
            transposed=experts.is_transposed,
        )

    def bias_of(name: str) -> Tensor:
        bias: Tensor = getattr(experts, f"{name}_bias")
        return bias[routing.experts]

    # One row for each expert that a token visits, sorted by expert.
    first = _first_name(experts)
    inner = project(dispatch(hidden_states, routing), first)
    if experts.has_bias:
        inner = inner + bias_of(first)
    weights = top_k_weights.reshape(-1)[routing.order].unsqueeze(-1).to(inner.dtype)

    if getattr(experts, "has_post_expert_norm", False):
        outputs = project(_activated(experts, inner), "down_proj")
        if experts.has_bias:
            outputs = outputs + bias_of("down_proj")
        outputs = experts.post_expert_norm(outputs) * weights
    else:
        # A row's weight goes through the second product, and its rows are narrower before it than after.
        if _is_swiglu(experts):
            activated = weighted_swiglu(inner, weights)
        else:
            activated = _activated(experts, inner) * weights
        outputs = project(activated, "down_proj")
        if experts.has_bias:
            outputs = outputs + bias_of("down_proj") * weights

    return combine(outputs, routing).to(hidden_states.dtype)


def _activated(experts: Any, x: Tensor) -> Tensor:
    if experts.has_gate:
        return cast(Tensor, experts._apply_gate(x))
    return cast(Tensor, experts.act_fn(x))


def _is_swiglu(experts: Any) -> bool:
    """True if the activation is `silu(gate) * up`, of gate and up side by side."""
    # A family may bend the gate, or clamp it, in a function of its own.
    is_plain = experts.has_gate and type(experts)._apply_gate.__name__ == "_default_apply_gate"
    return is_plain and "silu" in type(experts.act_fn).__name__.lower()


def _factors(wrapper: Any) -> Factors:
    name = wrapper.active_adapters[0]
    return Factors(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])
