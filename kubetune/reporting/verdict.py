"""The verdict on a run (verdict.json) for its page: the best checkpoint against the base model, and the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubetune.config.metric_names import full_name


def verdict(found: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rows` of metrics before and after, with intervals and tests where answers were compared; `turned`, answers that
    got better and worse by the first measure; `lengths` of answers as bars; `gate`. None where nothing was judged.
    """
    asked = lines_of(found, benchmarks)
    if not found and not asked:
        return None
    measured = {full_name(line["metric"]): line for line in found.get("answers") or ()}
    best = found.get("best") or {}
    rows = [
        {"name": name, "base": value, "best": best.get(name), **measured.get(name, {})}
        for name, value in (found.get("base") or {}).items()
    ] + [
        {"name": line["metric"], "base": line["before"], "best": line["after"], **line}
        for line in asked
    ]
    turned = found.get("turned") or {}
    first = next(
        (name for name, sides in turned.items() if sides.get("gained") or sides.get("lost")), None
    )
    return {
        "step": found.get("step", benchmarks.get("step")),
        "rows": rows,
        "tests": ", ".join(
            dict.fromkeys(line["test"] for line in (*measured.values(), *asked) if "test" in line)
        ),
        "metric": first,
        "turned": turned.get(first) or {},
        "lengths": {
            name: _shares(bars) for name, bars in (found.get("lengths") or {}).items() if bars
        },
        "gate": found.get("gate"),
    }


def lines_of(found: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The benchmarks of both models, where they are of the checkpoint that was judged."""
    is_same = found.get("step") in (None, benchmarks.get("step"))
    return list(benchmarks.get("compared") or ()) if is_same else []


def _shares(bars: list[list[int]]) -> list[tuple[int, int, int, float]]:
    most = max(count for _, _, count in bars)
    return [(low, high, count, count / max(1, most)) for low, high, count in bars]
