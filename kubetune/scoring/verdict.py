"""The verdict on a run, verdict.json: the best checkpoint against the base model, and the gate."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune import errors
from kubetune.base import files, logs
from kubetune.config.gate import Condition
from kubetune.data.prepared.histogram import bars
from kubetune.rundir import metrics
from kubetune.scoring.comparison import (
    Answered,
    answers_file,
    compare_answers,
    read_answers,
    turned,
)

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.config.schema.evaluation import EvaluationConfig

_COMPARISONS: Final = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
SHOWN = 5
"""Answers that the verdict shows of those gained, and of those lost."""


def conclude(wanted: EvaluationConfig, run_dir: Path, step: int) -> None:
    """Write the verdict on the checkpoint of a step. Raises GateFailed where that misses the gate.

    Benchmarks are still to come: conditions on them do not hold yet, and fail nothing.
    """
    values = next(
        (
            line
            for line in metrics.read_metrics(run_dir)
            if line["step"] == step and "eval_loss" in line
        ),
        {},
    )
    base = (
        files.read_object(run_dir / metrics.BASE)["metrics"]
        if (run_dir / metrics.BASE).exists()
        else {}
    )
    found: dict[str, Any] = {
        "step": step,
        "base": base,
        "best": {name: values.get(name) for name in base},
    }
    if wanted.generate is not None and answers_file(run_dir, 0).is_file():
        before, after = read_answers(run_dir, 0), read_answers(run_dir, step)
        measured = compare_answers(before, after)
        found["answers"] = [each.facts() for each in measured]
        found["turned"] = {
            each.metric: turned(before, after, each.metric, SHOWN) for each in measured
        }
        found["lengths"] = {
            name: _lengths(side) for name, side in (("before", before), ("after", after))
        }
        for line in found["answers"]:
            logs.RESULT.info("%s", line_in_words(line))
    checks = [
        _check(name, text, values.get(name), base.get(name)) for name, text in wanted.gate.items()
    ]
    _decide(
        run_dir,
        found,
        checks,
        [check for check in checks if not wanted.is_benchmark(check["metric"])],
    )


def judge_benchmarks(
    config: Config, run_dir: Path, step: int, lines: Sequence[Mapping[str, Any]]
) -> None:
    """Decide the conditions of the gate on benchmarks, whose `lines` are as `harness.compared` has them.

    Raises GateFailed.
    """
    wanted, found = config.evaluation, metrics.read_verdict(run_dir, step)
    if not (gate := found.get("gate")):
        return
    known = dict[str, Mapping[str, Any]]()
    for line in lines:
        task, _, metric = line["metric"].partition("/")
        for name in (task, line["metric"], f"{task}/{metric.partition(',')[0]}"):
            known.setdefault(f"eval_{name}", line)  # the first metric is the task's own
    checks = [
        _check(check["metric"], check["wanted"], line.get("after"), line.get("before"))
        if wanted.is_benchmark(check["metric"])
        and (line := known.get(check["metric"], {})) is not None
        else check
        for check in gate["checks"]
    ]
    _decide(run_dir, found, checks, checks)


def _decide(
    run_dir: Path,
    found: Mapping[str, Any],
    checks: Sequence[Mapping[str, Any]],
    final: Sequence[Mapping[str, Any]],
) -> None:
    """Write the verdict; raise GateFailed where one of the checks that are `final` does not hold."""
    passed = all(check["holds"] for check in checks)
    verdict = {**found, "gate": {"passed": passed, "checks": checks} if checks else None}
    files.write_atomic(
        run_dir / metrics.VERDICT, json.dumps(verdict, indent=1, ensure_ascii=False), within=run_dir
    )
    if failed := "; ".join(check["said"] for check in final if not check["holds"]):
        raise errors.GateFailed(
            f"the gate failed at step {found['step']}: {failed}. The checkpoint is saved"
        )
    if checks and passed:
        logs.RESULT.info("the gate holds at step %d", found["step"])


def line_in_words(line: Mapping[str, Any]) -> str:
    """One measure of both models as a line for a log, as `Measured.facts` or a benchmark has it."""
    said = f"{line['metric']} {line['before']:.4g} → {line['after']:.4g}"
    if "test" not in line:
        return said
    low, high = line["after_interval"]
    return (
        f"{said} (95 %: {low:.3g}–{high:.3g}, {line['rows']} rows); {line['gained']} gained, {line['lost']} lost, "
        f"p = {line['p_value']:.2g} ({line['test']})"
    )


def _lengths(answered: Sequence[Answered]) -> list[list[int]]:
    """Histogram of the characters of answers; empty ones, which have none, come first as `[0, 0, rows]`."""
    sizes = [len(one.answer) for one in answered]
    empty, full = sizes.count(0), [size for size in sizes if size]
    return [*([[0, 0, empty]] if empty else []), *(bars(full) if full else [])]


def is_met(condition: Condition, value: float, base: float | None) -> bool:
    """Truth of a condition of a metric's value and of the base model's; never true of NaN."""
    limit = condition.number
    if condition.is_change:
        if base is None:
            raise ValueError("a change against the base model needs the base model's value")
        limit = base + (abs(base) * condition.number if condition.is_share else condition.number)
    return bool(_COMPARISONS[condition.comparison](value, limit))


def _check(name: str, text: str, value: float | None, base: float | None) -> dict[str, Any]:
    """One condition of the gate; what was not measured does not hold."""
    condition = Condition.parse(text)
    holds, said = False, f"{name} was not measured, expected {text}"
    if value is not None and (base is not None or not condition.is_change):
        holds = is_met(condition, value, base)
        of_base = f" of the base model's {base:.4g}" if condition.is_change else ""
        said = f"{name} is {value:.4g}, expected {text}{of_base}"
    return {
        "metric": name,
        "wanted": text,
        "value": value,
        "base": base,
        "holds": holds,
        "said": said,
    }
