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
from kubetune.config.metric_names import TOLD_AT_THE_END, full_name
from kubetune.config.schema.evaluation import how_answered
from kubetune.data.length_bars import bars
from kubetune.rundir import metrics, outcome, shapes
from kubetune.rundir.intervals import p_in_words
from kubetune.scoring.comparison import (
    Answered,
    answers_file,
    compare_answers,
    read_answers,
    turned,
)

if TYPE_CHECKING:
    from kubetune.config.schema.evaluation import EvaluationConfig, GenerateConfig

_COMPARISONS: Final = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
# Answers that the verdict shows of those gained, and of those lost.
SHOWN = 5


def conclude(
    wanted: EvaluationConfig,
    run_dir: Path,
    step: int,
) -> None:
    """Write the verdict on the checkpoint of a step. Raise GateFailed if that misses the gate.

    Benchmarks are still to come: conditions on them do not hold yet, and fail nothing.
    """
    values = _values_of_step(run_dir, step)

    # The base model's own metrics, if it was measured before the first step.
    base: dict[str, float] = {}
    if (run_dir / metrics.BASE).exists():
        base = shapes.read(run_dir / metrics.BASE)["metrics"]
    facts: dict[str, Any] = {
        "step": step,
        "base": base,
        "best": {name: values.get(name) for name in base},
    }
    is_alike = outcome.are_alike(base, values)
    if not is_alike:
        facts["best"] |= dict.fromkeys(outcome.SUMS)
        logs.RESULT.warning(
            "the rewards before and after training are sums of different rewards, as one of them judged no answer, so they "
            "are not compared"
        )
    # There is nothing to compare with if the base model was asked nothing.
    if wanted.generate is not None and answers_file(run_dir, 0).is_file():
        facts |= _facts_of_answers(run_dir, step, wanted.generate)
        if not is_alike:
            facts["answers"] = [line for line in facts["answers"] if line["metric"] != "reward"]
        for line in facts["answers"]:
            logs.RESULT.log(logs.NOTICE, "%s", line_in_words(line))
    changes = _changes_in_words(facts)
    if changes:
        logs.RESULT.log(logs.NOTICE, "before training → step %d: %s", step, changes)

    warn_of_changed_functions(wanted, run_dir)

    checks = []
    final = []  # those that can be decided now
    for name, text in wanted.gate.items():
        check = _check(name, text, values.get(name), base.get(name))
        checks.append(check)
        if not wanted.is_benchmark(name):
            final.append(check)

    _decide(run_dir, facts, checks, final)


def _changes_in_words(facts: Mapping[str, Any]) -> str:
    """Return what evaluations without answers say of both models: accuracy 0.5 → 0.94, f1_macro 0.33 → 0.94."""
    tested = {full_name(line["metric"]) for line in facts.get("answers") or ()}
    texts = []
    for name in TOLD_AT_THE_END:
        before = facts["base"].get(full_name(name))
        after = facts["best"].get(full_name(name))
        if before is not None and after is not None and full_name(name) not in tested:
            texts.append(f"{name} {before:.4g} → {after:.4g}")
    return ", ".join(texts)


