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
from kubetune.models.mixtures.experts import swap_experts
from kubetune.models.mixtures.targets import find_targets, has_matrix, unreached_names
from kubetune.plan.linears import is_target


def add_lora(
    model: nn.Module,
    lora: LoraConfig,
    *,
    task_type: str,
    seed: int,
    heads: Sequence[str] = (),
    frozen: str | None = None,
) -> nn.Module:
    """Freeze `model` and put fp32 adapters into it. Initial weights depend on `seed` alone.

    `heads` are modules that are new to the model: trained in full and saved with the adapter. Modules whose whole name
    matches the expression `frozen` get no adapter.
    Raises ConfigError when no module matches `target_modules`.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    left = re.compile(
        frozen or "|".join(rf"(.*\.)?{re.escape(head)}(\..*)?" for head in heads) or "$^"
    )
    _require_reached(model, lora.target_modules, left)
    targets = find_targets(model, lora, frozen=lambda name: left.fullmatch(name) is not None)
    settings = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]  # PEFT divides by r; fractions are fine
        lora_dropout=lora.dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        modules_to_save=list(dict.fromkeys((*lora.modules_to_save, *heads))) or None,
        exclude_modules=list(heads) or frozen,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        # GPT-2's Conv1D keeps its weight transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type=task_type,
    )
    torch.manual_seed(seed)
    try:
        adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise errors.ConfigError(_explained(error, model, lora.target_modules)) from error
    _require_plain_head(model)
    saved: Any = adapted.peft_config["default"]
    if not isinstance(saved.target_modules, str):
        # PEFT keeps sets; lists make equal runs save equal files.
        saved.target_modules = sorted(saved.target_modules or ())
    saved.target_parameters = sorted(saved.target_parameters or ()) or None
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    swap_experts(adapted)
    for head in heads:
        adapted.get_base_model().get_submodule(head).register_forward_pre_hook(_to_float)
    return adapted


def _require_reached(
    model: nn.Module, targets: str | Sequence[str], frozen: re.Pattern[str]
) -> None:
    """Raise ConfigError where modules are named an adapter of which would learn nothing."""
    if targets == "all-linear":
        return
    refused = {
        name.rpartition(".")[2]
        for name in unreached_names(model)
        if is_target(name, targets) and not frozen.fullmatch(name)
    }
    if refused:
        raise errors.ConfigError(_refusal(model, targets, refused))


def _require_plain_head(model: nn.Module) -> None:
    """Raise ConfigError for an adapter on the output head, which no logits are made by while a model learns.

    And for one on input embeddings that the head is tied to: the head would go without it, so that no merged weight
    could be both.
    """
    head = cast(Any, model).get_output_embeddings()
    embeddings = cast(Any, model).get_input_embeddings()
    if hasattr(head, "base_layer"):
        key, name = _key_of_target(head), _last_part(model, head)
        raise errors.ConfigError(
            f"{key}: {name} is the output head, whose product and the loss are one here, so that an adapter on it would "
            f"learn nothing; leave it out, or write lora.modules_to_save: [{name}], which trains it whole"
        )
    if hasattr(embeddings, "base_layer") and embeddings.weight is getattr(head, "weight", None):
        key, name = _key_of_target(embeddings), _last_part(model, embeddings)
        raise errors.ConfigError(
            f"{key}: the output head is tied to {name} in this model, and would go without the adapter on it, so that "
            f"the two could not be merged; leave {name} out, or write lora.modules_to_save: [{name}], which trains it "
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
    """A head is trained in fp32; what a half-precision base hands it must be that too."""
    return (inputs[0].float(), *inputs[1:])


def _explained(error: ValueError, model: nn.Module, targets: str | Sequence[str]) -> str:
    """PEFT's objection to the targets, with such as it would take."""
    said = " ".join(str(error).split())
    if (found := re.search(r"Incompatible modules: \{([^}]*)\}", said)) is not None:
        refused = set(re.findall(r"\w+", found[1]))
        return _refusal(model, targets, refused & {*_last_parts(model, nn.Linear)})
    if "not found in the base model" in said:
        return (
            f"lora.target_modules: no module's whole name matches {targets}; names end in "
            + ", ".join(_last_parts(model, nn.Module))
        )
    return f"lora.target_modules: {said}"


def _refusal(model: nn.Module, targets: str | Sequence[str], refused: AbstractSet[str]) -> str:
    """Return words for targets that take in modules which can have no adapter, with those that can."""
    kind = getattr(model.config, "model_type", "this kind")
    wanted = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
    others = [name for name in _last_parts(model, nn.Linear) if name not in refused]
    return (
        f"lora.target_modules: {wanted} takes in {' and '.join(sorted(refused))}, which can have no adapter in {kind}; "
        f"write [{', '.join(others)}]"
    )


def _last_parts(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Last parts of the names of a model's modules that hold a matrix, but for its head; of one half adapted too."""
    head = cast(Any, model).get_output_embeddings()
    named = [
        (name.removesuffix(".base_layer"), module)
        for name, module in model.named_modules()
        if module is not head
    ]
    held = [
        name
        for name, m in named
        if name and ".lora_" not in name and isinstance(m, kind) and has_matrix(m)
    ]
    if kind is not nn.Module:
        out_of_reach = set(unreached_names(model))
        held = [name for name in held if name not in out_of_reach]
    return sorted({name.rpartition(".")[2] for name in held})
