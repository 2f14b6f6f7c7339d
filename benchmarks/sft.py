"""kubetune beside its peers, fine-tuning the same model on the same rows.

    python -m benchmarks.sft [--quick] [--cases NAME …] [--trainers NAME …] [--repeats N] [--threads N …]

Trainers take turns within each repeat, so that a busy or throttling machine hits all of them alike. On a machine with a
GPU the GPU cases run, elsewhere those for the CPU. A peer at its best is first measured once with each batch of
`BATCHES`, and then repeated with its fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import ceiling, summary
from benchmarks.cases import CASES, QUICK, TRAINERS, Case, Job
from benchmarks.harness import run_jobs
from benchmarks.results import Results, open_results

SUITE = "sft"
BATCH_SUITE = "batch"
BATCHES = (1, 2, 4, 8)  # sequences of a micro-batch; each divides the sequences of a step
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
    batches: dict[tuple[str, str], int] = {}
    if not args.quick:
        batches = best_batches(cases, args.trainers, results)
    run_jobs(SUITE, plan_jobs(cases, args.trainers, repeats, threads, batches), results)
    print(
        f"\nIn benchmarks/results/{results.path.name}; `python -m benchmarks.table` shows it as a table."
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
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
    """Return the cases asked for, else all that fit the machine."""
    if args.cases:
        return [CASES[name] for name in args.cases]
    if args.quick and not gpu:
        return [QUICK]
    cases = []
    for case in CASES.values():
        is_of_sft = case.name != "tiny" and not case.pairs
        if is_of_sft and case.gpu == gpu:
            cases.append(case)
    return cases


def best_batches(
    cases: Sequence[Case], only: Sequence[str] | None, results: Results
) -> dict[tuple[str, str], int]:
    """Measure peers at their best with each batch and one thread, and return the fastest by case and trainer.

    A peer of which no batch could be measured has none.
    """
    best = {}  # sequences of a micro-batch
    for case in cases:
        for name in case.trainers:
            if not TRAINERS[name].seeks_batch or (only and name not in only):
                continue
            # In a suite of their own, so that the tables leave the slower ones out.
            jobs = [Job(case, name, batch=batch) for batch in BATCHES]
            run_jobs(BATCH_SUITE, jobs, results)
            speeds = {}
            for job in jobs:
                measurement = results.find(BATCH_SUITE, job.key)
                if measurement is not None and summary.is_measured(measurement):
                    speeds[job.micro_batch] = summary.tokens_per_second(measurement)
            if speeds:
                best[case.name, name] = max(speeds, key=speeds.__getitem__)
    return best


def plan_jobs(
    cases: Sequence[Case],
    only: Sequence[str] | None,
    repeats: int,
    threads: Sequence[int],
    batches: Mapping[tuple[str, str], int],
) -> Iterator[Job]:
    """Yield every trainer of every case, one repeat after the other.

    Several threads are measured in the first case, and of some trainers. `batches`: micro-batches by case and trainer;
    the case's for those that are not in it.
    """
    for repeat in range(repeats):
        for case in cases:
            counts = threads if case is cases[0] else threads[:1]
            for count in counts:
                for name in case.trainers:
                    is_left_out = only and name not in only
                    if is_left_out or (count > 1 and name not in TWO_THREADS):
                        continue
                    batch = batches.get((case.name, name))
                    yield Job(case, name, threads=count, repeat=repeat, batch=batch)


if __name__ == "__main__":
    main()
