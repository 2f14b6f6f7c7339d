"""End a rank that makes no progress, and write where it hung: hang.json has rank, phase, step and Python stack.

A hung rank would keep all others waiting, and paid for, until somebody looks. Three clocks watch a rank, each for
what the one before cannot see; with `training.timeout_seconds` of 1,800:

    1,800 s   this module's thread: no `beat` of the loop for so long. It writes hang.json and ends the process.
    1,802 s   Python's faulthandler: the thread itself gets no turn, as some C code holds the interpreter.
    later     the agent (`find_frozen`): the kernel has stopped the whole process. Its last note on disk says where.

Not for ranks that die, which the others notice by themselves.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.rundir import exit_status, metrics

HANG = "hang.json"

# Added to the timeout of a rank that only waits for others, so that the one they wait for ends first.
WAITING_SECONDS = 2.0

# Time between two notes of where this rank is, which `kubetune watch` reads.
_BEAT_SECONDS = 2.0

# A rank that was killed after such a silence had stood still before: ranks note where they are every two seconds.
_FROZEN_FOR_SECONDS = 10.0

# Added to the timeout before faulthandler ends a rank whose interpreter does not even let this module's thread run.
_FROZEN_SECONDS = 2.0


@dataclass(frozen=True)
class Beat:
    """Last sign of life of this process."""

    phase: str
    step: int  # completed steps
    since: float  # on the monotonic clock
    is_waiting: bool = False  # True while it waits for other ranks
    added_seconds: float = 0.0  # added to the timeout


# Names of files that say only that a rank lives. They change all the time and go with it.
BEATS = "rank-*.beat.json"


@dataclass(frozen=True)
class _Notes:
    """This process's file of beats."""

    run_dir: Path
    rank: int
    phases: set[str]  # those that were noted


_last = Beat("starting", 0, time.monotonic())
_busy_alone = 0  # blocks of `busy_alone` that are being run
_notes: _Notes | None = None
_noting = threading.Lock()


def beat(phase: str, step: int | None = None) -> None:
    """Say that this process has come to `phase`, after `step` completed steps if that has changed.

    A phase is written to disk when it comes for the first time, so that one that never ends is named. Later the
    watchdog writes it every two seconds, because steps are many.
    """
    global _last
    if step is None:
        step = _last.step
    _last = Beat(phase, step, time.monotonic())
    if _notes is not None and phase not in _notes.phases:
        _notes.phases.add(phase)
        _note_beat(_notes.run_dir, _notes.rank)
    fault_injection.reach(phase)


@contextmanager
def waiting(added_seconds: float = WAITING_SECONDS) -> Iterator[None]:
    """Say that this process waits for other ranks while the block runs, and add to its timeout."""
    global _last
    before = _last
    _last = Beat(
        before.phase, before.step, time.monotonic(), is_waiting=True, added_seconds=added_seconds
    )
    yield
    _last = Beat(before.phase, before.step, time.monotonic())


@contextmanager
def busy_alone() -> Iterator[None]:
    """Say that this rank does something that needs no other rank, such as writing a checkpoint, while the block runs.

    If other ranks are lost, it may end that. Any thread may call this.
    """
    global _busy_alone
    with _noting:
        _busy_alone += 1
    try:
        yield
    finally:
        with _noting:
            _busy_alone -= 1


def is_busy_alone(run_dir: Path, ranks: Collection[int]) -> bool:
    """True if one of the ranks has said within the last seconds that it is busy with what needs no other rank."""
    for beat in read_beats(run_dir):
        is_fresh = time.time() - beat["time"] < _FROZEN_FOR_SECONDS
        if beat["rank"] in ranks and is_fresh and beat.get("alone"):
            return True
    return False


@contextmanager
def watch(run_dir: Path, rank: int, timeout_seconds: float) -> Iterator[None]:
    """End this process with LOST_PEER, and leave hang.json, if no beat comes for `timeout_seconds`."""
    global _notes, _last
    if rank == 0:
        (run_dir / HANG).unlink(missing_ok=True)
    done = threading.Event()
    stacks = run_dir / "logs" / f"rank-{rank}.frozen.txt"
    _last = Beat("joining", 0, time.monotonic())
    _notes = _Notes(run_dir, rank, set())
    # Only the opening is explained as a write that failed: errors in the block have another cause.
    with files.explained_writes(stacks):
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
    """Return the last beat of each rank: `rank`, `phase`, `step`, `waiting`, `since`, `time`."""
    beats = []
    for path in (run_dir / "logs").glob(BEATS):
        beat = _read(path)
        if beat is not None:
            beats.append(beat)
    return sorted(beats, key=lambda beat: int(beat["rank"]))


