"""The evaluation that a run stands for: that of the checkpoint which its user gets. Every page and list asks here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import read_object
from kubetune.errors import KubetuneError
from kubetune.rundir import checkpoints, metrics, shapes

Line = dict[str, Any]

# Begins the name of each reward in the sum of an evaluation, if there are several.
REWARD_PARTS: Final = "eval_reward/"
# What follows from their sum.
SUMS: Final = ("eval_reward", "eval_reward_std")


def evaluation_of_best(
    run_dir: Path, newest_first: Iterable[Line], best_by: str, *, greater: bool
) -> Line | None:
    """Return the evaluation of the checkpoint `best`, or one by hand; None of a run without evaluations.

    `newest_first`: evaluations of metrics.jsonl, at least the newest ones. Where that of the checkpoint is not among
    them, the verdict or the checkpoint itself has its numbers. A run without such a checkpoint stands for its best value
    of `best_by`, or for its newest evaluation if it has none. `greater`: more is better.

    A reward that is a sum of other rewards than that before training is left out: the two say nothing of each other.
    """
    line = _of_best(run_dir, newest_first, best_by, greater=greater)
    if line is None:
        return None
    return alike(line, before_training(run_dir))


def alike(line: Mapping[str, Any], other: Mapping[str, Any]) -> Line:
    """Return an evaluation, without its reward if that of another one is a sum of other rewards."""
    if are_alike(other, line):
        return dict(line)
    return {name: value for name, value in line.items() if name not in SUMS}


def are_alike(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """True unless the rewards of two evaluations are sums of different rewards: one that judges no answer is in no sum."""
    return not before or _parts_of_reward(before) == _parts_of_reward(after)


def _parts_of_reward(line: Mapping[str, Any]) -> set[str]:
    """Return the rewards that are in the sum of an evaluation; none of a lone reward, which is the sum itself."""
    return {name for name in line if name.startswith(REWARD_PARTS) and line[name] is not None}


def _of_best(
    run_dir: Path, newest_first: Iterable[Line], best_by: str, *, greater: bool
) -> Line | None:
    """Return the evaluation as `evaluation_of_best` says, with all that it holds."""
    step = checkpoints.linked(run_dir, "best")
    verdict: Line = {}
    # Damaged, it is left out: the run's own page says so.
    with suppress(KubetuneError):
        verdict = metrics.read_verdict(run_dir, step)
    if step is None:
        step = verdict.get("step")
    judged = {
        name: value for name, value in (verdict.get("best") or {}).items() if value is not None
    }
    seen = []
    for line in newest_first:
        if line["step"] == step:
            return line | judged
        seen.append(line)
    if judged:
        return {"step": step, **judged}
    if step is not None:
        with suppress(FileNotFoundError, KubetuneError):
            state = read_object(checkpoints.folder_of(run_dir, step) / checkpoints.STATE, run_dir)
            if metrics.is_number(state.get("best_value")):
                return {"step": step, best_by: state["best_value"]}
    measured = [line for line in reversed(seen) if metrics.is_number(line.get(best_by))]
    if measured:
        # The first of equal ones: one that is as good later is no improvement.
        choose = max if greater else min
        return choose(measured, key=lambda line: line[best_by])
    return seen[0] if seen else _by_hand(run_dir)


def _by_hand(run_dir: Path) -> Line | None:
    """Return what `kubetune evaluate` measured last, with its `data`; None if nobody called it, or it measured nothing."""
    with suppress(FileNotFoundError, KubetuneError):
        evaluation = shapes.read(run_dir / metrics.EVALUATION)
        values = numbers_of(evaluation)
        if values:
            which = str(evaluation.get("checkpoint"))
            step = int(which) if which.isdecimal() else checkpoints.linked(run_dir, which)
            if step is None:
                step = checkpoints.linked(run_dir, "last")
            return {"step": step, "data": str(evaluation.get("data")), **values}
    return None


def before_training(run_dir: Path) -> Mapping[str, Any]:
    """Return the metrics of the model before training; empty if it was not measured, or the file is damaged."""
    with suppress(FileNotFoundError, KubetuneError):
        return numbers_of(shapes.read(run_dir / metrics.BASE))
    return {}


def numbers_of(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics in base_evaluation.json or evaluation.json, which a received run may have in any shape."""
    values = base.get("metrics")
    if not isinstance(values, dict):
        return {}
    return {name: value for name, value in values.items() if metrics.is_number(value)}
