"""Names, shapes and sizes of a model's weights, read from the headers of its files: no weights, no torch.

Each safetensors file begins with a header, so a model of any size is known in milliseconds. If only config.json is on
this machine, the weights of the usual decoders follow from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kubetune.base.files import open_inside, read_inside, user_cache
from kubetune.errors import ModelError

MAX_HEADER_BYTES = 100 << 20
INDEX = "model.safetensors.index.json"

# The first bytes of what stands in place of a large file that was not fetched.
_POINTER = b"version https://git-lfs"
# The number of a layer in the name of a weight, as decoders have it.
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")

_MOST_DIMENSIONS = 64
_MOST_STATE_BYTES = 10_000
_MOST_VALUES = 1 << 62

# A config.json with more is no decoder's, and to list its weights would take for ever.
MOST_LAYERS = 10_000

# Mixtures with the attention of Llama, and no experts but those that tokens are routed to, by their model_type.
_MIXTURES = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")

# Names of vision towers in models.
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
# Names of the part that turns images into tokens.
PROJECTORS = (
    "merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "connector",
    "aligner",
    "embed_vision",
)
# Names of parts that only sound goes through. No data here have sound.
HEARING = ("audio_tower", "embed_audio")
# What files of a quantised model hold besides the codes, of bitsandbytes, FP8 and MXFP4. The last of bitsandbytes says
# the shape that a weight had before it was packed.
_BESIDE_CODES = re.compile(
    r".*(\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format)|_(scales|scale|scale_inv))"
)
_STATE = re.compile(r"(?P<weight>.*)\.quant_state\.bitsandbytes__\w+")
# Gemma 4's scales and bounds: they are in its files, but they are buffers and no parameters.
_SCALARS = re.compile(r"(.*\.)?(layer_scalar|(input|output)_(min|max))")


@dataclass(frozen=True)
class Weights:
    """A model's weights."""

    shapes: Mapping[str, tuple[int, ...]]  # by the name of the weight
    config: Mapping[str, Any]  # config.json
    stated: bool  # the shapes are from the headers of files, not derived from config.json

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Return the part of config.json that describes the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def quantization(self) -> Literal["4bit", "8bit"] | None:
        """Return in how many bits bitsandbytes has stored its linear layers, as `quantization` says it."""
        settings = self.config.get("quantization_config")
        if not isinstance(settings, dict) or settings.get("quant_method") != "bitsandbytes":
            return None
        return "4bit" if settings.get("load_in_4bit") else "8bit"

    @property
    def parameters(self) -> int:
        """Return the number of values in all weights. A tied head is in the file once, so it counts once."""
        return sum(map(math.prod, self.shapes.values()))


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model on this machine. Each is read at its first use, and only once."""

    path: str  # a folder, or a name on the hub
    environ: Mapping[str, str]

    @cached_property
    def folder(self) -> Path | None:
        """Return the folder of the model: `path` itself, or the newest snapshot in the hub's cache."""
        if Path(self.path).is_dir():
            return Path(self.path)
        snapshots = (hub_folder(self.path, self.environ) / "snapshots").glob("*/config.json")
        configs = sorted(snapshots, key=lambda file: file.stat().st_mtime)
        return configs[-1].parent if configs else None

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Return config.json. None if it is not on this machine or cannot be read."""
        if self.folder is None:
            return None
        try:
            facts = json.loads(read_inside(self.folder / "config.json"))
        except (OSError, ValueError, RecursionError):
            return None  # loading the model reports what is wrong with it
        return facts if isinstance(facts, dict) else None

    @cached_property
    def weights(self) -> Weights | None:
        """Return the weights. None if too little of the model is on this machine to know them."""
        if self.folder is None or self.config is None:
            return None
        try:
            return _weights_in(self.folder, self.config)
        except (
            ModelError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            return None  # loading the model reports what is wrong with it


# The next two do what huggingface_hub does, which takes a quarter of a second to import.


def hub_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of Hugging Face's caches."""
    return Path(environ.get("HF_HOME") or user_cache(environ) / "huggingface").expanduser()


