"""Whom the agent of a node waits for before a start: a note in the run directory, for `status` and `watch`.

`logs/node-N.waits.json` exists only while the agent waits. It is written again every few seconds, so that an old one is
known as that of an agent which was killed. The sentences for those who never come are here too: nodes and ranks
meet alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files

_NOTE_SECONDS = 5.0
_OLD_SECONDS = 60.0

SILENT = "something there takes connections and does not answer; it is stopped, or another program"


@contextmanager
def noted(run_dir: Path, node: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that notes whom this node waits for. Call it again and again; the note goes with the block."""
    path = _path(run_dir, node)
    began = time.time()
    last = ("", 0.0)  # the words of the newest note, and when it was written

    def note(waits_for: str) -> None:
        nonlocal last
        now = time.time()
        if waits_for != last[0] or now - last[1] > _NOTE_SECONDS:
            last = (waits_for, now)
            note = {"node": node, "waits_for": waits_for, "since": began, "time": now}
            files.leave_note(path, json.dumps(note))

    try:
        yield note
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read(run_dir: Path) -> str | None:
    """Return in words which node waits for what, None where none does: "node 1 has waited for node 0 for 40 s".

    A node that waits for something else than a node is nearer to the cause:

        node 0 waits for node 1    node 1 waits for a name server    the answer is of node 1
    """
    waiting = []
    for path in sorted((run_dir / "logs").glob("node-*.waits.json")):
        facts = _note(path)
        if facts is not None:
            waiting.append(facts)
    # The sort keeps the order of nodes where both are alike.
    waiting.sort(key=lambda facts: str(facts["waits_for"]).startswith("node "))
    if not waiting:
        return None
    nearest = waiting[0]
    # By the clock of that node only: others may differ from it.
    seconds = nearest["time"] - nearest["since"]
    return f"node {nearest['node']} has waited for {nearest['waits_for']} for {seconds:.0f} s"


def doing(run_dir: Path, node: int) -> str | None:
    """Return what this node does if it waits, None if it does not: "waiting for node 1"."""
    facts = _note(_path(run_dir, node))
    return None if facts is None else f"waiting for {facts['waits_for']}"


def _path(run_dir: Path, node: int) -> Path:
    return run_dir / "logs" / f"node-{node}.waits.json"


def _note(path: Path) -> dict[str, Any] | None:
    """Return a note, or None if its node does not wait now."""
    try:
        facts = files.read_object(path)
        is_whole = isinstance(facts["since"], float) and {"node", "waits_for"} <= facts.keys()
        is_new = time.time() - float(facts["time"]) < _OLD_SECONDS
    except (OSError, errors.EnvironmentFault, KeyError, TypeError, ValueError):
        return None  # it has met the others just now
    return facts if is_whole and is_new else None


def nodes(numbers: Sequence[int]) -> str:
    """Return the names of nodes: "node 1, node 3"."""
    return ", ".join(f"node {number}" for number in numbers)


def never_came(
    missing: str, all_of_them: str, address: str, seconds: float, here: Sequence[str]
) -> str:
    """Return what is said where some have met and others have not come: "node 1 never came: 2 nodes were to meet at …"."""
    return (
        f"{missing} never came: {all_of_them} were to meet at {address} within {seconds:g} s, here are {', '.join(here)}. "
        "Look whether their processes run, and whether they reach that address and port"
    )


def not_found(seeker: str, sought: str, address: str, seconds: float, reason: str) -> str:
    """Return what is said where the first of them is not at its address: "node 1 on b did not find node 0 at …"."""
    return (
        f"{seeker} did not find {sought} at {address} within {seconds:g} s: {reason.rstrip('.')}. Look whether it runs, and "
        "whether MASTER_ADDR and MASTER_PORT lead to it"
    )
