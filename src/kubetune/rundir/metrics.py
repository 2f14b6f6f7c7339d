"""The numbers of a run as lines of JSON: metrics.jsonl, timings.jsonl and events.jsonl.

metrics.jsonl holds only what a repeat of the run reproduces bit for bit; what depends on a clock or a machine is in
timings.jsonl. Each line is handed to the kernel at once, so that a killed process loses none. Not for what is computed
from the numbers (totals.py, throughput.py, report.py), nor for TensorBoard or MLflow (tracking).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from kubetune.base import jsonl
from kubetune.base.files import written_whole
from kubetune.base.jsonl import Appender
from kubetune.rundir import shapes

# The files of a run directory that say what it did. The config in full is config.naming.RESOLVED.
CONFIG = "config.yaml"  # the config as the user gave it
PLAN = "plan.json"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
EVENTS = "events.jsonl"
EVENTS_VERSION = 1
REPORT = "report.json"
IDENTITY = "identity.json"  # size and SHA-256 of the files that the run is made from (data/prepared/identity)
OF_RANKS = "rank_seconds"  # in lines of timings.jsonl: how long each rank computed
# What the names of all metrics of evaluations begin with.
OF_EVALUATION = "eval_"
TRACKING = "tracking.json"  # the MLflow run that a resumed run continues
LOAD = "load.jsonl"  # how busy the machine of rank 0 is
# How many tokens each expert got, by layer, in the steps of the last start.
EXPERTS = "experts.json"
DATA = "data.json"  # statistics and lengths of the prepared rows that the run was trained on
BASE = "base_evaluation.json"  # metrics of the model before training, where `evaluation` compares with it
VERDICT = "verdict.json"  # the best checkpoint against the base model, and what the gate asked for
BENCHMARKS = "benchmarks.json"  # the last benchmarks of the run, and of its base model where both were asked for
ANSWERS = "answers"  # folder of the questions and answers of each evaluation
EVALUATION = "evaluation.json"  # result of the last `kubetune evaluate`
# The label of each row by a classifier, from the last `kubetune evaluate`.
PREDICTIONS = "predictions.jsonl"
# Prompts, expected answers, and the model's answers before and after.
BEFORE_AFTER = "before_after.jsonl"
# A larger number than any that a run counts could not become a float.
_LARGEST = 2**63


class MetricsLog:
    """Rank 0's open metrics.jsonl and timings.jsonl.

    Opening cuts off what an earlier start wrote after the checkpoint that this start resumes from, so that no line
    occurs twice: steps after `resume_step` and evaluations after `evaluated_step` (both 0 for a start from the
    beginning). A warning names earlier lines that a damaged disk took.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0, evaluated_step: int = 0) -> None:
        # First cut, then open: an open file would stay that of before where the cut replaces it.
        for name in (METRICS, TIMINGS):
            _cut_after(run_dir / name, resume_step, evaluated_step)
        self._metrics = Appender(run_dir / METRICS)
        self._timings = Appender(run_dir / TIMINGS)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append `values` of `step` completed steps to metrics.jsonl. Numbers that are not finite become null."""
        self._metrics.require_place()
        self._metrics.append({"step": step, **values})

    def write_timing(self, step: int, values: Mapping[str, Any]) -> None:
        """Append seconds, tokens/s, memory and the like of one step to timings.jsonl."""
        self._timings.append({"step": step, **values})

    def sync(self) -> None:
        """Make the lines durable; called before a checkpoint is committed, which must not be ahead of its metrics."""
        self._metrics.require_place()
        self._metrics.sync()
        self._timings.sync()

    def close(self) -> None:
        """Close both files; what was written is not made durable by it."""
        self._metrics.close()
        self._timings.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def record_event(run_dir: Path, event: str, **facts: Any) -> None:
    """Append an event of a kind that events.py describes, and its time, to events.jsonl; any process may."""
    # Opened for each event, since agents, ranks and observers all write some.
    with Appender(run_dir / EVENTS) as events:
        events.append({"schema_version": EVENTS_VERSION, "time": now(), "event": event, **facts})


def now() -> str:
    """Return this moment in UTC, as in `2026-11-20T10:15:00.123Z`."""
    return written(datetime.now(UTC))


def written(moment: datetime) -> str:
    """Return a moment in UTC as events have it."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_verdict(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """Return verdict.json, or {} where it is missing or of another step than `step`."""
    return _of_step(run_dir / VERDICT, step)


def read_benchmarks(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """Return benchmarks.json, or {} where it is missing or of another step than `step`."""
    return _of_step(run_dir / BENCHMARKS, step)


def _of_step(path: Path, step: int | None) -> dict[str, Any]:
    """Return the JSON object of a file, or {} where it is missing or of another step."""
    try:
        results = shapes.read(path)
    except FileNotFoundError:
        return {}
    # An earlier start may have written the file, for a checkpoint that is not the best any more.
    if step is not None and results.get("step") != step:
        return {}
    return results


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines of metrics.jsonl in order: training steps, and evaluations (`is_evaluation`)."""
    return read_lines(run_dir / METRICS)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines of events.jsonl."""
    return read_lines(run_dir / EVENTS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file of a run, as `stream_lines` yields them."""
    return list(stream_lines(path))


