"""Files of the answers that a run by reward drew, `rollouts/step-000120.jsonl`, as a light verb reads them.

A line is a prompt with its answers: training/rollouts/rollout_records writes and reads all of it. A file may have megabytes,
and a run has one for each drawing, so this looks at the beginning of each line to find those of a prompt:

    {"made_by": "9f…", "slot": 0, "row": 17, "text": …, "prompt": […], "answers": […], …}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import open_inside
from kubetune.rundir.metrics import is_number

FOLDER: Final = "rollouts"

_ROW = re.compile(rb'"row": ?(\d{1,12}),')
_BEGINNING = 300  # bytes of a line in which its row is


def file_of(run_dir: Path, step: int) -> Path:
    """Return the file of the answers that are drawn by the weights after `step` steps."""
    return run_dir / FOLDER / f"step-{step:06d}.jsonl"


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps that have a file, in order."""
    names = [path.stem.removeprefix("step-") for path in (run_dir / FOLDER).glob("step-*.jsonl")]
    return sorted(int(name) for name in names if name.isdigit())


def places_of_rows(run_dir: Path, step: int) -> Mapping[int, tuple[int, int]]:
    """Return where the line of each row lies in the file of a step: its first byte, and its length.

    A row that was answered anew has its newest line. Raise OSError and IrregularFileError.
    """
    path = file_of(run_dir, step)
    facts = path.stat()
    # A page that is open asks again and again; files of earlier steps do not change.
    return _places(path, run_dir, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=1024)
def _places(path: Path, run_dir: Path, size: int, changed: int) -> Mapping[int, tuple[int, int]]:
    places = {}
    begin = 0
    with open_inside(path, run_dir) as file:
        for line in file:
            row = _ROW.search(line[:_BEGINNING])
            # A last line without a newline is still being written.
            if row is not None and line.endswith(b"\n"):
                places[int(row[1])] = (begin, len(line))
            begin += len(line)
    return places


def read_line(run_dir: Path, step: int, place: tuple[int, int]) -> dict[str, Any] | None:
    """Return the prompt of a line with its answers; None if the line is damaged, or not what a run writes."""
    begin, length = place
    with open_inside(file_of(run_dir, step), run_dir) as file:
        file.seek(begin)
        line = file.read(length)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return None
    answers = value.get("answers")
    if not isinstance(answers, list) or not all(map(_is_answer, answers)):
        return None
    return value


def _is_answer(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
        return False
    rewards = answer.get("rewards")
    if not isinstance(rewards, dict):
        return False
    return all(value is None or is_number(value) for value in rewards.values())


def weighted_sum(
    rewards: Mapping[str, float | None], weights: Iterable[tuple[str, float]]
) -> float | None:
    """Return an answer's reward: the weighted sum of those that could judge it, None if none could."""
    by_name = dict(weights)
    known = [by_name.get(name, 0.0) * value for name, value in rewards.items() if value is not None]
    return sum(known) if known else None
