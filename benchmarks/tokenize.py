"""Tokenising prompts and completions: rows per second of kubetune, of TRL and of `datasets.map`.

    python -m benchmarks.tokenize [--quick] [--repeats N]

Each is measured with one process and with one per core, from rows in memory (peers) or in a file (kubetune, reading
included) to ids and labels that training can use: arrow tables for the peers, prepared rows for kubetune.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.cases import Home
from benchmarks.harness import end_on_sigterm, execute
from benchmarks.peers.job import Order
from benchmarks.results import open_results
from benchmarks.startup import text_data, text_model

SUITE = "tokenize"
ROWS = 20_000
QUICK_ROWS = 2_000
PATHS: dict[str, tuple[str, Home]] = {
    "kubetune": ("tokenize_ours", "ours"),
    "trl": ("tokenize_trl", "peers"),
    "datasets.map": ("tokenize_map", "peers"),
}
# Nothing is trained: what a trainer would be told does not matter.
ORDER = Order(
    model="",
    data="",
    adapt="attention",
    lora_rank=1,
    batch=1,
    accumulation=1,
    epochs=1,
    max_length=1024,
    pack_length=1024,
    settings={},
    started=0.0,
    text=True,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenize", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROWS:,} rows instead of {ROWS:,}, one repeat"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument("--repeats", type=int, help="left out: 3, or 1 when quick")
    args = parser.parse_args(argv)
    results = open_results(quick=args.quick, fresh=args.fresh)
    end_on_sigterm()
    rows = QUICK_ROWS if args.quick else ROWS
    cores = len(os.sched_getaffinity(0))
    order = replace(ORDER, model=str(text_model()), data=str(text_data(rows)))
    for repeat in range(args.repeats or (1 if args.quick else 3)):
        for processes in dict.fromkeys((1, cores)):
            for path, (driver, home) in PATHS.items():
                key = {"path": path, "rows": rows, "processes": processes, "repeat": repeat}
                if results.find(SUITE, key) is not None:
                    continue
                numbers = execute(driver, home, replace(order, settings={"num_proc": processes}))
                results.add(SUITE, key, numbers)
                print(f"tokenise: {path}, {processes} processes: {numbers}", flush=True)


if __name__ == "__main__":
    main()
