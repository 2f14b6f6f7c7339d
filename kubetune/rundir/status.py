"""State of a run at this moment, read from its run directory and its machine: what `kubetune watch` shows.

The same on a laptop and, by cluster/in_pod, in a pod; asks no API server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kubetune.base import files, jsonl
from kubetune.base.files import IrregularFileError
from kubetune.base.gpus import gpu_use
from kubetune.config.metric_names import EXPERT_MEASURES, PREFERENCE_MEASURES
from kubetune.errors import EnvironmentFault, only_followed
from kubetune.rundir import checkpoints, exit_status, heartbeat, metrics
from kubetune.rundir.checkpoints import STATE

# What scrolls; in a cluster it comes over the network every few seconds.
_LOG_LINES = 300
_LOG_BYTES = 32 * 1024
_POINTS = 320
_SILENT_SECONDS = 30


def read_status(run_dir: Path, log_rank: int = 0) -> dict[str, Any]:
    """`progress` with recent losses and speeds, ranks, GPUs of this node and the last lines of one rank's log.

    `verdict` is that of the best checkpoint without its answers, empty before there is one.
    `ranks` tell how many seconds ago each said where it is, by the clock of this machine.
    """
    steps = [line for line in metrics.last_lines(run_dir / metrics.METRICS) if "loss" in line][
        -_POINTS:
    ]
    timings = metrics.last_lines(run_dir / metrics.TIMINGS)[-_POINTS:]
    start = metrics.last_start(metrics.read_events(run_dir))
    verdict: dict[str, Any] = {}
    with suppress(EnvironmentFault):  # where it is damaged, the page on the run says so
        verdict = metrics.read_verdict(run_dir)
    return {
        "progress": progress(run_dir),
        "losses": [line["loss"] for line in steps],
        "learning_rate": steps[-1].get("learning_rate") if steps else None,
        "grad_norm": steps[-1].get("grad_norm") if steps else None,
        "loss_steps": [steps[0]["step"], steps[-1]["step"]] if steps else None,
        "speeds": [line["tokens_per_second"] for line in timings if "tokens_per_second" in line],
        "rank_seconds": timings[-1].get("rank_seconds") or [] if timings else [],
        "peak_memory_bytes": timings[-1].get("peak_memory_bytes") if timings else None,
        "flops_per_token": start.get("flops_per_token"),
        "peak_tflops": start.get("peak_tflops"),
        "verdict": {key: verdict.get(key) for key in ("step", "base", "best", "answers")}
        if verdict
        else {},
        "ranks": ranks(run_dir),
        "gpus": gpu_use(),
        "log": log_lines(run_dir, log_rank),
        "log_rank": log_rank,
        "log_ranks": sorted(
            int(number)
            for path in (run_dir / "logs").glob("rank-*.log")
            if (number := path.stem.removeprefix("rank-")).isdecimal()
        ),
    }


def ranks(run_dir: Path, beats: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Place of each rank in the run, and how many seconds ago it said so. `beats`: its beats, if they were read."""
    now = time.time()
    return [
        {
            "rank": beat["rank"],
            "phase": beat["phase"],
            "waiting": beat["waiting"],
            "step": beat["step"],
            "phase_seconds": max(0.0, beat["time"] - beat["since"]),
            "silent_seconds": max(0.0, now - beat["time"]),
        }
        for beat in (heartbeat.read_beats(run_dir) if beats is None else beats)
    ]


