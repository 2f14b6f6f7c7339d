"""Rows of the evaluation data that a run's model is asked before and after training, kept in its directory.

So they need no data later, which may have gone or changed; the answers are inference/before_after.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune.config.schema import Config
from kubetune.data.prepared import kept_rows
from kubetune.data.prepared.kept_rows import KeptRows
from kubetune.data.prepared.order import hash_ids
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.formats import Chat, convert
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.reading.splits import split_sources
from kubetune.data.text.encode import learnt_messages

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUESTIONS: Final = "question_rows.safetensors"
MOST_CHARACTERS: Final = 4000
"""Of a prompt or a message that is shown."""


def keep(run_dir: Path, config: Config, rows: Rows | None) -> None:
    """Leave in the run directory the rows that `logging.before_after` asks for, unless they are there."""
    if rows is not None and config.logging.before_after and not (run_dir / QUESTIONS).exists():
        kept_rows.write(run_dir, QUESTIONS, choose(config, rows, config.logging.before_after))


def choose(config: Config, rows: Rows, number: int) -> KeptRows:
    """Rows that have an answer, drawn the same way each time, with their turns by number where they have some."""
    ids = np.arange(len(rows), dtype=np.int64)
    drawn = ids[np.argsort(hash_ids(ids, "sample"), kind="stable")].tolist()
    found = tuple(
        islice((kept_rows.row(rows, index) for index in drawn if cut(rows.row(index)[1]) is not None), number)
    )
    return KeptRows(found, "evaluation data", _turns(config, rows, [row.number for row in found]))


def _turns(config: Config, rows: Rows, ids: Sequence[int]) -> Mapping[str, dict[str, Any]]:
    """`messages` before the last answer, and the names of `tools`, of the rows that are conversations.

    A row that may have lost its last answer to `data.max_length`, or is learnt whole, is shown as the template has it.
    """
    found: dict[str, dict[str, Any]] = {}
    by_source: dict[int, dict[int, int]] = {}
    for index in ids if config.data.train_on == "assistant" else ():
        if config.data.overlong != "truncate" or rows.lengths[index] < config.data.max_length:
            by_source.setdefault(int(rows.source[index]), {})[int(rows.record[index])] = index
    for source, wanted in by_source.items():
        given = split_sources(config)["eval"][source]
        for number, record in enumerate(islice(read_source(given, Problems()), max(wanted) + 1)):
            example = convert(record.value, given.format, given.columns) if number in wanted else None
            if isinstance(example, Chat) and (answered := learnt_messages(example)):
                found[str(wanted[number])] = {
                    "messages": [_shortened(turn) for turn in example.messages[: answered[-1]]]
                }
                if example.tools:
                    found[str(wanted[number])]["tools"] = [_name(tool) for tool in example.tools]
    return found


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    is_long = isinstance(content, str) and len(content) > MOST_CHARACTERS
    return {**message, "content": f"{content[:MOST_CHARACTERS]} …"} if is_long and content else message


def _name(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    return str(inner.get("name", "?")) if isinstance(inner, dict) else str(inner)


def cut(trained: NDArray[np.bool_]) -> int | None:
    """Beginning of the last answer of a row; the middle of a text that is learnt whole; None where none is."""
    places = np.flatnonzero(trained)
    if not len(places):
        return None
    breaks = np.flatnonzero(np.diff(places) > 1)
    begin = int(places[breaks[-1] + 1] if len(breaks) else places[0])
    return begin if begin > 1 else max(1, (int(places[-1]) + 1) // 2)
