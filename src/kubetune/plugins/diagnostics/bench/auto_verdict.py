"""What `auto` should mean on this machine, by the results of `kubetune bench`, and which results disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.plan.activations import operations
from kubetune.plugins.diagnostics.bench.cases import PARTS, PARTS_LATE

# Speed-up that a choice has to bring beside the plain case: less may be noise.
LEAD = 1.03
# By which the first losses of cases may differ that compute the same, in 16 bits.
TOLERANCE = 0.02

# By the case's name: what `measure` returned of it.
Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class BenchQuestion:
    """A setting, and the cases that decide it."""

    key: str  # of planning.measured
    plain: str  # case without the setting
    cases: Mapping[Any, str]  # value of the setting → case with it
    otherwise: Any  # value where none of the cases leads


QUESTIONS = (
    BenchQuestion(
        "compile",
        "LoRA, bfloat16",
        {True: "LoRA, bfloat16, compiled", "layers": "LoRA, bfloat16, compiled layers"},
        False,
    ),
    BenchQuestion(
        "fp8", "LoRA, bfloat16, compiled", {True: "LoRA, bfloat16, compiled, fp8"}, False
    ),
    BenchQuestion(
        "attention",
        "LoRA, bfloat16",
        {"sdpa": "LoRA, bfloat16, one sequence at a time"},
        "padding_free",
    ),
)


def choices(rows: Rows, shapes: Sequence[str]) -> dict[str, Any]:
    """Return the faster value of each setting, by the first of the shapes where both cases ran, and `why`."""
    values: dict[str, Any] = {}
    reasons = []
    for question in QUESTIONS:
        for shape in shapes:
            answer, reason = _answer(question, rows, shape)
            # Shapes come in the order in which they matter.
            if question.key in answer and question.key not in values:
                values |= answer
                reasons.append(reason)
    return {**values, "why": "; ".join(reasons)}


def overlap(rows: Rows, shapes: Sequence[str], device: str) -> str | None:
    """Return in a sentence what it brings that a base in parts is gathered ahead. None where both cases did not run."""
    for shape in shapes:
        ahead = _speed(rows, f"{shape} {PARTS}")
        late = _speed(rows, f"{shape} {PARTS_LATE}")
        if ahead and late:
            text = f"gathering the next layer ahead: {ahead / late:.2f} times the speed ({shape})"
            if device == "cpu":
                text += "; on a CPU this means nothing, as the same cores copy and compute"
            return text
    return None


def _answer(question: BenchQuestion, rows: Rows, shape: str) -> tuple[dict[str, Any], str]:
    """Return the value of a setting by the cases of one shape, and the reason; empty where they did not run.

    4B LoRA, bfloat16              1,000 tokens/s
    4B LoRA, bfloat16, compiled    1,100 tokens/s    faster by more than LEAD: {"compile": True, …}
    """
    plain = _speed(rows, f"{shape} {question.plain}")
    speeds = {}
    for value, case in question.cases.items():
        speeds[value] = _speed(rows, f"{shape} {case}")
    # A case that failed decides nothing.
    if not plain or not any(speeds.values()):
        return {}, ""
    fastest = max(speeds, key=lambda value: speeds[value])
    case = question.cases[fastest]
    reason = f"{shape} {case}: {speeds[fastest]:,.0f} tokens/s, {question.plain}: {plain:,.0f}"
    if speeds[fastest] < LEAD * plain:
        return {question.key: question.otherwise}, reason
    answer = {question.key: fastest}
    if question.key == "compile":
        answer["compile_from"] = _compile_from(rows[f"{shape} {case}"], plain)
    return answer, reason


def _compile_from(row: Mapping[str, Any], plain: float) -> float:
    """Return the operations of a run that saves as many seconds as compiling takes; `plain`: tokens/s without it."""
    # Seconds saved by each token; so many tokens pay for the seconds of compiling.
    saved = 1 / plain - 1 / row["tokens_per_second"]
    return operations(row["parameters"], row["compile_seconds"] / saved)


def disagreements(rows: Rows) -> list[str]:
    """Return a sentence for each case whose first loss is not that of the others that compute the same."""
    sentences = []
    firsts: dict[str, tuple[str, float]] = {}  # by shape: its first case, and its loss
    for name, row in rows.items():
        # Weights in 8 bits give another loss.
        if not row.get("losses") or "fp8" in name:
            continue
        shape = name.split()[0]
        loss = row["losses"][0]
        other, expected = firsts.setdefault(shape, (name, loss))
        if abs(loss - expected) > TOLERANCE * expected:
            sentences.append(f"{name}: the first loss is {loss:.4f}, and {expected:.4f} of {other}")
    return sentences


def _speed(rows: Rows, name: str) -> float:
    """Return tokens/s of a case; 0 where it was not measured."""
    return float(rows.get(name, {}).get("tokens_per_second", 0))
