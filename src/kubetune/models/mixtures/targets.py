"""Modules and tensors that LoRA adapts, by `lora.target_modules` and `lora.target_parameters`, as PEFT takes them.

In a mixture of experts PEFT is given every name. Left to itself it adapts the router too, the experts of some families
only, and never the shared experts next to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import nn

from kubetune import errors
from kubetune.base import logs
from kubetune.config.schema import LoraConfig
from kubetune.models.mixtures.stacked_experts import routers_of, stacks_of
from kubetune.plan.adapter_targets import (
    lacks_match,
    lacks_targets,
    lacks_tensors,
    refused_on_tensors,
)
from kubetune.plan.linears import is_target, targeted, unreached

# Names that the layers of each expert had, and have in other tools, by the stacked tensor that holds them now. A tensor
# of two layers is adapted only if both are named.
_BEFORE_STACKING = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


class Targets(NamedTuple):
    """The modules and parameters that PEFT is to adapt."""

    modules: str | list[str]  # ends of names, or an expression for whole names
    parameters: list[str]  # ends of names of tensors


def find_targets(
    model: nn.Module,
    lora: LoraConfig,
    *,
    frozen: Callable[[str], bool],
) -> Targets:
    """Return the targets of LoRA in a model, without modules that are `frozen` by name.

    Raise ConfigError for names that the model lacks, and for settings that adapters on tensors cannot have.
    """
    wanted = lora.target_modules
    parameters = list(_asked(model, lora.target_parameters))
    stacks = stacks_of(model)
    # PEFT's own all-linear would adapt these too.
    takes_in_too_much = wanted == "all-linear" and (routers_of(model) or unreached_names(model))
    if stacks or takes_in_too_much:
        targets = _in_mixture(model, stacks, wanted, parameters, frozen)
    elif wanted == "all-linear":
        targets = Targets(wanted, parameters)
    elif isinstance(wanted, str):
        targets = Targets(_matched(model, wanted), parameters)
    else:
        # PEFT would leave out in silence what it does not find.
        _require(wanted, linear_names(model))
        targets = Targets(list(wanted), parameters)

    if targets.parameters:
        problem = refused_on_tensors(lora, targets.parameters)
        if problem is not None:
            raise errors.ConfigError(problem)
    return targets


def _matched(model: nn.Module, expression: str) -> list[str]:
    """Return the modules with a matrix that an expression matches, by names as short as they can be.

    PEFT would refuse an expression that matches anything else too, such as the block around them. Raise ConfigError if
    none matches.
    """
    names = linear_names(model)
    matched = targeted(names, expression)
    if not matched:
        raise errors.ConfigError(lacks_match(expression, names))
    # A convolution that only the expression's author can have meant stays.
    plain = [name for name in matched if _is_adaptable(model.get_submodule(name))]
    return _short(sorted(plain or matched), [name for name, _ in model.named_modules()])


def linear_names(model: nn.Module) -> list[str]:
    """Return the whole names of a model's modules that hold a matrix."""
    # The model itself has the empty name.
    return [name for name, module in model.named_modules() if name and has_matrix(module)]


def unreached_names(model: nn.Module) -> list[str]:
    """Return the whole names of modules for which adapters would learn nothing."""
    config: Any = model.config
    out_of_reach = unreached(config.get_text_config().model_type)
    return [name for name in linear_names(model) if out_of_reach.fullmatch(name)]


