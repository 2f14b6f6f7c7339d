"""The tokenizer of a model as llama.cpp has it: tokens with their kinds and scores, merges, and how text is split.

llama.cpp runs no tokenizer.json. It has four kinds of tokenizers of its own, and of the most usual kind (BPE of bytes)
some dozens of ways to split a text into words, each known by a name. Here the name is looked up by the splitting rules
of the tokenizer itself. The proof then compares ids, since equal rules are no proof of equal code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kubetune import errors

# Kinds of tokens, by the numbers of the format.
NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

_SPACE: Final = "\u2581"  # what stands for a space in tokenizers made by SentencePiece

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PATHS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How llama.cpp calls a way of splitting, by the rules of it: patterns one after the other.
_GPT2: Final = ("bytes with words",)
_NAMES: Final[Mapping[tuple[str, ...], str]] = {
    _GPT2: "gpt-2",
    ("digits", *_GPT2): "starcoder",
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}", "bytes"): "qwen2",
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}", "bytes"): "dbrx",
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "bytes",
    ): "qwen35",
    (rf"{_CASED}|{_UPPER}|\p{{N}}|{_PATHS}", "bytes"): "tekken",
    (
        rf"{_CASED}{_CONTRACTIONS}?|{_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}",
        "bytes",
    ): "gpt-4o",
}
# The same rules in a tokenizer that takes a whole word from its vocabulary before it merges.
_WHOLE_WORDS: Final = {"dbrx": "llama-bpe", "tekken": "tekken"}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the form of GGUF."""

    model: str  # llama.cpp's kind: gpt2 for BPE of bytes, llama for SentencePiece's BPE, t5 for unigram
    pre: str  # how text is split into words
    tokens: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    # Ids of bos, eos, eot, eom, unknown and padding.
    special: dict[str, int] = field(default_factory=dict)
    # Whether bos or a space comes before a text, and eos after it.
    adds: dict[str, bool] = field(default_factory=dict)
    template: str | None = None  # the chat template
    strips: bool = False  # spaces after special tokens belong to them, as in Phi-3


def read_vocabulary(folder: Path, size: int, end_ids: list[int] | None = None) -> Vocabulary:
    """Return the tokenizer of a model's folder. `size`: rows of its embedding. `end_ids`: tokens that end an answer.

    Raise ModelError for a tokenizer that llama.cpp does not have.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    described = json.loads(loaded.backend_tokenizer.to_str())
    model = described["model"]
    vocabulary = loaded.get_vocab()
    if max(vocabulary.values()) >= size:
        raise errors.ModelError(
            f"the tokenizer has ids up to {max(vocabulary.values())}, and the model rows for {size}: as GGUF nothing "
            "would load it. Nothing was written."
        )

    # Embeddings often have more rows than the tokenizer has tokens, and llama.cpp wants a token for each row:
    #     Qwen2.5 has 151,665 tokens and 151,936 rows, so the last are [PAD151665] … [PAD151935]
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for token, number in vocabulary.items():
        tokens[number] = token
        kinds[number] = NORMAL
    for added in described["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
        tokens[added["id"]] = added["content"]

    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    common: dict[str, Any] = {
        "tokens": tokens,
        "kinds": kinds,
        "special": _special(loaded, end_ids or []),
        "template": template,
        "strips": any(added["rstrip"] for added in described["added_tokens"]),
    }
    if model["type"] == "BPE" and _is_of_bytes(described):
        return _byte_level(described, common, _adds(loaded))
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return _sentencepiece(described, common, _adds(loaded))
    raise errors.ModelError(
        f"its tokenizer is of the kind {model['type']}, which is not written as GGUF; written are BPE of bytes and "
        "SentencePiece's BPE with bytes to fall back on. Nothing was written."
    )


def _special(loaded: Any, end_ids: list[int]) -> dict[str, int]:
    """Return the ids of tokens that have a name, those among them at which an answer ends."""
    numbers = {
        "bos": loaded.bos_token_id,
        "eos": loaded.eos_token_id,
        "unknown": loaded.unk_token_id,
        "padding": loaded.pad_token_id,
    }
    special = {}
    for key, number in numbers.items():
        if number is not None:
            special[key] = number
    others = [number for number in end_ids if number != special.get("eos")]
    if "eos" not in special and others:
        special["eos"] = others.pop(0)
    # llama.cpp has names for two more tokens that end an answer: of a turn, and of a message. Llama 3's <|end_of_text|>
    # is eos, its <|eot_id|> eot.
    for key, number in zip(("eot", "eom"), others, strict=False):
        special[key] = number
    return special


def _adds(loaded: Any) -> dict[str, bool]:
    """Return whether the tokenizer puts `bos` before a text, and `eos` after it."""
    # Llama 3's: "a" is 64, and with special tokens 128000 64, so it puts bos in front and no eos after.
    plain = loaded("a", add_special_tokens=False).input_ids
    full = loaded("a").input_ids
    bos = loaded.bos_token_id
    eos = loaded.eos_token_id
    begins = len(full) > len(plain) and full[:1] == [bos]
    ends = full[-1:] == [eos] and plain[-1:] != [eos]
    return {"bos": bos is not None and begins, "eos": eos is not None and ends}


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    # {"type": "Sequence", "pretokenizers": [{"type": "Split", …}, {"type": "ByteLevel", …}]}
    if part is None:
        return []
    if part["type"] == "Sequence":
        return list(part.get("pretokenizers") or part.get("normalizers") or [])
    return [part]


def _is_of_bytes(described: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(described["pre_tokenizer"]))


def _byte_level(
    described: Mapping[str, Any],
    common: dict[str, Any],
    adds: dict[str, bool],
) -> Vocabulary:
    """Return a tokenizer that merges bytes, as GPT-2's, Llama 3's and Qwen's do."""
    rules = []
    for step in _steps(described["pre_tokenizer"]):
        if step["type"] == "Split" and "Regex" in step["pattern"]:
            rules.append(step["pattern"]["Regex"])
        elif step["type"] == "Digits" and step["individual_digits"]:
            rules.append("digits")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            rules.append("bytes with words" if step["use_regex"] else "bytes")
        else:
            raise _foreign_split()

    # Qwen2.5's rules, for example, are one pattern that cuts words out, then bytes: "qwen2".
    name = _NAMES.get(tuple(rules))
    if described["model"].get("ignore_merges") and name is not None:
        name = _WHOLE_WORDS.get(name)
    if name is None:
        raise _foreign_split()

    merges = [" ".join(pair) for pair in _merges(described)]
    return Vocabulary("gpt2", name, merges=merges, adds=adds, **common)


