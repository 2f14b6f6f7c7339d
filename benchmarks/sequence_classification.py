"""Classifying sentences beside the Trainer of transformers, as recipes set it up and as well as it can be set up.

    python -m benchmarks.sequence_classification --model FOLDER --data FOLDER [--rows N] [--dtype float32] [--repeats N]

`FOLDER` of the model holds an encoder with its tokenizer, that of the data train.tsv and dev.tsv as GLUE's SST-2 has
them. Every trainer gets the same rows, batches of 64, one epoch, and ends with an evaluation; the CPU time of that is
what counts, without reading and tokenising. kubetune's also holds loading the model and writing the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import WORK, end_on_sigterm, environment, python_of, read_report
from benchmarks.results import ROOT, Results, open_results

SUITE = "sequence_classification"
TRAINERS = ("kubetune", "trainer-padded", "trainer-grouped")
"""`trainer-padded` pads every row to 128 tokens; `trainer-grouped` pads to the longest of batches of like lengths."""
TIMEOUT_SECONDS = 3600.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{SUITE}", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of an encoder and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tsv and dev.tsv")
    parser.add_argument("--rows", type=int, default=2048, help="rows of training taken (default 2048)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="results of their own, which the documentation leaves out")
    parser.add_argument("--fresh", action="store_true", help="replace today's results instead of going on with them")
    args = parser.parse_args(argv)
    results = open_results(quick=args.quick, fresh=args.fresh)
    end_on_sigterm()
    folder = take_rows(args.data, args.rows)
    for repeat in range(args.repeats):
        for trainer in TRAINERS:
            order = {"trainer": trainer, "model": args.model.name, "dtype": args.dtype, "rows": args.rows}
            measure_once({**order, "threads": args.threads, "repeat": repeat}, args.model, folder, results)


def take_rows(data: Path, rows: int) -> Path:
    """A folder with the first `rows` rows of training and all of the evaluation's."""
    folder = WORK / "classification" / str(rows)
    folder.mkdir(parents=True, exist_ok=True)
    with (data / "train.tsv").open(encoding="utf-8") as whole:
        lines = [line for _, line in zip(range(rows + 1), whole, strict=False)]
    (folder / "train.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "dev.tsv").write_bytes((data / "dev.tsv").read_bytes())
    return folder


def measure_once(key: dict[str, Any], model: Path, data: Path, results: Results) -> None:
    """Run one trainer in a process of its own and keep what it reports, unless the results have it."""
    if results.find(SUITE, key) is not None:
        return
    order = json.dumps({**key, "model": str(model.resolve()), "data": str(data), "work": str(WORK / "classification")})
    python = python_of("ours" if key["trainer"] == "kubetune" else "peers")
    done = subprocess.run(
        [python, "-m", "benchmarks.peers.classify", order],
        cwd=ROOT,
        env=environment(key["threads"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    found = read_report(done.stdout, done.returncode)
    results.add(SUITE, key, found)
    said = {name: found.get(name) for name in ("failed", "cpu_seconds", "accuracy", "peak_bytes") if name in found}
    speed = f"{key['rows'] / found['cpu_seconds']:.1f} rows/CPU-s, " if "cpu_seconds" in found else ""
    print(f"{key['trainer']:<16} {speed}{said}", flush=True)


if __name__ == "__main__":
    main()
