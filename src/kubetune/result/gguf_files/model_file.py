"""A model's folder as one GGUF file: keys, tokenizer and weights, each tensor read when it is written.

plan_tensors   which tensor of the file comes from which of the folder, in what type
write_model    keys, tokenizer, then one tensor after the other: no more than one is in memory
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, LlamaFileType
from torch import Tensor

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.models import weight_files
from kubetune.result.gguf_files.families import Facts, Family, family_of, keys_of, layers_of
from kubetune.result.gguf_files.vocabulary import Vocabulary, read_vocabulary

# Types of weights that are written here, by their names on the command line.
PLAIN: Final = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
}
QUANTISED: Final = {
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q5_1": LlamaFileType.MOSTLY_Q5_1,
    "q5_0": LlamaFileType.MOSTLY_Q5_0,
    "q4_1": LlamaFileType.MOSTLY_Q4_1,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}

# llama.cpp's names of the embedding of tokens and of the head.
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
# Small, and llama.cpp reads them only in fp32.
_ALWAYS_F32: Final = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "position_embd.weight",
    "rope_freqs.weight",
)

# Not weights: masks and frequencies that old checkpoints hold.
_NO_WEIGHTS: Final = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".inv_freq",
)

_EXPERT: Final = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")


@dataclass(frozen=True)
class Planned:
    """One tensor of the file, not yet read."""

    name: str  # as llama.cpp calls it
    shape: tuple[int, ...]
    type: Type
    load: Callable[[], np.ndarray]  # fp32, of `shape`


@dataclass(frozen=True)
class Written:
    """A GGUF file, and what its reader should know."""

    path: Path
    arch: str
    tensors: int
    wider: tuple[str, ...]  # tensors that kept 16 bits, since their rows are no multiple of a block
    context: int  # tokens that the model may be asked about


def facts_of(folder: Path, *, any_weights: bool = False) -> dict[str, Any]:
    """Return a folder's config.json with transformers' defaults filled in.

    Raise ModelError for quantised weights, unless the file needs none of them (`any_weights`).
    """
    from transformers import AutoConfig

    raw = json.loads((folder / "config.json").read_text("utf-8"))
    if raw.get("quantization_config") and not any_weights:
        method = raw["quantization_config"].get("quant_method")
        raise errors.ModelError(
            f"the weights of {folder} are quantised ({method}), so no GGUF is made of them. Nothing was written."
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return {**raw, **config.to_dict()}


def require_known(config: Path, tokenizer: Tokenizer) -> None:
    """Raise ModelError if llama.cpp lacks a model's family, a setting of it, or its tokenizer. No weights are read."""
    with tempfile.TemporaryDirectory(prefix="kubetune-gguf-") as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(config.read_bytes())
        tokenizer.save(folder)
        facts = facts_of(folder, any_weights=True)
        keys_of(facts, family_of(facts))
        rows = max(facts["vocab_size"], tokenizer.vocab_size)
        read_vocabulary(folder, rows)