def stream_lines(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file of a run. Damaged ones are left out, as in jsonl.py."""
    return jsonl.read(path, _LINE_CHECKS.get(path.name, _is_anything), damaged)


def stream_chunks(path: Path, damaged: list[int] | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield what `stream_lines` does, some hundred lines at once."""
    # Only the long files have a check of many lines at once.
    checks_of_many = {METRICS: _are_steps, TIMINGS: _are_timings}
    are_good = checks_of_many.get(path.name, lambda _: False)
    is_good = _LINE_CHECKS.get(path.name, _is_anything)
    return jsonl.read_chunks(path, is_good, damaged, are_good)


def follower(path: Path, offset: int = 0) -> jsonl.Follower:
    """Return a reader of the lines that a run adds to one of its JSONL files, from byte `offset` on."""
    return jsonl.Follower(path, _LINE_CHECKS[path.name], offset)


def last_lines(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Return the last lines of a JSONL file of a run, which may be long; at most `most` of them."""
    return jsonl.tail(path, _LINE_CHECKS.get(path.name, _is_anything), most)


def newest_with(path: Path, keys: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return the last line of a JSONL file of a run that has each key, None where none near its end has it."""
    return jsonl.newest_with(path, keys, _LINE_CHECKS.get(path.name, _is_anything))


def evaluations(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the evaluations of metrics.jsonl, the newest first."""
    return jsonl.newest_first(run_dir / METRICS, OF_EVALUATION, _LINE_CHECKS[METRICS])


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """True for a line of metrics.jsonl that is an evaluation, whatever the task measures in one."""
    # Nearly all lines of evaluations have a loss, so that the others are looked through only where it is missing.
    if "eval_loss" in line:
        return True
    return "loss" not in line and any(name.startswith(OF_EVALUATION) for name in line)


def is_number(value: Any) -> bool:
    """True for an int of at most 64 bits or a finite float."""
    # Every line of every run is checked: comparing types and subtracting are the quickest that Python has.
    if type(value) is int:
        return -_LARGEST <= value < _LARGEST
    return type(value) is float and value - value == 0.0


def is_time(value: object) -> bool:
    """True for a moment as events have it."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_anything(line: Mapping[str, Any]) -> bool:
    return True


def _is_step(line: Mapping[str, Any]) -> bool:
    """True for a line of metrics.jsonl: a step, and numbers or null."""
    if type(line.get("step")) is not int:
        return False
    return all(value is None or is_number(value) for value in line.values())


def _are_steps(lines: list[Any]) -> bool:
    """True if `_is_step` holds for all lines. Curves of long runs are read often, and one check is faster than many."""
    try:
        # A sum is finite only if all of its numbers are.
        values = [value for line in lines for value in line.values() if value is not None]
        return (
            set(map(type, map(itemgetter("step"), lines))) == {int}
            and set(map(type, values)) <= {int, float}
            and math.isfinite(math.fsum(values))
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return False


def _is_timing(line: Mapping[str, Any]) -> bool:
    if type(line.get("step")) is not int or not is_number(line.get("seconds")):
        return False
    for name, value in line.items():
        if name == OF_RANKS and isinstance(value, list):
            if not all(map(is_number, value)):
                return False
        elif value is not None and not is_number(value):
            return False
    return True


def _are_timings(lines: list[Any]) -> bool:
    """True if `_is_timing` holds for all lines."""
    try:
        if {type(line["step"]) for line in lines} != {int}:
            return False
        if not {type(line["seconds"]) for line in lines} <= {int, float}:
            return False
        values: list[Any] = []
        for line in lines:
            values += line.get(OF_RANKS) or ()
            values += [
                value for name, value in line.items() if name != OF_RANKS and value is not None
            ]
        return set(map(type, values)) <= {int, float} and math.isfinite(math.fsum(values))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return False


def _is_event(line: Mapping[str, Any]) -> bool:
    if not isinstance(line.get("event"), str) or not is_time(line.get("time")):
        return False
    # Only a launch has it, and only after a start that was cut off.
    if "last_seen" in line and not is_time(line["last_seen"]):
        return False
    return shapes.is_event(line)


def _is_answered(line: Mapping[str, Any]) -> bool:
    """True for a line of before_after.jsonl: a prompt, its turns, and the answers to it."""
    turns = line.get("messages", [])
    answers = line.get("answers", [])
    tools = line.get("tools", [])
    for values in (turns, answers, tools):
        if not isinstance(values, list):
            return False

    for key in ("prompt", "expected", "before", "after"):
        if not isinstance(line.get(key), str):
            return False
    # Only a distillation has a teacher.
    if not isinstance(line.get("teacher", ""), str):
        return False
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            return False
    return all(_is_answer_of_step(answer) for answer in answers)


def _is_answer_of_step(answer: object) -> bool:
    if not isinstance(answer, dict) or type(answer.get("step")) is not int:
        return False
    return isinstance(answer.get("answer"), str)


# What every whole line of a file is, and a damaged one may not be.
_LINE_CHECKS = {
    METRICS: _is_step,
    TIMINGS: _is_timing,
    LOAD: shapes.is_load,
    EVENTS: _is_event,
    BEFORE_AFTER: _is_answered,
}


def _cut_after(path: Path, step: int, evaluated_step: int) -> None:
    """Leave the lines up to these steps, each once, and warn of those that are missing."""
    if not path.exists():
        if step:
            jsonl.warn(
                f"{path} is gone: the curves of this run begin after step {step:,}; its totals still count all"
            )
        return

    # First pass: which steps are there, and how many bytes stay.
    size = 0
    has_step = bytearray(step + 1)
    has_evaluation = False
    for line, values in _lines_up_to(path, step, evaluated_step):
        size += len(line)
        if is_evaluation(values):
            has_evaluation = has_evaluation or values["step"] == evaluated_step
        elif 0 < values["step"] <= step:
            has_step[int(values["step"])] = 1

    missing = [number for number in range(1, step + 1) if not has_step[number]]
    if missing:
        lost = jsonl.describe(missing, "step")
        jsonl.warn(
            f"{path}: {lost} missing ({len(missing):,} of {step:,}); curves have a gap, totals still count all"
        )
    if path.name == METRICS and evaluated_step and not has_evaluation:
        jsonl.warn(
            f"{path}: the evaluation after step {evaluated_step:,} is missing; the best one is known all the same"
        )

    # Second pass: write the lines that stay, if any other line is to go.
    if size != path.stat().st_size:
        with written_whole(path) as file:
            for line, _ in _lines_up_to(path, step, evaluated_step):
                file.write(line)


def _lines_up_to(
    path: Path, step: int, evaluated_step: int
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines that an earlier start wrote before its checkpoint, as bytes and as values."""
    for line, values in jsonl.read_both(path, _LINE_CHECKS[path.name]):
        # The checkpoint of step 40 may be older than the evaluation after step 40, which is then done again.
        last = step
        if is_evaluation(values):
            last = evaluated_step
        if values["step"] <= last:
            yield line, values
