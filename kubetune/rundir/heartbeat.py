"""Ends a rank that makes no progress, and says where it hung: hang.json names rank, phase, step and Python stack.

A hung rank would keep all others waiting, and paid for, until somebody looks. The loop calls `beat` wherever it gets
to; a thread looks how long ago that was. Not for ranks that die, which the others notice by themselves.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.rundir import exit_status, metrics

HANG = "hang.json"
WAITING_SECONDS = 2.0
"""Patience added for a rank that only waits for others, so that the one they wait for explains itself first."""

_BEAT_SECONDS = 2.0
"""Time between two notes of where this rank is, which `kubetune watch` reads."""

_FROZEN_FOR_SECONDS = 10.0
"""Silence of a killed rank after which its death is no surprise: others note where they are every two seconds."""

_FROZEN_SECONDS = 2.0
"""Patience added before a rank whose interpreter does not even let this thread run is ended from outside of it."""


@dataclass(frozen=True)
class Beat:
    """Last sign of life of this process: completed steps, and `since` on the monotonic clock."""

    phase: str
    step: int
    since: float
    is_waiting: bool = False
    added_seconds: float = 0.0


@dataclass(frozen=True)
class _Notes:
    """Owner of this process's file of beats, and the phases that it has noted."""

    run_dir: Path
    rank: int
    phases: set[str]


_last = Beat("starting", 0, time.monotonic())
_notes: _Notes | None = None
_noting = threading.Lock()


def beat(phase: str, step: int | None = None) -> None:
    """This process has got to `phase`, after `step` completed steps where that is news.

    A phase is noted when it comes for the first time, so that one that never ends is named; later the watchdog notes
    it, every two seconds, because steps are many.
    """
    global _last
    _last = Beat(phase, _last.step if step is None else step, time.monotonic())
    if _notes is not None and phase not in _notes.phases:
        _notes.phases.add(phase)
        _note_beat(_notes.run_dir, _notes.rank)
    fault_injection.reach(phase)


@contextmanager
def waiting(added_seconds: float = WAITING_SECONDS) -> Iterator[None]:
    """In here this process waits for the other ranks, with more patience by so much."""
    global _last
    before = _last
    _last = Beat(
        before.phase, before.step, time.monotonic(), is_waiting=True, added_seconds=added_seconds
    )
    yield
    _last = Beat(before.phase, before.step, time.monotonic())


@contextmanager
def watch(run_dir: Path, rank: int, timeout_seconds: float) -> Iterator[None]:
    """End this process with LOST_PEER, and leave hang.json, when no beat comes for `timeout_seconds`."""
    global _notes, _last
    if rank == 0:
        (run_dir / HANG).unlink(missing_ok=True)
    done, stacks = threading.Event(), run_dir / "logs" / f"rank-{rank}.frozen.txt"
    _last, _notes = Beat("joining", 0, time.monotonic()), _Notes(run_dir, rank, set())
    with files.explained_writes(
        stacks
    ):  # and no longer: what goes wrong in the run has another cause
        frozen = open(stacks, "w")  # noqa: SIM115
    with frozen:
        arguments = (done, run_dir, rank, timeout_seconds, frozen.fileno())
        _rearm(timeout_seconds, frozen.fileno())  # the thread may never get its first turn
        thread = threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            _notes = None
            done.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            stacks.unlink(missing_ok=True)
            _beat_path(run_dir, rank).unlink(missing_ok=True)


def read_beats(run_dir: Path) -> list[dict[str, Any]]:
    """Last beat of each rank: rank, phase, step, whether it waits for others, and since when."""
    found = []
    for path in (run_dir / "logs").glob("rank-*.beat.json"):
        try:
            beat = files.read_object(path)
        except (OSError, errors.EnvironmentFault):
            continue  # it has ended just now, or writes in this moment
        numbers = all(
            isinstance(beat.get(name), (int, float)) for name in ("rank", "step", "since", "time")
        )
        if numbers and isinstance(beat.get("phase"), str) and "waiting" in beat:
            found.append(beat)
    return sorted(found, key=lambda beat: int(beat["rank"]))


