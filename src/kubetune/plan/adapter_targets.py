"""The modules and tensors that an adapter names, compared with the weights of its base.

By the names in the files, as far as they are those of the model; where they are not, only a built model tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from kubetune.base.humanize import nearest
from kubetune.config.schema import LoraConfig
from kubetune.errors import ConfigError
from kubetune.plan.linears import (
    EMBEDDINGS,
    HEADS,
    ROUTER,
    STACKED_AS,
    adapted_stacks,
    has_stacks,
    is_target,
    linears,
    names_of,
    stacks,
    targeted,
    unreached,
)
from kubetune.plan.model_shapes import Weights

# An adapter that vLLM accepts but silently ignores.
UNKNOWN_TO_SERVERS: Final = (
    "grpo.servers: the adapter is on experts that lie in one tensor, which servers are not told; name other modules in "
    "lora.target_modules, or leave the servers out"
)


def require_targets(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for named targets that no weight belongs to, if the names of weights are certain.

    They are in files as they are in the model, but for experts and for bases that were quantised before.
    """
    _require_whole_modules(lora, weights)
    targets = lora.target_modules
    if "quantization_config" in weights.config or not weights.stated:
        return
    if has_stacks(weights):
        _require_plain_adapters(lora, weights)
        return
    _require_tensors(lora, weights)
    modules = []
    for name, shape in weights.shapes.items():
        if len(shape) > 1 and name.endswith(".weight"):
            modules.append(name.removesuffix(".weight"))
    if isinstance(targets, str):
        # A head that is tied to the embeddings is in no file.
        problem = None
        if _has_names_of_model(weights) and not targeted([*modules, "lm_head"], targets):
            problem = lacks_match(targets, modules)
    else:
        named = [target for target in targets if not _may_be_tied(target)]
        problem = lacks_targets(named, modules)
    if problem is not None:
        raise ConfigError(problem)


