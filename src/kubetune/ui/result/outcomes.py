"""The outcomes of the verbs, read from the files that they write and from the JSON that they print."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubetune import errors
from kubetune.base import whole_folder
from kubetune.base.faults import known
from kubetune.base.files import read_inside, read_object
from kubetune.reporting.verdict_lines import ShownVerdict, verdict
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.result.publishing.description import describe

# How a command ended, by its exit code.
_ENDS: Final = {
    errors.OK: "is done",
    errors.BUG: "failed by a bug in kubetune",
    errors.USER: "was refused; its last line says what to change",
    errors.ENVIRONMENT: "failed because of the disk, memory, device or network",
    errors.GATE: "is done, and does not pass; its last lines say why",
    errors.PREEMPTED: "was cancelled; nothing half-written is left",
    # Before the verb has come to its own handler of the signal, nothing is written.
    -signal.SIGTERM: "was cancelled before it began",
    -signal.SIGKILL: "was killed, as the system does when memory runs out",
}
_MOST_SHOWN: Final = 50  # exports of one run


@dataclass(frozen=True)
class Exported:
    """A folder that an export has written."""

    folder: str  # its path
    kind: str  # adapter, merged, or model
    time: str
    # Labels with texts, as the verb prints them: what it is, and what was proved.
    lines: tuple[tuple[str, str], ...]
    problem: str = ""  # why it cannot be trusted


def end_in_words(code: int | None) -> str:
    """Return how a command ended. None: an earlier server began it, and only the process that began it gets its code."""
    if code is None:
        return "ended under an earlier server, so that its exit code is not known; its last lines say how"
    words = _ENDS.get(code, "failed")
    if code < 0:
        return f"{words} (signal {-code})"
    return f"{words} (exit code {code})"


def state_of_end(code: int | None) -> str:
    """Return the state that a command ended in, as states of runs are called; `ended` if nobody knows how."""
    if code is None:
        return "ended"
    if code == errors.OK:
        return "done"
    if code in (errors.PREEMPTED, -signal.SIGTERM):
        return "stopped"
    return "failed"


def exports_of(run_dir: Path) -> list[Exported]:
    """Return the exports in the run directory, the newest first."""
    exports = []
    for provenance in (run_dir / "exports").glob(f"[!.]*/{PROVENANCE}"):
        exports.append(_export(run_dir, provenance.parent))
    exports.sort(key=lambda exported: exported.time, reverse=True)
    return exports[:_MOST_SHOWN]


def _export(run_dir: Path, folder: Path) -> Exported:
    """Return an export as its provenance describes it, or why it cannot be trusted."""
    try:
        facts = read_object(folder / PROVENANCE, run_dir)
        lines = tuple(describe(folder, facts))
        kind = str(facts["kind"])
        time = str(facts["time"])
    except (errors.KubetuneError, OSError) as error:
        return Exported(str(folder), "", "", (), str(known(error) or error))
    # A received run directory may hold any JSON.
    except (LookupError, TypeError, ValueError, AttributeError):
        problem = f"its {PROVENANCE} is none that kubetune wrote"
        return Exported(str(folder), "", "", (), problem)
    problem = ""
    if not whole_folder.is_whole(folder, PROVENANCE):
        problem = "files of it are missing, or have another size than when they were proved"
    return Exported(str(folder), kind, time, lines, problem)


def comparison_in(path: Path, folder: Path) -> ShownVerdict | None:
    """Return the comparison that `kubetune evaluate --compare base --json` printed; None if it printed none.

    `folder`: the folder that the file must lie in.
    """
    try:
        lines = json.loads(read_inside(path, folder))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(lines, list):
        return None
    # Lines of answers have the form of lines of benchmarks, which the page of a run shows in the same table.
    try:
        return verdict({}, {"compared": lines})
    except (LookupError, TypeError):
        return None


def pushes_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of pushes, the newest first."""
    pushes = [event for event in events if event.get("event") == "push"]
    pushes.reverse()
    return pushes
