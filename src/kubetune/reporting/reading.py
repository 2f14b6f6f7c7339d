"""Read a run directory for a page: its numbers, events, data, checkpoints. Nothing is changed.

Everything but resolved.json may be missing: a run that has just started, or was cut off, has a page
too.
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
from kubetune.config.naming import model_label
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.plan.plan import Plan
from kubetune.reporting.expert_load import ExpertLoad, expert_load
from kubetune.reporting.numbers import NumbersReader, RunNumbers, read_numbers
from kubetune.rundir import heartbeat, metrics, shapes
from kubetune.rundir.checkpoints import MANIFEST, folder_of, linked, steps, verify
from kubetune.rundir.exit_status import ExitStatus, read_end, read_exit_status
from kubetune.rundir.labels import NO_LABELS, Labels, read_labels
from kubetune.rundir.outcome import alike, evaluation_of_best, numbers_of
from kubetune.rundir.report import read_report
from kubetune.rundir.totals import nothing_learnt_line, runaway_line

Lines = list[dict[str, Any]]

# Start of the key of the evaluation loss of one source: eval_loss/questions.jsonl
OF_SOURCE = "eval_loss/"

# Points of a curve on a page: about as many as it has pixels.
POINTS = 600


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    bytes: int
    links: tuple[str, ...]  # that lead to it: best, last


@dataclass(frozen=True)
class Incident:
    """Something that interrupted the run."""

    time: str
    what: str
    detail: str
    step: int | None = None  # where the run stopped, or from where it continued
    is_error: bool = False


@dataclass(frozen=True)
class RunRecord:
    """All that is known of one run."""

    path: Path
    config: Config
    plan: Plan | None
    numbers: RunNumbers
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
    base: Mapping[str, Any] = field(default_factory=dict)  # metrics of the model before training
    of_best: Mapping[str, Any] | None = None  # the evaluation of the checkpoint that its user gets
    labels: Labels = NO_LABELS  # name, note and tags that a user gave it
    ended: str | None = None  # when it ended, None if nothing recorded that
    damage: Sequence[str] = ()  # what is lost or damaged, and so not shown
    load: Lines = field(default_factory=list)  # of the machine of rank 0
    experts: ExpertLoad | None = None

    @property
    def machine(self) -> dict[str, Any]:
        """The machine of rank 0, as the last start described it; empty if none did."""
        # A later start may be on another machine.
        for event in reversed(self.events):
            machine = event.get("machine")
            if event["event"] in ("start", "resume"):
                return machine if isinstance(machine, dict) else {}
        return {}

    @property
    def evaluations(self) -> Lines:
        """The lines of metrics.jsonl that are evaluations."""
        return self.numbers.evaluations

    @property
    def measurements(self) -> Lines:
        """The evaluations, and before them, as one of step 0, the evaluation of the model before training, if there
        was one. A reward that is a sum of others than that of the checkpoint which its user gets is left out of it.
        """
        if not self.base:
            return self.evaluations
        base = alike(self.base, self.of_best or {})
        return [{"step": 0, "epoch": 0.0, **base}, *self.evaluations]

    @property
    def name(self) -> str:
        """The name that somebody gave it, else its run file's, else its folder's."""
        return self.labels.title or self.config.name or self.path.absolute().name

    @property
    def model(self) -> str:
        """The model, as people call it."""
        return model_label(self.config.model.path)


def read_run(
    run_dir: Path,
    points: int = POINTS,
    reader: NumbersReader | None = None,
    seconds: float = math.inf,
) -> RunRecord:
    """Return the record of a run. Its curves have at most `points` points.

    A `reader` has read numbers of this run before, and continues for at most `seconds`.

    Raise ConfigError if there is no run. Damaged records are left out, and named.
    """
    config = read_config(run_dir)
    if reader is None:
        damaged: dict[str, list[int]] = {metrics.METRICS: [], metrics.TIMINGS: []}
        numbers = read_numbers(run_dir, points, damaged)
    else:
        numbers = reader.read(seconds)
        damaged = reader.damaged

    files = _Files(run_dir)
    for name, line_numbers in damaged.items():
        files.note_damaged_lines(name, line_numbers)
    events = files.lines(metrics.EVENTS)
    report = files.object("report.json", lambda _: read_report(run_dir))
    return RunRecord(
        path=run_dir,
        config=config,
        plan=files.plan(),
        numbers=numbers,
        events=events,
        report=report,
        data=files.object(metrics.DATA),
        evaluation=files.object(metrics.EVALUATION),
        verdict=files.object(metrics.VERDICT),
        benchmarks=files.object(metrics.BENCHMARKS),
        answers=files.lines(metrics.BEFORE_AFTER),
        checkpoints=files.checkpoints(),
        incidents=_incidents(events, files.object(heartbeat.HANG)) + _went_wrong(report),
        exit_status=read_exit_status(run_dir),
        base=numbers_of(files.object(metrics.BASE)),
        of_best=evaluation_of_best(
            run_dir,
            reversed(numbers.evaluations),
            config.training.metric_for_best_model,
            greater=config.training.prefers_greater,
        ),
        ended=read_end(run_dir),
        labels=read_labels(run_dir),
        load=_without_repeated_steps(files.lines(metrics.LOAD)),
        experts=files.experts(),
        damage=files.damage,
    )


class _Files:
    """Reads the files of a run. A file that is missing is empty; damage is noted, not raised."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.damage: list[str] = []

    def lines(self, name: str) -> Lines:
        """Return the lines of a JSONL file."""
        # A run that is killed while it writes leaves half a line at the end.
        damaged: list[int] = []
        lines = list(metrics.stream_lines(self._run_dir / name, damaged))
        self.note_damaged_lines(name, damaged)
        return lines

    def note_damaged_lines(self, name: str, line_numbers: list[int]) -> None:
        """Note that lines of a file were left out, if there are any."""
        if line_numbers:
            self.damage.append(f"{name}: {jsonl.describe(line_numbers)} damaged and left out")

    def object(
        self,
        name: str,
        read: Callable[[Path], dict[str, Any]] = shapes.read,
    ) -> dict[str, Any]:
        """Return the object of a JSON file."""
        try:
            return read(self._run_dir / name)
        except FileNotFoundError:
            return {}
        except EnvironmentFault as error:
            self.damage.append(str(error))
            return {}

    def plan(self) -> Plan | None:
        """Return the plan."""
        try:
            return Plan.read(self._run_dir / metrics.PLAN)
        except FileNotFoundError:
            return None
        except ConfigError as error:
            self.damage.append(str(error))
            return None

    def experts(self) -> ExpertLoad | None:
        """Return the load of a mixture's experts."""
        return expert_load(self.object(metrics.EXPERTS))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints."""
        # `best` and `last` are links to the folders of steps, and may lead to the same one.
        links: dict[int | None, list[str]] = {}
        for name in ("best", "last"):
            links.setdefault(linked(self._run_dir, name), []).append(name)

        checkpoints = []
        for step in steps(self._run_dir):
            folder = folder_of(self._run_dir, step)
            # Only sizes: checksums of a large model take minutes.
            problem = verify(folder, thorough=False)
            if problem is None:
                files = read_object(folder / MANIFEST)["files"].values()
                size = sum(file["bytes"] for file in files)
                checkpoints.append(Checkpoint(step, size, tuple(links.get(step, ()))))
            # A folder without a manifest was never committed: it is no damage.
            elif (folder / MANIFEST).exists():
                self.damage.append(f"checkpoint {folder.name} {problem}")

        return checkpoints


def _without_repeated_steps(samples: Lines) -> Lines:
    """Return samples of the machine's load without samples of steps that a later start repeated.

    Steps 1 2 3 4, resumed from 2: 3 4 5 → 1 2 3 4 5
    """
    kept: Lines = []
    for sample in samples:
        # The work after this step was done again.
        while kept and kept[-1]["step"] > sample["step"]:
            kept.pop()
        kept.append(sample)
    return kept


def _went_wrong(report: Mapping[str, Any]) -> list[Incident]:
    """Return the end of a run that came to its last step, though its loss ran away or nothing was learned."""
    incidents = []
    for key, in_words in (("loss_runaway", runaway_line), ("nothing_learnt", nothing_learnt_line)):
        facts = report.get(key)
        if isinstance(facts, dict):
            # "the loss ran away: 9.3 over the last 50 steps, …" is a title, and what is after the colon.
            title, _, detail = in_words(facts).partition(": ")
            time = report.get("finished", "")
            incidents.append(Incident(time, title, detail, report.get("steps"), True))
    return incidents


def _incidents(events: Lines, hang: Mapping[str, Any]) -> list[Incident]:
    """Return every stop and every new start in order of time, with what is known of its cause."""
    incidents = []
    is_running = False
    has_failed = False
    for event in events:
        kind = event["event"]
        time = event["time"]
        # Each node launches and exits; node 0 stands for all.
        of_node_0 = event.get("node", 0) == 0
        if kind == "launch" and of_node_0:
            # Two launches without an exit between them: the machine went down, or the agent was killed.
            if is_running:
                detail = "the start before was cut off, and wrote no reason"
                incidents.append(Incident(time, "started again", detail, is_error=True))
                has_failed = True
            is_running = True
        elif kind == "resume":
            detail = f"from the checkpoint of step {event.get('step', 0):,}"
            incidents.append(Incident(time, "went on", detail, event.get("step"), has_failed))
            has_failed = False
        elif kind == "exit" and of_node_0:
            is_running = False
            code = event.get("code")
            # A run that ended well (0) was not interrupted; one that was preempted has not failed.
            if code:
                has_failed = code != errors.PREEMPTED
                what = f"ended with exit code {code}" if has_failed else "stopped"
                detail = event.get("reason", "")
                incidents.append(Incident(time, what, detail, event.get("step"), has_failed))

    # hang.json is written before the rank is ended, and may be of an older version of kubetune.
    if hang.keys() >= {"rank", "phase", "seconds", "time", "step"}:
        detail = f"rank {hang['rank']} in {hang['phase']} for {hang['seconds']:.0f} s"
        incidents.append(Incident(hang["time"], "hung", detail, hang["step"], True))
    return sorted(incidents, key=lambda incident: incident.time)


def metric_keys(lines: list[dict[str, Any]]) -> list[str]:
    """Return the keys of all metrics in these evaluations, in the order in which they first occur."""
    # A dict keeps the order of its keys, and has each once.
    keys: dict[str, None] = {}
    for line in lines:
        for key in line:
            if key.startswith("eval_"):
                keys[key] = None
    return list(keys)
