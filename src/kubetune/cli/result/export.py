"""`kubetune export`: write a run's result as a folder for transformers, PEFT and vLLM, proved to be the same model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.cpu import heap
from kubetune.base.humanize import visible
from kubetune.base.signals import stoppable
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.result.publishing.description import describe

if TYPE_CHECKING:
    from kubetune.result.publishing.written_export import Export


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
        nargs="?",
        const="q8_0",
        help="one GGUF file for llama.cpp and Ollama, with adapters merged: q8_0 (if left out), bf16, f16, f32, q5_1, "
        "q5_0, q4_1, q4_0, a K-quant such as q4_k_m, or `adapter` for the adapter alone",
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
        "--dtype", help="bfloat16, float16 or float32 (default: the base's, or model.dtype)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")


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
        help="the base model, if it is in another place on this machine than in training: a folder or a hub id with "
        "the same files",
    )
    parser.add_argument(
        "--trust-code",
        metavar="DIGEST",
        help="allow the code in this run's folder to run on this machine from now on; the refusal names the digest",
    )


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Export, and print what was written and what was proved."""
    heap.give_back()
    # What makes no sense is refused before the imports, which take seconds.
    from kubetune.library.verdict.places import require_writable
    from kubetune.result.forms import require_export
    from kubetune.result.forms.wanted import TrainedModel, WantedExport
    from kubetune.result.inference.requirements import require_result

    config = require_result(args.run_dir, args.checkpoint, args.model)
    wanted = WantedExport(
        args.merge, args.dtype, args.gguf, args.quantize, args.output, args.max_shard_size
    )
    require_export(TrainedModel.of(config, args.run_dir), wanted)
    if args.output is not None:
        require_writable("--output", args.output.absolute())
    # SIGTERM ends an export like Ctrl-C: nothing is left behind.
    with stoppable(), busy(f"loading what exports {visible(str(args.run_dir))}") as work:
        from kubetune.result.publishing.exporting import export_run

        export = export_run(
            args.run_dir,
            args.checkpoint,
            wanted,
            device=args.device,
            model=args.model,
            trust_code=args.trust_code,
            tell=work.tell,
        )
    return Answer({"path": str(export.path)} | export.facts, lambda: show(export))


def show(export: Export) -> None:
    """Print the facts of an export."""
    for label, text in describe(export.path, export.facts):
        print(f"{label:<12} {text}")
