"""Names of ours for the columns of records, each with its reason; what they mean is guessed by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_names import ANSWERS, PROMPTS, TALKS
from kubetune.data.proposed.answers_as_texts import as_text
from kubetune.data.proposed.multiple_choice import from_label, into_question
from kubetune.data.proposed.proposal import ReasonedChoice, values_of
from kubetune.data.proposed.seen_records import SeenRecords
from kubetune.data.proposed.trial_reading import can_be_read, has_answer, is_text_alone
from kubetune.data.proposed.unknown_columns import unknown
from kubetune.data.question_subjects import left_subjects, require_subjects, subject_columns
from kubetune.data.reading.record_problems import Problems
from kubetune.data.record_values import RecordValue, key_of, renamed
from kubetune.data.right_answers import require_right_answer
from kubetune.data.single_messages import require_whole_conversation, speaker_column
from kubetune.errors import DataError

# What a column is taken as, by our name of it.
_MEANINGS: Final = {
    "messages": "conversation",
    "chosen": "better answer",
    "rejected": "worse answer",
    "image": "image",
    "prompt": "question",
    "completion": "answer, which is learned",
    "label": "class",
    "text": "text",
    "text_pair": "text that it is about",
    "instruction": "question",
    "input": "text that it is about",
    "output": "answer, which is learned",
    "reasoning_content": "thoughts before the answer",
}
# The same of columns that were chosen because a question is about one of them.
_MEANINGS_BESIDE_SUBJECT: Final = {
    "instruction": "the question",
    "input": "what the question is about: a part of the prompt",
    "output": "the answer, which is learned",
    "chosen": "the better answer",
    "rejected": "the worse answer",
    "system": "what the conversation is about: the system's message",
}
# The columns that records of a kind have; texts to write may have several sets of them.
_EXPECTED: Final[Mapping[RecordKind, Sequence[str]]] = {
    "pair": ("chosen", "rejected", "prompt"),
    "graded": ("chosen", "rejected", "prompt"),
    "judged": ("prompt", "completion"),
    "prompt": ("prompt", "completion"),
    "labelled": ("text", "label"),
}


def columns_of(
    kind: RecordKind, seen: SeenRecords, source: SourceConfig
) -> dict[str, ReasonedChoice]:
    """Return our names of columns that have others. Raise DataError where no column is known."""
    if kind == "labelled":
        _require_text_for_label(seen, source)
    if source.columns:
        named = {key: ReasonedChoice(name, "as given") for key, name in source.columns.items()}
        return _image_column(kind, seen) | named
    if kind == "labelled":
        return _columns_of_labels(seen)
    columns = _guessed_columns(kind, seen, source.path)
    _require_all_learned(kind, seen, values_of(columns))
    return columns


def _image_column(kind: RecordKind, seen: SeenRecords) -> dict[str, ReasonedChoice]:
    """Return our name of the column of images; none beside a text that is learned as a whole, which has no place for one."""
    if kind in ("labelled", "prompt") or (kind == "text" and is_text_alone(seen.records[0])):
        return {}
    return _other_columns(("image",), seen.by_name)


def _columns_of_labels(seen: SeenRecords) -> dict[str, ReasonedChoice]:
    """Return our names of a text, or of two, and of their label."""
    by_name = seen.by_name
    if by_name["text_pair"]:
        return _other_columns(("text", "text_pair", "label"), by_name)
    if can_be_read(seen.records[0], "labelled"):
        return {}
    return _other_columns(_EXPECTED["labelled"], by_name)


def _guessed_columns(kind: RecordKind, seen: SeenRecords, path: str) -> dict[str, ReasonedChoice]:
    """Return our names of columns of questions and answers, by what they are called."""
    by_name = seen.by_name
    images = _image_column(kind, seen)
    subject = _with_subject(kind, seen, path)
    if subject:
        return images | subject
    if kind == "text":
        return images | _columns_of_texts(seen, path, values_of(images))
    if can_be_read(seen.records[0], kind):
        return images
    return images | _other_columns(_EXPECTED[kind], by_name)


def require_whole_conversations(seen: SeenRecords, kind: RecordKind) -> None:
    """Raise DataError for texts to learn that are one message of a conversation each."""
    by_name = seen.by_name
    if kind not in ("text", "labelled") or by_name["messages"] or by_name["completion"]:
        return
    label = by_name["label"]
    is_class = label is not None and seen.facts[label].is_class(label, records=len(seen.records))
    # Messages with a class of their own, such as an intent, are for a classifier.
    if is_class and label != speaker_column(seen.first):
        return
    texts = seen.texts()
    text = by_name["text"] or (texts[0] if len(texts) == 1 else None)
    if text is None:
        return
    names = {"text": text} if text != "text" else {}
    problems = Problems()
    for record in seen.records:
        try:
            require_whole_conversation(renamed(record.value, names), names)
        except ValueError as error:
            problems.add(record.where, str(error))
    problems.raise_if_any()


def taken_as(key: str, name: str) -> ReasonedChoice:
    """Return a column that stands for one of our names, with what it is taken as."""
    return ReasonedChoice(name, f"`{name}` is taken as the {_MEANINGS[key]}")


def _columns_of_texts(
    seen: SeenRecords, path: str, images: Mapping[str, str]
) -> dict[str, ReasonedChoice]:
    """Return our names of columns of texts to write. Raise DataError where no column is known.

    `images`: the column of images, if there is one.
    """
    by_name = seen.by_name
    first = seen.records[0]
    # The readers say what two answers are for: neither must be taken for the prompt.
    if by_name["chosen"] and by_name["rejected"]:
        return {}
    has_both = by_name["prompt"] and by_name["completion"]
    # The readers would ask an `input` that a question under another name is about.
    is_about_input = (
        by_name["prompt"] != seen.names.get("input") and by_name["prompt"] not in PROMPTS
    )
    if has_both and is_about_input and "input" in seen.names:
        return _with_input(seen)
    if not can_be_read(first, "text"):
        columns = _columns_by_name(seen, path)
        # Its names say now which text is the question.
        return _with_subject("text", seen, path) or columns
    # {"prompt": …, "solution": …} is known, but as a prompt whose answers are rewarded.
    names = _other_columns(("prompt", "completion"), by_name)
    is_known = has_answer(first, images)
    if has_both and not is_known and has_answer(first, {**images, **values_of(names)}):
        return names
    return {}


def _columns_by_name(seen: SeenRecords, path: str) -> dict[str, ReasonedChoice]:
    """Return our names of columns that only their names tell. Raise DataError where none is known, or two could be."""
    by_name = seen.by_name
    # With images and a question, the label is the answer.
    if by_name["image"] and by_name["completion"] is None:
        by_name["completion"] = by_name["label"]
    # With an article and its summary, the article is the prompt.
    if by_name["completion"] and by_name["prompt"] is None:
        others = [name for name in seen.texts() if name != by_name["completion"]]
        if len(others) == 1:
            by_name["prompt"] = others[0]
    for expected in (("prompt", "completion"), ("messages",), ("text",)):
        # Another text beside a text may be its answer, which only the user knows.
        if expected == ("text",) and _texts_beside(seen, by_name["text"]):
            break
        if all(by_name[key] for key in expected):
            return _other_columns(expected, by_name)
    raise DataError(unknown(seen, path))


def _with_input(seen: SeenRecords) -> dict[str, ReasonedChoice]:
    """Return our names of the columns of a question, its answer, and the `input` that the question is about."""
    by_name = seen.by_name
    names = {"instruction": by_name["prompt"], "input": seen.names["input"]}
    return _other_columns(tuple(names), names) | _other_columns(
        ("output",), {"output": by_name["completion"]}
    )


def _texts_beside(seen: SeenRecords, name: str | None) -> list[str]:
    """Return the other columns with a text of several words in nearly each record."""
    number = len(seen.records)
    return [
        other
        for other in seen.texts()
        if other != name and seen.facts[other].meaning(other, records=number) == "text"
    ]


def _with_subject(kind: RecordKind, seen: SeenRecords, path: str) -> dict[str, ReasonedChoice]:
    """Return the columns by which a text that the questions are about becomes part of the prompt; none without one.

    Raise DataError with a program for texts that no columns make a part of it.
    """
    # In the names that the readers know: other names are mapped to these.
    names = values_of(_other_columns(("prompt", "completion", "chosen", "rejected"), seen.by_name))
    for record in seen.records:
        value = _renamed(record.value, names)
        left = left_subjects(value, {}, needs_answer=kind == "text")
        if not left or any(name not in record.value for group in left for name in group):
            continue
        use = subject_columns(left, record.value, names)
        if use:
            return {
                key: ReasonedChoice(use[key], f"`{use[key]}` is {meaning}")
                for key, meaning in _MEANINGS_BESIDE_SUBJECT.items()
                if key in use
            }
        values = [record.value for record in seen.records]
        renamed = [_renamed(value, names) for value in values]
        advice = as_text(values, names, path) or into_question(renamed, names, path)
        if advice:
            raise DataError(advice)
    return {}


def _require_all_learned(kind: RecordKind, seen: SeenRecords, columns: Mapping[str, str]) -> None:
    """Raise DataError for what the readers would refuse if they had found these `columns` by themselves.

    A user who names an answer has seen the columns beside it. Names that are guessed here decide nothing.
    """
    # Where no columns name an answer, the readers say it.
    if columns.keys().isdisjoint((*TALKS, *PROMPTS, *ANSWERS, "chosen", "rejected", "text")):
        return
    problems = Problems()
    for record in seen.records:
        value = _renamed(record.value, columns)
        try:
            require_subjects(value, {}, needs_answer=kind == "text", names=columns)
            if kind == "text":
                require_right_answer(value, {}, names=columns)
            if kind == "text" and "text" in columns:
                require_whole_conversation(value, columns)
        except ValueError as error:
            problems.add(record.where, str(error))
    problems.raise_if_any()


def _require_text_for_label(seen: SeenRecords, source: SourceConfig) -> None:
    """Raise DataError with a program for labels that are answers to learn: one of several choices."""
    question = source.columns.get("text", seen.by_name["text"]) or "text"
    label = source.columns.get("label", seen.by_name["label"]) or "label"
    values = [record.value for record in seen.records]
    advice = from_label(values, question, label, source.path)
    if advice:
        raise DataError(advice)


def _renamed(value: RecordValue, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a record whose columns have our names. `names`: the file's, by ours; a conversation keeps its own."""
    return dict(value) if key_of(TALKS, value, {}) else renamed(value, names)


def _other_columns(
    expected: Sequence[str], by_name: Mapping[str, str | None]
) -> dict[str, ReasonedChoice]:
    """Return the columns that have another name than the expected one, as `data.train.columns` has them."""
    columns: dict[str, ReasonedChoice] = {}
    for key in expected:
        name = by_name[key]
        if name is None or name == key:
            continue
        # The readers know this name by themselves.
        if key == "image" and name == "images":
            continue
        columns[key] = taken_as(key, name)
    return columns
