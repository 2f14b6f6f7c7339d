"""The numbers of a run as lines of JSON: metrics.jsonl, timings.jsonl, events.jsonl, and report.json made from them.

metrics.jsonl holds only what a repeat of the run reproduces bit for bit; whatever a clock or a machine has a say in is
in timings.jsonl. Each line is handed to the kernel at once, so that a killed process loses none. Not for pages made
from the numbers (reporting/) and not for TensorBoard or MLflow (trackers.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubetune.base import jsonl
from kubetune.base.files import open_regular, read_object, write_atomic, written_whole
from kubetune.base.humanize import counted, share
from kubetune.base.jsonl import Appender
from kubetune.base.logs import scrub
from kubetune.config.naming import RESOLVED
from kubetune.errors import ConfigError, EnvironmentFault

CONFIG = "config.yaml"
"""The config as it was given; in full it is config.naming.RESOLVED."""
PLAN = "plan.json"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
EVENTS, EVENTS_VERSION = "events.jsonl", 1
REPORT, REPORT_VERSION = "report.json", 1
_REPORT_START = b'{\n  "schema_version"'
IDENTITY = "identity.json"
"""Files that the run is made from, by size and SHA-256 (data/prepared/identity)."""
TRACKING = "tracking.json"
"""The MLflow run that a resumed run goes on in."""
LOAD = "load.jsonl"
"""Load of the machine of rank 0."""
EXPERTS = "experts.json"
"""Tokens that each expert was given, by layer, in the steps of the last start."""
DATA = "data.json"
"""Data that the run was trained on: statistics and lengths of its prepared rows."""
BASE = "base_evaluation.json"
"""Metrics of the model before training, where `evaluation` compares with it."""
VERDICT = "verdict.json"
"""The best checkpoint against the base model, and what the gate asked for and found."""
BENCHMARKS = "benchmarks.json"
"""Results of the last benchmarks of the run, and of its base model where they were asked of both."""
ANSWERS = "answers"
"""Folder of what was asked, and of what each evaluation was answered."""
EVALUATION = "evaluation.json"
"""Result of the last `kubetune evaluate`."""
PREDICTIONS = "predictions.jsonl"
"""Labels that a classifier gave each row, by the last `kubetune evaluate`."""
BEFORE_AFTER = "before_after.jsonl"
"""Prompts with what was expected and what the model said before and after, where somebody asked."""

_COUNTED = (
    "FLOPs that training needs: 4 a token for a frozen weight and 6 for a trained one, causal attention halved, the "
    "head where there is a label; no padding, no recomputation. Time within steps; evaluation and saving are not in it."
)


_ENDS = 10
_FAR, _FLOOR = 2.0, 0.1
"""Of medians of losses: one beyond twice the other, and the noise of a tenth, lies far above it."""
_FAR_OF_ONE, _FLOOR_OF_ONE = 4.0, 1.0
"""The same of the first step's loss alone, which the rows of one batch decide."""


class MetricsLog:
    """Rank 0's open metrics.jsonl and timings.jsonl.

    Opening cuts off what an earlier start wrote beyond the checkpoint that is gone on from, so that nothing is there
    twice: steps after `resume_step` and evaluations after `evaluated_step` (0 and 0: a start from the beginning). Lines
    that a damaged disk took from what comes before are missed aloud.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0, evaluated_step: int = 0) -> None:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def record_event(run_dir: Path, event: str, **facts: Any) -> None:
    """Append an event of a kind that events.py describes, and its time, to events.jsonl; any process may."""
    with Appender(run_dir / EVENTS) as events:
        events.append({"schema_version": EVENTS_VERSION, "time": now(), "event": event, **facts})


def now() -> str:
    """This moment in UTC, as in `2026-11-20T10:15:00.123Z`."""
    return written(datetime.now(UTC))


def written(moment: datetime) -> str:
    """A moment in UTC as events have it."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_verdict(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """Contents of verdict.json; empty where there is none, or it is of another step than `step`."""
    return _of_step(run_dir / VERDICT, step)


def read_benchmarks(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """Contents of benchmarks.json; empty where there is none, or it is of another step than `step`."""
    return _of_step(run_dir / BENCHMARKS, step)


def _of_step(path: Path, step: int | None) -> dict[str, Any]:
    try:
        found = read_object(path)
    except FileNotFoundError:
        return {}
    return found if step in (None, found.get("step")) else {}


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, training steps and evaluations (those with `eval_loss`), in order."""
    return read_lines(run_dir / METRICS)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of events.jsonl."""
    return read_lines(run_dir / EVENTS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file of a run, as `stream_lines` gives them."""
    return list(stream_lines(path))


