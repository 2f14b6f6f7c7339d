"""A LoRA adapter as a GGUF file, which llama.cpp puts beside the GGUF file of its base.

llama.cpp scales an adapter by alpha / rank, with one alpha for all of it. Other scales (of rsLoRA, or of `alpha_pattern`)
become part of B. With alpha_pattern {v: 6} beside alpha 8, q of rank 4 and v of rank 2:

                 q                  v
    PEFT         8/4 · B·A          6/2 · B·A
    llama.cpp    alpha/4 · B'·A     alpha/2 · B'·A
    file         alpha = 8, B' = B          B' = 6/8 · B
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from torch import Tensor

from kubetune import errors
from kubetune.models import weight_files
from kubetune.models.adapters import saved
from kubetune.result.gguf_files.families import Facts, family_of
from kubetune.result.gguf_files.model_file import (
    Planned,
    add_keys,
    converted,
    tensor_names,
    write_tensors,
)

# Parts of a model on which llama.cpp loads none, or reads one otherwise than PEFT.
_NOT_LOADED: Final = ("embed", "lm_head", "experts")


def write_adapter(
    folder: Path,
    facts: Facts,
    path: Path,
    about: Mapping[str, str],
) -> int:
    """Write the PEFT adapter of a folder as `path`, and return the number of its pairs.

    `facts`: the base's. Raise ModelError for what llama.cpp would leave out or compute otherwise.
    """
    family = family_of(facts)
    settings = saved.read_settings(folder)
    if settings.target_parameters:
        raise errors.ModelError(
            "llama.cpp loads no adapters on experts of a mixture; `--gguf bf16` writes the whole model. Nothing was "
            "written."
        )
    names = tensor_names(family, facts)
    pairs = _pairs(weight_files.read(folder / saved.WEIGHTS))
    alpha: float | None = None
    planned = []
    for module, (a, b) in sorted(pairs.items()):
        name = f"{module}.weight"
        target = names(name)
        if target is None or any(part in module for part in _NOT_LOADED):
            raise errors.ModelError(
                f"llama.cpp loads no adapter on {module} as it was trained; `--gguf bf16` writes the whole model. "
                "Nothing was written."
            )
        # By which llama.cpp would have to divide by the rank.
        wanted = _scale(module, settings, len(a)) * len(a)
        if alpha is None:
            alpha = wanted
        # A stays as it is, since it reads the columns of the weight, whose order llama.cpp keeps. B has its rows.
        rows = b
        if not family.transposed:
            rows = converted(name, b, facts, family)
        planned.append(_planned(f"{target}.lora_a", a))
        planned.append(_planned(f"{target}.lora_b", rows * (wanted / alpha)))

    writer = GGUFWriter(path, family.arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    add_keys(writer, "general", about)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha or 0))
    write_tensors(writer, planned)
    return len(pairs)


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tuple(tensor.shape), Type.F32, tensor.contiguous().numpy)


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by the module that they are on, in fp32."""
    # base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight → model.layers.0.self_attn.q_proj, A
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise errors.ModelError(
                f"llama.cpp loads no adapter with {name}; `--gguf bf16` writes the whole model. Nothing was written."
            )
        halves.setdefault(match[1], {})[match[2]] = tensor.to(torch.float32)
    pairs = {}
    for module, half in halves.items():
        pairs[module] = (half["A"], half["B"])
    return pairs


def _scale(module: str, settings: saved.AdapterSettings, rank: int) -> float:
    """Return by what B·A of a module is multiplied, as PEFT does it."""
    alpha = settings.alpha_of(module)
    if settings.use_rslora:
        return alpha / math.sqrt(rank)
    return alpha / rank
