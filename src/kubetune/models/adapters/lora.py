"""LoRA by PEFT, in PEFT's own format: what is trained here, PeftModel.from_pretrained loads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch
from torch import nn

from kubetune import errors
from kubetune.config.schema import LoraConfig
from kubetune.models.mixtures.stacked_experts import swap_experts
from kubetune.models.mixtures.targets import find_targets, has_matrix, unreached_names
from kubetune.models.sharded_base import base_shards
from kubetune.plan.adapter_targets import lacks_whole_modules
from kubetune.plan.linears import targeted


def add_lora(
    model: nn.Module,
    lora: LoraConfig,
    *,
    task_type: str,
    seed: int,
    heads: Sequence[str] = (),
    frozen: str | None = None,
) -> nn.Module:
    """Freeze `model` and put fp32 adapters into it. Initial weights depend only on `seed`.

    `heads` are modules that are new to the model: trained in full and saved with the adapter. A module gets no
    adapter if its whole name matches the expression `frozen`.
    Raise ConfigError if no module matches `target_modules`, or one of `modules_to_save` is not in the model.
    """
    from peft import LoraConfig as PeftLoraConfig

    left_out = re.compile(frozen or _expression_of(heads))
    _require_modules(model, lora, left_out)
    targets = find_targets(model, lora, frozen=lambda name: left_out.fullmatch(name) is not None)

    # Each name once: a user may have named the heads too.
    trained_whole = list(dict.fromkeys((*lora.modules_to_save, *heads)))
    settings = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]  # PEFT divides by r; fractions are fine
        lora_dropout=lora.dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        modules_to_save=trained_whole or None,
        exclude_modules=list(heads) or frozen,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        # GPT-2's Conv1D keeps its weight transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type=task_type,
    )

    torch.manual_seed(seed)
    adapted = _with_adapters(model, settings, lora)
    _require_plain_head(model)

    # PEFT keeps sets; lists make equal runs save equal files.
    saved: Any = adapted.peft_config["default"]
    if not isinstance(saved.target_modules, str):
        saved.target_modules = sorted(saved.target_modules or ())
    saved.target_parameters = sorted(saved.target_parameters or ()) or None

    # In half precision most steps of an adapter would be rounded away. Modules of the base that learn whole stay as the
    # layers around them compute, and have their fp32 in the optimizer, as in full fine-tuning.
    of_base = _of_base(adapted, heads)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter not in of_base:
            parameter.data = parameter.data.float()
    swap_experts(adapted)
    for head in heads:
        adapted.get_base_model().get_submodule(head).register_forward_pre_hook(_to_float)
    return cast(nn.Module, adapted)


def _with_adapters(model: nn.Module, settings: Any, lora: LoraConfig) -> Any:
    """Return PEFT's model around `model`. Raise ConfigError if PEFT refuses the targets."""
    from peft import get_peft_model

    try:
        with base_shards.measured(model, by_dora=lora.use_dora):
            return get_peft_model(cast(Any, model), settings)
    except ValueError as error:
        raise errors.ConfigError(_explained(error, model, lora.target_modules)) from error


def _of_base(adapted: Any, heads: Sequence[str]) -> set[nn.Parameter]:
    """Return what learns whole of modules that the base has, without new `heads`."""
    from peft.utils.other import ModulesToSaveWrapper

    parameters: set[nn.Parameter] = set()
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper) and name not in heads:
            parameters.update(module.modules_to_save.parameters())
    return parameters


def _expression_of(names: Sequence[str]) -> str:
    """Return an expression for the whole names of modules with these last parts, and of all that is in them."""
    if not names:
        return "$^"  # matches nothing
    return "|".join(rf"(.*\.)?{re.escape(name)}(\..*)?" for name in names)


def _require_modules(model: nn.Module, lora: LoraConfig, left_out: re.Pattern[str]) -> None:
    """Raise ConfigError for modules that are named and not in the model, whether for adapters or to be trained whole."""
    names = [name for name, _ in model.named_modules()]
    problem = lacks_whole_modules(lora.modules_to_save, names)
    if problem is not None:
        raise errors.ConfigError(problem)
    _require_reached(model, lora.target_modules, left_out)


