"""One set of weights from a base and its adapters, in the memory the base already takes.

Adapters are merged layer by layer: one layer at a time is widened to fp32, gets its adapter added by PEFT's own code
(so rsLoRA, DoRA and trained heads mean what they meant in training), and is rounded. Nothing here writes files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from kubetune import errors
from kubetune.models import loading
from kubetune.models.padding_free import unwrap

_SAID = (
    "All adapters are already merged",
    "Input and output embeddings are no longer tied",
    "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter",
    "The following (rank|alpha)_pattern keys did not match",
)


def is_quantised(model: nn.Module) -> bool:
    """The base of the model holds quantised weights."""
    return bool(getattr(unwrap(model), "is_quantized", False))


def dequantise(model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The PEFT model of `folder` on the same base with weights in `dtype`: the numbers that the adapter has met.

    The PEFT model given is used up. Each quantised layer is let go as its plain one is made, so the base never exists
    twice.
    """
    with quiet():
        base = model.unload()
        base = base.dequantize(dtype)
    for layer in base.modules():
        # transformers leaves some of the dequantised numbers in a dtype of its own choice.
        if isinstance(layer, nn.Linear) and layer.weight.dtype != dtype:
            layer.to(dtype)
    return loading.with_adapter(base, folder)


def merge_adapters(model: Any, dtype: torch.dtype) -> Any:
    """The transformers model with the adapters of a PEFT model in its weights, which are `dtype` where they changed.

    The PEFT model is used up. Raises ModelError where adapters cannot be merged, or would make a weight infinite.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)
    ]
    try:
        with quiet(), torch.no_grad():
            for name, layer in layers:
                _merge_layer(name, layer, dtype)
            return model.merge_and_unload()
    except ValueError as error:
        raise errors.ModelError(
            f"the adapters cannot be merged: {' '.join(str(error).split())}"
        ) from error


def _merge_layer(name: str, layer: Any, dtype: torch.dtype) -> None:
    weights = list(layer.get_base_layer().parameters(recurse=False))
    for weight in weights:
        weight.data = weight.data.float()
    layer.merge(safe_merge=True)
    for weight in weights:
        weight.data = weight.data.to(dtype)
        if not torch.isfinite(weight.data).all():
            raise ValueError(
                f"{name} would have weights beyond what {str(dtype).removeprefix('torch.')} holds; use another --dtype"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT and transformers warn of what is done here on purpose: merging twice, heads that the base lacks."""
    was = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            for message in _SAID:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        transformers_logging.set_verbosity(was)