def _weights(folder: Path) -> list[Path]:
    """Return the files that transformers reads of a folder, which may hold the same weights in another form too."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        # {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", …}}
        file_by_tensor = json.loads(index.read_text("utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(file_by_tensor.values()))]
    if single.is_file():
        return [single]
    return []


class Folder:
    """The safetensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.place: dict[str, Path] = {}
        for path in _weights(folder):
            with weight_files.opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    self.place[name] = path
        if not self.place:
            raise errors.ModelError(
                f"{folder} holds no weights in safetensors. Nothing was written."
            )

    def load(self, name: str) -> Tensor:
        """Return one tensor in fp32."""
        with weight_files.opened(self.place[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.float()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        with weight_files.opened(self.place[name]) as file:
            return tuple(file.get_slice(name).get_shape())


def write_model(
    folder: Path,
    path: Path,
    kind: str,
    about: Mapping[str, str],
    end_ids: list[int] | None = None,
) -> Written:
    """Write the model of a folder as `path`, with weights of the type `kind`.

    `about`: keys of `general.` such as name and license. `end_ids`: tokens that end an answer. Raise ModelError, before
    anything is written, for what llama.cpp does not compute or does not tokenize alike.
    """
    facts = facts_of(folder)
    family = family_of(facts)
    keys, extra = keys_of(facts, family)
    planned, wider = plan_tensors(Folder(folder), facts, family, kind)
    for name, tensor in extra.items():
        planned.append(Planned(name, tuple(tensor.shape), Type.F32, tensor.numpy))
    vocabulary = read_vocabulary(folder, _named_in(planned, EMBEDDING).shape[0], end_ids)

    # The library writes nothing before all keys and the sizes of all tensors are known: they are the file's head.
    writer = GGUFWriter(path, family.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    if "name" in about:
        name = name_for_llama_cpp(about["name"], strips=vocabulary.strips)
        about = {**about, "name": name}
    add_keys(writer, "general", about)
    add_keys(writer, family.arch, keys)
    writer.add_file_type({**PLAIN, **QUANTISED}[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, vocabulary)
    write_tensors(writer, planned)
    return Written(path, family.arch, len(planned), tuple(wider), keys["context_length"])


def name_for_llama_cpp(name: str, *, strips: bool) -> str:
    """Return the name of a model as llama.cpp may read it.

    If the name has "phi-3" or "phi3", llama.cpp swallows spaces after special tokens, and does not load the file if the
    tokens of Phi-3 are missing. So the name has it exactly if the tokenizer does that (`strips`).
    """
    # "my-Phi-3-bot" → "my-Phi 3-bot" for a tokenizer that swallows nothing, and "bot" → "bot (phi-3)" for one that does.
    named = re.search(r"phi-?3", name, re.IGNORECASE)
    if strips and not named:
        return f"{name} (phi-3)"
    if named and not strips:
        return re.sub(r"(phi)-?(3)", r"\1 \2", name, flags=re.IGNORECASE)
    return name


def add_keys(writer: GGUFWriter, group: str, keys: Mapping[str, Any]) -> None:
    """Add keys of a group, such as `general`, with the type that their value has in Python."""
    for name, value in keys.items():
        key = f"{group}.{name}"
        # A bool is an int too, so it is asked for first.
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, number in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_add_bos_token(vocabulary.adds["bos"])
    writer.add_add_eos_token(vocabulary.adds["eos"])
    if "space_prefix" in vocabulary.adds:
        writer.add_add_space_prefix(vocabulary.adds["space_prefix"])
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


def write_tensors(writer: GGUFWriter, planned: Sequence[Planned]) -> None:
    """Write the header with all keys, then the tensors, and close the file."""
    # 64 × 32 numbers in q8_0 are 64 × 34 bytes: each block of 32 has a scale of two bytes.
    for tensor in planned:
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.type)
        writer.add_tensor_info(
            tensor.name,
            shape,
            np.dtype(np.uint8),
            math.prod(shape),
            raw_dtype=tensor.type,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in planned:
        values = np.ascontiguousarray(tensor.load(), dtype=np.float32)
        blocks = gguf.quants.quantize(values, tensor.type)
        writer.write_tensor_data(blocks.view(np.uint8))
        fault_injection.reach("gguf.tensor")
    writer.close()


def plan_tensors(
    source: Folder,
    facts: Facts,
    family: Family,
    kind: str,
) -> tuple[list[Planned], list[str]]:
    """Return the tensors of the file, and those of them that keep 16 bits. Raise ModelError for one without a name."""
    names = tensor_names(family, facts)
    is_tied = bool(facts.get("tie_word_embeddings"))
    gathered = _gathered(source, tied=is_tied)
    if family.head == "never read" and "lm_head.weight" in gathered:
        raise errors.ModelError(
            f"the head of this model is not its embedding, and llama.cpp reads no head of {facts['model_type']}: "
            "it would answer by the embedding. Nothing was written."
        )
    planned = []
    wider = []
    for name, parts in gathered.items():
        for target, shape, load in _targets(name, parts, source, facts, family, names):
            type_ = _type_of(target, shape, kind)
            if type_ is None:
                type_ = Type.F16
                wider.append(target)
            planned.append(Planned(target, shape, type_, load))

    has_head = any(tensor.name == HEAD for tensor in planned)
    if family.head == "needed" and not has_head:
        # A tied head is written a second time, if llama.cpp does not look for it in the embedding.
        planned.append(replace(_named_in(planned, EMBEDDING), name=HEAD))
    return planned, wider


def _named_in(planned: Sequence[Planned], name: str) -> Planned:
    """Return the tensor of a name, which every model has."""
    return next(tensor for tensor in planned if tensor.name == name)


def tensor_names(family: Family, facts: Facts) -> Callable[[str], str | None]:
    """Return what finds llama.cpp's name of a tensor."""
    # The library's number of "qwen2", for example.
    names = gguf.MODEL_ARCH_NAMES
    arch = next(number for number in names if names[number] == family.arch)
    table = gguf.get_tensor_name_map(arch, layers_of(facts))
    return lambda name: table.get_name(name, try_suffixes=(".weight", ".bias"))


def _gathered(source: Folder, *, tied: bool) -> dict[str, list[str]]:
    """Return the tensors of a folder by name, the experts of a layer as one.

    model.layers.0.mlp.experts.0.up_proj.weight, …experts.1.up_proj.weight → model.layers.0.mlp.experts.up_proj.weight
    """
    gathered: dict[str, dict[int, str]] = {}
    for name in source.place:
        # Some files hold a tied head beside the embedding that it is.
        if name.endswith(_NO_WEIGHTS) or (tied and name == "lm_head.weight"):
            continue
        match = _EXPERT.match(name)
        if match is None:
            gathered[name] = {0: name}
        else:
            whole = f"{match[1]}.{match[3]}.weight"
            gathered.setdefault(whole, {})[int(match[2])] = name
    ordered = {}
    for name, parts in gathered.items():
        ordered[name] = [parts[number] for number in sorted(parts)]
    return ordered


def _targets(
    name: str,
    parts: list[str],
    source: Folder,
    facts: Facts,
    family: Family,
    names: Callable[[str], str | None],
) -> list[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """Return the tensors of the file that one of the folder becomes: itself, or two of a pair of experts' weights.

    Each by llama.cpp's name, its shape, and the function that loads it.

    Four experts, 96 wide in a model of 64:

        experts.gate_up_proj            [4, 192, 64] → gate [4, 96, 64] and up [4, 96, 64]
        experts.0.up_proj … 3.up_proj   [96, 64]     → up [4, 96, 64]
    """
    shape = source.shape(parts[0])
    is_stacked = name != parts[0]
    if is_stacked:
        shape = (len(parts), *shape)

    def load() -> np.ndarray:
        tensors = [source.load(part) for part in parts]
        tensor = tensors[0]
        if is_stacked:
            tensor = torch.stack(tensors)
        return converted(name, tensor, facts, family).numpy()

    # Gate and up of all experts, one above the other. Both are read twice, so that one is in memory at a time.
    if name.endswith(".experts.gate_up_proj"):
        half = shape[1] // 2
        stem = name.removesuffix("gate_up_proj")
        gate = _named(f"{stem}gate_proj.weight", names)
        up = _named(f"{stem}up_proj.weight", names)
        shape = (shape[0], half, shape[2])
        return [
            (gate, shape, lambda: load()[:, :half]),
            (up, shape, lambda: load()[:, half:]),
        ]
    name_of_weight = name
    if name.endswith(".experts.down_proj"):
        name_of_weight = f"{name}.weight"
    if family.transposed and _is_conv1d(name):
        shape = shape[::-1]
    return [(_named(name_of_weight, names), shape, load)]


def _named(name: str, names: Callable[[str], str | None]) -> str:
    """Return llama.cpp's name of a tensor. Raise ModelError if it has none."""
    target = names(name)
    if target is None:
        raise errors.ModelError(
            f"llama.cpp has no place for the tensor {name} of this model. Nothing was written."
        )
    return target


def _is_conv1d(name: str) -> bool:
    """True for a linear layer of GPT-2, whose weights are [in, out]."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def converted(
    name: str,
    tensor: Tensor,
    facts: Facts,
    family: Family,
) -> Tensor:
    """Return a tensor as llama.cpp wants it: its rows in another order, its values moved, or itself."""
    if family.transposed and _is_conv1d(name):
        return tensor.T.contiguous()
    if family.norm_offset and name.endswith("norm.weight"):
        return tensor + family.norm_offset
    return family.order(name, tensor, facts)


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> Type | None:
    """Return the type of a tensor of the file; None if its rows do not fill blocks of the type."""
    if len(shape) == 1 or name.endswith((*_ALWAYS_F32, ".bias")):
        return Type.F32
    if kind in PLAIN:
        return Type[kind.upper()]
    # Embedding and head lose most by few bits, and keep 8 if all else has 4 or 5.
    if name in (EMBEDDING, HEAD):
        kind = "q8_0"
    type_ = Type[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[type_]
    if shape[-1] % block:
        return None
    return type_
