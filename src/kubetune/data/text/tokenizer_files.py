"""Read a tokenizer's files as transformers' `AutoTokenizer` would, without importing transformers.

tokenizer.json holds the whole tokenizer, but some of transformers' classes build their pre-processing anew instead of
reading it there. Where that could make a difference, transformers itself is asked once, and its answer is cached:

    tokenizer.json and the files beside it
        tokens missing in it, or a class that builds other steps?   →  _ask_transformers, cached
        otherwise                                                   →  tokenizers.Tokenizer.from_file
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from kubetune.base.files import read_inside, write_atomic
from kubetune.data.reading.strict_json import JsonObject
from kubetune.errors import EnvironmentFault, ModelError

TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
# The files that make a tokenizer, any of which may be missing.
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

# Files of the model that say something about its tokenizer.
MODEL_FILES: Final = ("config.json", "generation_config.json")

# Files that a vision-language model has beside its tokenizer; they are kept with it.
PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)

# The special tokens that have a role; chat templates know them by these names.
NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Keys of a tokenizer's files whose values are several tokens.
_KEYS_OF_TOKENS: Final = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)

# The pattern by which Qwen's tokenizers split a text into words.
QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

_BERT_NORMALIZER: Final = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
# Classes of transformers that rebuild their pre-processing -> the normalizer and pre-tokenizer that they build with
# default settings (a test checks these against the real classes). A tokenizer.json with the same may be read as it is.
_REBUILT: Final[dict[str, tuple[Any, Any]]] = {
    "Qwen2Tokenizer": (
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": QWEN2_SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
    ),
    "GPT2Tokenizer": (
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ),
    "BertTokenizer": (_BERT_NORMALIZER, {"type": "BertPreTokenizer"}),
}
# Special tokens that these classes have even if no file names them.
_DEFAULT_TOKENS: Final[dict[str, dict[str, str]]] = {
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "BertTokenizer": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
}
# Class that transformers takes for a type of model whose files name none.
_CLASS_OF_MODEL: Final = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gpt2": "GPT2Tokenizer",
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
}
# Classes that take tokenizer.json as it is.
_READ_AS_IS: Final = ("TokenizersBackend", "PreTrainedTokenizer")
# Types of models for which transformers ignores the class that the files name.
_OVERRULED: Final = (
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "siglip2",
    "hyperclovax_vision_v2",
)


def read_json(path: Path | None) -> JsonObject:
    """Return the JSON object in a file of a model, {} for a missing file. Raise ModelError if the file is damaged."""
    if path is None:
        return {}
    try:
        value = json.loads(read_inside(path))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}; the model may be downloaded incompletely"
        ) from error

    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def tokenizer_class(files: Mapping[str, Path], config: Mapping[str, Any]) -> str | None:
    """Return the name of the class that `AutoTokenizer` would choose, without `Fast`; None if only transformers knows."""
    # A tokenizer may name its class itself, or its model does, or the type of the model decides.
    model = read_json(files.get("config.json"))
    model_type = model.get("model_type")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    if declared is None or (model_type in _OVERRULED and model_type in _CLASS_OF_MODEL):
        return _CLASS_OF_MODEL.get(str(model_type))
    if model_type in _OVERRULED:
        return None
    return str(declared).removesuffix("Fast")


def special_tokens(
    files: Mapping[str, Path],
    config: Mapping[str, Any],
    cache: Path,
    *,
    names_missing: bool,
) -> dict[str, str]:
    """Return the special tokens that have a name: name -> text. It is a role (NAMES), or one from the tokenizer's files.

    `names_missing`: the result of `names_missing_tokens`. A class may have tokens by default, such as RoBERTa's `</s>`,
    so for classes in no table here transformers is asked, and `cache` keeps the answer. Raise ModelError as
    `load_backend` does.
    """
    name = tokenizer_class(files, config)
    is_known = name in _READ_AS_IS or name in _DEFAULT_TOKENS
    if is_known and not names_missing:
        return _named_tokens(files, config)
    return _ask_transformers(files, cache).special_tokens


def _named_tokens(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the files name, and the defaults of a class in the table, as transformers does."""
    # transformers reads special_tokens_map.json only beside an older tokenizer_config.json.
    legacy: JsonObject = {}
    if "added_tokens_decoder" not in config:
        legacy = read_json(files.get("special_tokens_map.json"))

    # Tokens with a role: a default, which the files may replace, also by null.
    values: JsonObject = dict(_default_tokens(files, config))
    for source in (config, legacy):
        for name in NAMES:
            if name in source:
                values[name] = source[name]

    tokens = {name: _text_of(values[name]) for name in NAMES if values.get(name)}

    # Tokens with other names.
    for name, value in config.items():
        if name.endswith("_token") and name not in NAMES and isinstance(value, str) and value:
            tokens[name] = value
    for source in (config, legacy):
        extra = source.get("extra_special_tokens")
        if isinstance(extra, dict):  # name -> token, as vision-language models have it
            for name, value in extra.items():
                tokens[name] = _text_of(value)

    return tokens


