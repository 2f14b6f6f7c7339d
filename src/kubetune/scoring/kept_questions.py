"""Rows of the evaluation data that a run's model is asked before and after training, kept in its directory.

So they need no data later, which may have gone or changed. The answers are result/inference/before_after.py's.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Final

from kubetune.data.prepared import kept_rows
from kubetune.data.prepared.kept_rows import KeptRows
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.examples import Chat, Preference
from kubetune.data.reading.formats import convert
from kubetune.data.spec import DataSpec
from kubetune.data.text.encode import trained_messages
from kubetune.scoring.questions import drawn, records_of

QUESTION_ROWS: Final = "question_rows.safetensors"
# Characters of a prompt or a message that are shown.
MOST_CHARACTERS: Final = 4000


def keep(
    run_dir: Path,
    spec: DataSpec,
    rows: Rows | None,
    number: int,
) -> None:
    """Leave `number` rows of the evaluation data in the run directory, unless they are there.

    Raise DataError if an image of them has changed, EnvironmentFault for a full disk or a damaged file.
    """
    if rows is None or not number:
        return
    kept = kept_rows.read(run_dir, QUESTION_ROWS)
    # A later start may ask for more rows than the first did.
    if kept is None or len(kept.rows) < number:
        kept_rows.write(run_dir, QUESTION_ROWS, choose(spec, rows, number))


def choose(spec: DataSpec, rows: Rows, number: int) -> KeptRows:
    """Return up to `number` rows that have an answer, always the same ones, with their turns if they are
    conversations.
    """
    indices = []
    kept = []
    for question in islice(drawn(rows), number):
        indices.append(question.row)
        kept.append(kept_rows.row(rows, question.row))
    return KeptRows(tuple(kept), "evaluation data", _turns(spec, rows, indices))


def _turns(
    spec: DataSpec,
    rows: Rows,
    indices: list[int],
) -> dict[str, dict[str, Any]]:
    """Return `messages` before the last answer, and the names of `tools`, of the rows that are conversations.

    A row that may have lost its last answer to `data.max_length`, or is trained whole, is shown as the template has it.
    """
    if spec.data.train_on != "assistant":
        return {}
    if spec.data.overlong == "truncate":
        indices = [index for index in indices if rows.lengths[index] < spec.data.max_length]

    sources = spec.splits["eval"]
    turns: dict[str, dict[str, Any]] = {}
    for index, record in records_of(sources, rows, indices).items():
        source = sources[int(rows.source[index])]
        example = convert(
            record,
            source.format,
            source.columns,
            kind=spec.record_kind,
        )

        # A pair of answers is shown by the chosen one; plain prompts are shown as they are.
        if isinstance(example, Preference):
            example = example.chosen
        if not isinstance(example, Chat):
            continue

        # The question is all that is before the last answer.
        answered = trained_messages(example)
        if answered:
            turns[str(index)] = _question(example, answered[-1])

    return turns


def _question(chat: Chat, answer: int) -> dict[str, Any]:
    """Return what is before an answer of a conversation. `answer`: its index among the messages."""
    question: dict[str, Any] = {
        "messages": [_shortened(message) for message in chat.messages[:answer]]
    }
    if chat.tools:
        question["tools"] = [_name(tool) for tool in chat.tools]
    return question


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    # Contents that are no text (null next to tool calls) stay as they are.
    content = message.get("content")
    if isinstance(content, str) and len(content) > MOST_CHARACTERS:
        return {**message, "content": f"{content[:MOST_CHARACTERS]} …"}
    return message


def _name(tool: Any) -> str:
    """Return a tool's name: of a plain function, or of one in the object that OpenAI's API has around it."""
    if isinstance(tool, dict):
        tool = tool.get("function", tool)
    if isinstance(tool, dict):
        return str(tool.get("name", "?"))
    return str(tool)