def state_of(
    exit_facts: Mapping[str, Any] | None, ranks: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """State of a run of this machine and why: `running`, `waiting`, `done`, `stopped` or `failed`.

    `exit_facts` are `progress`'s exit_status, `ranks` those of `ranks`.
    """
    if exit_facts is None:
        silent = min((rank["silent_seconds"] for rank in ranks), default=None)
        if silent is not None and silent < _SILENT_SECONDS:
            return "running", ""
        return "waiting", "no rank has said where it is: it starts, has just ended, or was cut off"
    ended = exit_status.ExitStatus(**exit_facts)
    return ended.state, "" if ended.reason == exit_status.DONE else ended.reason


def log_lines(run_dir: Path, rank: int, count: int = _LOG_LINES) -> list[str]:
    """The last lines of a rank's log; what is wrong with it where it is no file of the run directory."""
    try:
        return last_lines(run_dir / "logs" / f"rank-{rank}.log", count, run_dir)
    except IrregularFileError as error:
        return [f"kubetune: {error}"]


def last_lines(path: Path, count: int = _LOG_LINES, folder: Path | None = None) -> list[str]:
    """The last lines of a text file; none when it is not there. `folder`: that which it must lie in."""
    return [
        line.decode(errors="replace").rstrip("\r\n")
        for line in jsonl.last_lines(path, _LOG_BYTES, folder)[-count:]
    ]


_STEPS_FOR_SPEED = 20


def progress(
    run_dir: Path,
    events: Sequence[dict[str, Any]] | None = None,
    beats: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Progress of the run in this directory. Keys that nothing is known about yet are None.

    `events`, `beats`: those of the run, where somebody has read them already.
    """
    # Lists of runs ask this of thousands: no line is parsed that is not needed.
    numbers = metrics.newest_with(run_dir / metrics.METRICS, ("loss", "eval_loss"))
    newest, evaluation = numbers["loss"] or {}, numbers["eval_loss"]
    timings = metrics.last_lines(run_dir / metrics.TIMINGS, _STEPS_FOR_SPEED)
    events = metrics.read_events(run_dir) if events is None else events
    beats = heartbeat.read_beats(run_dir) if beats is None else beats
    plan = _plan(run_dir)
    step = newest.get("step")
    # A start that is still preparing does not know it yet; the one before it did.
    known = [
        event["steps"]
        for event in events
        if event["event"] in ("start", "resume") and event.get("steps")
    ]
    total = plan.get("num_steps") or (known[-1] if known else None)
    seconds = sum(line["seconds"] for line in timings) / len(timings) if timings else None
    status, saved = exit_status.read_exit_status(run_dir), _newest_checkpoint(run_dir)
    return {
        "starting": _is_starting(events),
        "phase": beats[0]["phase"] if beats else None,
        "step": step,
        "steps": total,
        "loss": newest.get("loss"),
        "measures": {name: newest[name] for name in PREFERENCE_MEASURES if name in newest},
        "experts": {name: newest[name] for name in EXPERT_MEASURES if name in newest},
        "tokens_per_second": timings[-1].get("tokens_per_second") if timings else None,
        "seconds_left": (total - step) * seconds
        if total and step is not None and seconds
        else None,
        "evaluation": evaluation,
        "saved_step": saved,
        "best": _best(run_dir, saved),
        "restarts": max(
            0, sum(event["event"] == "launch" and event.get("node") == 0 for event in events) - 1
        ),
        "last_exit": _cause(events),
        "exit_status": asdict(status) if status else None,
    }


def _is_starting(events: Sequence[dict[str, Any]]) -> bool:
    """True if the newest start has not come to training yet: what is known of speed is of the one before."""
    begins = [event["event"] for event in events if event["event"] in ("launch", "start", "resume")]
    return begins[-1:] == ["launch"]


def _cause(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the exits of the last start that failed on some node, the one that brought the others about."""
    exits: list[dict[str, Any]] = []
    for event in reversed(events):
        if event["event"] == "exit" and event.get("code"):
            exits.insert(0, event)
        elif event["event"] == "launch" and exits:
            break
    # The first of those that did not only lose a peer, or were told to stop because another did.
    return min(
        exits, key=lambda event: only_followed(event["code"], event.get("error")), default=None
    )


def _plan(run_dir: Path) -> dict[str, Any]:
    """plan.json; nothing where it is missing or damaged, which is no reason to know nothing at all."""
    try:
        return files.read_object(run_dir / metrics.PLAN)
    except (FileNotFoundError, EnvironmentFault):
        return {}


def _newest_checkpoint(run_dir: Path) -> int | None:
    whole = (
        step
        for step in reversed(checkpoints.steps(run_dir))
        if (checkpoints.folder_of(run_dir, step) / checkpoints.MANIFEST).exists()
    )
    return next(whole, None)


def _best(run_dir: Path, saved: int | None) -> dict[str, Any] | None:
    """`step` and `value` of the best evaluation that the newest checkpoint knows, by metric_for_best_model."""
    with suppress(FileNotFoundError, EnvironmentFault):
        step = run_dir / "checkpoints" / f"step-{saved or 0:06d}"
        state = files.read_object(step / STATE, run_dir)
        if state.get("best_step") is not None:
            return {"step": state["best_step"], "value": state.get("best_value")}
    return None
