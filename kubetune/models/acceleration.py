"""Decides what makes a loaded model fast or small: recomputation, cheaper forwards, compiled kernels.

Decisions follow from the work planned and the memory of the device, never from a clock, so that a resumed run decides
alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kubetune import errors
from kubetune.base import logs, processes
from kubetune.config.schema import TrainingConfig
from kubetune.data.text.labels import Labels
from kubetune.distributed import process_group
from kubetune.models import compiled_layers, fsdp, fused_forwards
from kubetune.models.fsdp import is_sharded
from kubetune.models.kernels import pointwise
from kubetune.models.padding_free import Route, language_model, unwrap
from kubetune.planning.memory import Shape, layers_to_recompute

# Of the device's memory, what whole gradients may take where a sharded model would otherwise sum them more than once.
WHOLE_GRADIENT_SHARE = 1 / 8

# Floating-point operations from which compiling pays for itself: some minutes of training on two cores, or on a GPU.
WORTH_COMPILING = {"cpu": 5e13, "cuda": 5e15}


@dataclass(frozen=True)
class Workload:
    """What a run is going to do: tokens in its largest micro-batch, and tokens from the first step to the last.

    `labels` are what a classifier is to tell apart.
    """

    micro_batch_tokens: int
    total_tokens: int
    labels: Labels | None = None


def tune(model: nn.Module, route: Route, training: TrainingConfig, workload: Workload, device: torch.device) -> None:
    """Set up a model for training as `training` asks; raises ConfigError for what cannot work here."""
    # Compiled forwards are proved on the modules at hand, whose weights are only slices when they are sharded.
    fused = not is_sharded(model) and wants_compile(training.compile, model, workload, device) and route.padding_free
    if sums_once_per_step(model, device):
        logs.MODEL.info("gradients are kept whole and summed over the ranks once per step")
        fsdp.sum_once_per_step(model)
    layers = recomputed_layers(training.gradient_checkpointing, model, workload, device, fused=fused)
    if layers != 0:
        some = "all" if layers is None else f"the first {layers}"
        logs.MODEL.info("activations of %s layers are recomputed in the backward", some)
        recompute_activations(model, layers)
    if training.lean and route.padding_free:
        pointwise.plan_compile(fused)
        swapped = fused_forwards.make_lean(model, fused=fused)
        logs.MODEL.debug(
            "cheaper forwards: %s", ", ".join(f"{count} × {name}" for name, count in swapped.items()) or "none"
        )
        if fused:
            logs.MODEL.info("pointwise kernels are compiled after the first step, which waits for none")
    if training.compile == "layers":
        _compile_layers(model, route, fused=fused)


def _compile_layers(model: nn.Module, route: Route, *, fused: bool) -> None:
    if not fused:
        why_not = "it is sharded" if is_sharded(model) else "it takes one sequence at a time"
        logs.MODEL.warning("training.compile is layers, but no layer of this model is compiled: %s", why_not)
    elif not compiled_layers.compile_layers(model):
        logs.MODEL.warning("training.compile is layers, but the decoder layers of this model are not known")


def wants_compile(setting: bool | str, model: nn.Module, workload: Workload, device: torch.device) -> bool:
    """`training.compile`, decided."""
    missing = pointwise.can_compile(device)
    if setting == "auto":
        # Forward and the gradient of the inputs; frozen weights need no gradient of their own.
        work = 4.0 * sum(p.numel() for p in model.parameters()) * workload.total_tokens
        return missing is None and work >= WORTH_COMPILING[device.type]
    if setting and missing is not None:
        said = f"training.compile is {str(setting).lower()}, but {missing}; install one, or leave it at auto"
        raise errors.ConfigError(said)
    return bool(setting)


def device_bytes(device: torch.device) -> int:
    """Memory of a device; of this host's, one rank's part."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return processes.usable_memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def whole_gradient_bytes(model: nn.Module) -> int:
    """What the gradients of all sharded weights take that are trained."""
    return 4 * sum(p.numel() for p in model.parameters() if p.requires_grad and hasattr(p, "to_local"))


def sums_once_per_step(model: nn.Module, device: torch.device) -> bool:
    """Whether a sharded model's whole gradients are small enough to be kept from one micro-batch to the next."""
    return 0 < whole_gradient_bytes(model) <= WHOLE_GRADIENT_SHARE * device_bytes(device)


def recomputed_layers(
    setting: bool | str, model: nn.Module, workload: Workload, device: torch.device, *, fused: bool
) -> int | None:
    """`training.gradient_checkpointing`, decided: how many layers recompute; None for all.

    `auto` recomputes on a GPU, and there only as many layers as its memory asks for.
    """
    if setting != "auto":
        return None if setting else 0
    shape = Shape.of(unwrap(model).config.get_text_config().to_dict())
    if device.type != "cuda" or shape is None:
        return 0
    held = [(process_group.local(p), p.requires_grad) for p in model.parameters()]
    return layers_to_recompute(
        shape,
        weight_bytes=sum(p.nbytes for p, _ in held)
        + (whole_gradient_bytes(model) if sums_once_per_step(model, device) else 0),
        trained_parameters=sum(p.numel() for p, is_trained in held if is_trained),
        tokens=workload.micro_batch_tokens,
        element_bytes=min(p.element_size() for p, _ in held if p.is_floating_point()),
        device_bytes=device_bytes(device),
        fused=fused,
    )


def recompute_activations(model: nn.Module, layers: int | None = None) -> None:
    """Keep only the input of the first `layers` layers (None: of all) and run them again in the backward."""
    lm: Any = unwrap(model)
    # transformers 5.2x renamed it and warns about the old name.
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if layers is None:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    recomputing = [module for module in language_model(lm).modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in recomputing[layers:]:
        module.gradient_checkpointing = False
