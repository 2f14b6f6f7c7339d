"""From one process to two: tokens per second by the wall of kubetune and of the fastest stock peer.

    python -m benchmarks.scaling [--quick] [--repeats N]

Needs two idle cores or GPUs; on a busy machine the numbers say nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.cases import CASES, QUICK, Case, Job
from benchmarks.harness import run_jobs
from benchmarks.results import open_results

SUITE = "scaling"
LAYOUTS = ((1, 1), (1, 2), (2, 1))
"""(processes, threads of each)."""
TRAINERS = ("kubetune", "hf-best")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, one repeat")
    parser.add_argument("--fresh", action="store_true", help="replace today's results instead of going on with them")
    parser.add_argument("--case", choices=CASES, help="left out: LoRA on the attention of the 42 M model")
    parser.add_argument("--repeats", type=int, help="left out: 3, or 1 when quick")
    args = parser.parse_args(argv)
    case = CASES[args.case] if args.case else QUICK if args.quick else CASES["q32k-attention"]
    results = open_results(quick=args.quick, fresh=args.fresh)
    run_jobs(SUITE, plan_jobs(case, args.repeats or (1 if args.quick else 3)), results)


def plan_jobs(case: Case, repeats: int) -> Iterator[Job]:
    """Layouts take turns within a repeat."""
    for repeat in range(repeats):
        for trainer in TRAINERS:
            for processes, threads in LAYOUTS:
                yield Job(case, trainer, threads=threads, processes=processes, repeat=repeat)


if __name__ == "__main__":
    main()