def has_matrix(module: nn.Module) -> bool:
    """True if a module has a weight that is a matrix."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() > 1


def _in_mixture(
    model: nn.Module,
    stacks: Mapping[str, nn.Module],
    wanted: str | tuple[str, ...],
    parameters: list[str],
    frozen: Callable[[str], bool],
) -> Targets:
    """Return the targets in a mixture. Modules are named one by one, weights of experts and routers as tensors."""
    # Example, of one layer of Qwen3-MoE with `wanted` = [q_proj, gate_proj, up_proj]:
    #
    #     self_attn.q_proj              a module that is wanted: PEFT adapts it by its name
    #     mlp.gate                      the router: not wanted
    #     mlp.experts.gate_up_proj      [experts, 2 × width, hidden], holds gate_proj and up_proj of all experts:
    #                                   adapted as a tensor
    linear = _adaptable_modules(model, frozen)
    if wanted == "all-linear":
        modules, tensors = _all_linear(model, linear, stacks, frozen)
    else:
        modules, tensors = _named(model, linear, stacks, wanted, frozen)

    # PEFT takes some of these names for parts of experts. As tensors it adapts them all the same, but not in 4 or 8 bits.
    modules, taken_for_experts = _kept_by_peft(model, modules)
    lost = []
    for name in taken_for_experts:
        if linear[name].weight.is_floating_point():
            tensors.add(f"{name}.weight")
        elif f"{name}.weight" not in tensors:
            lost.append(name)

    if lost:
        logs.MODEL.warning(
            "no adapters on %s: PEFT takes their names for those of the experts, and their weights are quantised",
            ", ".join(_short(lost, linear)),
        )

    # Names as short as they can be: they are saved with the adapter.
    all_tensors = [name for name, _ in model.named_parameters()]
    short_tensors = _short(sorted(tensors), all_tensors, parts=2)
    short_modules = _short(modules, [name for name, _ in model.named_modules()])
    return Targets(short_modules, sorted({*parameters, *short_tensors}))


def _adaptable_modules(model: nn.Module, frozen: Callable[[str], bool]) -> dict[str, Any]:
    modules = {}
    for name, module in model.named_modules():
        if _is_adaptable(module) and not frozen(name):
            modules[name] = module
    return modules


def _all_linear(
    model: nn.Module,
    linear: Mapping[str, nn.Module],
    stacks: Mapping[str, nn.Module],
    frozen: Callable[[str], bool],
) -> tuple[list[str], set[str]]:
    """Return modules and tensors of `all-linear`: without head, embeddings and routers, but with the experts."""
    out_of_reach = {name for name in unreached_names(model) if not frozen(name)}
    if out_of_reach:
        last_parts = sorted({name.rpartition(".")[2] for name in out_of_reach})
        logs.MODEL.info(
            "no adapters on %s: the model reads their weights without calling them, so an adapter would learn "
            "nothing",
            ", ".join(last_parts),
        )

    # The head is left out as PEFT's own all-linear leaves it out, embeddings since they multiply nothing.
    head = model.get_output_embeddings()  # type: ignore[operator]
    routers = tuple(f"{name}." for name in routers_of(model))
    modules = []
    for name, module in linear.items():
        is_skipped = module is head or isinstance(module, nn.Embedding) or name in out_of_reach
        is_in_router = f"{name}.".startswith(routers)
        if not is_skipped and not is_in_router:
            modules.append(name)

    tensors: set[str] = set()
    for name, stack in stacks.items():
        for tensor in _tensors(stack):
            tensors.add(f"{name}.{tensor}")
    return modules, tensors


def _named(
    model: nn.Module,
    linear: Mapping[str, nn.Module],
    stacks: Mapping[str, nn.Module],
    wanted: str | tuple[str, ...],
    frozen: Callable[[str], bool],
) -> tuple[list[str], set[str]]:
    """Return the modules and tensors that `lora.target_modules` names. Raise ConfigError for one without adapters."""
    if not isinstance(wanted, str):
        _require(wanted, [*linear_names(model), *_names_in(stacks)])
    routers = routers_of(model)
    modules = [name for name, _ in model.named_modules()]
    chosen = targeted([*modules, *_names_in(stacks)], wanted)
    for name in linear_names(model):
        # A matrix that its module computes with in another way than PEFT's layers do.
        is_other = name not in linear and name not in routers and not frozen(name)
        if is_other and name in chosen:
            raise errors.ConfigError(
                f"lora.target_modules: {name.rpartition('.')[2]} can have no adapter, as this model computes with "
                f"its weight by itself ({type(model.get_submodule(name)).__name__}); leave it out"
            )

    tensors: set[str] = set()
    for name, stack in stacks.items():
        for tensor in _wanted_tensors(name, stack, chosen):
            tensors.add(f"{name}.{tensor}")
    for name in routers:
        if name not in linear and name in chosen:
            tensors.add(f"{name}.weight")
    return [name for name in linear if name in chosen], tensors


def _is_adaptable(module: nn.Module) -> bool:
    """True for a matrix that PEFT's layers compute with."""
    # GPT-2's, by its name, as PEFT recognises it too.
    if type(module).__name__ == "Conv1D":
        return True
    # Classes of model families may be made from nn.Linear and compute in another way.
    if type(module).__module__.startswith("transformers.models."):
        return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return isinstance(module, (nn.Linear, nn.Embedding))


def _tensors(stack: nn.Module) -> list[str]:
    """Return the names of the tensors that hold all experts, `[experts, …, …]`."""
    tensors = stack.named_parameters(recurse=False)
    return [name for name, tensor in tensors if tensor.dim() == 3]


