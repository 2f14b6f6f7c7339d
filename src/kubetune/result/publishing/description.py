"""Describe an export and its proof in labelled lines, for `kubetune export` and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.result.forms import form_in


def describe(path: Path, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts of the export in a folder as labelled lines. `facts`: its provenance.json."""
    base = facts["base"]
    yield "checkpoint", facts["checkpoint"]["name"]
    name = base["name"]
    if base["revision"]:
        name += f"@{base['revision']}"
    yield "base", name
    weights, *of_form = form_in(facts).describe(facts)
    yield weights
    yield from _proof(facts["proof"])
    yield from of_form

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
