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
    rows.extend(_of_benchmark(line) for line in compared_benchmarks)

    # The tests of significance that the page explains, each once, in the order of the rows.
    tests = dict.fromkeys(row["test"] for row in rows if "test" in row)

    # Answers of many metrics would be too long a page; the first that has any is shown.
    shown = [name for name, sides in turned_by.items() if sides.get("gained") or sides.get("lost")]
    metric = shown[0] if shown else None

    lengths = judged.get("lengths") or {}
    return {
        "step": judged.get("step", benchmarks.get("step")),
        "rows": rows,
        "tests": ", ".join(tests),
        "metric": metric,
        **_turned(turned_by.get(metric), compared_answers.get(full_name(metric or ""))),
        "lengths": shared_bars(lengths.get("before") or (), lengths.get("after") or ()),
        "gate": judged.get("gate"),
    }


def _of_benchmark(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": line["metric"], "base": line["before"], "best": line["after"], **line}


def _turned(sides: Mapping[str, Any] | None, compared: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the answers that got better and worse, so many that they fill their rows, and how many there are."""
    turned = {}
    counts = {}
    for side, lines in (sides or {}).items():
        turned[side] = even(lines)
        counts[side] = (compared or {}).get(side)
    return {"turned": turned, "counts": counts}


def lines_of(judged: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the benchmarks of both models, if they are of the checkpoint that was judged."""
    step = judged.get("step")
    if step is not None and step != benchmarks.get("step"):
        return []
    return list(benchmarks.get("compared") or ())
