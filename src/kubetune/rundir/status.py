"""The state of a run at this moment, read from its run directory and its machine: what `kubetune watch` shows.

It is the same on a laptop and in a pod (k8s/cluster/in_pod), and asks no API server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from kubetune.base import files, jsonl
from kubetune.base.files import IrregularFileError
from kubetune.base.gpus import gpu_use
from kubetune.base.humanize import duration, thinned
from kubetune.config.metric_names import (
    DRAWN_MEASURES,
    EXPERT_MEASURES,
    PREFERENCE_MEASURES,
    TELLING,
)
from kubetune.errors import EnvironmentFault, only_followed
from kubetune.rundir import checkpoints, exit_status, heartbeat, metrics, shapes, waits
from kubetune.rundir.checkpoints import STATE

# Limits of what a view holds. On a cluster it comes over the network every few seconds.
_LOG_LINES = 300
_LOG_BYTES = 32 * 1024
_CELLS = 60  # of a curve on a terminal
_SILENT_SECONDS = 30
# States of a run that has not ended, as far as is known.
LIVE = ("starting", "running", "waiting")
# A start that has written nothing for longer than this counts as dead.
_STARTING_SECONDS = 600
_STEPS_FOR_SPEED = 20


def read_status(run_dir: Path, log_rank: int = 0) -> dict[str, Any]:
    """Return `progress`, curves of the whole run, ranks, GPUs of this node and the last lines of one rank's log.

    `numbers` and `timing`: the lines of the newest step in metrics.jsonl and timings.jsonl, empty before there is one.
    """
    steps = []
    for line in metrics.last_lines(run_dir / metrics.METRICS):
        # Lines of evaluations lie between those of steps.
        if "loss" in line:
            steps.append(line)
    timings = metrics.last_lines(run_dir / metrics.TIMINGS, 1)
    return {
        "progress": progress(run_dir),
        "curves": curves(run_dir),
        "numbers": steps[-1] if steps else {},
        "timing": timings[-1] if timings else {},
        "ranks": ranks(run_dir),
        "gpus": gpu_use(),
        "log": log_lines(run_dir, log_rank),
        "log_rank": log_rank,
        "log_ranks": _ranks_with_logs(run_dir),
    }


def curves(run_dir: Path, cells: int = _CELLS) -> dict[str, list[float | None]]:
    """Return what tells best how the run goes at its task, then its loss, in at most `cells` points: name -> values."""
    # Several lines for each point, as evaluations lie between those of steps.
    lines = jsonl.sample(run_dir / metrics.METRICS, 5 * cells)
    result = {}
    for name in (*TELLING, "loss"):
        values = [line[name] for line in lines if metrics.is_number(line.get(name))]
        if len(values) > 1:
            result[name] = thinned(values, cells)
    return result


def _ranks_with_logs(run_dir: Path) -> list[int]:
    numbers = []
    for path in (run_dir / "logs").glob("rank-*.log"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal():
            numbers.append(int(number))
    return sorted(numbers)


def ranks(run_dir: Path, beats: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return where each rank is, and how many seconds ago it wrote that. `beats`: its heartbeats, if they were read."""
    if beats is None:
        beats = heartbeat.read_beats(run_dir)
    now = time.time()
    facts = []

    # Clocks of nodes differ by a little, so that a beat may come from the future.
    for beat in beats:
        facts.append(
            {
                "rank": beat["rank"],
                "phase": beat["phase"],
                "waiting": beat["waiting"],
                "step": beat["step"],
                "phase_seconds": max(0.0, beat["time"] - beat["since"]),
                "silent_seconds": max(0.0, now - beat["time"]),
            }
        )
    return facts


def state_of(
    exit_facts: Mapping[str, Any] | None,
    ranks: Sequence[Mapping[str, Any]],
    launched: str | None = None,
    waits_for: str | None = None,
) -> tuple[str, str]:
    """Return the state of a run of this machine and why.

    It is `starting`, `running`, `waiting`, `done`, `stopped` or `failed`. `exit_facts`, `launched` and `waits_for` are
    `progress`'s, `ranks` those of `ranks`.
    """
    if exit_facts is None:
        if waits_for is not None:
            return "waiting", waits_for
        # One rank that speaks is enough: the others may be waiting for it in a collective.
        silent = min((rank["silent_seconds"] for rank in ranks), default=None)
        if silent is not None and silent < _SILENT_SECONDS:
            return "running", ""
        if launched is not None and _seconds_since(launched) < _STARTING_SECONDS:
            return "starting", "it prepares data and loads the model"
        if silent is None:
            return "waiting", "it never came to training: it waits for its turn, or was cut off"
        return (
            "waiting",
            f"nothing heard for {duration(silent)}: it was cut off, or cannot be seen from here",
        )

    ended = exit_status.ExitStatus(**exit_facts)
    reason = ended.reason
    if reason == exit_status.DONE:
        reason = ""
    return ended.state, reason


def log_lines(run_dir: Path, rank: int, count: int = _LOG_LINES) -> list[str]:
    """Return the last lines of a rank's log, or what is wrong with it if it is no file of the run directory."""
    try:
        return last_lines(run_dir / "logs" / f"rank-{rank}.log", count, run_dir)
    except IrregularFileError as error:
        return [f"kubetune: {error}"]


def last_lines(path: Path, count: int = _LOG_LINES, folder: Path | None = None) -> list[str]:
    """Return the last lines of a text file, none if it is missing. `folder`: the one that it must lie in."""
    lines = jsonl.last_lines(path, _LOG_BYTES, folder)
    texts = []
    for line in lines[-count:]:
        # What a library prints need not be UTF-8, and the first line may begin within a character.
        text = line.decode(errors="replace")
        texts.append(text.rstrip("\r\n"))
    return texts


