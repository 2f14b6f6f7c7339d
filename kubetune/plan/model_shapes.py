"""Names, shapes and sizes of a model's weights, read from the headers of its files: no weights, no torch.

A header stands at the front of each safetensors file, so that a model of any size is known in milliseconds. Where only
config.json is there, the weights of the usual decoders follow from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune.base.files import open_inside, read_inside, user_cache
from kubetune.errors import ModelError

MAX_HEADER_BYTES = 100 << 20
INDEX = "model.safetensors.index.json"

_MOST_DIMENSIONS, _MOST_VALUES = 64, 1 << 62

MOST_LAYERS = 10_000
"""A config.json that has more is no decoder's, and would take for ever."""

TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
"""Names that models give their vision tower."""
PROJECTORS = (
    "merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "connector",
    "aligner",
    "embed_vision",
)
"""Names that models give the part that turns images into tokens."""
HEARING = ("audio_tower", "embed_audio")
"""Names of what only sound goes through, which nothing here has."""
_SCALARS = re.compile(r"(.*\.)?(layer_scalar|(input|output)_(min|max))")
"""Gemma 4's scales and bounds: buffers in its files, and no parameters."""


@dataclass(frozen=True)
class Weights:
    """A model's weights: the shape of each by its name, and its config.json. `stated`: its files were read.

    `file_bytes` of these together; 0 where they are not here.
    """

    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    stated: bool
    file_bytes: int = 0

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of config.json that describes the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def parameters(self) -> int:
        """Number of values in all weights; a tied head is in the file, and counted, once."""
        return sum(map(math.prod, self.shapes.values()))


def find_folder(path: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of a model on this machine: itself, or its newest snapshot in the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    snapshots = (hub_folder(path, environ) / "snapshots").glob("*/config.json")
    configs = sorted(snapshots, key=lambda file: file.stat().st_mtime)
    return configs[-1].parent if configs else None


def hub_home(environ: Mapping[str, str]) -> Path:
    """Folder of Hugging Face's caches; found here, since the hub's library starts slowly."""
    return Path(environ.get("HF_HOME") or user_cache(environ) / "huggingface").expanduser()


def hub_folder(path: str, environ: Mapping[str, str]) -> Path:
    """Folder of a model in the hub's cache, which is there or not."""
    cache = Path(environ.get("HF_HUB_CACHE") or hub_home(environ) / "hub").expanduser()
    return cache / f"models--{path.replace('/', '--')}"


def read_config(path: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """A model's config.json, or None where it is not on this machine or cannot be read."""
    folder = find_folder(path, environ)
    try:
        facts = json.loads(read_inside(folder / "config.json")) if folder is not None else None
    except (OSError, ValueError, RecursionError):
        return None  # loading says what is wrong with it
    return facts if isinstance(facts, dict) else None


def read_weights(path: str, environ: Mapping[str, str]) -> Weights | None:
    """The weights of a model, or None where too little of it is on this machine to know them."""
    folder = find_folder(path, environ)
    if folder is None:
        return None
    try:
        config = json.loads(read_inside(folder / "config.json"))
        shapes: dict[str, tuple[int, ...]] = {}
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            shapes |= _header(file)
        whole = _is_whole(folder, shapes)
        if whole:
            shapes = {name: shape for name, shape in shapes.items() if not _SCALARS.fullmatch(name)}
            return Weights(
                shapes, config, stated=True, file_bytes=sum(file.stat().st_size for file in files)
            )
        derived = shapes_of(Weights({}, config, stated=False).text_config)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None  # loading says what is wrong with it
    return Weights(derived, config, stated=False) if derived else None


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with open_inside(file) as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(size))
    return {
        name: _shape(entry["shape"], file)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _shape(sizes: Any, file: Path) -> tuple[int, ...]:
    """The shape that a header states. Raises ValueError for what no file of weights can hold."""
    are_sizes = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if not are_sizes or len(sizes) > _MOST_DIMENSIONS or math.prod(sizes) > _MOST_VALUES:
        raise ValueError(f"{file} has a weight of the shape {str(sizes)[:80]}")
    return tuple(sizes)


def files_of(folder: Path) -> list[str]:
    """Names of the files in a model's folder that its weights are read from, and of their index.

    Raises ModelError for an index that names anything but safetensors files beside it: a path would lead out of the
    folder, and another format may be a pickle, which can run code.
    """
    for other in sorted(folder.glob("*.safetensors.index.json")):
        _names_of(other)  # config.json may have another index than the usual one read
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / INDEX
    if not index.is_file():
        return sorted(file.name for file in folder.glob("*.safetensors"))
    return [INDEX, *_names_of(index)]


def _names_of(index: Path) -> list[str]:
    """Return the files that an index names. Raises ModelError unless all are safetensors files beside it."""
    try:
        names = set(json.loads(read_inside(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(
            f"model {index.parent}: {index.name} cannot be read ({type(error).__name__}: {error})"
        ) from None
    if wrong := sorted(str(name) for name in names if not _is_plain_name(name)):
        raise ModelError(
            f"model {index.parent}: {index.name} names {wrong[0]!r}; expected names of *.safetensors files in the same "
            "folder. Nothing was loaded."
        )
    return sorted(names)


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not {"/", "\\", "\0"} & set(name)
    )


def _is_whole(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    index = folder / INDEX
    if index.is_file():
        return set(json.loads(read_inside(index))["weight_map"]) <= set(shapes)
    return bool(shapes)


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama-like decoder (q, k, v, o; gate, up, down; two norms), {} for configs of other kinds."""
    try:
        hidden, layers, vocabulary = (
            config["hidden_size"],
            config["num_hidden_layers"],
            config["vocab_size"],
        )
        heads, intermediate = config["num_attention_heads"], config["intermediate_size"]
    except KeyError:
        return {}
    if (
        config.get("num_experts")
        or config.get("num_local_experts")
        or config.get("n_routed_experts")
    ):
        return {}
    if not all(
        isinstance(size, int) and size > 0
        for size in (hidden, layers, vocabulary, heads, intermediate)
    ):
        return {}
    if layers > MOST_LAYERS:
        return {}
    size = config.get("head_dim") or hidden // heads
    keys = (config.get("num_key_value_heads") or heads) * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * size, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * size),
            f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{at}.mlp.up_proj.weight": (intermediate, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes
