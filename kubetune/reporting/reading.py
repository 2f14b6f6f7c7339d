"""A run directory, read for a page: its numbers, events, data, checkpoints. Changes nothing.

Everything but resolved.json may be missing: a run that has just begun, or was cut off, has a page too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import jsonl
from kubetune.base.files import read_object
from kubetune.config.load import read_config
from kubetune.config.naming import model_short_name
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.plan.plan import Plan
from kubetune.reporting.expert_load import ExpertLoad, expert_load
from kubetune.reporting.numbers import Numbers, NumbersReader, read_numbers
from kubetune.rundir import heartbeat, metrics
from kubetune.rundir.checkpoints import MANIFEST, folder_of, steps, verify
from kubetune.rundir.exit_status import ExitStatus, read_exit_status
from kubetune.rundir.report import read_report
from kubetune.rundir.totals import runaway_line

Lines = list[dict[str, Any]]

OF_SOURCE = "eval_loss/"
"""Start of the key of the evaluation loss of one source."""

POINTS = 600
"""Of a curve on a page."""


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
    """All that is known of one run. `damage`: what a disk has lost or spoilt, and is not shown."""

    path: Path
    config: Config
    plan: Plan | None
    numbers: Numbers
    events: Lines
    report: dict[str, Any]
    data: dict[str, Any]
    evaluation: dict[str, Any]
    verdict: dict[str, Any]
    benchmarks: dict[str, Any]
    answers: Lines
    checkpoints: Sequence[Checkpoint]
    incidents: Sequence[Incident]
    exit_status: ExitStatus | None
    damage: Sequence[str] = ()
    load: Lines = field(default_factory=list)
    experts: ExpertLoad | None = None

    @property
    def machine(self) -> dict[str, Any]:
        """The machine of rank 0, as the last start described it; empty where none did."""
        told = (
            event.get("machine")
            for event in reversed(self.events)
            if event["event"] in ("start", "resume")
        )
        found = next(told, None)
        return found if isinstance(found, dict) else {}

    @property
    def evaluations(self) -> Lines:
        """The lines of metrics.jsonl that tell of evaluations."""
        return self.numbers.evaluations

    @property
    def name(self) -> str:
        """The run's own name, or that of its folder."""
        return self.config.name or self.path.absolute().name

    @property
    def model(self) -> str:
        """The model without the folders before it."""
        return model_short_name(self.config.model.path)


def read_run(
    run_dir: Path,
    points: int = POINTS,
    reader: NumbersReader | None = None,
    seconds: float = math.inf,
) -> RunRecord:
    """The record of a run, its curves with at most so many `points`.

    `reader`: who has read the numbers of this run before, and goes on for so many `seconds` at most.

    Raises ConfigError where there is none; what is damaged is left out, and named.
    """
    config, damage = read_config(run_dir), list[str]()
    wrong: dict[str, list[int]] = {metrics.METRICS: [], metrics.TIMINGS: []}
    numbers = reader.read(seconds) if reader is not None else read_numbers(run_dir, points, wrong)
    wrong = reader.damaged if reader is not None else wrong
    for name, lines in wrong.items():
        _tell(name, lines, damage)
    events, report = (
        _lines(run_dir / metrics.EVENTS, damage),
        _object(run_dir, damage, read_report),
    )
    return RunRecord(
        path=run_dir,
        config=config,
        plan=_plan(run_dir / metrics.PLAN, damage),
        numbers=numbers,
        events=events,
        report=report,
        data=_object(run_dir / metrics.DATA, damage),
        evaluation=_object(run_dir / metrics.EVALUATION, damage),
        verdict=_object(run_dir / metrics.VERDICT, damage),
        benchmarks=_object(run_dir / metrics.BENCHMARKS, damage),
        answers=_lines(run_dir / metrics.BEFORE_AFTER, damage),
        checkpoints=_checkpoints(run_dir / "checkpoints", damage),
        incidents=[*_incidents(run_dir, events, damage), *_runaway(report)],
        exit_status=read_exit_status(run_dir),
        damage=damage,
        load=_load(_lines(run_dir / metrics.LOAD, damage)),
        experts=_experts(run_dir / metrics.EXPERTS, damage),
    )


def _load(lines: Lines) -> Lines:
    """Looks at the machine; those that a later start went back behind are left out."""
    kept: Lines = []
    for line in lines:
        while kept and kept[-1]["step"] > line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def _lines(path: Path, damage: list[str]) -> Lines:
    wrong: list[int] = []
    lines = list(metrics.stream_lines(path, wrong))
    _tell(path.name, wrong, damage)
    return lines


def _tell(name: str, wrong: list[int], damage: list[str]) -> None:
    if wrong:
        damage.append(f"{name}: {jsonl.describe(wrong)} damaged and left out")


def _object(
    path: Path, damage: list[str], read: Callable[[Path], dict[str, Any]] = read_object
) -> dict[str, Any]:
    try:
        return read(path)
    except FileNotFoundError:
        return {}
    except EnvironmentFault as error:
        damage.append(str(error))
        return {}


def _experts(path: Path, damage: list[str]) -> ExpertLoad | None:
    try:
        return expert_load(_object(path, damage))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        damage.append(f"{path.name}: not what a run writes, and left out")
        return None


def _plan(path: Path, damage: list[str]) -> Plan | None:
    try:
        return Plan.read(path)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        damage.append(str(error))
        return None


def _checkpoints(root: Path, damage: list[str]) -> list[Checkpoint]:
    links: dict[str, list[str]] = {}
    for name in ("best", "last"):
        if (root / name).is_symlink():
            links.setdefault((root / name).resolve().name, []).append(name)
    found = []
    for step in steps(root.parent):
        folder = folder_of(root.parent, step)
        problem = verify(folder, thorough=False)
        if problem is None:
            size = sum(facts["bytes"] for facts in read_object(folder / MANIFEST)["files"].values())
            found.append(Checkpoint(step, size, tuple(links.get(folder.name, ()))))
        elif (folder / MANIFEST).exists():
            damage.append(f"checkpoint {folder.name} {problem}")
    return found


def _runaway(report: Mapping[str, Any]) -> list[Incident]:
    """The loss that ran away though all its numbers were finite, as the end of the run."""
    found = report.get("loss_runaway")
    if not isinstance(found, dict):
        return []
    detail = runaway_line(found).partition(": ")[2]
    return [Incident(report["finished"], "the loss ran away", detail, report.get("steps"), True)]


def _incidents(run_dir: Path, events: Lines, damage: list[str]) -> list[Incident]:
    """Every stop and every new start, with what is known of its cause."""
    found: list[Incident] = []
    is_running = has_failed = False
    for event in events:
        kind, time, code = event["event"], event["time"], event.get("code")
        if kind == "launch" and event.get("node", 0) == 0:
            if is_running:
                found.append(
                    Incident(
                        time,
                        "started again",
                        "the start before was cut off without a word",
                        None,
                        True,
                    )
                )
                has_failed = True
            is_running = True
        elif kind == "resume":
            text = f"from the checkpoint of step {event.get('step', 0):,}"
            found.append(Incident(time, "went on", text, event.get("step"), has_failed))
            has_failed = False
        elif kind == "exit" and event.get("node", 0) == 0:
            is_running = False
            if code:
                has_failed = code != errors.PREEMPTED
                what = f"ended with exit code {code}" if has_failed else "stopped"
                found.append(
                    Incident(time, what, event.get("reason", ""), event.get("step"), has_failed)
                )
    hang = _object(run_dir / heartbeat.HANG, damage)
    if hang.keys() >= {"rank", "phase", "seconds", "time", "step"}:
        detail = f"rank {hang['rank']} in {hang['phase']} for {hang['seconds']:.0f} s"
        found.append(Incident(hang["time"], "hung", detail, hang["step"], True))
    return sorted(found, key=lambda incident: incident.time)


def metric_keys(lines: list[dict[str, Any]]) -> list[str]:
    """Return the keys of all metrics in these evaluations, in the order in which they first occur."""
    keys: dict[str, None] = {}
    for line in lines:
        for key in line:
            if key.startswith("eval_"):
                keys[key] = None
    return list(keys)
