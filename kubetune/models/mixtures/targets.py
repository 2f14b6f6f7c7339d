"""Modules and tensors that LoRA adapts, by `lora.target_modules` and `lora.target_parameters`, as PEFT takes them.

PEFT is told by name what to adapt in a mixture of experts: left to itself it takes the router in, gives adapters to the
experts of some families alone, and none to the shared experts beside those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import nearest
from kubetune.config.schema import LoraConfig
from kubetune.models.mixtures.experts import routers_of, stacks_of
from kubetune.plan.linears import is_target, unreached

_BEFORE_STACKING = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Names that the layers of each expert had, and have in other tools, by the tensor that holds them now."""


class Targets(NamedTuple):
    """Names of modules, or an expression for them, and of tensors."""

    modules: str | list[str]
    parameters: list[str]


def find_targets(model: nn.Module, lora: LoraConfig, *, frozen: Callable[[str], bool]) -> Targets:
    """The targets of LoRA in a model, but for modules that are `frozen` by name.

    Raises ConfigError for names that the model lacks, and for settings that adapters on tensors cannot have.
    """
    wanted = lora.target_modules
    parameters = list(_asked(model, lora.target_parameters))
    stacks = stacks_of(model)
    takes_in_too_much = wanted == "all-linear" and (routers_of(model) or unreached_names(model))
    if not stacks and not takes_in_too_much:
        if not isinstance(wanted, str):
            _require(wanted, linear_names(model))
        found = Targets(wanted if isinstance(wanted, str) else list(wanted), parameters)
    else:
        found = _in_mixture(model, stacks, wanted, parameters, frozen)
    if found.parameters:
        _require_plain(lora, found)
    return found


def linear_names(model: nn.Module) -> list[str]:
    """Whole names of a model's modules that hold a matrix."""
    return [name for name, module in model.named_modules() if name and has_matrix(module)]


def unreached_names(model: nn.Module) -> list[str]:
    """Whole names of a model's modules an adapter of which would learn nothing."""
    config: Any = model.config
    out_of_reach = unreached(config.get_text_config().model_type)
    return [name for name in linear_names(model) if out_of_reach.fullmatch(name)]


def has_matrix(module: nn.Module) -> bool:
    """Presence of a weight that is a matrix."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() > 1


def _in_mixture(
    model: nn.Module,
    stacks: Mapping[str, nn.Module],
    wanted: str | tuple[str, ...],
    parameters: list[str],
    frozen: Callable[[str], bool],
) -> Targets:
    head = model.get_output_embeddings()  # type: ignore[operator]
    routers = routers_of(model)
    out_of_reach = {name for name in unreached_names(model) if not frozen(name)}
    linear = {
        name: module
        for name, module in model.named_modules()
        if _is_adaptable(module) and not frozen(name)
        if wanted != "all-linear"
        or not (module is head or isinstance(module, nn.Embedding) or name in out_of_reach)
    }
    if wanted == "all-linear":
        if out_of_reach:
            logs.MODEL.info(
                "no adapters on %s: the model reads their weights without calling them, so an adapter would learn "
                "nothing",
                ", ".join(sorted({name.rpartition(".")[2] for name in out_of_reach})),
            )
        modules = [
            name
            for name in linear
            if not any(f"{name}.".startswith(f"{router}.") for router in routers)
        ]
        tensors = {
            f"{name}.{tensor}" for name, stack in stacks.items() for tensor in _tensors(stack)
        }
    else:
        if not isinstance(wanted, str):
            _require(wanted, [*linear_names(model), *_names_in(stacks)])
        modules = [name for name in linear if is_target(name, wanted)]
        others = [
            name
            for name in linear_names(model)
            if name not in {*linear, *routers} and not frozen(name)
        ]
        if lost := [name for name in others if is_target(name, wanted)]:
            raise errors.ConfigError(
                f"lora.target_modules: {lost[0].rpartition('.')[2]} can have no adapter, as this model computes with "
                f"its weight by itself ({type(model.get_submodule(lost[0])).__name__}); leave it out"
            )
        tensors = {
            f"{name}.{tensor}"
            for name, stack in stacks.items()
            for tensor in _meant(name, stack, wanted)
        }
        tensors |= {
            f"{name}.weight" for name in routers if name not in linear and is_target(name, wanted)
        }
    modules, beside = _kept_by_peft(model, modules)
    tensors |= {f"{name}.weight" for name in beside if linear[name].weight.is_floating_point()}
    if lost := [name for name in beside if f"{name}.weight" not in tensors]:
        logs.MODEL.warning(
            "no adapters on %s: PEFT takes their names for those of the experts, and their weights are quantised",
            ", ".join(_short(lost, linear)),
        )
    every = [name for name, _ in model.named_parameters()]
    parameters = [*parameters, *_short(sorted(tensors), every, parts=2)]
    return Targets(
        _short(modules, [name for name, _ in model.named_modules()]), sorted(set(parameters))
    )


def _is_adaptable(module: nn.Module) -> bool:
    """A matrix that PEFT's layers compute with; those of families compute otherwise, though they are linear too."""
    is_own = (
        type(module).__module__.startswith("transformers.models.")
        and type(module).forward is not nn.Linear.forward
    )
    return type(module).__name__ == "Conv1D" or (
        isinstance(module, (nn.Linear, nn.Embedding)) and not is_own
    )