def _default_tokens(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the tokenizer's class has by itself: name -> text."""
    name = tokenizer_class(files, config)
    if name is None:
        return {}
    return _DEFAULT_TOKENS.get(name, {})


def _text_of(value: Any) -> str:
    """Return the text of a token. Files hold either the text alone, or an object with the text and settings."""
    if isinstance(value, dict):
        return str(value["content"])
    return str(value)


def names_missing_tokens(files: Mapping[str, Path], config: Mapping[str, Any]) -> bool:
    """True if the other files name tokens that tokenizer.json does not have among its added tokens.

    transformers then adds some of them. The key and the file that name them decide which, in which order and with which
    settings, so it has to be asked.
    """
    added = read_json(files.get("tokenizer.json")).get("added_tokens", [])
    # All tokens that any file names, against those that tokenizer.json has.
    texts = set(read_json(files.get("added_tokens.json")))
    texts.update(_default_tokens(files, config).values())
    for source in (config, read_json(files.get("special_tokens_map.json"))):
        for key, value in source.items():
            if key.endswith("_token") or key in _KEYS_OF_TOKENS:
                texts.update(_texts_in(value))

    return not texts <= {token["content"] for token in added}


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of all tokens in a value of a tokenizer's files: a token, a list or a mapping of some."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield str(value["content"])
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


def load_backend(
    files: Mapping[str, Path],
    config: Mapping[str, Any],
    cache: Path,
    *,
    names_missing: bool,
) -> tokenizers.Tokenizer:
    """Return the tokenizer with the ids that `AutoTokenizer` gives. `cache` keeps what transformers was asked.

    `names_missing`: the result of `names_missing_tokens`. Raise ModelError if there is no tokenizer, or only one that
    the `tokenizers` library cannot run.
    """
    # From what needs transformers for certain to what can be read at once.
    file = files.get("tokenizer.json")
    if file is None or names_missing:
        return _ask_transformers(files, cache).backend()
    if not _safe_as_it_is(file, tokenizer_class(files, config), config):
        return _ask_transformers(files, cache).backend()
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelError(
            f"{file} cannot be read: {error}; the model may be downloaded incompletely"
        ) from error


def _safe_as_it_is(
    file: Path,
    name: str | None,
    config: Mapping[str, Any],
) -> bool:
    """True if tokenizer.json alone gives the ids that transformers' class of this name gives."""
    if name in _READ_AS_IS:
        return True
    if name not in _REBUILT:
        return False

    # Settings from which such a class builds other steps than the table has.
    if config.get("add_prefix_space") or not config.get("do_lower_case", True):
        return False
    if config.get("strip_accents") is not None or config.get("split_special_tokens"):
        return False

    content = read_json(file)
    added = content.get("added_tokens", [])
    decoder = config.get("added_tokens_decoder", {})
    # Such a class adds only the tokens of `added_tokens_decoder`, and makes several ids of others.
    if decoder:
        by_id = _by_id((token["id"], token) for token in added)
        if by_id != _by_id(decoder.items()):
            return False

    # It takes some of these flags from one file and some from the other, and drops others.
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            return False

    return _steps(content) == tuple(_canonical(step) for step in _REBUILT[name])


def _by_id(tokens: Iterable[tuple[Any, Mapping[str, Any]]]) -> dict[int, tuple[Any, ...]]:
    """Return what decides where the added tokens of one file are matched in a text: id -> content and flags."""
    flags = ("content", "lstrip", "rstrip", "single_word", "normalized")
    by_id = {}
    for id, token in tokens:
        by_id[int(id)] = tuple(token.get(flag, False) for flag in flags)
    return by_id


def _steps(content: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the normalizer and the pre-tokenizer of a tokenizer.json."""
    return _canonical(content.get("normalizer")), _canonical(content.get("pre_tokenizer"))


def _canonical(step: Any) -> Any:
    """Return a step of tokenizer.json without `trim_offsets`, which changes no ids."""
    if isinstance(step, dict):
        return {key: _canonical(value) for key, value in step.items() if key != "trim_offsets"}
    if isinstance(step, list):
        return [_canonical(part) for part in step]
    return step


class LoadedTokenizer(NamedTuple):
    """A tokenizer as transformers builds it from its files."""

    # Name -> text of the special tokens that have a name.
    special_tokens: dict[str, str]
    # Loads the tokenizer as transformers runs it.
    backend: Callable[[], tokenizers.Tokenizer]


def _ask_transformers(files: Mapping[str, Path], cache: Path) -> LoadedTokenizer:
    """Return what transformers makes of a tokenizer's files. Raise ModelError if it cannot read them."""
    # Another version of transformers may read the same files in another way.
    digest = hashlib.sha256(version("transformers").encode())
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes())
    file = cache / "tokenizers" / f"{digest.hexdigest()[:32]}.json"
    names = file.with_suffix(".special.json")
    if file.is_file() and names.is_file():
        return LoadedTokenizer(read_json(names), partial(tokenizers.Tokenizer.from_file, str(file)))

    tokenizer = _load_by_transformers(next(iter(files.values())).parent)
    special = tokenizer.special_tokens_map
    backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    # A cache that cannot be written to only costs the time to ask again.
    with contextlib.suppress(EnvironmentFault):
        write_atomic(names, json.dumps(special))
        write_atomic(file, backend.to_str())
    return LoadedTokenizer(special, lambda: backend)


def _load_by_transformers(folder: Path) -> Any:
    """Return the tokenizer that `AutoTokenizer` reads. Raise ModelError if it has no fast form."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(
            f"{folder} holds no tokenizer that can be read: {error}; expected tokenizer.json, or the files that "
            "transformers can make one from"
        ) from error

    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise ModelError(
            f"the tokenizer of {folder} ({type(tokenizer).__name__}) has no fast form; kubetune needs a tokenizer.json"
        )

    return tokenizer
