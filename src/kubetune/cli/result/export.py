"""`kubetune export`: a run's result as a folder that transformers, PEFT and vLLM load, with proof that it is it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base import cpu
from kubetune.base.humanize import counted, visible
from kubetune.base.signals import stoppable
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json

if TYPE_CHECKING:
    from kubetune.result.publishing.export import Export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    add_export_options(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default RUN_DIR/exports/STEP-KIND"
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest file of a model's weights (default 5GB)",
    )
    parser.add_argument(
        "--gguf",
        metavar="TYPE",
        help="one GGUF file for llama.cpp and Ollama, with adapters merged: bf16, f16, f32, q8_0, q5_1, q5_0, q4_1, "
        "q4_0, a K-quant such as q4_k_m, or `adapter` for the adapter alone",
    )
    parser.add_argument(
        "--quantize",
        metavar="FORM",
        help="fp8: weights in FP8 (compressed-tensors) for vLLM, with adapters merged; needs no data",
    )
    add_json(parser, "the provenance as JSON")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what an export holds."""
    add_result(parser)
    parser.add_argument(
        "--merge", action="store_true", help="put the adapter into the weights of the base"
    )
    parser.add_argument(
        "--dtype", help="bfloat16, float16 or float32; left out: that of the base, or model.dtype"
    )
    parser.add_argument("--device", help="cpu or cuda; left out: a GPU where there is one")


def add_result(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint, and name the base of a run that comes from another machine."""
    parser.add_argument(
        "--checkpoint",
        "--step",
        default="best",
        metavar="best|last|N",
        help="which checkpoint (default best)",
    )
    parser.add_argument(
        "--model",
        metavar="PATH|ID",
        help="the model that the run was made from, where it lies elsewhere here: a folder or a hub id. It must be the "
        "same, file by file",
    )
    parser.add_argument(
        "--trust-code",
        metavar="DIGEST",
        help="allow code that the run brings to run on this machine, from now on: the digest that its refusal names",
    )


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Export, and print what was written and what was proved."""
    # SIGTERM ends an export like Ctrl-C: nothing is left behind.
    cpu.give_back()
    with stoppable():
        with busy(f"loading what exports {visible(str(args.run_dir))}"):
            from kubetune.result.publishing.export import export_run

        export = export_run(
            args.run_dir,
            args.checkpoint,
            merged=args.merge,
            dtype=args.dtype,
            out=args.output,
            device=args.device,
            max_shard_size=args.max_shard_size,
            model=args.model,
            trust_code=args.trust_code,
            gguf=args.gguf,
            quantize=args.quantize,
            tell=tell,
        )
    return Answer({"path": str(export.path)} | export.facts, lambda: show(export))


def show(export: Export) -> None:
    """Print the facts of an export."""
    for label, text in describe(export):
        print(f"{label:<12} {text}")


def tell(text: str) -> None:
    """Print what is being done now."""
    print(f"… {text}", flush=True)


def describe(export: Export) -> Iterator[tuple[str, str]]:
    """Yield the facts of an export as labelled lines."""
    facts: dict[str, Any] = export.facts
    base = facts["base"]
    yield "checkpoint", facts["checkpoint"]["name"]
    name = base["name"]
    if base["revision"]:
        name += f"@{base['revision']}"
    yield "base", name
    # A large model is written in several files.
    sizes = [size for name, size in export.files.items() if name.endswith(".safetensors")]
    count = counted(len(sizes), "file")
    if "gguf" in facts:
        file = facts["gguf"]["file"]
        yield "weights", f"{file}, {facts['kind']}, {export.files[file]:,} bytes"
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

    yield "wrote", str(export.path)
    purpose = "it"
    if facts["served_by"]:
        purpose = f"and serve it: {', '.join(facts['served_by'])}"
    yield "next", f"{export.path / 'README.md'} says how to load {purpose}"


def _quantised(facts: dict[str, Any], size: int) -> Iterator[tuple[str, str]]:
    """Yield what weights in FP8 spare and cost, as labelled lines. `size`: of the weights, in bytes."""
    before = facts["bytes_before"]
    yield "", f"{counted(facts['layers'], 'layer')} in FP8: {size / before:.0%} of {before:,} bytes"
    base = facts["base_quantised_alike"]
    if isinstance(base, float):
        yield "", f"the base quantised alike moves by {base:.1e}"
    else:
        yield "", f"the base quantised alike: {base}"


def _gguf(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what llama.cpp said of a GGUF file, as labelled lines."""
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
        yield "", f"the base quantised alike loses {base['difference']:.1e}"
    elif base is not None:
        yield "", f"the base quantised alike: {base}"
    equal = sum(parting is None for parting in proof["greedy"])
    yield "", f"greedy answers equal over 64 tokens: {equal} of {len(proof['greedy'])}"
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


def _proof(proof: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how the export was compared with the checkpoint, as labelled lines."""
    # A difference says little by itself: it is small beside what the adapter does, or not.
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
