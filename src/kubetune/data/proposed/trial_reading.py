"""Records read on trial with the readers of training: what becomes of them, and what nothing reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_facts import Columns
from kubetune.data.column_names import REASONING
from kubetune.data.column_words import nowhere
from kubetune.data.prepared.remarks import written_texts
from kubetune.data.proposed.answers_as_texts import as_text
from kubetune.data.reading.examples import Chat, Example, Pair, parts_of
from kubetune.data.reading.formats import detect, read
from kubetune.data.reading.messages import OF_TEMPLATES
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.unread_columns import LeftOut, left_out
from kubetune.errors import DataError


class TrialReading(NamedTuple):
    """Records as they were understood."""

    examples: Sequence[Example]
    unused: Sequence[LeftOut]  # what nothing reads
    problems: Problems  # of the records that cannot be read
    absent: Counter[str]  # records without a column that is named, and that they can do without


def read_all(
    records: Sequence[Record], source: SourceConfig, kind: RecordKind, columns: Mapping[str, str]
) -> TrialReading:
    """Read records. Raise DataError, with the first reason, where none can be read."""
    examples = []
    problems = Problems()
    unused = Columns()
    keys: set[str] = set()
    absent: Counter[str] = Counter()
    for record in records:
        try:
            reading = read(record.value, source.format, columns, kind=kind)
        except ValueError as error:
            problems.add(record.where, str(error))
            continue
        examples.append(reading.example)
        for key in reading.unused:
            unused.note(key, record.value, columns, list(written_texts(reading.example)))
        keys.update(reading.unused)
        absent.update(reading.absent)

    if not examples:
        advice = as_text([record.value for record in records], columns, source.path)
        if advice:
            raise DataError(advice)
        raise problems.error()
    problem = nowhere(absent, len(examples), source.path)
    if problem:
        raise DataError(f"{problem}. Nothing was written.")
    is_rewarded = kind == "prompt"
    named = list(left_out(unused.to_json(len(examples)), source.path, is_rewarded=is_rewarded))
    # A chat template of the model may read some.
    others = keys - {column.name for column in named} - {*OF_TEMPLATES}
    named += [LeftOut(name, "other", "", "") for name in sorted(others)]
    return TrialReading(examples, named, problems, absent)


def use_of_thoughts(reading: TrialReading) -> Mapping[str, str]:
    """Return all columns by which the only thoughts are read before the answer; none without any, or with several."""
    first = reading.examples[0]
    thoughts = [column for column in reading.unused if column.meaning == "thought"]
    if len(thoughts) != 1 or not (isinstance(first, Chat) or is_plain(first)):
        return {}
    # The shape that `settle_format` chooses reads these names by itself.
    if thoughts[0].name in REASONING:
        return {}
    return thoughts[0].use


def in_sentences(unused: Sequence[LeftOut]) -> list[str]:
    """Return what nothing reads in words: a sentence for each column of texts or classes, and one for all others."""
    sentences = []
    others = []
    for column in unused:
        if column.meaning == "other":
            others.append(f"`{column.name}`")
        else:
            sentences.append(f"`{column.name}` ({column.what}) is not used. {column.advice}")
    if others:
        sentences.append(f"not used: {', '.join(others)}")
    return sentences


def can_be_read(record: Record, kind: RecordKind) -> bool:
    """True if the readers know what a record is, without other names."""
    try:
        if kind == "text":
            detect(record.value)
        else:
            read(record.value, kind=kind)
    except ValueError:
        return False
    return True


def is_text_alone(record: Record) -> bool:
    """True for a record that is learned as a plain text, every token of it."""
    return can_be_read(record, "text") and detect(record.value) == "text"


def has_answer(record: Record, columns: Mapping[str, str]) -> bool:
    """True if a record can be learned from, with these names of columns."""
    try:
        read(record.value, columns=columns, kind="text")
    except ValueError:
        return False
    return True


def is_chat(example: Example) -> bool:
    """True if what is learned of an example is a conversation."""
    return isinstance(parts_of(example)[0], Chat)


def is_plain(example: Example) -> bool:
    """True if a prompt is plain text, whose answer does not go on in the middle of a line.

    A completion that begins with a space is meant to follow its prompt as it is.
    """
    answer = parts_of(example)[0]
    return isinstance(answer, Pair) and not answer.completion[:1].isspace()