def hub_folder(path: str, environ: Mapping[str, str]) -> Path:
    """Return the folder that a model has in the hub's cache. It may not exist."""
    cache = Path(environ.get("HF_HUB_CACHE") or hub_home(environ) / "hub").expanduser()
    return cache / f"models--{path.replace('/', '--')}"


def read_config(path: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a model's config.json. None if it is not on this machine or cannot be read."""
    return ModelFiles(path, environ).config


def read_weights(path: str, environ: Mapping[str, str]) -> Weights | None:
    """Return the weights of a model. None if too little of it is on this machine to know them."""
    return ModelFiles(path, environ).weights


def _weights_in(folder: Path, config: dict[str, Any]) -> Weights | None:
    """Return the weights of the model in a folder. None if neither its files nor its config.json tell them."""
    shapes: dict[str, tuple[int, ...]] = {}
    # Beside them may lie the same weights by other names, or an adapter.
    files = [folder / name for name in files_of(folder) if name != INDEX]
    files = [file for file in files if file.is_file()]
    for file in files:
        shapes |= _header(file)
    if _is_whole(folder, shapes):
        if "quantization_config" in config:
            shapes = _unpacked(shapes, files)
        parameters = {name: shape for name, shape in shapes.items() if not _SCALARS.fullmatch(name)}
        return Weights(parameters, config, stated=True)

    # Some files are missing, as in a cache with only config.json.
    derived = shapes_of(Weights({}, config, stated=False).text_config)
    return Weights(derived, config, stated=False) if derived else None


def incomplete(file: Path) -> str:
    """Return what is missing of a safetensors file, as a clause; empty if it is whole, or only loading can tell."""
    with open_inside(file) as stream:
        first = stream.read(len(_POINTER))
        if not first:
            return "has 0 bytes"
        if first == _POINTER:
            return "is a pointer of Git LFS in place of the file (`git lfs pull` fetches it)"
    try:
        entries, begin = _entries(file)
        end = begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "is damaged or was not downloaded to its end"
    size = file.stat().st_size
    if size < end:
        return f"has {size:,} of {end:,} bytes: it is damaged or was not downloaded to its end"
    return ""


def _entries(file: Path) -> tuple[dict[str, Any], int]:
    """Return the weights that the header of a safetensors file lists, and where the first of them begins.

    A file is 8 bytes with the size of the header, the header as a JSON object, and the weights.
    """
    with open_inside(file) as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + size


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the header of a safetensors file."""
    entries, _ = _entries(file)
    return {name: _shape(entry["shape"], file) for name, entry in entries.items()}


def _unpacked(
    stored: Mapping[str, tuple[int, ...]], files: Iterable[Path]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the weights of a quantised model have when they are numbers again.

    experts.down_proj_blocks [32, 2880, 90, 16], two codes a byte (MXFP4)     →  experts.down_proj [32, 2880, 2880]
    q_proj.weight [8388608, 1], whose state says [4096, 4096] (bitsandbytes)  →  q_proj.weight [4096, 4096]
    """
    packed: dict[str, tuple[int, ...]] = {}
    for file in files:
        packed |= _shapes_before_packing(file)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        if _BESIDE_CODES.fullmatch(name) or _STATE.fullmatch(name):
            continue
        if name.endswith("_blocks") and len(shape) == 4:
            experts, outside, blocks, half = shape
            shapes[name.removesuffix("_blocks")] = (experts, blocks * 2 * half, outside)
        else:
            shapes[name] = packed.get(name, shape)
    return shapes


def _shapes_before_packing(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of 4-bit weights in a safetensors file of bitsandbytes, which keeps them as JSON."""
    entries, begin = _entries(file)
    shapes = {}
    with open_inside(file) as stream:
        for name, entry in entries.items():
            match = _STATE.fullmatch(name)
            if match is None:
                continue
            first, end = entry["data_offsets"]
            stream.seek(begin + first)
            state = json.loads(stream.read(max(0, min(end - first, _MOST_STATE_BYTES))))
            shapes[match["weight"]] = _shape(state["shape"], file)
    return shapes


def layer_of(name: str) -> str:
    """Return the layer that a weight is in: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`, "" if in none."""
    match = _LAYER.search(name)
    return "" if match is None else name[: match.end(1)]


def number_of_layers(names: Iterable[str]) -> int:
    """Return how many layers the longest stack has that weights are named by: `model.layers.3.…` is the fourth."""
    numbers = [int(match[1]) for match in map(_LAYER.search, names) if match is not None]
    return max(numbers, default=-1) + 1


def _shape(sizes: Any, file: Path) -> tuple[int, ...]:
    """Return the shape that a header states. Raise ValueError for one that no file of weights can hold."""
    are_sizes = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if not are_sizes or len(sizes) > _MOST_DIMENSIONS or math.prod(sizes) > _MOST_VALUES:
        raise ValueError(f"{file} has a weight of the shape {str(sizes)[:80]}")
    return tuple(sizes)


def files_of(folder: Path) -> list[str]:
    """Return the names of the files that a model's weights are read from, and of their index.

    Raise ModelError for an index that names anything but safetensors files next to it: a path may lead out of the folder,
    and another format may be a pickle, which can run code.
    """
    # All indices are checked, since config.json may name another one than the usual.
    for other in sorted(folder.glob("*.safetensors.index.json")):
        _names_of(other)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / INDEX
    if not index.is_file():
        return sorted(file.name for file in folder.glob("*.safetensors"))
    return [INDEX, *_names_of(index)]


def _names_of(index: Path) -> list[str]:
    """Return the files that an index names. Raise ModelError unless all are safetensors files next to it."""
    try:
        names = set(json.loads(read_inside(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(
            f"model {index.parent}: {index.name} cannot be read ({type(error).__name__}: {error})"
        ) from None
    wrong = sorted(str(name) for name in names if not _is_plain_name(name))
    if wrong:
        raise ModelError(
            f"model {index.parent}: {index.name} names {wrong[0]!r}; expected names of *.safetensors files in the same "
            "folder. Nothing was loaded."
        )
    return sorted(names)


def _is_plain_name(name: object) -> bool:
    """True for the name of a safetensors file, without a path."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return not any(character in name for character in ("/", "\\", "\0"))


def _is_whole(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """True if the files of a folder have all weights that its index names."""
    index = folder / INDEX
    if index.is_file():
        return set(json.loads(read_inside(index))["weight_map"]) <= set(shapes)
    return bool(shapes)


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the weights of a Llama-like decoder: q, k, v, o; gate, up, down, or experts; two norms. {} for others."""
    try:
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        vocabulary = config["vocab_size"]
        heads = config["num_attention_heads"]
        intermediate = config["intermediate_size"]
    except KeyError:
        return {}
    experts = _number_of_experts(config)
    if experts and config.get("model_type") not in _MIXTURES:
        return {}
    width = config.get("moe_intermediate_size") or intermediate
    # A config with odd values is not worth an error here.
    sizes = (hidden, layers, vocabulary, heads, intermediate, width)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or layers > MOST_LAYERS:
        return {}
    size = config.get("head_dim") or hidden // heads
    keys = (config.get("num_key_value_heads") or heads) * size
    # Names and shapes as transformers has them for Llama, Qwen and Mistral.
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * size, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * size),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        if experts and _is_mixture(config, layer):
            shapes |= _mixture_shapes(f"{at}.mlp", hidden, width, experts)
        else:
            shapes |= {
                f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
                f"{at}.mlp.up_proj.weight": (intermediate, hidden),
                f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            }
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _is_mixture(config: Mapping[str, Any], layer: int) -> bool:
    """True if a layer of a mixture has experts: Qwen names layers without, or the number of layers from one to the next."""
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _number_of_experts(config: Mapping[str, Any]) -> Any:
    """Return how many experts a layer of a mixture has, 0 for other decoders."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            return config[key]
    return 0


def _mixture_shapes(at: str, hidden: int, width: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Return the weights of a layer's router and experts, which transformers stacks. `width`: of one expert."""
    return {
        f"{at}.gate.weight": (experts, hidden),
        f"{at}.experts.gate_up_proj": (experts, 2 * width, hidden),
        f"{at}.experts.down_proj": (experts, hidden, width),
    }
