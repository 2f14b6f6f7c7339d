"""What a run directory tells, read for a page: its numbers, events, data, checkpoints. Changes nothing.

Everything but resolved.json may be missing: a run that has just begun, or was cut off, has a page too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune import endings, errors, metrics
from kubetune.config.load import read_config
from kubetune.config.schema import Config
from kubetune.errors import EnvironmentFault
from kubetune.plan import Plan, model_short_name

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its size, and which links lead to it."""

    step: int
    bytes: int
    links: tuple[str, ...]


@dataclass(frozen=True)
class Incident:
    """Something that interrupted the run. `step`: where it goes on, or stood, where that is known."""

    time: str
    what: str
    detail: str
    step: int | None = None
    is_error: bool = False


@dataclass(frozen=True)
class RunRecord:
    """All that is known of one run. `steps` and `timings` are lines of metrics.jsonl and timings.jsonl."""

    path: Path
    config: Config
    plan: Plan | None
    steps: Lines
    evaluations: Lines
    timings: Lines
    events: Lines
    report: dict[str, Any]
    data: dict[str, Any]
    evaluation: dict[str, Any]
    samples: Lines
    checkpoints: Sequence[Checkpoint]
    incidents: Sequence[Incident]
    ending: endings.Ending | None

    @property
    def name(self) -> str:
        """The run's own name, or that of its folder."""
        return self.config.name or self.path.absolute().name

    @property
    def model(self) -> str:
        """The model without the folders before it."""
        return model_short_name(self.config.model.path)


def read_run(run_dir: Path) -> RunRecord:
    """The record of a run. Raises ConfigError where there is none, EnvironmentFault for files that are damaged."""
    config = read_config(run_dir)
    numbers = _lines(run_dir / metrics.METRICS)
    events = _lines(run_dir / metrics.EVENTS)
    plan = run_dir / "plan.json"
    return RunRecord(
        path=run_dir,
        config=config,
        plan=Plan.from_json(plan.read_text("utf-8")) if plan.is_file() else None,
        steps=[line for line in numbers if "loss" in line],
        evaluations=[line for line in numbers if "eval_loss" in line],
        timings=_lines(run_dir / metrics.TIMINGS),
        events=events,
        report=_json(run_dir / metrics.REPORT),
        data=_json(run_dir / metrics.DATA),
        evaluation=_json(run_dir / metrics.EVALUATION),
        samples=_lines(run_dir / metrics.SAMPLES),
        checkpoints=_checkpoints(run_dir / "checkpoints"),
        incidents=_incidents(run_dir, events),
        ending=endings.read_ending(run_dir),
    )


def _lines(path: Path) -> Lines:
    try:
        return metrics.read_lines(path)
    except ValueError as error:
        raise EnvironmentFault(f"{path} is damaged: {error}; no page was written") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise EnvironmentFault(f"{path} is damaged: {error}; no page was written") from None


def _checkpoints(root: Path) -> list[Checkpoint]:
    links: dict[str, list[str]] = {}
    for name in ("best", "last"):
        if (root / name).is_symlink():
            links.setdefault((root / name).resolve().name, []).append(name)
    found = []
    for manifest in sorted(root.glob("step-*/manifest.json")):
        folder = manifest.parent
        size = sum(facts["bytes"] for facts in json.loads(manifest.read_text("utf-8"))["files"].values())
        found.append(Checkpoint(int(folder.name.removeprefix("step-")), size, tuple(links.get(folder.name, ()))))
    return found


def _incidents(run_dir: Path, events: Lines) -> list[Incident]:
    """Every stop and every new start, with what is known of its cause."""
    found: list[Incident] = []
    is_running = has_failed = False
    for event in events:
        kind, time, code = event["event"], event["time"], event.get("code")
        if kind == "launch" and event.get("node", 0) == 0:
            if is_running:
                found.append(Incident(time, "started again", "the start before was cut off without a word", None, True))
                has_failed = True
            is_running = True
        elif kind == "resume":
            text = f"from the checkpoint of step {event['step']:,}"
            found.append(Incident(time, "went on", text, event["step"], has_failed))
            has_failed = False
        elif kind == "exit" and event.get("node", 0) == 0:
            is_running = False
            if code:
                has_failed = code != errors.PREEMPTED
                what = f"ended with exit code {code}" if has_failed else "stopped"
                found.append(Incident(time, what, event.get("reason", ""), event.get("step"), has_failed))
    hang = _json(run_dir / "hang.json")
    if hang:
        detail = f"rank {hang['rank']} in {hang['phase']} for {hang['seconds']:.0f} s"
        found.append(Incident(hang["time"], "hung", detail, hang["step"], True))
    return sorted(found, key=lambda incident: incident.time)
