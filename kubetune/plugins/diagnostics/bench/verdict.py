"""Choices that follow from the rows of `kubetune bench`, and how they are said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.plan.activations import operations

LEAD = 1.03
"""Speed-up that a choice has to bring beside the plain one."""
TOLERANCE = 0.02
"""By which the first losses of cases may differ that compute the same, in 16 bits."""

Rows = Mapping[str, Mapping[str, Any]]


def choices(rows: Rows, shapes: Sequence[str]) -> dict[str, Any]:
    """The faster of what was measured, by the first of the shapes where both ran: those of `planning.measured`."""
    found: dict[str, Any] = {}
    said: list[str] = []

    def decide(key: str, plain: str, values: Mapping[Any, str], otherwise: Any) -> None:
        """Take the fastest of `values` (setting → case) if it leads the `plain` case; `otherwise` if none does."""
        for shape in shapes:
            speeds = {value: _speed(rows, f"{shape} {case}") for value, case in values.items()}
            beside, ran = _speed(rows, f"{shape} {plain}"), {v: s for v, s in speeds.items() if s}
            if not (beside and ran):
                continue
            best = max(ran, key=lambda value: ran[value])
            found[key] = best if ran[best] >= LEAD * beside else otherwise
            if key == "compile" and found[key]:
                found["compile_from"] = _compile_from(rows[f"{shape} {values[best]}"], beside)
            said.append(
                f"{shape} {values[best]}: {ran[best]:,.0f} tokens/s, {plain}: {beside:,.0f}"
            )
            return

    decide(
        "compile",
        "LoRA, bfloat16",
        {True: "LoRA, bfloat16, compiled", "layers": "LoRA, bfloat16, compiled layers"},
        False,
    )
    decide("fp8", "LoRA, bfloat16, compiled", {True: "LoRA, bfloat16, compiled, fp8"}, False)
    decide(
        "attention",
        "LoRA, bfloat16",
        {"sdpa": "LoRA, bfloat16, one sequence at a time"},
        "padding_free",
    )
    return found | {"why": "; ".join(said)}


def _compile_from(row: Mapping[str, Any], plain: float) -> float:
    """Operations of a run that is faster by as many seconds as compiling took; `plain`: tokens/s without it."""
    saved = 1 / plain - 1 / row["tokens_per_second"]
    return operations(row["parameters"], row["compile_seconds"] / saved)


def disagreements(rows: Rows) -> list[str]:
    """Cases whose first loss is not that of the others that compute the same, each in a sentence."""
    found, first = [], dict[tuple[str, bool], tuple[str, float]]()
    for name, row in rows.items():
        if not row.get("losses") or "fp8" in name or "QLoRA" in name:
            continue
        key, loss = (name.split()[0], "beginnings" in name), float(row["losses"][0])
        other, expected = first.setdefault(key, (name, loss))
        if abs(loss - expected) > TOLERANCE * abs(expected):
            found.append(f"{name}: the first loss is {loss:.4f}, and {expected:.4f} of {other}")
    return found


def _speed(rows: Rows, name: str) -> float | None:
    speed = rows.get(name, {}).get("tokens_per_second")
    return float(speed) if speed else None