def _values_of_step(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the metrics of the evaluation after a step; empty without an evaluation."""
    for line in metrics.read_metrics(run_dir):
        if line["step"] == step and metrics.is_evaluation(line):
            return line
    return {}


def _facts_of_answers(run_dir: Path, step: int, generate: GenerateConfig) -> dict[str, Any]:
    """Return what the verdict says of the answers before training and after a step."""
    # Step 0 is the model before training.
    before = read_answers(run_dir, 0)
    after = read_answers(run_dir, step)
    answers = []
    changed = {}
    for measured in compare_answers(before, after):
        answers.append(measured.facts() | {"how": how_answered(measured.metric, generate)})
        changed[measured.metric] = turned(
            before,
            after,
            measured.metric,
            SHOWN,
        )
    longest = max((len(answered.answer) for answered in (*before, *after)), default=0)
    lengths = {"before": _lengths(before, longest), "after": _lengths(after, longest)}
    return {"answers": answers, "turned": changed, "lengths": lengths}


def functions_of(wanted: EvaluationConfig) -> dict[str, str]:
    """Return the SHA-256 of the file with the user's functions, as `functions`; empty if a run has none."""
    if wanted.metrics is None:
        return {}
    return {"functions": files.sha256_file(Path(wanted.metrics.file).expanduser())}


def warn_of_changed_functions(wanted: EvaluationConfig, run_dir: Path) -> None:
    """Warn if the user's functions are not the same as when the base model was measured.

    That is no error: functions that raised and so ended the run are fixed before it continues.
    """
    if wanted.metrics is None or not (run_dir / metrics.BASE).exists():
        return
    # The name of the file may stay while its content changes, so its digest is compared.
    before = shapes.read(run_dir / metrics.BASE).get("functions")
    if before is not None and {"functions": before} != functions_of(wanted):
        logs.EVAL.warning(
            "%s has changed since it measured the model before training: what %s says before and after the change does "
            "not compare, nor do the best checkpoint, the verdict and the gate that go by it",
            wanted.metrics.file,
            ", ".join(wanted.metrics.functions),
        )


def judge_benchmarks(
    wanted: EvaluationConfig,
    run_dir: Path,
    step: int,
    lines: Sequence[Mapping[str, Any]],
) -> None:
    """Decide the conditions of the gate on benchmarks. `lines` are from `harness.compared`.

    Raise GateFailed.
    """
    facts = metrics.read_verdict(run_dir, step)
    gate = facts.get("gate")
    if not gate:
        return
    measured: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        # `gsm8k/exact_match,strict-match` is meant by that name, by `gsm8k/exact_match` and by `gsm8k`, unless an earlier
        # metric of the task has the name: the first is the task's own.
        task, _, metric = line["metric"].partition("/")
        for name in (task, line["metric"], f"{task}/{metric.partition(',')[0]}"):
            measured.setdefault(f"eval_{name}", line)

    checks = []
    for check in gate["checks"]:
        name = check["metric"]
        if wanted.is_benchmark(name):
            line = measured.get(name, {})
            check = _check(
                name,
                check["wanted"],
                line.get("after"),
                line.get("before"),
            )

        checks.append(check)

    _decide(run_dir, facts, checks, checks)


def _decide(
    run_dir: Path,
    facts: Mapping[str, Any],
    checks: Sequence[Mapping[str, Any]],
    final: Sequence[Mapping[str, Any]],
) -> None:
    """Write the verdict. Raise GateFailed if one of the `final` checks does not hold."""
    passed = all(check["holds"] for check in checks)
    gate = {"passed": passed, "checks": checks} if checks else None
    # Written before it fails, so that pages can say why.
    content = json.dumps({**facts, "gate": gate}, indent=1, ensure_ascii=False)
    files.write_atomic(run_dir / metrics.VERDICT, content, within=run_dir)

    failed = [check["message"] for check in final if not check["holds"]]
    if failed:
        raise errors.GateFailed(
            f"the gate failed at step {facts['step']}: {'; '.join(failed)}. The checkpoint is saved"
        )

    # Only now: with benchmarks still to come, some checks do not hold yet.
    if checks and passed:
        logs.RESULT.log(logs.NOTICE, "the gate holds at step %d", facts["step"])


def line_in_words(line: Mapping[str, Any]) -> str:
    """Return a line for a log of one measure of both models, as `Measured.facts` or a benchmark has it."""
    text = f"{line['metric']} {line['before']:.4g} → {line['after']:.4g}"
    if "test" not in line:
        return text
    if "how" in line:
        text += f", {line['how']}"
    low, high = line["after_interval"]
    return (
        f"{text} (95 %: {low:.3g}–{high:.3g}, {line['rows']} rows); {line['gained']} gained, {line['lost']} lost, "
        f"{p_in_words(line['p_value'], line['test'])} ({line['test']})"
    )


def _lengths(answers: Sequence[Answered], longest: int) -> list[list[int]]:
    """Return a histogram of the characters of answers; empty answers come first as `[0, 0, rows]`.

    `longest`: of both models' answers, whose bars are the same.
    """
    lengths = [len(answered.answer) for answered in answers if answered.answer]
    num_empty = len(answers) - len(lengths)
    histogram = []
    if num_empty:
        histogram.append([0, 0, num_empty])
    if lengths:
        histogram.extend(bars(lengths, longest=longest))
    return histogram


def is_met(
    condition: Condition,
    value: float,
    base: float | None,
) -> bool:
    """True if the metric's value meets the condition. NaN never does."""
    limit = condition.number
    if condition.is_change:
        if base is None:
            raise ValueError("a change against the base model needs the base model's value")
        # `<= +2%` of a base of 3.0 is at most 3.06, `<= +2` at most 5.
        change = condition.number
        if condition.is_share:
            change *= abs(base)
        limit = base + change
    return bool(_COMPARISONS[condition.comparison](value, limit))


def _check(
    name: str,
    text: str,
    value: float | None,
    base: float | None,
) -> dict[str, Any]:
    """Check one condition of the gate. A metric that was not measured fails."""
    condition = Condition.parse(text)

    holds = False
    message = f"{name} was not measured, expected {text}"

    # A change against the base model needs both numbers.
    if value is not None and (base is not None or not condition.is_change):
        holds = is_met(condition, value, base)
        message = f"{name} is {value:.4g}, expected {text}"
        if condition.is_change:
            message += f" of the base model's {base:.4g}"

    return {
        "metric": name,
        "wanted": text,
        "value": value,
        "base": base,
        "holds": holds,
        "message": message,
    }