def _names_in(stacks: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the experts' layers, now and before they were stacked."""
    for name, stack in stacks.items():
        for tensor in _tensors(stack):
            yield f"{name}.{tensor}"
            for old_names in _BEFORE_STACKING.get(tensor, ()):
                for old_name in old_names:
                    yield f"{name}.{old_name}"


def _wanted_tensors(
    name: str,
    stack: nn.Module,
    chosen: AbstractSet[str],
) -> Iterator[str]:
    """Yield the tensors of stacked experts that are chosen, by their own names or the names of the layers in them."""
    for tensor in _tensors(stack):
        if name in chosen or f"{name}.{tensor}" in chosen:
            yield tensor
            continue
        for old_names in _BEFORE_STACKING.get(tensor, ()):
            hits = [old for old in old_names if f"{name}.{old}" in chosen]
            if len(hits) == len(old_names):
                yield tensor
                break
            if hits:
                missing = " and ".join(old for old in old_names if old not in hits)
                raise errors.ConfigError(
                    f"lora.target_modules: {hits[0]} of the experts can have no adapter without {missing}, as one "
                    f"tensor, {tensor}, holds both; name both, or target {tensor}"
                )


def _kept_by_peft(model: nn.Module, modules: list[str]) -> tuple[list[str], list[str]]:
    """Return the modules that PEFT adapts when they are named, and the modules with names that it takes for
    experts' parts.
    """
    from peft import LoraConfig as PeftLoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version that takes all names as they are
        return modules, []

    # PEFT's own conversion is asked: it takes out of the targets what it makes into tensors. It does so only if all names
    # of an expert's layers are there.
    last_parts = {name.rpartition(".")[2] for name in modules}
    for groups in _BEFORE_STACKING.values():
        for old_names in groups:
            last_parts.update(old_names)
    probe: Any = PeftLoraConfig(target_modules=sorted(last_parts))
    convert_peft_config_for_transformers(probe, model, None)

    # The remaining targets stay modules.
    kept: list[str] = []
    taken_for_experts: list[str] = []
    for name in modules:
        is_kept = name.rpartition(".")[2] in probe.target_modules
        (kept if is_kept else taken_for_experts).append(name)
    return kept, taken_for_experts


def _short(
    names: Sequence[str],
    all_names: Iterable[str],
    parts: int = 1,
) -> list[str]:
    """Return the shortest ends of names, of at least so many parts, that mean these and no others of a model."""
    # Wanted are layers.0.mlp.up and layers.1.mlp.up. The ends of their names mean, of all names of the model:
    #
    #     up        layers.0.mlp.up, layers.1.mlp.up, vision.up      one too many
    #     mlp.up    layers.0.mlp.up, layers.1.mlp.up                 returned
    wanted = set(names)
    meant_by: dict[str, set[str]] = {}
    for name in all_names:
        for end in _ends(name, 1):
            meant_by.setdefault(end, set()).add(name)
    return sorted({_shortest_end(name, parts, meant_by, wanted) for name in names})


def _shortest_end(
    name: str,
    parts: int,
    meant_by: Mapping[str, set[str]],
    wanted: set[str],
) -> str:
    for end in _ends(name, parts):
        if meant_by.get(end, {name}) <= wanted:
            return end
    return name


def _ends(name: str, parts: int) -> Iterator[str]:
    """Yield the ends of a name from the shortest of so many parts on: `c`, `b.c`, `a.b.c`."""
    pieces = name.split(".")
    for start in range(max(0, len(pieces) - parts), -1, -1):
        yield ".".join(pieces[start:])


def _asked(model: nn.Module, targets: Sequence[str]) -> Sequence[str]:
    """Return `lora.target_parameters`, each of which must be a matrix or a stack of them."""
    dimensions = {name: parameter.dim() for name, parameter in model.named_parameters()}
    problem = lacks_tensors(targets, dimensions)
    if problem is not None:
        raise errors.ConfigError(problem)
    out_of_reach = set(unreached_names(model))
    for target in targets:
        for name in dimensions:
            if not is_target(name, (target,)):
                continue
            # A tensor that no layer multiplies with as PEFT expects would get an adapter that does nothing.
            module_name = name.rpartition(".")[0]
            module = model.get_submodule(module_name)
            if module_name in out_of_reach or isinstance(module, nn.Conv1d):
                raise errors.ConfigError(
                    f"lora.target_parameters: {target} can have no adapter, as this model computes with it by itself; "
                    "leave it out"
                )
    return targets


def _require(targets: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a target that matches no name."""
    problem = lacks_targets(targets, names)
    if problem is not None:
        raise errors.ConfigError(problem)
