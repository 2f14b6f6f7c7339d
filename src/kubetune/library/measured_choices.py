"""The values that this machine chooses for keys that are `auto`, and why, for a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kubetune.base.cpu import processor
from kubetune.config.schema import Config, ModelConfig
from kubetune.plan import measured
from kubetune.plan.devices import device_bytes
from kubetune.plan.linears import shape_of
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan


def with_measured_choices(
    config: Config, plan: Plan, weights: Weights | None, tokens: int | None, gpu: str | None
) -> tuple[Config, Sequence[str]]:
    """Return the config with `auto` replaced if this machine has measured what is best, and each choice as a sentence.

    `tokens`: of an epoch. `gpu`: the name of the GPU here.
    """
    texts = []

    # The processors of a cluster are not known here.
    if plan.device == "cpu" and config.kubernetes is None:
        model, remarks = _with_dtype(config.model, weights)
        config = config.model_copy(update={"model": model})
        texts += remarks
    if plan.device == "cpu" and config.training.async_save is True:
        texts.append(
            "training.async_save: true keeps a copy of what a checkpoint holds in memory; auto does so only on a GPU"
        )

    if config.training.parallelism == "auto":
        from kubetune.plan.fitting import decide_parallelism

        memory = None
        if config.kubernetes is None or config.compute.gpu_memory:
            memory = device_bytes(config.compute, plan)
        chosen, why, _ = decide_parallelism(config, plan, memory, os.environ, weights)
        texts.append(f"training.parallelism: auto -> {chosen}, because {why}")
        training = config.training.model_copy(update={"parallelism": chosen})
        config = config.model_copy(update={"training": training})

    # torch.compile pays only if what it saves in all steps is more than what it takes at the start.
    runs_elsewhere = config.kubernetes is not None or (plan.device == "cuda" and gpu is None)
    if weights is None or config.training.compile != "auto" or runs_elsewhere:
        return config, texts
    measurements = measured.read(gpu)
    total_tokens = float(tokens or 0) * plan.num_epochs
    compiles = measured.compiles(
        config.task, config.training, measurements, weights.parameters, total_tokens, plan.device
    )
    if compiles != "auto":
        texts.append(
            f"training.compile: auto -> {str(compiles).lower()}, because {measurements.why} "
            f"(measured on {measurements.time[:10]})"
        )
        training = config.training.model_copy(update={"compile": compiles})
        config = config.model_copy(update={"training": training})
    return config, texts


def _with_dtype(model: ModelConfig, weights: Weights | None) -> tuple[ModelConfig, list[str]]:
    """Return the section with the dtype that `auto` means on this processor, and what is to be said of it."""
    shape = None
    if weights is not None:
        shape = shape_of(weights)
    width = None if shape is None else shape.hidden
    if model.dtype != "auto":
        remark = processor.slow_dtype(model.dtype, width)
        return model, [remark] if remark is not None else []
    dtype, reason = processor.dtype_for(width)
    text = f"model.dtype: auto -> {dtype}, because {reason}"
    return model.model_copy(update={"dtype": dtype}), [text]
