"""Tables of the classification suites: beside the Trainer of transformers, and learning from random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks import from_scratch, sequence_classification
from benchmarks.sequence_classification import CASES, TRAINERS, rows_per_cpu_second, rows_per_second
from benchmarks.summary import Measurement, Spread, grouped, is_measured, ratios

SIDE_BY_SIDE = [
    "trainer",
    "rows/CPU-s",
    "kubetune is faster by",
    "peak MB",
    "accuracy",
    "rows/s",
    "faster by the wall",
]
TRAINED = ["processes", "rows", "steps", "accuracy", "F1"]


def side_by_side(
    measurements: Sequence[Measurement],
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, head and rows of a table for each case and number of threads."""
    of_suite = [m for m in measurements if m["suite"] == sequence_classification.SUITE]
    tables = []
    for (name, threads), runs in grouped(of_suite, ("case", "threads")).items():
        case = CASES[name]
        by_trainer = grouped(runs, ["trainer"])
        ours = by_trainer.get(("kubetune",), [])
        rows = []
        for trainer in TRAINERS:
            rows.append(_row(trainer, by_trainer.get((trainer,), []), ours))
        method = "LoRA" if case.adapt == "lora" else "full fine-tuning"
        number = "1 thread" if threads == 1 else f"{threads} threads"
        title = (
            f"### Classification, BERT shape {case.shape}: {method}, {case.rows:,} rows, {number}"
        )
        tables.append((title, SIDE_BY_SIDE, rows))
    return tables


def _row(trainer: str, runs: Sequence[Measurement], ours: Sequence[Measurement]) -> list[str]:
    label = TRAINERS[trainer][0]
    measured = [run for run in runs if is_measured(run)]
    if not measured:
        return [label, "not measured", *[""] * (len(SIDE_BY_SIDE) - 2)]
    # Ours is beside itself no faster.
    others = [] if trainer == "kubetune" else ours
    peak = max(run["peak_bytes"] for run in measured) / 2**20
    accuracy = ""
    if "accuracy" in measured[0]:
        accuracy = f"{measured[0]['accuracy']:.3f}"
    return [
        label,
        _speed(rows_per_cpu_second, measured),
        _faster_by(rows_per_cpu_second, others, measured),
        f"{peak:,.0f}",
        accuracy,
        _speed(rows_per_second, measured),
        _faster_by(rows_per_second, others, measured),
    ]


def _speed(quantity: Callable[[Measurement], float], runs: Sequence[Measurement]) -> str:
    """Return the median over the repeats."""
    spread = Spread.of(map(quantity, runs))
    return "" if spread is None else f"{spread.median:,.1f}"


def _faster_by(
    quantity: Callable[[Measurement], float],
    ours: Sequence[Measurement],
    theirs: Sequence[Measurement],
) -> str:
    """Return how many times as fast as theirs ours is; nothing if there is none of ours to compare with."""
    spread = Spread.of(ratios(ours, theirs, quantity))
    return "" if spread is None else f"{spread.median:.2f}×"


def trained(measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return a row for each number of processes that trained on SST-2 from random weights."""
    rows = []
    for measurement in measurements:
        if measurement["suite"] != from_scratch.SUITE or not is_measured(measurement):
            continue
        rows.append(
            [
                str(measurement["processes"]),
                f"{measurement['rows']:,}",
                f"{measurement['steps']:,}",
                f"{measurement['accuracy']:.3f}",
                f"{measurement['f1']:.3f}",
            ]
        )
    return rows
