"""What makes a run fit its device: what `training.parallelism: auto` is, and changes of a config that is too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kubetune.base.humanize import size
from kubetune.config.schema import Config, DataConfig, GrpoConfig, LoraConfig, TrainingConfig
from kubetune.plan.costs import RunWeights, memory_of
from kubetune.plan.forecast import Forecast
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan
from kubetune.plan.proposals import parallelisms

# What to write, and the memory after it.
Remedies = Sequence[tuple[str, Forecast]]


class Choice(NamedTuple):
    """What `auto` is for a run, and why in a clause."""

    parallelism: str
    why: str
    is_known: bool = True  # False: the machine that runs it may know more


def decide_parallelism(
    config: Config,
    plan: Plan,
    memory: int | None,
    environ: Mapping[str, str],
    weights: Weights | None = None,
) -> Choice:
    """Return what `auto` is for a run whose processes have so many bytes each, None if nobody knows.

    It follows from the config, the sizes of the model and the memory of a device, never from the data, which are not
    prepared yet: rows count as long as they may be. Where nobody knows, it is what takes the least memory.
    `weights`: those of the model if they were read before.
    """
    whole, in_parts = parallelisms(config.lora)
    if plan.world_size == 1:
        return Choice(whole, "there is one process")
    if memory is None:
        key = "compute.memory" if plan.device == "cpu" else "compute.gpu_memory"
        return Choice(in_parts, f"the memory of a process is not known here ({key})", False)
    models = RunWeights.of(config, environ, weights)
    needs = []
    for parallelism in (whole, in_parts):
        training = config.training.model_copy(update={"parallelism": parallelism})
        changed = config.model_copy(update={"training": training})
        taken = memory_of(changed, plan, models, memory, None)
        if taken is None:
            why = f"the sizes of {config.model.path} are not known before it is loaded"
            return Choice(in_parts, why, False)
        needs.append(f"{size(taken.peak_bytes)} with {parallelism}")
        why = f"a process has {size(memory)} and takes about {', '.join(needs)}"
        if taken.fits:
            return Choice(parallelism, why)
    return Choice(in_parts, f"{why}: neither fits")


def remedies(
    config: Config, plan: Plan, models: RunWeights, device_bytes: int, longest: int | None = None
) -> Remedies:
    """Return the changes that are each enough, with the memory after it. `longest`: tokens of the longest row."""
    fitting = []
    changes = _changes(config.training, config.data, config.lora, config.quantization, plan)
    if config.task == "grpo":
        changes = _smaller_drawing(config.grpo) + changes
    for text, update in changes:
        changed = config.model_copy(update=update)
        batch = changed.training.per_device_train_batch_size
        tokens = batch * changed.longest_row if changed.data.packing else None
        sizes = {"per_device_train_batch_size": batch, "micro_batch_tokens": tokens}
        then = plan.model_copy(update=sizes)
        memory = memory_of(changed, then, models, device_bytes, longest)
        if memory is not None and memory.fits:
            fitting.append((text, memory))
    return fitting


def _smaller_drawing(settings: GrpoConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the changes that draw fewer answers at a time, down to the answers to one prompt."""
    changes: list[tuple[str, dict[str, Any]]] = []
    rows = settings.generation_batch_size
    while rows > settings.num_generations:
        rows = max(rows // 2, settings.num_generations)
        smaller = settings.model_copy(update={"generation_batch_size": rows})
        changes.append((f"grpo.generation_batch_size: {rows}", {"grpo": smaller}))
    return changes


def _changes(
    training: TrainingConfig,
    data: DataConfig,
    lora: LoraConfig | None,
    quantization: str,
    plan: Plan,
) -> list[tuple[str, dict[str, Any]]]:
    """Return the changes that may make a run fit, mildest first: what to write, and the keys of the config."""
    changes: list[tuple[str, dict[str, Any]]] = []

    def change_training(text: str, **values: object) -> None:
        changes.append((text, {"training": training.model_copy(update=values)}))

    # Slower, but the same numbers.
    if training.gradient_checkpointing is not True:
        change_training("training.gradient_checkpointing: true", gradient_checkpointing=True)
    # Halve the micro-batch: the gradient stays the same.
    batch = training.per_device_train_batch_size
    while batch > 1:
        batch //= 2
        text = f"training.per_device_train_batch_size: {batch}, with the same global_batch_size"
        change_training(text, per_device_train_batch_size=batch)
    # Spread the weights over the GPUs.
    if training.parallelism == "ddp" and plan.world_size > 1:
        wanted = "fsdp" if lora is None else "shard_base"
        change_training(f"training.parallelism: {wanted}", parallelism=wanted)
    # Train less, or in fewer bits: another result.
    if lora is None:
        change_training("training.optim: adamw_8bit", optim="adamw_8bit")
        changes.append(("lora: {r: 16}", {"lora": LoraConfig()}))
    elif plan.device == "cuda" and quantization not in ("4bit", "fp4"):
        changes.append(("quantization: 4bit", {"quantization": "4bit"}))
    # Shorter rows lose data, so they come last.
    length = data.max_length // 2
    shorter = data.model_copy(update={"max_length": max(8, length)})
    changes.append((f"data.max_length: {length}", {"data": shorter}))
    return changes
