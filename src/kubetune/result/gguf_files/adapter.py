"""A LoRA adapter as a GGUF file, which llama.cpp puts beside the GGUF file of its base.

llama.cpp scales an adapter by alpha / rank, with one alpha for all of it. Other scales (of rsLoRA, or of `alpha_pattern`)
become part of B:

    file's alpha = scale · rank of the first pair;   B of another pair · (its scale · its rank / alpha)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from kubetune import errors
from kubetune.result.gguf_files.families import Facts, family_of
from kubetune.result.gguf_files.writer import (
    Planned,
    add_keys,
    converted,
    tensor_names,
    write_tensors,
)

_FIRST: Final = "base_model.model."


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
    settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    if settings.get("target_parameters"):
        raise errors.ModelError(
            "llama.cpp loads no adapters on experts of a mixture; `--gguf bf16` writes the whole model. Nothing was "
            "written."
        )
    names = tensor_names(family, facts)
    pairs = _pairs(load_file(folder / "adapter_model.safetensors"))
    alpha: float | None = None
    planned = []
    for module, (a, b) in sorted(pairs.items()):
        name = f"{module}.weight"
        target = names(name)
        if target is None or "embed" in module or "lm_head" in module or "experts" in module:
            raise errors.ModelError(
                f"llama.cpp loads no adapter on {module} as it was trained; `--gguf bf16` writes the whole model. "
                "Nothing was written."
            )
        weight = _scale(module, settings, len(a)) * len(a)
        if alpha is None:
            alpha = weight
        # A stays as it is, since it reads the columns of the weight, whose order llama.cpp keeps. B has its rows.
        rows = b if family.transposed else converted(name, b, facts, family)
        rows = rows * (weight / alpha)
        for end, tensor in (("lora_a", a), ("lora_b", rows)):
            planned.append(
                Planned(f"{target}.{end}", tuple(tensor.shape), Type.F32, tensor.contiguous().numpy)
            )

    writer = GGUFWriter(path, family.arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    add_keys(writer, {f"general.{key}": value for key, value in about.items()})
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha or 0))
    write_tensors(writer, planned)
    return len(pairs)


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by the module that they are on, in fp32."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"{re.escape(_FIRST)}(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise errors.ModelError(
                f"llama.cpp loads no adapter with {name}; `--gguf bf16` writes the whole model. Nothing was written."
            )
        halves.setdefault(match[1], {})[match[2]] = tensor.to(torch.float32)
    return {module: (half["A"], half["B"]) for module, half in halves.items()}


def _scale(module: str, settings: Mapping[str, Any], rank: int) -> float:
    """Return by what B·A of a module is multiplied, as PEFT does it."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        # PEFT's rule: the pattern is the end of the name, after a dot or from its start.
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank)
