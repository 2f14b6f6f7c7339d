"""From one process to two: tokens per second by the wall of kubetune and of the fastest stock peer.

    python -m benchmarks.scaling [--quick] [--repeats N]
    python -m benchmarks.scaling --alternate 20

Needs two idle cores or GPUs; on a busy machine the numbers say nothing. If a core's speed changes from minute to
minute, as on a shared machine, `--alternate` compares better. Two runs of kubetune, of one process and of two, are
started and warmed up. Then they take turns, each while the other is stopped:

    one process     2 steps   stopped   2 steps   stopped
    two processes   stopped   2 steps   stopped   2 steps

It prints the ratio of each pair and their median, and writes no results.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.cases import CASES, QUICK, Case, Job
from benchmarks.harness import WORK, end_on_sigterm, launch, order_of, prepare_run, run_jobs
from benchmarks.recorder import STEP
from benchmarks.results import open_results

SUITE = "scaling"
LAYOUTS = ((1, 1), (1, 2), (2, 1))  # processes, threads of each
TRAINERS = ("kubetune", "hf-best")
WARM = 6  # steps before the first comparison, in which kernels are compiled
PIECE = 2  # steps of each comparison


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows, one repeat")
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument(
        "--case", choices=CASES, help="left out: LoRA on the attention of the 42 M model"
    )
    parser.add_argument("--repeats", type=int, help="left out: 3, or 1 when quick")
    parser.add_argument(
        "--alternate", type=int, metavar="PAIRS", help="compare so many pairs of pieces; no results"
    )
    args = parser.parse_args(argv)
    case = QUICK if args.quick else CASES["q32k-attention"]
    if args.case:
        case = CASES[args.case]
    if args.alternate:
        alternate(case, args.alternate)
        return
    results = open_results(quick=args.quick, fresh=args.fresh)
    run_jobs(SUITE, plan_jobs(case, args.repeats or (1 if args.quick else 3)), results)


def alternate(case: Case, pairs: int) -> None:
    """Print how much faster two processes take the same steps than one, in pairs one behind the other."""
    end_on_sigterm()
    steps = WARM + PIECE * (pairs + 1)
    case = replace(case, epochs=-(-steps * case.sequences_per_step // case.corpus.rows))
    with ExitStack() as stack:
        runs = [Alternating(stack, case, processes) for processes in (1, 2)]
        ratios = []
        for number in range(pairs):
            # Each goes first in half of the pairs.
            in_turn = runs if number % 2 else runs[::-1]
            seconds = {run: run.go_on(PIECE) for run in in_turn}
            single = seconds[runs[0]]
            double = seconds[runs[1]]
            ratios.append(single / double)
            print(f"{number + 1}: {single:.2f} / {double:.2f} s = {ratios[-1]:.2f}", flush=True)
    print(f"median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


class Alternating:
    """A run that is stopped except in `go_on`. RuntimeError is raised if it ends by itself."""

    def __init__(self, stack: ExitStack, case: Case, processes: int) -> None:
        job = Job(case, "kubetune", processes=processes)
        order = replace(order_of(job), run_dir=f"{WORK / 'run'}-{processes}")
        prepare_run(job, order)
        self._ranks, (self._output, *_) = launch(stack, "ours", "ours", order, processes=processes)
        stack.callback(self._end)
        self._wait(WARM)
        self._signal(signal.SIGSTOP)

    def go_on(self, steps: int) -> float:
        """Go on by so many steps. Return the seconds by the wall."""
        goal = self._steps() + steps
        start = time.perf_counter()
        self._signal(signal.SIGCONT)
        self._wait(goal)
        seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)
        return seconds

    def _wait(self, steps: int) -> None:
        while self._steps() < steps:
            if any(rank.poll() is not None for rank in self._ranks):
                raise RuntimeError(
                    f"a run ended before its step {steps}; its log lies in {WORK / 'logs'}"
                )
            time.sleep(0.002)

    def _steps(self) -> int:
        return Path(self._output.name).read_text().count(f"\n{STEP}")

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def plan_jobs(case: Case, repeats: int) -> Iterator[Job]:
    """Yield all jobs. Layouts take turns within a repeat."""
    for repeat in range(repeats):
        for trainer in TRAINERS:
            for processes, threads in LAYOUTS:
                yield Job(case, trainer, threads=threads, processes=processes, repeat=repeat)


if __name__ == "__main__":
    main()
