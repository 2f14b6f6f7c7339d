"""The part of verdict.json that the page shows: the best checkpoint against the base model, and the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubetune.config.metric_names import full_name
from kubetune.reporting.beside.kept_answers import even
from kubetune.reporting.histogram import shared_bars
from kubetune.rundir.outcome import alike


def verdict(judged: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the page shows of a judged run, or None if nothing was judged.

    `judged` holds verdict.json and `benchmarks` benchmarks.json. The result has

        rows      metrics before and after, with intervals and tests if answers were compared
        turned    answers that became better and worse by `metric`, the first metric that has any
        counts    how many did, where that is known
        lengths   lengths of answers before and after, in the same bars
        gate      the conditions and whether each is met
    """
    compared_benchmarks = lines_of(judged, benchmarks)
    if not judged and not compared_benchmarks:
        return None

    # Metrics of answers have an interval and a test next to their values, losses have none.
    compared_answers = {full_name(line["metric"]): line for line in judged.get("answers") or ()}
    best = judged.get("best") or {}
    turned_by = dict(judged.get("turned") or {})
    base = alike(judged.get("base") or {}, best)
    if len(base) < len(judged.get("base") or {}):
        compared_answers.pop("eval_reward", None)
        turned_by.pop("reward", None)

    rows = []
    for name, value in base.items():
        comparison = compared_answers.get(name, {})
        rows.append({"name": name, "base": value, "best": best.get(name), **comparison})
    for line in compared_benchmarks:
        name = line["metric"]
        rows.append({"name": name, "base": line["before"], "best": line["after"], **line})

    # The tests of significance that the page explains, each once, in the order of the rows.
    tests = dict.fromkeys(row["test"] for row in rows if "test" in row)

    # Answers of many metrics would be too long a page; the first that has any is shown.
    shown = [name for name, sides in turned_by.items() if sides.get("gained") or sides.get("lost")]
    metric = shown[0] if shown else None

    sides = turned_by.get(metric) or {}
    counts = compared_answers.get(full_name(metric or "")) or {}

    lengths = judged.get("lengths") or {}
    return {
        "step": judged.get("step", benchmarks.get("step")),
        "rows": rows,
        "tests": ", ".join(tests),
        "metric": metric,
        # So many that they fill their rows.
        "turned": {side: even(lines) for side, lines in sides.items()},
        "counts": {side: counts.get(side) for side in sides},
        "lengths": shared_bars(lengths.get("before") or (), lengths.get("after") or ()),
        "gate": judged.get("gate"),
    }


def lines_of(judged: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the benchmarks of both models, if they are of the checkpoint that was judged."""
    step = judged.get("step")
    if step is not None and step != benchmarks.get("step"):
        return []
    return list(benchmarks.get("compared") or ())
