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
from kubetune.models.adapters.on_base import with_adapter
from kubetune.models.padding_free import unwrap

# Beginnings of warnings about what is done here on purpose.
_EXPECTED_WARNINGS = (
    "All adapters are already merged",
    "Input and output embeddings are no longer tied",
    "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter",
    "The following (rank|alpha)_pattern keys did not match",
)


def is_quantised(model: nn.Module) -> bool:
    """True if the base of the model holds quantised weights."""
    return bool(getattr(unwrap(model), "is_quantized", False))


def dequantise(model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Return the PEFT model of `folder` on the same base with weights in `dtype`.

    They are the numbers that the adapter was trained on. `model`, a PEFT model too, is used up: each quantised layer
    is let go as its plain one is made, so the base never exists twice.
    """
    with quiet():
        # Without its adapter, which is put on the plain layers again below.
        base = model.unload()
        base = base.dequantize(dtype)
    for layer in base.modules():
        # transformers leaves some of the dequantised numbers in a dtype of its own choice.
        if isinstance(layer, nn.Linear) and layer.weight.dtype != dtype:
            layer.to(dtype)

    return with_adapter(base, folder)


def merge_adapters(model: Any, dtype: torch.dtype) -> Any:
    """Return the transformers model with the adapters of a PEFT model in its weights, in `dtype` where they changed.

    The PEFT model is used up. Raise ModelError if adapters cannot be merged, or would make a weight infinite.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        with quiet(), torch.no_grad():
            # A list, since merging may change the tree of modules.
            for name, layer in list(model.named_modules()):
                if isinstance(layer, BaseTunerLayer):
                    _merge_layer(name, layer, dtype)
            # Everything is merged: PEFT only takes its own layers out.
            return model.merge_and_unload()
    except ValueError as error:
        raise errors.ModelError(
            f"the adapters cannot be merged: {' '.join(str(error).split())}"
        ) from error


def _merge_layer(name: str, layer: Any, dtype: torch.dtype) -> None:
    """Add the adapter of a layer to its weights. Raise ValueError if one of them becomes infinite.

    The sum is made in fp32 and rounded once: in bfloat16, a small change of a large weight would be lost.
    """
    weights = list(layer.get_base_layer().parameters(recurse=False))
    for weight in weights:
        weight.data = weight.data.float()

    # `safe_merge` adds on a copy, so that a failure leaves the layer as it was.
    layer.merge(safe_merge=True)
    for weight in weights:
        weight.data = weight.data.to(dtype)
        if not torch.isfinite(weight.data).all():
            raise ValueError(
                f"{name} would have weights beyond what {str(dtype).removeprefix('torch.')} holds; use another --dtype"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of PEFT and transformers about merging twice, and heads that the base lacks."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
