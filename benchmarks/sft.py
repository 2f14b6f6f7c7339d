"""kubetune beside its peers, fine-tuning the same model on the same rows.

    python -m benchmarks.sft [--quick] [--cases NAME …] [--trainers NAME …] [--repeats N] [--threads N …]

Trainers take turns within each repeat, so that a busy or throttling machine hits all of them alike. On a machine with a
GPU the GPU cases run, elsewhere those for the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks import ceiling
from benchmarks.cases import CASES, QUICK, Case, Job
from benchmarks.harness import run_jobs
from benchmarks.results import open_results

SUITE = "sft"
TWO_THREADS = ("kubetune", "hf-best", "trl-best", "trl-default")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for and not measured yet."""
    args = parse(argv)
    results = open_results(quick=args.quick, fresh=args.fresh)
    gpu = results.data["machine"]["gpu"] is not None
    cases = chosen_cases(args, gpu)
    for case in cases:
        ceiling.measure_once(case.model, results)
    repeats = args.repeats or (1 if args.quick else 3)
    threads = args.threads or ([1] if args.quick or gpu else [1, 2])
    run_jobs(SUITE, plan_jobs(cases, args.trainers, repeats, threads), results)
    print(
        f"\nIn benchmarks/results/{results.path.name}; `python -m benchmarks.table` shows it as a table."
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sft", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="one small case, one repeat: a rough look in minutes"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--trainers", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--repeats", type=int, help="left out: 3, or 1 when quick")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="left out: 1 and, where it is shown, 2"
    )
    return parser.parse_args(argv)


def chosen_cases(args: argparse.Namespace, gpu: bool) -> list[Case]:
    """The cases asked for, else all that fit the machine."""
    if args.cases:
        return [CASES[name] for name in args.cases]
    if args.quick and not gpu:
        return [QUICK]
    return [
        case
        for case in CASES.values()
        if case.gpu == gpu and case.name != "tiny" and not case.pairs
    ]


def plan_jobs(
    cases: Sequence[Case], only: Sequence[str] | None, repeats: int, threads: Sequence[int]
) -> Iterator[Job]:
    """Every trainer of every case, one repeat after the other. Several threads are measured in the first case."""
    for repeat in range(repeats):
        for case in cases:
            for count in threads if case is cases[0] else threads[:1]:
                names = (
                    case.trainers
                    if count == 1
                    else [name for name in case.trainers if name in TWO_THREADS]
                )
                yield from (
                    Job(case, name, threads=count, repeat=repeat)
                    for name in names
                    if not only or name in only
                )


if __name__ == "__main__":
    main()