def stream_lines(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file of a run, one after the other; what is damaged is left out, as in jsonl.py."""
    return jsonl.read(path, _IS_GOOD.get(path.name, _is_anything), damaged)


def stream_chunks(path: Path, damaged: list[int] | None = None) -> Iterator[list[dict[str, Any]]]:
    """As `stream_lines`, some hundred lines at once."""
    are_good = {METRICS: _are_steps, TIMINGS: _are_timings}.get(path.name, lambda _: False)
    return jsonl.read_chunks(path, _IS_GOOD.get(path.name, _is_anything), damaged, are_good)


def follower(path: Path, offset: int = 0) -> jsonl.Follower:
    """Reader of the lines that a run adds to one of its JSONL files, from a byte on."""
    return jsonl.Follower(path, _IS_GOOD[path.name], offset)


def last_lines(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """The last lines of a JSONL file of a run, which may be long; `most` of them at most."""
    return jsonl.tail(path, _IS_GOOD.get(path.name, _is_anything), most)


def newest_with(path: Path, keys: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return the last line of a JSONL file of a run that has each key, None where none near its end has it."""
    return jsonl.newest_with(path, keys, _IS_GOOD.get(path.name, _is_anything))


def _is_number(value: Any) -> bool:
    # Asked of every line of every run: type and difference are the quickest that Python has.
    return type(value) is int or (type(value) is float and value - value == 0.0)


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_anything(line: Mapping[str, Any]) -> bool:
    return True


def _is_step(line: Mapping[str, Any]) -> bool:
    return type(line.get("step")) is int


def _are_steps(lines: list[Any]) -> bool:
    try:
        return set(map(type, map(itemgetter("step"), lines))) == {int}
    except (KeyError, TypeError):
        return False


def _is_timing(line: Mapping[str, Any]) -> bool:
    return type(line.get("step")) is int and _is_number(line.get("seconds"))


def _are_timings(lines: list[Any]) -> bool:
    try:
        seconds = [line["seconds"] for line in lines]
        return (
            set(map(type, seconds)) <= {int, float}
            and math.isfinite(math.fsum(seconds))
            and _are_steps(lines)
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _is_event(line: Mapping[str, Any]) -> bool:
    is_dated = _is_time(line.get("time")) and (
        "last_seen" not in line or _is_time(line["last_seen"])
    )
    return is_dated and isinstance(line.get("event"), str)


def _is_answered(line: Mapping[str, Any]) -> bool:
    turns, answers = line.get("messages", []), line.get("answers", [])
    return (
        all(isinstance(line.get(key), str) for key in ("prompt", "expected", "before", "after"))
        and isinstance(turns, list)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns)
        and isinstance(line.get("tools", []), list)
        and isinstance(answers, list)
        and all(
            isinstance(a, dict) and _is_step(a) and isinstance(a.get("answer"), str)
            for a in answers
        )
    )


_IS_GOOD = {
    METRICS: _is_step,
    TIMINGS: _is_timing,
    LOAD: _is_step,
    EVENTS: _is_event,
    BEFORE_AFTER: _is_answered,
}
"""Tests that every whole line of a file passes, and a damaged one may not."""


@dataclass
class Totals:
    """Sums over the steps of a run. `first` and `last`: their lines; `evaluation`: the line of the last evaluation."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    first: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    first_losses: list[float] = field(default_factory=list)
    last_losses: list[float] = field(default_factory=list)

    def add(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Count these lines of steps too."""
        if not steps:
            return
        self.first, self.last = self.first or steps[0], steps[-1]
        self.steps += len(steps)
        if lacking := _ENDS - len(self.first_losses):
            self.first_losses += islice(_losses(steps), lacking)
        latest = [*islice(_losses(reversed(steps)), _ENDS)][::-1]
        self.last_losses = [*self.last_losses, *latest][-_ENDS:]
        self.samples += _sum(steps, "samples")
        self.tokens += _sum(steps, "tokens")
        self.trained_tokens += _sum(steps, "trained_tokens")


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> int:
    try:
        return sum([step[key] for step in steps])
    except KeyError:
        return sum([step.get(key, 0) for step in steps])


def _losses(steps: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    return (line["loss"] for line in steps if _is_number(line.get("loss")))


def runaway(totals: Totals) -> dict[str, Any] | None:
    """Losses that rose: the medians of so many `steps` at each end; None where the last do not lie above the first.

    Every one of the last must lie above every one of the first, so that single bad steps are not taken for a trend. A
    loss that ran away within the first steps is seen by that of the very first, before which no weight had moved.
    """
    count = min(_ENDS, totals.steps // 4)
    first, last = totals.first_losses[:count], totals.last_losses[-count:] if count else []
    if not first or not last:
        return None
    low, high = statistics.median(first), statistics.median(last)
    if min(last) > max(first) and high > _FAR * low + _FLOOR:
        return {"steps": count, "first": low, "last": high}
    is_far = min(last) > _FAR_OF_ONE * first[0] + _FLOOR_OF_ONE
    return {"steps": count, "first": first[0], "last": high} if is_far else None


def runaway_line(found: Mapping[str, Any]) -> str:
    """The same in words."""
    return (
        f"the loss ran away: {found['last']:.4g} over the last {counted(found['steps'], 'step')}, {found['first']:.4g} "
        "at first; the result may be worse than the model it was made from. Lower training.learning_rate, or set "
        "training.loss_watchdog_threshold"
    )


def read_totals(run_dir: Path) -> Totals:
    """The sums of what metrics.jsonl and timings.jsonl hold."""
    found = Totals(seconds=math.fsum(line["seconds"] for line in stream_lines(run_dir / TIMINGS)))
    for line in stream_lines(run_dir / METRICS):
        if "eval_loss" in line:
            found.evaluation = line
        if "loss" in line:
            found.add([line])
    return found


def write_report_json(
    run_dir: Path,
    totals: Totals,
    *,
    world_size: int,
    data_fingerprint: str,
    peak_memory_bytes: int,
    copy_to: Path | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Sum the whole run up, earlier starts included, in report.json (and `copy_to`), and return it.

    `peak_memory_bytes` is the highest of all ranks; `facts` are added as they are.
    """
    seconds, tokens = totals.seconds, totals.tokens
    report = {
        "schema_version": REPORT_VERSION,
        "world_size": world_size,
        "steps": totals.last.get("step", 0),
        "epochs": totals.last.get("epoch", 0),
        "samples": totals.samples,
        "tokens": tokens,
        "trained_tokens": totals.trained_tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "throughput": throughput(
            read_events(run_dir), tokens, totals.trained_tokens, seconds, world_size
        ),
        "loss_first": totals.first.get("loss"),
        "loss_last": totals.last.get("loss"),
        "loss_runaway": runaway(totals),
        "eval_last": totals.evaluation,
        "peak_memory_bytes": peak_memory_bytes,
        "data_fingerprint": data_fingerprint,
        "config_sha256": _config_sha256(run_dir),
        "versions": versions(),
        "finished": now(),
        **facts,
    }
    content = scrub(json.dumps(report, indent=2) + "\n")
    write_atomic(run_dir / REPORT, content, within=run_dir)
    if copy_to is not None:
        require_place_of_report(copy_to)
        write_atomic(copy_to, content)
    return report


def require_place_of_report(path: Path) -> None:
    """Raise ConfigError where a copy of a report would overwrite anything but another one, or an empty file."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        start = file.read(len(_REPORT_START))
        if start not in (b"", _REPORT_START):
            raise ConfigError(
                f"logging.report_json: {path} holds something other than a report, and would be overwritten; name "
                "another file, or remove it"
            )


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the contents of report.json.

    Raises FileNotFoundError, or EnvironmentFault for a damaged report and for one of another version.
    """
    path = run_dir / REPORT
    report = read_object(path)
    version = report.get("schema_version")
    if version != REPORT_VERSION:
        raise EnvironmentFault(
            f"{path}: schema_version is {version!r}, this version of kubetune reads "
            f"{REPORT_VERSION}; read it with the version that wrote it"
        )
    return report


def is_reported(run_dir: Path, step: int) -> bool:
    """report.json is there, and tells of this many steps and of the config as it is."""
    try:
        report = read_report(run_dir)
    except (FileNotFoundError, EnvironmentFault):
        return False
    return (report.get("steps"), report.get("config_sha256")) == (step, _config_sha256(run_dir))


def _config_sha256(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / RESOLVED).read_bytes()).hexdigest()


def throughput(
    events: Sequence[Mapping[str, Any]],
    tokens: int,
    trained_tokens: int,
    seconds: float,
    world_size: int,
) -> dict[str, Any] | None:
    """Speed in the seconds that steps took, and as a share of the devices' peak where the last start names one.

    Tokens are those of the data: nothing is padded. MFU counts the FLOPs that training needs (flops.py).
    """
    if not seconds:
        return None
    start, speed = last_start(events), tokens / seconds
    on_each, mfu = utilization(start, speed, world_size)
    return {
        "tokens_per_second": speed,
        "trained_tokens_per_second": trained_tokens / seconds,
        "flops_per_token": start.get("flops_per_token"),
        "tflops_per_device": on_each,
        "peak_tflops": start.get("peak_tflops"),
        "peak_source": start.get("peak_source"),
        "mfu": mfu,
        "counted": _COUNTED,
    }


def last_start(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last event that says what the devices are and what a token takes; empty before the first."""
    return next((event for event in reversed(events) if event["event"] in ("start", "resume")), {})


def utilization(
    start: Mapping[str, Any], tokens_per_second: float | None, world_size: int
) -> tuple[float | None, float | None]:
    """TFLOP/s on each device, and MFU: their share of a device's peak; None where a start does not know the one or
    the other."""
    flops, peak = start.get("flops_per_token"), start.get("peak_tflops")
    on_each = tokens_per_second * flops / world_size / 1e12 if tokens_per_second and flops else None
    return on_each, on_each / peak if on_each is not None and peak else None


def throughput_line(found: Mapping[str, Any]) -> str:
    """The same in one line, for the log."""
    line = f"{found['tokens_per_second']:,.0f} tokens/s without padding, {found['trained_tokens_per_second']:,.0f} trained"
    if found["mfu"] is None:
        return line
    return f"{line}; MFU {mfu_sentence(found)}"


def mfu_sentence(found: Mapping[str, Any]) -> str:
    """A throughput's MFU and what it is a share of: `9.7 %: 0.00661 of the 0.0682 TFLOP/s that … reached`."""
    kind, _, product = found["peak_source"].partition(": ")
    whose = {
        "compute.peak_tflops": "that compute.peak_tflops says",
        "measured": f"that {product} reached",
    }
    reached, peak = found["tflops_per_device"], found["peak_tflops"]
    return f"{share(found['mfu'])}: {reached:.3g} of the {peak:.3g} TFLOP/s {whose.get(kind, found['peak_source'])}"


def _cut_after(path: Path, step: int, evaluated_step: int) -> None:
    """Leave the lines up to these steps, each once, and tell of those that are missing."""
    if not path.exists():
        if step:
            jsonl.warn(
                f"{path} is gone: the curves of this run begin after step {step:,}; its totals still count all"
            )
        return
    size, seen, evaluated = 0, bytearray(step + 1), not evaluated_step or path.name != METRICS
    for line, values in _kept(path, step, evaluated_step):
        size += len(line)
        if "eval_loss" in values:
            evaluated = evaluated or values["step"] == evaluated_step
        elif 0 < values["step"] <= step:
            seen[int(values["step"])] = 1
    if missing := [number for number in range(1, step + 1) if not seen[number]]:
        lost = jsonl.describe(missing, "step")
        jsonl.warn(
            f"{path}: {lost} missing ({len(missing):,} of {step:,}); curves have a gap, totals still count all"
        )
    if not evaluated:
        jsonl.warn(
            f"{path}: the evaluation after step {evaluated_step:,} is missing; the best one is known all the same"
        )
    if size != path.stat().st_size:
        with written_whole(path) as file:
            for line, _ in _kept(path, step, evaluated_step):
                file.write(line)


def _kept(path: Path, step: int, evaluated_step: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line, values in jsonl.read_both(path, _IS_GOOD[path.name]):
        if values["step"] <= (evaluated_step if "eval_loss" in values else step):
            yield line, values


def versions() -> dict[str, str]:
    """The versions that numbers may depend on."""
    found = {"python": platform.python_version()}
    for package in ("kubetune", "torch", "transformers", "peft", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
