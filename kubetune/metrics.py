"""The numbers of a run as lines of JSON: metrics.jsonl, timings.jsonl, events.jsonl, and report.json made from them.

metrics.jsonl holds only what a repeat of the run reproduces bit for bit; whatever a clock or a machine has a say in is
in timings.jsonl. Each line is handed to the kernel at once, so that a killed process loses none. Not for pages made
from the numbers (report/) and not for TensorBoard or MLflow (tracking.py).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubetune.files import explained_writes, write_atomic
from kubetune.logs import scrub

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
EVENTS = "events.jsonl"
REPORT = "report.json"
DATA = "data.json"
"""What the run learnt from: statistics and lengths of its prepared rows."""
EVALUATION = "evaluation.json"
"""What `kubetune evaluate` found last."""
SAMPLES = "samples.jsonl"
"""Prompts with what was expected and what the model said before and after, where somebody asked."""

_COUNTED = (
    "FLOPs that training needs: 4 a token for a frozen weight and 6 for a trained one, causal attention halved, the "
    "head where there is a label; no padding, no recomputation. Time within steps; evaluation and saving are not in it."
)


class MetricsLog:
    """Rank 0's open metrics.jsonl and timings.jsonl.

    Opening cuts off what an earlier start wrote beyond the checkpoint that is gone on from, so that nothing is there
    twice: steps after `resume_step` and evaluations after `evaluated_step` (0 and 0: a start from the beginning).
    """

    def __init__(self, run_dir: Path, resume_step: int = 0, evaluated_step: int = 0) -> None:
        for name in (METRICS, TIMINGS):
            _cut_after(run_dir / name, resume_step, evaluated_step)
        self._metrics = _Appender(run_dir / METRICS)
        self._timings = _Appender(run_dir / TIMINGS)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append `values` of `step` completed steps to metrics.jsonl. Numbers that are not finite become null."""
        self._metrics.append({"step": step, **values})

    def write_timing(self, step: int, values: Mapping[str, Any]) -> None:
        """Append seconds, tokens/s, memory and the like of one step to timings.jsonl."""
        self._timings.append({"step": step, **values})

    def sync(self) -> None:
        """Make the lines durable; called before a checkpoint is committed, which must not be ahead of its metrics."""
        self._metrics.sync()
        self._timings.sync()

    def close(self) -> None:
        self._metrics.close()
        self._timings.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record_event(run_dir: Path, event: str, **facts: Any) -> None:
    """Append an event (`start`, `resume`, `save`, `stop`, `error`, …) and its time to events.jsonl; any process may."""
    with _Appender(run_dir / EVENTS) as events:
        events.append({"time": now(), "event": event, **facts})


def now() -> str:
    """This moment in UTC, as in `2026-11-20T10:15:00.123Z`."""
    return written(datetime.now(UTC))


def written(moment: datetime) -> str:
    """A moment in UTC as events have it."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, training steps and evaluations (those with `eval_loss`), in order."""
    return read_lines(run_dir / METRICS)