def progress(
    run_dir: Path,
    events: Sequence[dict[str, Any]] | None = None,
    beats: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return how far the run in this directory is. A key is None while nothing is known about it.

    `events`, `beats`: those of the run, if the caller has read them already.
    """
    if events is None:
        events = metrics.read_events(run_dir)
    if beats is None:
        beats = heartbeat.read_beats(run_dir)

    # A list of runs calls this for thousands of them, so only the needed lines are parsed.
    newest = metrics.newest_with(run_dir / metrics.METRICS, ("loss", metrics.OF_EVALUATION))
    training = newest["loss"] or {}
    timings = metrics.last_lines(run_dir / metrics.TIMINGS, _STEPS_FOR_SPEED)
    step = training.get("step")
    steps = planned_steps(run_dir, events)
    status = exit_status.read_exit_status(run_dir)
    saved = _newest_checkpoint(run_dir)

    # Rank 0's phase stands for that of the run.
    phase = None
    if beats:
        phase = beats[0]["phase"]
    tokens_per_second = None
    if timings:
        tokens_per_second = timings[-1].get("tokens_per_second")
    exit_facts = None
    if status:
        exit_facts = asdict(status)

    return {
        "starting": _is_starting(events),
        "launched": launched_at(events),
        "waits_for": waits.read(run_dir),
        "phase": phase,
        "step": step,
        "steps": steps,
        "loss": training.get("loss"),
        "measures": _present(training, (*PREFERENCE_MEASURES, *DRAWN_MEASURES)),
        "experts": _present(training, EXPERT_MEASURES),
        "tokens_per_second": tokens_per_second,
        "seconds_left": _seconds_left(step, steps, timings),
        "evaluation": newest[metrics.OF_EVALUATION],
        "saved_step": saved,
        "best": _best(run_dir, saved),
        "restarts": _restarts(events),
        "last_exit": _cause(events),
        "exit_status": exit_facts,
    }


def planned_steps(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of steps of the whole run."""
    steps = _plan(run_dir).get("num_steps")
    if isinstance(steps, int) and steps:
        return steps
    # A start that is still preparing has none in its plan yet. An earlier one may have had.
    for event in reversed(events):
        if event["event"] in ("start", "resume") and event.get("steps"):
            return int(event["steps"])
    return None


def _seconds_left(
    step: int | None, steps: int | None, timings: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the seconds until the last step, at the mean speed of the latest ones."""
    if step is None or not steps:
        return None
    seconds = sum(line["seconds"] for line in timings)
    if not seconds:
        return None
    return (steps - step) * float(seconds / len(timings))


def _restarts(events: Sequence[Mapping[str, Any]]) -> int:
    """Return how often the run was started again; each start has one launch on node 0."""
    launches = 0
    for event in events:
        if event["event"] == "launch" and event.get("node") == 0:
            launches += 1
    return max(0, launches - 1)


def _present(line: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: line[name] for name in names if name in line}


def _is_starting(events: Sequence[dict[str, Any]]) -> bool:
    """True if the newest start has not come to training yet: what is known of speed is of the one before."""
    # Each start writes `launch`, and once it trains `start` or, from a checkpoint, `resume`:
    #     launch start launch          the second start is still preparing
    #     launch start launch resume   it trains
    for event in reversed(events):
        if event["event"] in ("launch", "start", "resume"):
            return bool(event["event"] == "launch")
    return False


def launched_at(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return when the newest start began, if it has not come to training yet."""
    for event in reversed(events):
        if event["event"] in ("start", "resume"):
            return None
        if event["event"] == "launch":
            return str(event["time"])
    return None


def _seconds_since(time_text: str) -> float:
    return time.time() - datetime.fromisoformat(time_text).timestamp()


def _cause(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the exit that caused the others, among the failed exits of the last start that failed."""
    # Go back to the launch before the newest failed exits: each node has written one.
    exits: list[dict[str, Any]] = []
    for event in reversed(events):
        if event["event"] == "exit" and event.get("code"):
            exits.insert(0, event)
        elif event["event"] == "launch" and exits:
            break

    # Nodes that lost a peer, or were stopped because another node ended, only followed. Of the others, the first.
    for event in exits:
        if not only_followed(event["code"], event.get("error")):
            return event
    return exits[0] if exits else None


def _plan(run_dir: Path) -> dict[str, Any]:
    """Return plan.json. Empty if it is missing or damaged, since the other files still tell something."""
    try:
        return shapes.read(run_dir / metrics.PLAN)
    except (FileNotFoundError, EnvironmentFault):
        return {}


def _newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint. The manifest is the last file that is written of it."""
    for step in reversed(checkpoints.steps(run_dir)):
        if (checkpoints.folder_of(run_dir, step) / checkpoints.MANIFEST).exists():
            return step
    return None


def _best(run_dir: Path, saved: int | None) -> dict[str, Any] | None:
    """Return `step` and `value` of the best evaluation that the newest checkpoint knows, by metric_for_best_model."""
    with suppress(FileNotFoundError, EnvironmentFault):
        folder = run_dir / "checkpoints" / f"step-{saved or 0:06d}"
        state = files.read_object(folder / STATE, run_dir)
        step = state.get("best_step")
        value = state.get("best_value")
        if isinstance(step, int) and (value is None or metrics.is_number(value)):
            return {"step": step, "value": value}
    return None
