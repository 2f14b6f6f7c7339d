"""Quantisation of the frozen base, by bitsandbytes: the decision, its reason, and its settings."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kubetune import errors
from kubetune.base import logs
from kubetune.config.schema import LoraConfig
from kubetune.distributed.process_group import World
from kubetune.extras import require
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import auto_quantization
from kubetune.rundir import metrics

# Small and new layers gain nothing from being quantised, and a new head must be trained.
HEADS = (
    "classifier",
    "score",
    "pre_classifier",
    "pooler",
    "lm_head",
    "embed_out",
    "qa_outputs",
)

# PEFT imports bitsandbytes whenever it is there. It warns of kernels nobody asked for, and of every cast of an input.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def decide(
    quantization: str,
    lora: LoraConfig | None,
    world: World,
) -> str:
    """Return the quantization that `auto` means here; the log says why."""
    if quantization != "auto":
        return quantization
    chosen, reason = auto_quantization(lora, world.device.type, world.size)
    if chosen != "none":
        missing = _missing()
        if missing is not None:
            chosen = "none"
            reason = missing

    logs.MODEL.info("quantization: auto -> %s, because %s", chosen, reason)
    return chosen


def as_trained(
    run_dir: Path,
    quantization: str,
    lora: LoraConfig | None,
) -> str:
    """Return what `quantization` was decided to be when a run was trained, whatever this machine has."""
    if quantization != "auto":
        return quantization
    # By the device and the ranks of the training, which the run's plan has.
    plan = Plan.read(run_dir / metrics.PLAN)
    world = World(size=plan.world_size, device=torch.device(plan.device))
    return decide(quantization, lora, world)


def _missing() -> str | None:
    """Return why bitsandbytes cannot be used here; None if it can."""
    try:
        require_bitsandbytes("8-bit")
    except errors.ConfigError as error:
        return error.problem
    return None


def settings(
    quantization: str,
    lora: LoraConfig | None,
    compute_dtype: torch.dtype,
) -> Any:
    """Return transformers' settings for bitsandbytes, or None for a base that is not quantised.

    Raise ConfigError when bitsandbytes is missing or cannot run, and when nothing but the base would be trained.
    """
    # `auto` that was not decided has nothing to quantise.
    if quantization in ("none", "auto"):
        return None
    if lora is None:
        raise errors.ConfigError(
            f"quantization: {quantization} freezes the base: add a `lora` section"
        )

    require_bitsandbytes(f"quantization: {quantization}")
    from transformers import BitsAndBytesConfig

    # Naming modules replaces transformers' own choice, so the heads of all tasks are named.
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(HEADS))
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type={"4bit": "nf4", "fp4": "fp4"}[quantization],
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=list(HEADS),
    )


def settings_of_files(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with which files of codes are read as numbers, if nothing here can train on the codes.

    `facts`: config.json. transformers would keep the codes on a GPU of which it thinks that it can multiply them:

        MXFP4    its kernels have no backward: what lies below the experts would not learn
        FP8      its kernels come with the package `kernels`, without which the first step would fail
    """
    codes = facts.get("quantization_config")
    if not isinstance(codes, dict):
        return {}
    method = codes.get("quant_method")
    if method == "mxfp4" or (method == "fp8" and find_spec("kernels") is None):
        from transformers.quantizers import AutoQuantizationConfig

        as_numbers = AutoQuantizationConfig.from_dict({**codes, "dequantize": True})
        return {"quantization_config": as_numbers}
    return {}


def describe(
    quantization: str,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Return how a quantised base is stored and multiplied, for the log."""
    products = f"products in {str(compute_dtype).removeprefix('torch.')}"
    if quantization != "8bit":
        kind = "nf4" if quantization == "4bit" else quantization
        return f"the base is stored in 4 bits ({kind}), its scales in 8 (double quantisation); {products}"
    if device.type != "cpu":
        return "the base is stored in 8 bits and multiplied by inputs rounded to 8 bits, in training and evaluation"
    return (
        f"the base is stored in 8 bits; on a CPU bitsandbytes trains with {products}, but evaluates with inputs "
        "rounded to 8 bits as well: the losses of the two differ a little for the same weights"
    )


def count(parameter: nn.Parameter) -> int:
    """Return how many numbers a parameter stands for: of a 4-bit one each byte holds two."""
    # bitsandbytes' state has the shape that the weight had before it was packed.
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def keep_layout(model: nn.Module) -> None:
    """Let 4-bit weights keep the layout that gradients can pass through.

    On CPUs with bf16 instructions a 4-bit layer would repack itself for inference at its first evaluation, for good:
    its scales are rounded to bf16, and from then on no gradient reaches what is below it.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # The flag that makes a layer repack itself.
            module.support_avx512bf16_for_cpu = False


@contextmanager
def multiplying_as_in_training(model: nn.Module) -> Iterator[None]:
    """Keep 8-bit layers on a CPU from rounding their inputs in evaluation. In training they do not round either.

    Outputs that are compared with those in training must be computed as in training.
    """
    # bitsandbytes rounds inputs on a CPU exactly if a layer is not in training.
    layers = [module for module in model.modules() if _rounds_inputs(module)]
    for layer in layers:
        # Only the flag: calling `train` would reach the adapters too.
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _rounds_inputs(module: Any) -> bool:
    """True for an 8-bit layer on a CPU that is not in training."""
    is_of_bitsandbytes = type(module).__module__.startswith("bitsandbytes")
    if type(module).__name__ != "Linear8bitLt" or not is_of_bitsandbytes:
        return False
    return not module.training and module.weight.device.type == "cpu"


def require_bitsandbytes(setting: str) -> None:
    """Raise ConfigError, naming the setting that needs it, unless bitsandbytes can be used."""
    require(setting, "bitsandbytes", after=". Nothing was written.")
    try:
        import bitsandbytes  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise errors.ConfigError(
            f"{setting} needs bitsandbytes, which cannot run here: {' '.join(str(error).split())}. Nothing was written."
        ) from error
