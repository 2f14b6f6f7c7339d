"""Describe an export and its proof in labelled lines, for `kubetune export` and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.result.gguf_files import card as gguf_card


def describe(path: Path, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts of the export in a folder as labelled lines. `facts`: its provenance.json."""
    sizes_of_files = {name: file["bytes"] for name, file in facts["files"].items()}
    base = facts["base"]
    yield "checkpoint", facts["checkpoint"]["name"]
    name = base["name"]
    if base["revision"]:
        name += f"@{base['revision']}"
    yield "base", name
    # A large model is written in several files.
    sizes = [size for name, size in sizes_of_files.items() if name.endswith(".safetensors")]
    count = counted(len(sizes), "file")
    if "gguf" in facts:
        file = facts["gguf"]["file"]
        yield "weights", f"{file}, {facts['kind']}, {sizes_of_files[file]:,} bytes"
    else:
        yield "weights", f"{facts['kind']}, {facts['dtype']}, {count}, {sum(sizes):,} bytes"
    yield from _proof(facts["proof"])
    if "quantised" in facts:
        yield from _quantised(facts["quantised"], sum(sizes))
    if "gguf" in facts:
        yield from _gguf(facts["gguf"])

    # Licences of bases ask for a copy with what is derived from them.
    licences = ", ".join(base["licence_files"])
    if licences:
        yield "licence", f"{licences}, copied from the base"
    else:
        yield "licence", "the base has no licence file"

    yield "wrote", str(path)
    purpose = "it"
    if facts["served_by"]:
        purpose = f"and serve it: {', '.join(facts['served_by'])}"
    yield "next", f"{path / 'README.md'} says how to load {purpose}"


def _quantised(facts: dict[str, Any], size: int) -> Iterator[tuple[str, str]]:
    """Yield the size of weights in FP8 and how far the base moves, as labelled lines. `size`: of the weights, in bytes."""
    before = facts["bytes_before"]
    yield "", f"{counted(facts['layers'], 'layer')} in FP8: {size / before:.0%} of {before:,} bytes"
    base = facts["base_quantised_alike"]
    if isinstance(base, float):
        yield "", f"the base quantised alike moves by {base:.1e}"
    else:
        yield "", f"the base quantised alike: {base}"


def _gguf(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the results of running a GGUF file in llama.cpp, as labelled lines."""
    if facts.get("kept_in_16_bits"):
        kept = counted(len(facts["kept_in_16_bits"]), "tensor")
        yield "", f"{kept} in f16, as rows do not fill blocks of {facts['type']}"
    if "not_proved" in facts:
        yield "llama.cpp", f"not proved: {facts['not_proved']}"
        return
    proof = facts["proof"]
    label = "llama.cpp"
    for comparison in proof["comparisons"]:
        apart = f"{comparison['difference']:.1e} apart (allowed {comparison['tolerance']:.0e})"
        agreement = f"same first choice {comparison['agreement']:.1%}"
        yield label, f"log-probabilities of {comparison['what']}: {apart}, {agreement}"
        label = ""
    base = proof.get("base_quantised_alike")
    if isinstance(base, dict):
        equal = gguf_card.count_equal(base["greedy"])
        yield (
            "",
            f"the base quantised alike loses {base['difference']:.1e}, greedy answers equal: {equal}",
        )
    elif base is not None:
        yield "", f"the base quantised alike: {base}"
    if "rounding" in proof:
        yield "", f"transformers in 16 bits is {proof['rounding']:.1e} from itself in 32"
    asked = "greedy answers of up to 64 tokens equal"
    if "greedy_quantised" in proof:
        yield "", _greedy(asked, proof["greedy_quantised"])
        asked = "before quantising"
    yield "", _greedy(asked, proof["greedy"])
    if "texts_tokenized_alike" in proof:
        yield "", f"texts tokenized alike: {proof['texts_tokenized_alike']}"
    chats = proof.get("chats")
    if chats:
        alike = sum(chat["alike"] is True for chat in chats)
        unknown = sum(chat["alike"] is None for chat in chats)
        line = f"prompts by llama.cpp's own code alike: {alike} of {len(chats)}"
        if unknown:
            line += "; it does not know this template, so run it with --jinja"
        yield "", line


def _greedy(of: str, partings: list[dict[str, Any] | None]) -> str:
    """Return how many greedy answers are equal, and where the others part."""
    # greedy answers of up to 64 tokens equal: 2 of 4; others part from token 17 on, where the first choice leads by …
    line = f"{of}: {gguf_card.count_equal(partings)}"
    parted = [parting for parting in partings if parting is not None]
    if parted:
        first = min(parting["token"] for parting in parted) + 1
        gap = max(parting["gap"] for parting in parted)
        line += f"; others part from token {first} on, where the first choice leads by {gap:.1e} at most"
    return line


def _proof(proof: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how the export was compared with the checkpoint, as labelled lines."""
    # A difference says little by itself, so it is compared with the effect of the adapter.
    rows = f"{proof['rows']} {proof['origin']}, {proof['tokens']:,} tokens"
    yield "proof", f"logits on {rows}, in {proof['run_in']}"
    for comparison in proof["comparisons"]:
        apart = f"{comparison['difference']:.1e} apart (allowed {comparison['tolerance']:.0e})"
        agreement = f"same first choice {comparison['agreement']:.1%}"
        yield "", f"{comparison['what']}: {apart}, {agreement}"
    effect = proof["effect_of_adapter"]
    if effect is not None:
        yield "", f"the adapter moves them by {effect:.1e}"
        if proof["comparisons"][0]["difference"] > effect / 2:
            advice = "the adapter changed little, or use --dtype float32"
            yield "", f"rounding hides much of that: {advice}"
    files = ", ".join(proof["tokenizer_files_equal"])
    yield "tokenizer", f"{files}: equal byte by byte; template as trained"
