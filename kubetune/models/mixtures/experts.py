"""Experts of a mixture as transformers stacks them, and their adapters run without being merged into the weights.

transformers describes how its experts compute by a few attributes of their class (`use_experts_implementation`), and
so any family that says so is run here. PEFT merges the adapters of all experts into their weights in every forward;
what is saved and loaded stays PEFT's.
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

ROUTERS = ("gate", "router")
"""Names of what sends tokens to experts, beside these."""
ALWAYS_ROUTERS = ("router", "router_gate")
"""Those that mean it also where transformers stacks no experts beside (JetMoE, Doge)."""


def is_described(module: nn.Module) -> bool:
    """Presence of transformers' description of how stacked experts compute."""
    return all(
        hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    )


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold all experts of a layer in stacked tensors, by their whole names."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if (is_described(module) or name.rpartition(".")[2] == "experts")
        and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    }


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that send tokens to experts, by their whole names."""
    parents = {name.rpartition(".")[0] for name in stacks_of(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if (name.rpartition(".")[0] in parents and name.rpartition(".")[2] in ROUTERS)
        or name.rpartition(".")[2] in ALWAYS_ROUTERS
    }


def swap_experts(model: nn.Module) -> int:
    """Run the adapters of described experts by grouped products; the number of layers that are."""
    wrapper = _wrapper_class()
    if wrapper is None:
        return 0
    inner = {id(m.base_layer) for m in model.modules() if isinstance(m, wrapper)}
    found = [
        m for m in model.modules() if isinstance(m, wrapper) and id(m) not in inner and is_plain(m)
    ]
    for module in found:
        module.forward = MethodType(_forward, module)
    return len(found)


def _wrapper_class() -> Any:
    layers = sys.modules.get(
        "peft.tuners.lora.layer"
    )  # where nobody has imported it, there are no adapters
    return None if layers is None else layers.ParamWrapper


def is_plain(outer: Any) -> bool:
    """One adapter on each of some frozen tensors of described experts."""
    base = outer.get_base_layer()
    if not is_described(base) or type(base).forward.__name__ != "forward":
        return False
    names = {"gate_up_proj" if base.has_gate else "up_proj", "down_proj"}
    return all(
        wrapper.parameter_name in names
        and len(wrapper.active_adapters) == 1
        and not wrapper.get_param().requires_grad
        and wrapper.get_param().is_floating_point()
        and wrapper.get_param().element_size() > 1
        for wrapper in _wrappers(outer)
    )


def _wrappers(outer: Any) -> Iterator[Any]:
    while hasattr(outer, "parameter_name"):
        yield outer
        outer = outer.base_layer


def _forward(
    outer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The work of transformers' `grouped_mm_experts_forward`, with adapters beside both of its products."""
    if outer.disable_adapters or outer.merged:
        return type(outer).forward(outer, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    experts = outer.get_base_layer()
    factors = {wrapper.parameter_name: _factors(wrapper) for wrapper in _wrappers(outer)}
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    routing = sort_by_expert(top_k_index, experts.num_experts)

    def project(x: Tensor, name: str, weights: Tensor | float = 1.0) -> Tensor:
        weight = getattr(experts, name)
        y = grouped_linear(x, weight, routing, factors.get(name), transposed=experts.is_transposed)
        return (
            y + getattr(experts, f"{name}_bias")[routing.experts] * weights
            if experts.has_bias
            else y
        )

    inside = project(dispatch(hidden_states, routing), first)
    weights = top_k_weights.reshape(-1)[routing.order].unsqueeze(-1).to(inside.dtype)
    if getattr(experts, "has_post_expert_norm", False):
        made = experts.post_expert_norm(project(_activated(experts, inside), "down_proj")) * weights
    else:  # rows are narrower in front of the second product than behind it
        swiglu = (
            weighted_swiglu(inside, weights)
            if _is_swiglu(experts)
            else _activated(experts, inside) * weights
        )
        made = project(swiglu, "down_proj", weights)
    return combine(made, routing).to(hidden_states.dtype)


def _activated(experts: Any, x: Tensor) -> Tensor:
    return cast(Tensor, experts._apply_gate(x) if experts.has_gate else experts.act_fn(x))


def _is_swiglu(experts: Any) -> bool:
    """Gate and up side by side, and no more to them than `silu(gate) * up`."""
    is_plain = experts.has_gate and type(experts)._apply_gate.__name__ == "_default_apply_gate"
    return is_plain and "silu" in type(experts.act_fn).__name__.lower()


def _factors(wrapper: Any) -> Factors:
    name = wrapper.active_adapters[0]
    return Factors(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])