def read_beat(run_dir: Path, rank: int) -> dict[str, Any] | None:
    """Return the last beat of one rank, None if it has none that can be read."""
    return _read(_beat_path(run_dir, rank))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        beat = files.read_object(path)
    except (OSError, errors.EnvironmentFault):
        return None  # the rank has ended just now, or writes at this moment
    numbers = [beat.get(name) for name in ("rank", "step", "since", "time")]
    has_numbers = all(isinstance(number, (int, float)) for number in numbers)
    if has_numbers and isinstance(beat.get("phase"), str) and "waiting" in beat:
        return beat
    return None


def find_frozen(
    run_dir: Path, deaths: Sequence[exit_status.Death], since: float
) -> dict[int, exit_status.ExitStatus]:
    """Return the exit status of ranks that were killed after a long silence, and write hang.json of them.

    A process that the kernel has stopped cannot run its own watchdog, so its last note must do. `since`: when this
    start began, in seconds since the epoch; an older note is that of an earlier start.
    """
    # A rank that was killed soon after its last note died of it; one with an old note had stood still.
    killed = {death.rank: death.seen for death in deaths if death.was_killed}
    statuses = {}
    for beat in read_beats(run_dir):
        rank = beat["rank"]
        silent = killed.get(rank, 0.0) - beat["time"]
        if beat["time"] < since or silent < _FROZEN_FOR_SECONDS:
            continue
        reason = (
            f"rank {rank} was killed when its process had stood still for {silent:.0f} s, "
            f"last seen in {beat['phase']} after step {beat['step']} "
            "(was it stopped, or short of memory?)"
        )
        statuses[rank] = exit_status.ExitStatus(
            errors.LOST_PEER, f"{reason}; see {HANG}", beat["step"], errors.RankDied.__name__
        )
        with suppress(errors.EnvironmentFault):
            _write_hang(run_dir, beat, silent, stack=f"none: {reason}\n", threads={})
    return statuses


def _write_hang(
    run_dir: Path, beat: Mapping[str, Any], seconds: float, *, stack: str, threads: dict[str, str]
) -> None:
    """Write hang.json: the last beat, for how long it was silent, and the stacks of its threads."""
    facts = {name: beat[name] for name in ("rank", "phase", "waiting", "step")}
    facts |= {"seconds": seconds, "time": metrics.now(), "stack": stack, "threads": threads}
    files.write_atomic(run_dir / HANG, json.dumps(facts, indent=2) + "\n", within=run_dir)


def _note_beat(run_dir: Path, rank: int) -> None:
    """Leave the last beat in a file."""
    with _noting:  # the loop's thread notes, and the watchdog's
        last = _last
        now = time.time()
        facts = _facts(rank, last)
        facts |= {"since": now - (time.monotonic() - last.since), "time": now}
        facts["alone"] = _busy_alone > 0
        files.leave_note(_beat_path(run_dir, rank), json.dumps(facts))


def _facts(rank: int, beat: Beat) -> dict[str, Any]:
    return {"rank": rank, "phase": beat.phase, "waiting": beat.is_waiting, "step": beat.step}


def _beat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.beat.json"


def _rearm(timeout_seconds: float, frozen: int) -> None:
    # faulthandler's timer does not need the interpreter's lock, which a C call may never give back.
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
        last = _last
        silent = time.monotonic() - last.since
        if silent > timeout_seconds + last.added_seconds:
            _give_up(run_dir, rank, last, silent)


def _give_up(run_dir: Path, rank: int, last: Beat, silent: float) -> None:
    frames = sys._current_frames()
    stack = "".join(traceback.format_stack(frames[threading.main_thread().ident or 0]))
    # If the main thread only waits for another, say one that writes a checkpoint, that one's stack says more.
    others = {}
    for thread in threading.enumerate():
        is_this_or_main = thread in (threading.main_thread(), threading.current_thread())
        if thread.ident in frames and not is_this_or_main:
            others[thread.name] = "".join(traceback.format_stack(frames[thread.ident]))
    doing = f"hung in {last.phase}"
    error: type[errors.KubetuneError] = errors.RankDied
    if last.is_waiting:  # another rank hung
        doing = f"waited for other ranks in {last.phase}"
        error = errors.LostPeer
    reason = f"rank {rank} {doing} for {silent:.0f} s after step {last.step}; see {HANG}"
    status = exit_status.ExitStatus(errors.LOST_PEER, reason, last.step, error.__name__)
    try:
        # To the file descriptor: the main thread may have been stopped in the middle of a print.
        os.write(2, f"kubetune: {reason}\n{stack}".encode())
        exit_status.write_rank_exit_status(run_dir, rank, status)
        # The rank that hung has the better stack, if it has written already.
        if not (last.is_waiting and (run_dir / HANG).exists()):
            _write_hang(run_dir, _facts(rank, last), silent, stack=stack, threads=others)
    finally:
        # The main thread cannot be asked to leave: it is what hangs.
        os._exit(errors.LOST_PEER)
