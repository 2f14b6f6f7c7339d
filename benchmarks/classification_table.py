"""Tables of the classification suites: beside the Trainer of transformers, and learning from random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks import from_scratch, sequence_classification
from benchmarks.sequence_classification import CASES, TRAINERS, rows_per_cpu_second, rows_per_second
from benchmarks.summary import Measurement, Spread, is_measured, ratios

SIDE_BY_SIDE = [
    "trainer", "rows/CPU-s", "kubetune is faster by", "peak MB", "accuracy", "rows/s", "faster by the wall",
]  # fmt: skip
TRAINED = ["processes", "rows", "steps", "accuracy", "F1"]


def side_by_side(
    measurements: Sequence[Measurement],
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head and rows of a table for each case and number of threads."""
    found = [m for m in measurements if m["suite"] == sequence_classification.SUITE]
    tables = []
    for name, threads in dict.fromkeys((m["case"], m["threads"]) for m in found):
        case = CASES[name]
        runs = [m for m in found if (m["case"], m["threads"]) == (name, threads)]
        ours = [m for m in runs if m["trainer"] == "kubetune"]
        rows = [
            _row(trainer, [m for m in runs if m["trainer"] == trainer], ours)
            for trainer in TRAINERS
        ]
        what = "LoRA" if case.adapt == "lora" else "full fine-tuning"
        title = f"### Classification, BERT shape {case.shape}: {what}, {case.rows:,} rows, {threads} thread"
        tables.append((title + ("s" if threads > 1 else ""), SIDE_BY_SIDE, rows))
    return tables


def _row(trainer: str, runs: Sequence[Measurement], ours: Sequence[Measurement]) -> list[str]:
    measured = [m for m in runs if is_measured(m)]
    if not measured:
        return [TRAINERS[trainer][0], "not measured", *[""] * (len(SIDE_BY_SIDE) - 2)]
    cpu, cpu_faster = _speed(rows_per_cpu_second, trainer, measured, ours)
    wall, wall_faster = _speed(rows_per_second, trainer, measured, ours)
    peak = f"{max(m['peak_bytes'] for m in measured) / 2**20:,.0f}"
    accuracy = f"{measured[0]['accuracy']:.3f}" if "accuracy" in measured[0] else ""
    return [TRAINERS[trainer][0], cpu, cpu_faster, peak, accuracy, wall, wall_faster]


def _speed(
    quantity: Callable[[Measurement], float],
    trainer: str,
    runs: list[Measurement],
    ours: Sequence[Measurement],
) -> tuple[str, str]:
    """The median over the repeats, and how many times ours it is."""
    speed = Spread.of(map(quantity, runs))
    faster = None if trainer == "kubetune" else Spread.of(ratios(ours, runs, quantity))
    return f"{speed.median:,.1f}" if speed else "", f"{faster.median:.2f}×" if faster else ""


def trained(measurements: Sequence[Measurement]) -> list[list[str]]:
    """A row for each number of processes that trained on SST-2 from random weights."""
    found = [m for m in measurements if m["suite"] == from_scratch.SUITE and is_measured(m)]
    return [
        [
            str(m["processes"]),
            f"{m['rows']:,}",
            f"{m['steps']:,}",
            f"{m['accuracy']:.3f}",
            f"{m['f1']:.3f}",
        ]
        for m in found
    ]
