"""Decide what makes a loaded model fast or small: recomputation, cheaper forwards, compiled kernels.

    what                                 decided by
    fused forwards                       training.fused_forwards
    their kernels compiled               training.compile, the number of parameters and of tokens ahead
    layers compiled                      training.compile: layers
    activations recomputed               training.gradient_checkpointing, the memory of the GPU
    gradients summed once a step         the memory of the device; of a sharded model only

Nothing is decided by a clock, so that a resumed run decides alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kubetune.base import logs, processes
from kubetune.config.schema import TrainingConfig
from kubetune.data.text.class_labels import Labels
from kubetune.distributed.process_group import World, agree, gather
from kubetune.kernels import pointwise
from kubetune.models import fused_forwards
from kubetune.models.compiled_layers import CompiledLayers, compile_layers
from kubetune.models.fsdp import is_sharded
from kubetune.models.learner import Learner
from kubetune.models.mixtures import routing
from kubetune.models.padding_free import RECOMPUTING, language_model, recomputable_layers, unwrap
from kubetune.plan.activations import is_worth_compiling
from kubetune.plan.devices import require_compiler
from kubetune.plan.forecast import Forecast

# Share of the device's memory that whole gradients of a sharded model may take, to be summed only once a step.
WHOLE_GRADIENT_SHARE = 1 / 8


@dataclass(frozen=True)
class Workload:
    """The data that a model is about to learn from."""

    total_tokens: int  # from the first step to the last
    labels: Labels | None = None  # what a classifier is to tell apart
    memory: Forecast | None = None  # what it is expected to take


def tune(
    learner: Learner,
    training: TrainingConfig,
    workload: Workload,
    world: World,
) -> Learner:
    """Return the learner set up for training; raise ConfigError for what cannot work here. All ranks call it."""
    model = learner.model
    # The smallest device decides for all: ranks that sum gradients at different times wait for each other for ever.
    num_bytes = min(gather(device_bytes(world.device), world))
    route = learner.route
    learner = replace(learner, routing=routing.watch(learner.lm, training))

    fused = _compiles(training.compile, model, workload, world) and route.padding_free

    if sums_once_per_step(model, num_bytes):
        logs.MODEL.info("gradients are kept whole and summed over the ranks once per step")
        learner = replace(learner, sums_once_per_step=True)

    layers = recomputed_layers(training.gradient_checkpointing, workload.memory, compiled=fused)
    if layers != 0:
        some = "all" if layers is None else f"the first {layers}"
        logs.MODEL.info("activations of %s layers are recomputed in the backward", some)
        recompute_activations(model, layers)

    # The kernels themselves are compiled later, when the first step has shown that the run works.
    if training.fused_forwards:
        learner.kernels.is_planned = fused
        kernels = learner.kernels if fused else None
        swapped = fused_forwards.swap_forwards(
            model,
            kernels,
            learner.undo,
            skip_rows=route.ends_in_last_layer,
        )
        counts = ", ".join(f"{count} × {name}" for name, count in swapped.items())
        logs.MODEL.debug("fused forwards: %s", counts or "none")
        if fused:
            logs.MODEL.info(
                "pointwise kernels are compiled after the first step, which waits for none"
            )

    # Last: what is compiled are the forwards that were swapped before.
    if training.compile == "layers":
        learner = replace(learner, compiled_layers=_compile_layers(model, fused=fused))
    return learner


def _compiles(
    setting: bool | str,
    model: nn.Module,
    workload: Workload,
    world: World,
) -> bool:
    """Return what `training.compile` means for all ranks."""
    # Compiled forwards are proved on the modules at hand. Under FSDP2 these have only slices of their weights.
    is_sliced = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    wants = not is_sliced and wants_compile(setting, model, workload, world.device)
    # Compiled kernels are tried on a batch of all ranks, so all have them or none.
    return not agree(not wants, world)


def _compile_layers(model: nn.Module, *, fused: bool) -> CompiledLayers | None:
    if not fused:
        why_not = "it is sharded" if is_sharded(model) else "it takes one sequence at a time"
        logs.MODEL.warning(
            "training.compile is layers, but no layer of this model is compiled: %s", why_not
        )
        return None
    compiled = compile_layers(model)
    if compiled is None:
        logs.MODEL.warning("training.compile is layers, but no layer of this model can be compiled")
    return compiled


def without_compiler(training: TrainingConfig) -> TrainingConfig:
    """Return the section with `compile: false` in place of `auto`."""
    if training.compile != "auto":
        return training
    return training.model_copy(update={"compile": False})


def wants_compile(
    setting: bool | str,
    model: nn.Module,
    workload: Workload,
    device: torch.device,
) -> bool:
    """Return what `training.compile` means for this model, work and device."""
    missing = pointwise.can_compile(device)
    # `auto` weighs the seconds that compiling takes against what it spares over all tokens ahead.
    if setting == "auto":
        num_parameters = sum(p.numel() for p in model.parameters())
        pays = is_worth_compiling(num_parameters, workload.total_tokens, device.type)
        if pays and missing is not None:
            logs.MODEL.warning("kernels stay plain, which is slower: %s (docs/image.md)", missing)
        return pays and missing is None

    # Asked for by name, so it is no warning.
    require_compiler(setting, device.type)
    return bool(setting)


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device; of this host's, one rank's part."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return processes.usable_memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def whole_gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the whole gradients of all sharded weights that are trained."""
    # In fp32, so 4 bytes a number.
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            total += 4 * parameter.numel()
    return total


def sums_once_per_step(model: nn.Module, device_bytes: int) -> bool:
    """True if whole gradients of a sharded model have room to be kept from one micro-batch to the next."""
    return 0 < whole_gradient_bytes(model) <= WHOLE_GRADIENT_SHARE * device_bytes


def recomputed_layers(
    setting: bool | str, memory: Forecast | None, *, compiled: bool
) -> int | None:
    """Return how many layers recompute by `training.gradient_checkpointing`; None for all.

    `auto` recomputes on a GPU, and there only as many layers as the forecast says. `compiled`: the kernels are.
    """
    if setting != "auto":
        return None if setting else 0
    # Without the sizes of the model nothing can be forecast.
    if memory is None:
        return 0
    return memory.recomputed[compiled]


def recompute_activations(model: nn.Module, layers: int | None = None) -> None:
    """Keep only the input of the first `layers` layers (None: of all) and run them again in the backward."""
    lm: Any = unwrap(model)
    # transformers 5.2x renamed it and warns about the old name.
    enable = getattr(lm, "activation_checkpointing_enable", None)
    if enable is None:
        enable = lm.gradient_checkpointing_enable
    enable(RECOMPUTING)
    if layers is None:
        return
    for module in recomputable_layers(language_model(lm))[layers:]:
        module.gradient_checkpointing = False