def _merges(described: Mapping[str, Any]) -> list[list[str]]:
    """Return the pairs of tokens that are joined, the first ones first."""
    # Files of older versions have "t h" in place of ["t", "h"].
    pairs = []
    for merge in described["model"]["merges"]:
        if isinstance(merge, str):
            merge = merge.split(" ")
        pairs.append(merge)
    return pairs


def _foreign_split() -> errors.ModelError:
    known = ", ".join(sorted({*_NAMES.values(), *_WHOLE_WORDS.values()}))
    return errors.ModelError(
        "its tokenizer cuts text into words by a rule (`pre_tokenizer` in tokenizer.json) that llama.cpp is not known "
        f"to have, so the model would be given other tokens than it was trained on. Known are the rules of {known}. "
        "Nothing was written; `--merge` makes the form for transformers and vLLM."
    )


def _sentencepiece(
    described: Mapping[str, Any],
    common: dict[str, Any],
    adds: dict[str, bool],
) -> Vocabulary:
    """Return a tokenizer made by SentencePiece, as Llama 2's, Mistral's and Gemma's are.

    llama.cpp merges the two neighbours whose joint token has the highest score. Merges of tokenizer.json are in that
    order, so the score is the number of the first merge that makes a token, negated.
    """
    # merges  "t h", "th e", "▁ the"     ranks 0, 1, 2
    # scores  th 0, the −1, ▁the −2      so "th" is joined before "▁the"
    tokens: list[str] = common["tokens"]
    kinds: list[int] = common["kinds"]
    first: dict[str, int] = {}
    for rank, pair in enumerate(_merges(described)):
        first.setdefault("".join(pair), rank)

    scores = []
    for number, token in enumerate(tokens):
        kind = kinds[number]
        if kind == NORMAL:
            scores.append(-float(first.get(token, len(first))))
            # <0x41> stands for the byte of "A", if no token fits.
            if re.fullmatch("<0x..>", token):
                kinds[number] = BYTE
            continue
        # None of the others comes about by merging.
        scores.append(-10000.0 if kind == UNUSED else -1000.0)
        if kind == USER_DEFINED:
            tokens[number] = token.replace(_SPACE, " ")
    unknown = common["special"].get("unknown")
    if unknown is not None:
        kinds[unknown] = UNKNOWN

    return Vocabulary(
        "llama",
        "default",
        scores=scores,
        adds={**adds, "space_prefix": _puts_space_first(described, common["template"])},
        **common,
    )


def _puts_space_first(described: Mapping[str, Any], template: str | None) -> bool:
    """True if llama.cpp is to put a space before the first word, of a text and after each special token.

    A tokenizer may do it only at the start of a text ("first"), which llama.cpp cannot. The prompts of a chat template
    start with a special token, so no word of theirs has that space.
    """
    for step in [*_steps(described["normalizer"]), *_steps(described["pre_tokenizer"])]:
        if step["type"] == "Prepend":
            return True
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return bool(scheme == "always" or (scheme == "first" and template is None))
    return False