def find_frozen(
    run_dir: Path, deaths: Sequence[exit_status.Death], since: float
) -> dict[int, exit_status.ExitStatus]:
    """Exit status of ranks that were killed when they had not been heard of for long; hang.json tells of them.

    A process that the kernel has stopped cannot even run its own watchdog, so its last note must do. `since`: when this
    start began, in seconds since the epoch; an older note is that of an earlier one.
    """
    killed = {death.rank: death.seen for death in deaths if death.was_killed}
    found = {}
    for last in read_beats(run_dir):
        silent = killed.get(last["rank"], 0.0) - last["time"]
        if last["time"] < since or silent < _FROZEN_FOR_SECONDS:
            continue
        still = (
            f"rank {last['rank']} was killed when its process had stood still for {silent:.0f} s"
        )
        where = f"{last['phase']} after step {last['step']}"
        reason = f"{still}, last seen in {where} (was it stopped, or short of memory?)"
        found[last["rank"]] = exit_status.ExitStatus(
            errors.LOST_PEER, f"{reason}; see {HANG}", last["step"], errors.RankDied.__name__
        )
        facts = {name: last[name] for name in ("rank", "phase", "waiting", "step")}
        told = {
            **facts,
            "seconds": silent,
            "time": metrics.now(),
            "stack": f"none: {reason}\n",
            "threads": {},
        }
        with suppress(errors.EnvironmentFault):
            files.write_atomic(run_dir / HANG, json.dumps(told, indent=2) + "\n", within=run_dir)
    return found


def _note_beat(run_dir: Path, rank: int) -> None:
    """Leave the last beat in a file. Of no use after a crash, so it need not be durable, and a full disk is no harm."""
    path = _beat_path(run_dir, rank)
    temporary = files.temporary_sibling(path)
    with _noting:  # the loop's thread notes, and the watchdog's
        last, now = _last, time.time()
        facts = {
            "rank": rank,
            "phase": last.phase,
            "waiting": last.is_waiting,
            "step": last.step,
            "since": now - (time.monotonic() - last.since),
            "time": now,
        }
        try:
            temporary.write_text(json.dumps(facts))
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _beat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.beat.json"


def _rearm(timeout_seconds: float, frozen: int) -> None:
    # Python's own timer needs no interpreter: it strikes where a C call never gives back the lock of it.
    faulthandler.dump_traceback_later(timeout_seconds + _FROZEN_SECONDS, exit=True, file=frozen)


def _watch(
    done: threading.Event, run_dir: Path, rank: int, timeout_seconds: float, frozen: int
) -> None:
    _note_beat(run_dir, rank)
    noted = time.monotonic()
    while not done.wait(min(1.0, timeout_seconds / 10)):
        if time.monotonic() - noted >= _BEAT_SECONDS:
            noted = time.monotonic()
            _note_beat(run_dir, rank)
        _rearm(timeout_seconds, frozen)
        last, silent = _last, time.monotonic() - _last.since
        if silent > timeout_seconds + last.added_seconds:
            _give_up(run_dir, rank, last, silent)


def _give_up(run_dir: Path, rank: int, last: Beat, silent: float) -> None:
    frames = sys._current_frames()
    stack = "".join(traceback.format_stack(frames[threading.main_thread().ident or 0]))
    # Where the main thread only waits for another, as for a checkpoint written beside the loop, that one tells more.
    others = {
        thread.name: "".join(traceback.format_stack(frames[thread.ident or 0]))
        for thread in threading.enumerate()
        if thread.ident in frames
        and thread not in (threading.main_thread(), threading.current_thread())
    }
    doing = (
        f"waited for other ranks in {last.phase}" if last.is_waiting else f"hung in {last.phase}"
    )
    reason = f"rank {rank} {doing} for {silent:.0f} s after step {last.step}; see {HANG}"
    facts = {
        "rank": rank,
        "phase": last.phase,
        "waiting": last.is_waiting,
        "step": last.step,
        "seconds": silent,
    }
    try:
        # To the file descriptor: the main thread may have been stopped in the middle of a print.
        os.write(2, f"kubetune: {reason}\n{stack}".encode())
        # A rank that only waited is not the one that hung.
        error = errors.LostPeer if last.is_waiting else errors.RankDied
        exit_status.write_rank_exit_status(
            run_dir,
            rank,
            exit_status.ExitStatus(errors.LOST_PEER, reason, last.step, error.__name__),
        )
        if not (last.is_waiting and (run_dir / HANG).exists()):
            written = {**facts, "time": metrics.now(), "stack": stack, "threads": others}
            files.write_atomic(run_dir / HANG, json.dumps(written, indent=2) + "\n", within=run_dir)
    finally:
        # The main thread cannot be asked to leave: it is what hangs.
        os._exit(errors.LOST_PEER)
