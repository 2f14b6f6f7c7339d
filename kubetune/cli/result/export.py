"""`kubetune export`: a run's result as a folder that transformers, PEFT and vLLM load, with proof that it is it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import allocator
from kubetune.base.signals import stoppable
from kubetune.cli.json_answers import print_json

if TYPE_CHECKING:
    from kubetune.result.publishing.export import Export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    add_export_options(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default RUN_DIR/exports/STEP-KIND"
    )
    parser.add_argument(
        "--out", type=Path, dest="output", help=argparse.SUPPRESS
    )  # what it was called before
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest file of a model's weights (default 5GB)",
    )
    parser.add_argument("--json", action="store_true", help="print the provenance as JSON")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Options that decide what an export holds."""
    add_result(parser)
    parser.add_argument(
        "--merge", action="store_true", help="put the adapter into the weights of the base"
    )
    parser.add_argument(
        "--dtype", help="bfloat16, float16 or float32; left out: that of the base, or model.dtype"
    )
    parser.add_argument("--device", help="cpu or cuda; left out: a GPU where there is one")


def add_result(parser: argparse.ArgumentParser) -> None:
    """Options that say which result of a run is meant, and where its base lies, for a run from another place."""
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


def run(args: argparse.Namespace) -> int:
    """Export, and print what was written and what was proved."""
    allocator.give_back()
    with stoppable():
        from kubetune.result.publishing.export import export_run

        export = export_run(
            args.run_dir, args.checkpoint, merged=args.merge, dtype=args.dtype, out=args.output, device=args.device,
            max_shard_size=args.max_shard_size, model=args.model,
            trust_code=args.trust_code, tell=(lambda _: None) if args.json else tell,
        )  # fmt: skip
    if args.json:
        print_json({"path": str(export.path)} | export.facts)
        return errors.OK
    for label, text in describe(export):
        print(f"{label:<12} {text}")
    return errors.OK


def tell(text: str) -> None:
    """Print what is being done now."""
    print(f"… {text}", flush=True)


def describe(export: Export) -> Iterator[tuple[str, str]]:
    """The facts of an export as labelled lines."""
    facts: dict[str, Any] = export.facts
    found = facts["proof"]
    yield "checkpoint", facts["checkpoint"]["name"]
    yield (
        "base",
        facts["base"]["name"]
        + (f"@{facts['base']['revision']}" if facts["base"]["revision"] else ""),
    )
    weights = {name: size for name, size in export.files.items() if name.endswith(".safetensors")}
    count = f"{len(weights)} file{'s' if len(weights) > 1 else ''}"
    yield "weights", f"{facts['kind']}, {facts['dtype']}, {count}, {sum(weights.values()):,} bytes"
    yield (
        "proof",
        f"logits on {found['rows']} {found['origin']}, {found['tokens']:,} tokens, in {found['run_in']}",
    )
    for one in found["comparisons"]:
        yield (
            "",
            (
                f"{one['what']}: {one['difference']:.1e} apart (allowed {one['tolerance']:.0e}), "
                f"same first choice {one['agreement']:.1%}"
            ),
        )
    effect, worst = found["effect_of_adapter"], found["comparisons"][0]["difference"]
    if effect is not None:
        yield "", f"the adapter moves them by {effect:.1e}"
        if worst > effect / 2:
            yield (
                "",
                "rounding takes much of that away: the adapter has changed little, or use --dtype float32",
            )
    yield (
        "tokenizer",
        f"{', '.join(found['tokenizer_files_equal'])}: equal byte by byte; template as trained",
    )
    licences = ", ".join(facts["base"]["licence_files"])
    yield (
        "licence",
        f"{licences}, copied from the base" if licences else "the base has no file that says it",
    )
    yield "wrote", str(export.path)
    served = f" and serve it: {', '.join(facts['served_by'])}" if facts["served_by"] else " it"
    yield "next", f"{export.path / 'README.md'} says how to load{served}"
