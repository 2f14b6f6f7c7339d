"""Sweeps of this machine as a list, and the state of one: whether its driver is at work, and why it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.base import processes
from kubetune.base.locks import holder, locker
from kubetune.config.naming import RESOLVED
from kubetune.errors import KubetuneError, first_line
from kubetune.library.sweep.sweep_record import (
    LOCK,
    SWEEP,
    TRIALS,
    Record,
    Search,
    read_record,
    read_search,
    summary,
)

# A driver writes its record every two seconds while runs go on.
_SILENT_SECONDS = 30.0


def find_sweeps(folder: Path) -> Iterator[Path]:
    """Yield the folders of sweeps at or below a folder, in the order of their paths. Links are not followed."""
    for place, folders, files in os.walk(folder):
        if SWEEP in files:
            yield Path(place)
        # Neither a run nor a sweep holds another sweep.
        if SWEEP in files or RESOLVED in files:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def overview(folder: Path) -> dict[str, Any]:
    """Return the facts of a sweep for a list. `state` is `damaged` if it cannot be read."""
    facts: dict[str, Any] = {
        "path": str(folder),
        "name": folder.absolute().name,
        "metric": None,
        "best": None,
    }
    try:
        search = read_search(folder)
        record = read_record(folder)
    except (KubetuneError, OSError) as error:
        return {**facts, "trials": "", "state": "damaged", "why": first_line(error)}

    state, why = sweep_state(folder, record, search)
    ranked = record.ranked(greater=search.greater)
    if ranked:
        facts |= {"metric": search.metric, "best": ranked[0].value}
    return {**facts, "trials": summary(record), "state": state, "why": why}


def sweep_state(folder: Path, record: Record, search: Search) -> tuple[str, str]:
    """Return the state of a sweep in a word, as runs have it, and why it does not go on."""
    if _is_driven(folder, record):
        return "running", ""
    open_trials = any(trial.state == "open" for trial in record.trials)
    is_over = not open_trials and len(record.trials) >= record.total and record.trials
    if record.reason:
        state = "stopped"
    elif is_over:
        state = "done"
    else:
        # Killed, or its machine was lost: it could write no reason.
        return "stopped", "the process that ran it has ended; repeat the command to continue it"
    if not open_trials and not record.ranked(greater=search.greater):
        state = "failed"
    return state, record.reason


def _is_driven(folder: Path, record: Record) -> bool:
    """True if the driver of a sweep is at work, here or on another machine with the same disk."""
    # It is the process of this machine that has the lock's file open.
    lock = folder / LOCK
    driver = holder(lock)
    # At its end a driver writes the page itself, and is not at work any more.
    if driver is not None:
        return bool(driver.pid != os.getpid())
    # Of another user's process one cannot see that it has the lock's file open, only that it lives.
    number = locker(lock)
    if number is not None and not processes.is_alive(number):
        return False
    if not any(record.running):
        return False
    try:
        written_at = (folder / TRIALS).stat().st_mtime
    except OSError:
        return False
    return time.time() - written_at < _SILENT_SECONDS