def _require_plain_adapters(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for settings that adapters on experts cannot have, if experts of a mixture get some.

    transformers stacks the experts of each of its decoders.
    """
    names = set()
    for stack in adapted_stacks(lora, weights):
        names.add(".".join(stack.name.split(".")[-2:]))
    problem = refused_on_tensors(lora, sorted(names)) if names else None
    if problem is not None:
        raise ConfigError(problem)


def _require_tensors(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for named tensors that the weights lack, and for settings that adapters on them cannot have."""
    if not lora.target_parameters:
        return
    named = []
    for target in lora.target_parameters:
        # A head that is tied is in no file, and a file may leave out how a whole name begins.
        is_in_file = any(f".{target}".endswith(f".{name}") for name in weights.shapes)
        if not is_in_file and not _may_be_tied(target.removesuffix(".weight")):
            named.append(target)
    problem = lacks_tensors(named, {name: len(shape) for name, shape in weights.shapes.items()})
    if problem is None:
        problem = refused_on_tensors(lora, lora.target_parameters)
    if problem is not None:
        raise ConfigError(problem)


def lacks_tensors(targets: Iterable[str], dimensions: Mapping[str, int]) -> str | None:
    """Return the problem of `lora.target_parameters` that are no matrix and no stack of them, None if each is one.

    `dimensions`: how many the tensors of the model have, by their names.
    """
    matrices = [name for name, number in dimensions.items() if number in (2, 3)]
    for target in targets:
        if any(is_target(name, (target,)) for name in matrices):
            continue
        # Either the name is wrong, or it means something that cannot be adapted: a bias, a norm's weight.
        is_vector = any(is_target(name, (target,)) for name in dimensions)
        problem = "is no matrix" if is_vector else "is not in this model"
        ends = sorted({".".join(name.split(".")[-2:]) for name in matrices})
        close = nearest(target, ends)
        advice = f"did you mean {close}?" if close else f"it has {', '.join(ends)}"
        return f"lora.target_parameters: {target} {problem}; {advice}"
    return None


def refused_on_tensors(lora: LoraConfig, parameters: Sequence[str]) -> str | None:
    """Return the problem of settings that adapters on tensors, as PEFT makes them, cannot have; None for none."""
    for setting, value in (("lora.dropout", lora.dropout), ("lora.use_dora", lora.use_dora)):
        if value:
            return (
                f"{setting} is {str(value).lower()}, which adapters on tensors ({', '.join(parameters)}) cannot have; "
                "leave it out, or name modules beside the experts in lora.target_modules, such as [q_proj, k_proj, "
                "v_proj, o_proj]"
            )
    return None


def _require_whole_modules(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for modules to be trained whole if no weight has their last name."""
    if not weights.stated or "quantization_config" in weights.config:
        return
    # Files and models may write what is before the last name differently. A head may be tied or new, in no file.
    named = []
    for name in lora.modules_to_save:
        last = name.rpartition(".")[2]
        if HEADS.search(last) is None:
            named.append(last)
    modules = set()
    for name in weights.shapes:
        parts = name.split(".")
        for end in range(1, len(parts)):
            modules.add(".".join(parts[:end]))
    problem = lacks_whole_modules(named, modules)
    if problem is not None:
        raise ConfigError(problem)


def lacks_whole_modules(wanted: Iterable[str], modules: Iterable[str]) -> str | None:
    """Return the problem of `lora.modules_to_save` that a model does not have, None if it has each.

    PEFT trains what it finds, and is silent about the others.
    """
    names = [name for name in modules if name]
    lost = [name for name in wanted if not any(module.endswith(name) for module in names)]
    if not lost:
        return None
    last_parts = set()
    for name in names:
        part = name.rpartition(".")[2]
        if not part.isdecimal():
            last_parts.add(part)
    return _no_such_module("lora.modules_to_save", lost, last_parts)


def _no_such_module(key: str, lost: Sequence[str], last_parts: set[str]) -> str:
    """Return the problem of names under a key that are no module's, with the names that a module has."""
    close = nearest(lost[0], sorted(last_parts))
    hint = f"did you mean {close}? It" if close else "it"
    return f"{key}: this model has no module named {', '.join(lost)}; {hint} has {', '.join(sorted(last_parts))}"


def lacks_targets(targets: Sequence[str], modules: Iterable[str]) -> str | None:
    """Return the problem of targets that match no module of a model, None if each matches one.

    PEFT is content if one of a list does. The sentence names modules that can have an adapter.
    """
    names = [name for name in modules if name]
    lost = []
    for target in targets:
        if not any(is_target(name, (target,)) for name in names):
            lost.append(target)
    if not lost:
        return None
    last_parts = set()
    for name in names:
        part = name.rpartition(".")[2]
        if not part.isdecimal() and not _may_be_tied(name):
            last_parts.add(part)
    return _no_such_module("lora.target_modules", lost, last_parts)


def lacks_match(expression: str, modules: Iterable[str]) -> str:
    """Return the problem of an expression that matches no module of a model, with the ends of their names."""
    last_parts = set()
    for module in modules:
        if HEADS.search(module) is None:
            last_parts.add(module.rpartition(".")[2])
    return (
        f"lora.target_modules: no module's whole name matches {expression}; names end in "
        f"{', '.join(sorted(last_parts))}"
    )


def _has_names_of_model(weights: Weights) -> bool:
    """True if the names of the weights are, in their files, those that the model has.

    Files may lack the first part, and those of models that see and hear have other parts.
    """
    if "text_config" in weights.config:
        return False
    return all(name.startswith("model.") or HEADS.search(name) for name in weights.shapes)


def may_lack_targets(lora: LoraConfig, weights: Weights) -> bool:
    """True if the names of the weights leave open whether LoRA can adapt its target modules.

    Only a built model tells then.
    """
    targets = lora.target_modules
    if has_stacks(weights):
        return _is_open_in_mixture(lora, weights)
    if lora.target_parameters and _has_open_tensors(lora, weights):
        return True
    if targets == "all-linear":
        return False
    modules = []
    for name, shape in weights.shapes.items():
        if len(shape) > 1:
            modules.append(name.removesuffix(".weight"))
    chosen = targeted(modules, targets)
    # A named module that may be tied to another, or that a kernel reads, is allowed or refused by the built model.
    out_of_reach = unreached(weights.text_config.get("model_type"))
    for module in chosen:
        if _may_be_tied(module) or out_of_reach.fullmatch(module):
            return True
    if isinstance(targets, str):
        return not chosen
    return not all(_ends_one_of(modules, target) for target in targets)


def _is_open_in_mixture(lora: LoraConfig, weights: Weights) -> bool:
    """True if the names of a mixture's weights leave open whether LoRA can adapt what is named.

    Example, of Qwen3-MoE: [q_proj, v_proj], [gate_proj, up_proj, down_proj] and `mlp.experts.down_proj` are decided. Not
    so [gate_proj], of which one tensor holds the half, a router, a head, or a name that the files lack.
    """
    targets = lora.target_modules
    is_plain = not (lora.dropout or lora.use_dora)
    if "quantization_config" in weights.config or not weights.stated:
        return bool(lora.target_parameters) or targets != "all-linear" or not is_plain
    experts = [name for stack in stacks(weights) for name in names_of(stack)]
    for target in lora.target_parameters:
        if not any(is_target(name, (target,)) for name in experts):
            return True
    if targets == "all-linear":
        return False

    modules = [linear.name for linear in linears(weights, embeddings=True)]
    chosen = targeted([*modules, *experts, "lm_head"], targets)
    out_of_reach = unreached(weights.text_config.get("model_type"))
    for name in chosen.difference(experts):
        if _may_be_tied(name) or ROUTER.search(name) or out_of_reach.fullmatch(name):
            return True
        # PEFT takes some names of other layers for parts of the experts, and these for tensors.
        if not is_plain and name.rpartition(".")[2] in STACKED_AS:
            return True
    if _halves(chosen.intersection(experts)):
        return True
    if isinstance(targets, str):
        return not chosen
    return not all(_ends_one_of(list(chosen), target) for target in targets)


def _halves(names: AbstractSet[str]) -> set[str]:
    """Return the names of experts' layers that share a tensor with another one, which is not among the names."""
    alone = set()
    for name in names:
        parent, _, layer = name.rpartition(".")
        for first, second in (("gate_proj", "up_proj"), ("w1", "w3")):
            other = {first: second, second: first}.get(layer)
            if other is not None and f"{parent}.{other}" not in names:
                alone.add(name)
    return alone


def _has_open_tensors(lora: LoraConfig, weights: Weights) -> bool:
    """True if the names of the weights leave open whether each of `lora.target_parameters` can be adapted."""
    if not weights.stated or "quantization_config" in weights.config:
        return True
    out_of_reach = unreached(weights.text_config.get("model_type"))
    modules = [name.removesuffix(".weight") for name in weights.shapes]
    chosen = targeted(modules, lora.target_modules)
    for target in lora.target_parameters:
        hits = [name for name in weights.shapes if is_target(name, (target,))]
        for name in hits:
            module = name.removesuffix(".weight")
            is_kept_by_model = _may_be_tied(module) or out_of_reach.fullmatch(module)
            # A module may get an adapter beside that on its tensor, and a convolution is no matrix.
            if is_kept_by_model or module in chosen or len(weights.shapes[name]) != 2:
                return True
        if not hits:
            return True
    return False


def _ends_one_of(modules: Sequence[str], target: str) -> bool:
    """True if a target, such as `q_proj` or `mlp.up_proj`, is the end of a module's name."""
    return any(f".{module}".endswith(f".{target}") for module in modules)


def _may_be_tied(module: str) -> bool:
    """True if a module, by its name, is a head or embeddings, which may be one weight."""
    return HEADS.search(module) is not None or EMBEDDINGS.search(module) is not None