def _require_reached(
    model: nn.Module,
    targets: str | Sequence[str],
    frozen: re.Pattern[str],
) -> None:
    """Raise ConfigError if the model reads the weights of a target without calling it: its adapter would learn
    nothing.
    """
    if targets == "all-linear":
        return
    refused = set()
    for name in targeted(unreached_names(model), targets):
        if not frozen.fullmatch(name):
            refused.add(name.rpartition(".")[2])
    if refused:
        raise errors.ConfigError(_refusal(model, targets, refused))


def _require_plain_head(model: nn.Module) -> None:
    """Raise ConfigError for an adapter on the output head, or on input embeddings that the head is tied to."""
    # The loss takes the head's own weight: an adapter on it would have no gradient. If the head is tied to embeddings
    # with an adapter, it goes without that; merged, the weight would have to be two.
    head = cast(Any, model).get_output_embeddings()
    embeddings = cast(Any, model).get_input_embeddings()
    if hasattr(head, "base_layer"):
        key, name = _key_of_target(head), _last_part(model, head)
        raise errors.ConfigError(
            f"{key}: {name} is the output head, which kubetune computes together with the loss, so an adapter on it would "
            f"get no gradient; leave it out, or write lora.modules_to_save: [{name}], which trains it whole"
        )

    if hasattr(embeddings, "base_layer") and embeddings.weight is getattr(head, "weight", None):
        key, name = _key_of_target(embeddings), _last_part(model, embeddings)
        raise errors.ConfigError(
            f"{key}: the output head shares the weight of {name} in this model, but would not get its adapter, so the "
            f"result could not be merged; leave {name} out, or write lora.modules_to_save: [{name}], which trains it "
            "whole and unties the head"
        )


def _key_of_target(adapted: Any) -> str:
    """Return the key of the config that a module got its adapter by."""
    kind = "parameters" if hasattr(adapted, "parameter_name") else "modules"
    return f"lora.target_{kind}"


def _last_part(model: nn.Module, wanted: nn.Module) -> str:
    """Return the last part of a module's name."""
    name: str = next(name for name, module in model.named_modules() if module is wanted)
    return name.rpartition(".")[2]


def _to_float(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hand a head, which is trained in fp32, what a base in half precision gives, in fp32 too."""
    return (inputs[0].float(), *inputs[1:])


def _explained(error: ValueError, model: nn.Module, targets: str | Sequence[str]) -> str:
    """Return what PEFT has against the targets, with names that it would take."""
    message = " ".join(str(error).split())
    # PEFT raises plain ValueErrors, so only their words tell them apart.
    incompatible = re.search(r"Incompatible modules: \{([^}]*)\}", message)
    if incompatible is not None:
        refused = set(re.findall(r"\w+", incompatible[1]))
        return _refusal(model, targets, refused & {*_last_parts(model)})
    return f"lora.target_modules: {message}"


def _refusal(model: nn.Module, targets: str | Sequence[str], refused: AbstractSet[str]) -> str:
    """Return a message for targets that take in modules which can have no adapter, with those that can."""
    kind = getattr(model.config, "model_type", "this kind")
    wanted = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
    others = [name for name in _last_parts(model) if name not in refused]
    return (
        f"lora.target_modules: {wanted} takes in {' and '.join(sorted(refused))}, which can have no adapter in {kind}; "
        f"write [{', '.join(others)}]"
    )


def _last_parts(model: nn.Module) -> list[str]:
    """Return the last parts of the names of a model's modules that have a matrix, without its head.

    PEFT may have refused the model when it had adapted a part of it: then some names end in `base_layer`.
    """
    head = cast(Any, model).get_output_embeddings()
    out_of_reach = set(unreached_names(model))

    last_parts = set()
    for full_name, module in model.named_modules():
        name = full_name.removesuffix(".base_layer")
        is_other = not name or ".lora_" in name or name in out_of_reach or module is head
        if not is_other and isinstance(module, nn.Linear) and has_matrix(module):
            last_parts.add(name.rpartition(".")[2])

    return sorted(last_parts)
