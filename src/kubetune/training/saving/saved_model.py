"""The model of a checkpoint: taken in the loop's thread, and written by whichever thread writes the checkpoint.

A thread that writes beside the loop must call nothing on the model: FSDP's `state_dict` would take whole weights away
from a forward, and the libraries' `save_pretrained` changes the settings of what it saves. So each of these holds
tensors by the names of the file, and copies of the settings.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from kubetune.models.padding_free import unwrap
from kubetune.training.optimizer import shards


class SavedModel(Protocol):
    """A model that can be written to a folder."""

    def write(self, folder: Path) -> None:
        """Write the files of the model, in the form that `from_pretrained` reads."""
        ...


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter, in PEFT's form."""

    tensors: dict[str, Tensor]
    settings: Any  # a copy of PEFT's
    base_config: Any = None  # a copy of the model's, if the adapter is useless without it

    def write(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json, as PEFT does."""
        from peft.utils import SAFETENSORS_WEIGHTS_NAME

        path = folder / SAFETENSORS_WEIGHTS_NAME
        save_file(_separate(self.tensors), path, metadata={"format": "pt"})
        self.settings.save_pretrained(folder)
        if self.base_config is not None:
            self.base_config.save_pretrained(folder)


@dataclass(frozen=True)
class SavedWhole:
    """A model that was trained in full, and of which one rank has all weights."""

    shell: Any  # a copy of the model's outermost module, which only tells transformers how to save
    weights: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write the files of transformers' `save_pretrained`."""
        self.shell.save_pretrained(folder, state_dict=dict(self.weights))


@dataclass(frozen=True)
class SavedParts:
    """A model that was trained in full, of which each rank has a part. The parts are in the folder already."""

    layout: Mapping[str, Sequence[int]]  # shapes of what is trained, in the order of the buffers
    others: dict[str, Tensor]  # what is saved besides, whole on every rank
    dtype: torch.dtype
    config: Any
    generation_config: Any  # None for a model that does not generate

    def write(self, folder: Path) -> None:
        """Put model.safetensors together from the parts, and write the settings."""
        shards.write_weights(folder, self.layout, self.dtype, self.others)
        self.config.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the format wants them: contiguous, and no two in the same memory, as if two layers share one."""
    separate = {}
    places = set()
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr())
        separate[name] = tensor.contiguous()
        if place in places:
            separate[name] = tensor.clone()
        places.add(place)
    return separate


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters of a PEFT model's adapter, by the names of PEFT's files."""
    from peft import get_peft_model_state_dict

    # Embeddings under an adapter are frozen, and so no part of it. Left to decide, PEFT would ask the hub.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), save_embedding_layers=False
    )
    return tensors


def adapter_with(model: Any, tensors: dict[str, Tensor], *, labelled: bool = False) -> SavedAdapter:
    """Return an adapter with these tensors. `labelled`: its base is a classifier."""
    settings = copy.deepcopy(model.peft_config["default"])
    # As PEFT saves it: whoever loads the adapter does not train it on, unless he says so.
    settings.inference_mode = True
    base_config = None
    if labelled:
        # An adapter of a classifier is useless without the number and names of its classes.
        base_config = copy.deepcopy(unwrap(model).config)
    return SavedAdapter(tensors, settings, base_config)


def whole_with(model: Any, weights: dict[str, Tensor]) -> SavedWhole:
    """Return a model with these weights, by the names of its state dict."""
    shell = copy.copy(model)
    shell.config = copy.deepcopy(model.config)
    shell.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return SavedWhole(shell, weights)


def parts_with(
    model: Any, layout: Mapping[str, Sequence[int]], others: dict[str, Tensor]
) -> SavedParts:
    """Return a model that is put together from the parts of all ranks and `others` (`fsdp.saved_beside`)."""
    generation_config = None
    if model.can_generate():
        generation_config = copy.deepcopy(model.generation_config)
    config = copy.deepcopy(model.config)
    return SavedParts(dict(layout), others, config.dtype, config, generation_config)
