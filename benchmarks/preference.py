"""DPO beside TRL's DPOTrainer: speed and memory on the same pairs, and how soon training starts.

    python -m benchmarks.preference [--quick] [--cases NAME …] [--trainers NAME …] [--repeats N]
    python -m benchmarks.preference --starts [--trainers NAME …] [--repeats N]

Starts are measured twice, from the command to the end of the first step. At the first the reference's log-probability
of every answer has to be computed; at the second a trainer that keeps these has them.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import ceiling, sft
from benchmarks.cases import CASES, TRAINERS, Job
from benchmarks.corpus import Corpus
from benchmarks.harness import WORK, execute, order_of, provide, run_jobs
from benchmarks.results import Results, open_results
from benchmarks.startup import TIMEOUT_SECONDS, first_step, start_command

SUITE = "preference"
STARTS = "preference-start"
MEASURED = ("q32k-pairs", "q32k-pairs-long")
START = replace(CASES["q32k-pairs"], name="start-pairs", corpus=Corpus(rows=32))
STARTERS = ("kubetune", "dpo-best")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for and not measured yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preference", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="one case, one repeat: a rough look in minutes"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME", help=f"{', '.join(MEASURED)}, tiny-pairs"
    )
    parser.add_argument("--trainers", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--starts", action="store_true", help="only how soon training starts, on one thread"
    )
    parser.add_argument("--repeats", type=int, help="left out: 3, or 1 when quick")
    args = parser.parse_args(argv)
    results = open_results(quick=args.quick, fresh=args.fresh, subject="preference")
    names = args.cases or (MEASURED[:1] if args.quick else MEASURED)
    if args.starts:
        names = ()
    cases = [CASES[name] for name in names]
    for case in cases:
        ceiling.measure_once(case.model, results)
    repeats = args.repeats or (1 if args.quick else 3)
    batches: dict[tuple[str, str], int] = {}
    if not args.quick:
        batches = sft.best_batches(cases, args.trainers, results)
    run_jobs(SUITE, sft.plan_jobs(cases, args.trainers, repeats, [1], batches), results)

    if args.starts or not (args.quick or args.cases):
        starters = [name for name in STARTERS if not args.trainers or name in args.trainers]
        for repeat in range(repeats):
            measure_starts(repeat, results, starters)


def measure_starts(repeat: int, results: Results, trainers: Sequence[str]) -> None:
    """Start each trainer with nothing kept, and again with what it kept of that, unless the results have it."""
    model, data = provide(START)
    for trainer in trainers:
        keys = [
            {"trainer": trainer, "kept": kept, "rows": START.corpus.rows, "repeat": repeat}
            for kept in (False, True)
        ]
        if all(results.find(STARTS, key) is not None for key in keys):
            continue
        # kubetune keeps log-probabilities with prepared rows, TRL with its data sets.
        for folder in ("startup-cache", "datasets"):
            shutil.rmtree(WORK / folder, ignore_errors=True)
        for key in keys:
            if trainer == "kubetune":
                numbers = start_kubetune(model, data)
            else:
                numbers = start_peer(trainer)
            which = "again" if key["kept"] else "anew"
            print(f"first step: {trainer}, {which}: {numbers}", flush=True)
            if results.find(STARTS, key) is None:
                results.add(STARTS, key, numbers)


def start_kubetune(model: Path, data: Path) -> dict[str, Any]:
    """Run `kubetune train` until its first step is done; it is stopped then."""
    settings = {
        "task": "preference",
        "lora.r": 16,
        "training.global_batch_size": START.sequences_per_step,
        **TRAINERS["kubetune"].settings,
    }
    return start_command(model, data, settings, threads=1)


def start_peer(name: str) -> dict[str, Any]:
    """Have a peer take one step."""
    order = replace(order_of(Job(START, name)), epochs=1, max_steps=1)
    trainer = TRAINERS[name]
    return first_step(
        execute(trainer.driver, trainer.home, order, threads=1, timeout=TIMEOUT_SECONDS)
    )


if __name__ == "__main__":
    main()