def read_timings(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of timings.jsonl."""
    return read_lines(run_dir / TIMINGS)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of events.jsonl."""
    return read_lines(run_dir / EVENTS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file of ours; none when it is missing. A torn last line is not there yet."""
    return [json.loads(line) for line in _whole_lines(path)]


def step_seconds(run_dir: Path) -> float:
    """The time that all steps took."""
    return math.fsum(line.get("seconds", 0.0) for line in read_timings(run_dir))


def write_report_json(
    run_dir: Path,
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
    lines = read_metrics(run_dir)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    seconds = step_seconds(run_dir)
    tokens = sum(line.get("tokens", 0) for line in steps)
    trained_tokens = sum(line.get("trained_tokens", 0) for line in steps)
    report = {
        "world_size": world_size,
        "steps": steps[-1]["step"] if steps else 0,
        "epochs": steps[-1].get("epoch") if steps else 0,
        "samples": sum(line.get("samples", 0) for line in steps),
        "tokens": tokens,
        "trained_tokens": trained_tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "throughput": throughput(read_events(run_dir), tokens, trained_tokens, seconds, world_size),
        "loss_first": steps[0]["loss"] if steps else None,
        "loss_last": steps[-1]["loss"] if steps else None,
        "eval_last": evaluations[-1] if evaluations else None,
        "peak_memory_bytes": peak_memory_bytes,
        "data_fingerprint": data_fingerprint,
        "config_sha256": _config_sha256(run_dir),
        "versions": versions(),
        "finished": now(),
        **facts,
    }
    content = scrub(json.dumps(report, indent=2) + "\n")
    for path in filter(None, (run_dir / REPORT, copy_to)):
        write_atomic(path, content)
    return report


def is_reported(run_dir: Path, step: int) -> bool:
    """Whether report.json is there and tells of this many steps, and of the config as it is."""
    try:
        report = json.loads((run_dir / REPORT).read_text())
    except FileNotFoundError:
        return False
    return (report["steps"], report["config_sha256"]) == (step, _config_sha256(run_dir))


def _config_sha256(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "resolved.json").read_bytes()).hexdigest()


def throughput(
    events: Sequence[Mapping[str, Any]], tokens: int, trained_tokens: int, seconds: float, world_size: int
) -> dict[str, Any] | None:
    """Speed in the seconds that steps took, and as a share of the devices' peak where the last start names one.

    Tokens are those of the data: nothing is padded. MFU counts the FLOPs that training needs (throughput.py).
    """
    if not seconds:
        return None
    start: Mapping[str, Any] = next((event for event in reversed(events) if event["event"] in ("start", "resume")), {})
    speed = tokens / seconds
    flops, peak = start.get("flops_per_token"), start.get("peak_tflops")
    on_each = speed * flops / world_size / 1e12 if flops else None
    return {
        "tokens_per_second": speed,
        "trained_tokens_per_second": trained_tokens / seconds,
        "flops_per_token": flops,
        "tflops_per_device": on_each,
        "peak_tflops": peak,
        "peak_source": start.get("peak_source"),
        "mfu": on_each / peak if on_each is not None and peak else None,
        "counted": _COUNTED,
    }


def throughput_line(found: Mapping[str, Any]) -> str:
    """The same in one line, for the log."""
    line = (
        f"{found['tokens_per_second']:,.0f} tokens/s without padding, {found['trained_tokens_per_second']:,.0f} trained"
    )
    if found["mfu"] is None:
        return line
    peak = f"{found['mfu']:.1%} of {found['peak_tflops']:.4g} ({found['peak_source']})"
    return f"{line}; {found['tflops_per_device']:.3g} TFLOP/s on each device, MFU {peak}"


def _cut_after(path: Path, step: int, evaluated_step: int) -> None:
    if not path.exists():
        return

    def is_kept(line: bytes) -> bool:
        values = json.loads(line)
        return bool(values["step"] <= (evaluated_step if "eval_loss" in values else step))

    kept = b"".join(line for line in _whole_lines(path) if is_kept(line))
    if len(kept) != path.stat().st_size:
        write_atomic(path, kept)


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class _Appender(FileIO):
    """A JSONL file that whole lines are appended to, each in one write, which no other process can split."""

    def __init__(self, path: Path) -> None:
        with explained_writes(path):
            super().__init__(path, "ab")

    def append(self, values: Mapping[str, Any]) -> None:
        # JSON has no NaN or infinity; floats are written by repr, so reading gives back the same bits.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = scrub(json.dumps(finite, allow_nan=False) + "\n").encode()
        with explained_writes(str(self.name)):
            written = self.write(line)
            if written < len(line):
                # The disk filled up half-way through the line; what was written would spoil the next one.
                self.truncate(os.fstat(self.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)

    def sync(self) -> None:
        with explained_writes(str(self.name)):
            os.fsync(self.fileno())


def versions() -> dict[str, str]:
    """The versions that numbers may depend on."""
    found = {"python": platform.python_version()}
    for package in ("kubetune", "torch", "transformers", "peft", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
