"""The part of verdict.json that the page shows: the best checkpoint against the base model, and the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.config.metric_names import full_name
from kubetune.reporting.histogram import DrawnBar, shared_bars
from kubetune.reporting.point_details.kept_answers import even
from kubetune.rundir.outcome import alike


@dataclass(frozen=True)
class ShownVerdict:
    """The verdict on a run as a page shows it."""

    step: int | None  # of the judged checkpoint
    # Metrics before and after, with intervals and tests if answers were compared.
    rows: Sequence[dict[str, Any]]
    tests: str  # tests of significance that the page explains, each once, in the order of the rows
    # Answers that became worse (`lost`) and better (`gained`) by `metric`, and how many did if that is known.
    metric: str | None
    turned: Mapping[str, Sequence[dict[str, Any]]]
    counts: Mapping[str, int | None]
    # Lengths of answers before and after, in the same bars.
    lengths: Sequence[tuple[int, int, list[DrawnBar]]]
    gate: Mapping[str, Any] | None  # the conditions, each with its outcome


def verdict(judged: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> ShownVerdict | None:
    """Return the verdict of a run, or None if nothing was judged.

    `judged` holds verdict.json and `benchmarks` benchmarks.json.
    """
    compared_benchmarks = lines_of(judged, benchmarks)
    if not judged and not compared_benchmarks:
        return None

    # Metrics of answers have an interval and a test next to their values, losses have none.
    compared_answers = {full_name(line["metric"]): line for line in judged.get("answers") or ()}
    best = judged.get("best") or {}
    turned_by = dict(judged.get("turned") or {})
    base = alike(judged.get("base") or {}, best)
    # Sums of different rewards are not compared.
    if len(base) < len(judged.get("base") or {}):
        compared_answers.pop("eval_reward", None)
        turned_by.pop("reward", None)

    rows = []
    for name, value in base.items():
        comparison = compared_answers.get(name, {})
        rows.append({"name": name, "base": value, "best": best.get(name), **comparison})
    rows.extend(_of_benchmark(line) for line in compared_benchmarks)

    # Answers of many metrics would be too long a page; the first that has any is shown.
    shown = [name for name, sides in turned_by.items() if sides.get("gained") or sides.get("lost")]
    metric = shown[0] if shown else None
    sides = turned_by[metric] if metric is not None else {}
    compared = compared_answers.get(full_name(metric or ""), {})
    lengths = judged.get("lengths") or {}
    return ShownVerdict(
        step=judged.get("step", benchmarks.get("step")),
        rows=rows,
        tests=", ".join(dict.fromkeys(row["test"] for row in rows if "test" in row)),
        metric=metric,
        # So many that they fill their rows.
        turned={side: even(lines) for side, lines in sides.items()},
        counts={side: compared.get(side) for side in sides},
        lengths=shared_bars(lengths.get("before") or (), lengths.get("after") or ()),
        gate=judged.get("gate"),
    )


def _of_benchmark(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": line["metric"], "base": line["before"], "best": line["after"], **line}


def lines_of(judged: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the benchmarks of both models, if they are of the checkpoint that was judged."""
    step = judged.get("step")
    if step is not None and step != benchmarks.get("step"):
        return []
    return list(benchmarks.get("compared") or ())
