"""A tokenizer's files as transformers' `AutoTokenizer` would read them, found out without importing transformers.

tokenizer.json holds the whole tokenizer, but some of transformers' classes build their pre-processing anew instead of
reading it there. Where that could matter, transformers itself is asked once and its answer kept in a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from kubetune.base.files import write_atomic
from kubetune.errors import EnvironmentFault, ModelError

TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""The files that make a tokenizer, any of which may be missing."""

MODEL_FILES: Final = ("config.json", "generation_config.json")
"""Files of the model that say something about its tokenizer."""

PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files that a vision-language model has beside its tokenizer; they are kept with it."""

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a role; chat templates know them by these names."""

QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The words of Qwen's tokenizers."""

_BERT_NORMALIZER: Final = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
# Classes of transformers that rebuild their pre-processing: the normalizer and pre-tokenizer they build with default
# settings (checked against the real classes by a test). A tokenizer.json that says the same may be read as it is.
_REBUILT: Final[dict[str, tuple[Any, Any]]] = {
    "Qwen2Tokenizer": (
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
    ),
    "GPT2Tokenizer": (
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ),
    "BertTokenizer": (_BERT_NORMALIZER, {"type": "BertPreTokenizer"}),
}
_DEFAULT_TOKENS: Final[dict[str, dict[str, str]]] = {
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "BertTokenizer": {n: f"[{n[:-6].upper()}]" for n in NAMES if n not in ("bos_token", "eos_token")},
}
_CLASS_OF_MODEL: Final = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gpt2": "GPT2Tokenizer",
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
}
# Classes that take tokenizer.json as it is, and the model types for which transformers overrules them.
_READ_AS_IS: Final = ("TokenizersBackend", "PreTrainedTokenizer")
_OVERRULED: Final = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "siglip2", "hyperclovax_vision_v2")


def read_json(path: Path | None) -> dict[str, Any]:
    """A JSON object from a file of a model; an absent file is an empty object. Raises ModelError when it is damaged."""
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; the model may be downloaded incompletely") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def tokenizer_class(files: Mapping[str, Path], config: Mapping[str, Any]) -> str | None:
    """The name of the class `AutoTokenizer` would choose, without `Fast`; None when that takes asking it."""
    model = read_json(files.get("config.json"))
    model_type = model.get("model_type")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    if declared is None or (model_type in _OVERRULED and model_type in _CLASS_OF_MODEL):
        return _CLASS_OF_MODEL.get(str(model_type))
    return None if model_type in _OVERRULED else str(declared).removesuffix("Fast")


def special_tokens(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that have a role, by name."""
    found: dict[str, Any] = dict(_DEFAULT_TOKENS.get(tokenizer_class(files, config) or "", {}))
    found.update({name: config[name] for name in NAMES if name in config})
    if "added_tokens_decoder" not in config:
        legacy = read_json(files.get("special_tokens_map.json"))
        found.update({name: legacy[name] for name in NAMES if name in legacy})
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if text}


def load_backend(files: Mapping[str, Path], config: Mapping[str, Any], cache: Path) -> tokenizers.Tokenizer:
    """The tokenizer with the ids `AutoTokenizer` gives. `cache` keeps what transformers had to be asked for.

    Raises ModelError when there is no tokenizer, or only one that the `tokenizers` library cannot run.
    """
    file = files.get("tokenizer.json")
    if file is None or not _safe_as_it_is(file, tokenizer_class(files, config), config):
        return _ask_transformers(files, cache)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelError(f"{file} cannot be read: {error}; the model may be downloaded incompletely") from error
    _add_missing_tokens(backend, files, config)
    return backend


def _safe_as_it_is(file: Path, name: str | None, config: Mapping[str, Any]) -> bool:
    if name in _READ_AS_IS:
        return True
    if name not in _REBUILT or config.get("add_prefix_space") or not config.get("do_lower_case", True):
        return False
    if any(config.get(option) is not None for option in ("strip_accents", "split_special_tokens")):
        return config.get("strip_accents") is None and config.get("split_special_tokens") is False
    return _steps(read_json(file)) == tuple(_canonical(step) for step in _REBUILT[name])


def _steps(content: Mapping[str, Any]) -> tuple[Any, Any]:
    return _canonical(content.get("normalizer")), _canonical(content.get("pre_tokenizer"))


def _canonical(step: Any) -> Any:
    """A step of tokenizer.json without `trim_offsets`, which changes no ids."""
    if isinstance(step, dict):
        return {key: _canonical(value) for key, value in step.items() if key != "trim_offsets"}
    return [_canonical(part) for part in step] if isinstance(step, list) else step


def _add_missing_tokens(backend: tokenizers.Tokenizer, files: Mapping[str, Path], config: Mapping[str, Any]) -> None:
    """Add the tokens that the other files name and tokenizer.json lacks, in transformers' order."""
    known = {str(token) for token in backend.get_added_tokens_decoder().values()}
    decoder = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for token in (AddedToken(**value) for _, value in decoder):
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    names = [*special_tokens(files, config).values(), *(t["content"] if isinstance(t, dict) else t for t in extra)]
    missing = [name for name in dict.fromkeys(names) if name not in known]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])


def _ask_transformers(files: Mapping[str, Path], cache: Path) -> tokenizers.Tokenizer:
    digest = hashlib.sha256(version("transformers").encode())
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes())
    answer = cache / "tokenizers" / f"{digest.hexdigest()[:32]}.json"
    if answer.is_file():
        return tokenizers.Tokenizer.from_file(str(answer))
    folder = next(iter(files.values())).parent
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{folder} holds no tokenizer that can be read: {error}; expected tokenizer.json, or the files that "
            "transformers can make one from"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(
            f"the tokenizer of {folder} ({type(tokenizer).__name__}) has no fast form; kubetune needs a tokenizer.json"
        )
    with contextlib.suppress(EnvironmentFault):  # without a cache only the time to ask again is lost
        write_atomic(answer, backend.to_str())
    return backend
