"""Weights in FP8 by compressed-tensors: held, computed with, written."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from tqdm import tqdm

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.models.patch import Replaced


def without_progress_bars() -> Replaced:
    """Return the context in which tqdm draws nothing. compressed-tensors has no switch for its bars."""
    original = tqdm.__init__

    def hidden(bar: Any, *arguments: Any, **settings: Any) -> None:
        original(bar, *arguments, **{**settings, "disable": True})

    return Replaced(tqdm, "__init__", hidden)


def quantise(model: Any) -> int:
    """Let a model compute with weights in FP8, which are still held in its dtype. Return the number of layers.

    Raise ModelError for a mixture whose experts are no linear layers, as they would keep most of the size.
    """
    stacked = [name for name, weight in model.named_parameters() if weight.dim() > 2]
    if stacked:
        raise errors.ModelError(
            f"{stacked[0]} holds many matrices in one, as experts of a mixture do, and is not quantised to FP8. Nothing "
            "was written."
        )
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    # Scales follow from the weights, row by row, so no data is needed to find them.
    layers = 0
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        weight = layer.weight.data.float()
        smallest = weight.amin(1, keepdim=True)
        largest = weight.amax(1, keepdim=True)
        scale, _ = calculate_qparams(smallest, largest, layer.quantization_scheme.weights)
        layer.weight_scale.data.copy_(scale)
        layers += 1
    return layers


def save(model: Any, staging: Path, folder: Path) -> None:
    """Write the model in FP8, and copy the other files of the export."""
    compressor = ModelCompressor.from_pretrained_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    fault_injection.reach("fp8.weights")
    for path in staging.iterdir():
        # Chat templates with a name have a folder of their own.
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif ".safetensors" not in path.name and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