def _tensors(stack: nn.Module) -> list[str]:
    return [
        name for name, parameter in stack.named_parameters(recurse=False) if parameter.dim() == 3
    ]


def _names_in(stacks: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names that the experts' layers go by, now and before they were stacked."""
    for name, stack in stacks.items():
        for tensor in _tensors(stack):
            yield f"{name}.{tensor}"
            yield from (
                f"{name}.{old}" for olds in _BEFORE_STACKING.get(tensor, ()) for old in olds
            )


def _meant(name: str, stack: nn.Module, wanted: str | tuple[str, ...]) -> Iterator[str]:
    """Tensors of stacked experts that are meant, by their own names or those of the layers that they hold."""
    for tensor in _tensors(stack):
        if is_target(name, wanted) or is_target(f"{name}.{tensor}", wanted):
            yield tensor
            continue
        for olds in _BEFORE_STACKING.get(tensor, ()):
            found = [old for old in olds if is_target(f"{name}.{old}", wanted)]
            if len(found) == len(olds):
                yield tensor
                break
            if found:
                missing = " and ".join(old for old in olds if old not in found)
                raise errors.ConfigError(
                    f"lora.target_modules: {found[0]} of the experts can have no adapter without {missing}, as one "
                    f"tensor, {tensor}, holds both; name both, or target {tensor}"
                )


def _kept_by_peft(model: nn.Module, modules: list[str]) -> tuple[list[str], list[str]]:
    """Modules that PEFT adapts when they are named, and those whose names it takes for parts of the experts."""
    from peft import LoraConfig as PeftLoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version that takes all names as they are
        return modules, []
    old = {name for pairs in _BEFORE_STACKING.values() for names in pairs for name in names}
    leaves = {name.rpartition(".")[2] for name in modules}
    probe: Any = PeftLoraConfig(target_modules=sorted(leaves | old))
    convert_peft_config_for_transformers(probe, model, None)
    kept = set(probe.target_modules)
    beside = [name for name in modules if name.rpartition(".")[2] not in kept]
    return [name for name in modules if name not in set(beside)], beside


def _short(names: Sequence[str], every: Iterable[str], parts: int = 1) -> list[str]:
    """Shortest ends of names, of so many parts or more, that mean these and no others of a model."""
    wanted, found = set(names), set[str]()
    meant: dict[str, set[str]] = {}
    for name in every:
        pieces = name.split(".")
        for start in range(len(pieces)):
            meant.setdefault(".".join(pieces[start:]), set()).add(name)
    for name in names:
        pieces = name.split(".")
        ends = (".".join(pieces[start:]) for start in range(max(0, len(pieces) - parts), -1, -1))
        found.add(next((end for end in ends if meant.get(end, {name}) <= wanted), name))
    return sorted(found)


def _asked(model: nn.Module, targets: Sequence[str]) -> Iterator[str]:
    """`lora.target_parameters`, each of which must be a matrix or a stack of them."""
    held = {name: parameter.dim() for name, parameter in model.named_parameters()}
    known = {name for name, dimensions in held.items() if dimensions in (2, 3)}
    out_of_reach = set(unreached_names(model))
    for target in targets:
        if not any(is_target(name, (target,)) for name in known):
            ends = sorted({".".join(name.split(".")[-2:]) for name in known})
            close = nearest(target, ends)
            flat = any(is_target(name, (target,)) for name in held)
            said = "is no matrix" if flat else "is not in this model"
            raise errors.ConfigError(
                f"lora.target_parameters: {target} {said}; "
                + (f"did you mean {close}?" if close else f"it has {', '.join(ends)}")
            )
        modules = {name.rpartition(".")[0] for name in known if is_target(name, (target,))}
        if any(
            name in out_of_reach or isinstance(model.get_submodule(name), nn.Conv1d)
            for name in modules
        ):
            raise errors.ConfigError(
                f"lora.target_parameters: {target} can have no adapter, as this model computes with it by itself; "
                "leave it out"
            )
        yield target


def _require(targets: Sequence[str], known: Sequence[str]) -> None:
    """PEFT accepts a list as soon as one name matches; a misspelt one would be left out silently."""
    if lost := [
        target for target in targets if not any(is_target(name, (target,)) for name in known)
    ]:
        suffixes = sorted({re.sub(r".*\.", "", name) for name in known})
        raise errors.ConfigError(
            f"lora.target_modules: this model has no module named {', '.join(lost)}; it has {', '.join(suffixes)}"
        )


def _require_plain(lora: LoraConfig, found: Targets) -> None:
    """Raise ConfigError for settings that adapters on tensors, as PEFT makes them, cannot have."""
    for setting, value in (("lora.dropout", lora.dropout), ("lora.use_dora", lora.use_dora)):
        if value:
            names = ", ".join(found.parameters)
            raise errors.ConfigError(
                f"{setting} is {str(value).lower()}, which adapters on tensors ({names}) cannot have; leave it out, or "
                "name modules beside the experts in lora.target_modules, such as [q_proj, k_proj, v_proj, o_proj]"
            )
