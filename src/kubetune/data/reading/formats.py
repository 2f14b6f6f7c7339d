"""The shapes that records come in, and the one normal form each is turned into.

A shape is recognised by its keys. Conversations of any spelling become `Chat`; nothing here knows tokens or files.
Adding a shape is one function and one line in SHAPES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kubetune.config.schema import RecordKind
from kubetune.data.column_names import (
    ANSWERS,
    COMPLETIONS,
    OUTPUTS,
    PROMPTS,
    QUESTIONS,
    REASONING,
    RIGHT_ANSWERS,
)
from kubetune.data.column_uses import likely_columns
from kubetune.data.column_words import in_words, in_yaml
from kubetune.data.left_media import require_media
from kubetune.data.question_subjects import require_subjects
from kubetune.data.reading.conversations import Beginning, Beside, chat, spoken
from kubetune.data.reading.examples import Chat, Example, Pair, Text
from kubetune.data.reading.fields import (
    Fields,
    first_of,
    keys,
    listed,
    quoted,
    required,
    show,
    text_of,
)
from kubetune.data.reading.labelled import read_labelled
from kubetune.data.reading.messages import (
    Turn,
    read_all,
    read_history,
    read_turn,
)
from kubetune.data.reading.preferences import ranked_answers, read_answers
from kubetune.data.reading.prompts import Answered, with_answer
from kubetune.data.reading.refusals import (
    DECIDING,
    is_obeyed,
    require_no_preference,
    require_readable,
    require_trained,
)
from kubetune.data.record_values import is_number, is_prose, is_thought, joined_texts, key_of
from kubetune.data.right_answers import require_right_answer
from kubetune.data.single_messages import (
    require_whole_conversation,
    talk_in_words,
    written_talk,
)

Value = Mapping[str, Any]


def convert(
    value: Value,
    shape: str = "auto",
    columns: Mapping[str, str] | None = None,
    *,
    kind: RecordKind = "text",
) -> Example:
    """Return the normal form of a record; `read` also says which of its keys were left aside."""
    return read(value, shape, columns, kind=kind).example


class Reading(NamedTuple):
    """A record as it was understood."""

    example: Example
    unused: tuple[str, ...]  # keys that hold something and decide nothing
    taken: str = ""  # how keys with unclear names were read
    # columns that `data.train.columns` names, and that the record can do without
    absent: tuple[str, ...] = ()


def read(
    value: Value,
    shape: str = "auto",
    columns: Mapping[str, str] | None = None,
    *,
    kind: RecordKind = "text",
) -> Reading:
    """Return the normal form of a record, and which of its keys decide nothing or were taken as something.

    `shape` is a key of SHAPES or `auto`; `columns` maps the names expected to the names in the file; `kind` is what
    the task learns from. Raise ValueError that says what was found and what was expected, also for keys
    that would make another thing of the record than its texts say: preferences, media, settings of a template.
    """
    columns = columns or {}
    value, replaced, absent = _renamed(value, columns)

    # What must be refused is looked for before the texts are read.
    require_trained(value)
    answered = with_answer(value, columns) if kind == "prompt" else Answered(value)
    value = answered.value
    # A text that is learned or classified as a whole: what is beside it is another matter.
    is_whole_text = kind == "labelled" or shape in ("labelled", "text")
    if not is_whole_text:
        if kind == "text":
            require_no_preference(value, columns)
        require_subjects(value, columns, needs_answer=kind == "text")
        if kind == "text":
            require_right_answer(value, columns)
    if kind in ("pair", "graded", "judged"):
        answers, unused = read_answers(value, shape, kind)
        require_media(value, unused, columns, kind)
        unused = _without_obeyed(sorted({*unused, *replaced}), value)
        return Reading(answers, unused, absent=absent)

    record = Fields(value, {**columns, **answered.columns})
    for key in (*replaced, *answered.others):
        record.note_unused(key)
    if shape == "auto":
        shape = detect(value, kind=kind, columns=columns)
    if shape in _MAY_BE_CHATS:
        require_readable(record)
    example = SHAPES[shape](record)
    _require_used_columns(record, columns, shape)
    if shape in _MAY_BE_CHATS:
        require_media(value, record.unused, columns, kind)
    return Reading(example, _without_obeyed(record.unused, value), record.taken, absent)


# Keys that only some records of a file need have: what a question is about, and what is beside it.
_OPTIONAL: Final = frozenset((
    "input", "history", "system", "system_prompt", "tools", "functions", "images", "image", *REASONING,
))  # fmt: skip


def _renamed(value: Value, columns: Mapping[str, str]) -> tuple[Value, list[str], tuple[str, ...]]:
    """Return a record with its keys named as expected, those that another took the name of, and columns that it lacks.

    {"text": "Hi", "body": "Ho"} with the columns {"text": "body"} becomes {"text": "Ho"}, and "text" was replaced.
    """
    replaced = []
    for expected in columns:
        # Where two columns exchange their names, neither is lost.
        if value.get(expected) is not None and expected not in columns.values():
            replaced.append(expected)

    of_file = value
    absent = []
    for expected, column in columns.items():
        # An `input` alone is the prompt.
        is_beside = expected != "input" or not columns.keys().isdisjoint((*QUESTIONS, "prompt"))
        is_beside = is_beside or first_of((*QUESTIONS, "prompt"), of_file) is not None
        if column not in of_file and expected in _OPTIONAL and is_beside:
            absent.append(column)
            continue
        if column not in value:
            raise ValueError(
                f"has no column {column!r}, which data.train.columns gives for {expected!r}; {keys(of_file)}"
            )
        # A copy: the record is shown to the user as it is in the file.
        renamed = dict(value)
        item = renamed.pop(column)
        renamed[expected] = item
        value = renamed

    return value, replaced, tuple(absent)


def _require_used_columns(
    record: Fields,
    columns: Mapping[str, str],
    shape: str,
) -> None:
    """Raise ValueError where `data.train.columns` names a key that records of this shape do not have."""
    for key, column in columns.items():
        if key in DECIDING or not record.holds(key) or record.has_read(key):
            continue
        raise ValueError(
            f"is read as {shape}, in which `data.train.columns` has no `{key}` ({column!r} is given for it); set "
            "`data.train.format`, or leave it out"
        )


def _without_obeyed(unused: Sequence[str], value: Value) -> tuple[str, ...]:
    """Return the keys that decide nothing, without those that say what is done anyway, such as `weight: 1`."""
    return tuple(key for key in unused if not is_obeyed(key, value.get(key)))


def detect(
    value: Value,
    *,
    kind: RecordKind = "text",
    columns: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the shape of a record by the keys it has. Raise ValueError when it has none, or of two only one is read."""
    if kind == "labelled":
        return "labelled"
    # Tables give every row all their columns, so keys that are null decide only where no others do.
    held = {key for key in value if value[key] is not None}
    for present in (held, value.keys()):
        for shape, groups in _MARKS:
            if all(first_of(group, present) is not None for group in groups):
                # Whoever names the text has seen the other columns.
                if shape == "text" and "text" not in columns and kind == "text":
                    _require_text_alone(value)
                    require_whole_conversation(value)
                return shape

    raise ValueError(
        f"{keys(value)}; expected `messages`, `prompt` and `completion`, `text`, `conversations`, `instruction` "
        f"and `output`, or `question` and `answer`{_other_names(value)}"
    )


def _other_names(value: Value) -> str:
    """Return what one may paste, with columns of this record that fit."""
    talk = written_talk(value)
    if talk:
        return f"; {talk_in_words(talk)}"
    ranking = ranked_answers(value)
    if ranking:
        raise ValueError(ranking)
    columns = likely_columns(value)
    if columns:
        return (
            f"; other names are given so: `data: {{train: {{path: FILE, {in_yaml(columns)}}}}}`, or `{in_words(columns)}` "
            "beside `--data`; `kubetune init FILE` proposes them"
        )
    if value.get("prompt"):
        return (
            "; prompts without an answer are for `task: grpo`, or `task: distill` with `lmbda: 1`"
        )
    return ""


def _require_text_alone(value: Value) -> None:
    """Raise ValueError for a `text` with what is to be written of it, such as a summary, which would be lost."""
    asked = key_of(PROMPTS, value, {})
    for name, written in value.items():
        # Of a question with its answer, the text is the whole.
        if not isinstance(written, str) or not written.strip() or (asked and name in ANSWERS):
            continue
        if name.lower() in OUTPUTS or (
            name.lower() in RIGHT_ANSWERS and (asked or is_prose(written))
        ):
            use = {"prompt": "text", "completion": name}
            if asked == "input":
                use = {"instruction": "text", "output": name}
            elif asked:
                use = {"instruction": asked, "input": "text", "output": name}
            raise ValueError(
                f"has `{name}` beside `text`, and it would be lost; give `{in_yaml(use)}` (`{in_words(use)}` beside "
                f"`--data`) to learn it as the answer, or `format: text` to learn the text alone"
            )


# Each shape with the keys it is known by: one of each group. The first shape that fits is taken.
_MARKS: Final[tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]] = (
    ("messages", (("messages",),)),
    ("sharegpt", (("conversations",),)),
    ("alpaca", (("instruction",), ("output",))),
    ("question_answer", (QUESTIONS, ("input",), ANSWERS)),
    ("prompt_completion", (("prompt", "input"), ("completion", "output"))),
    ("text", (("text",),)),
    ("question_answer", (QUESTIONS, ANSWERS)),
    ("prompt_completion", (("prompt", "input"), ANSWERS)),
    ("labelled", (("label",), ("sentence", "premise"))),
    ("labelled", (("label", "score"), ("sentence1",), ("sentence2",))),
)


def _from_messages(record: Fields) -> Chat:
    return chat(Beside(record), read_all(listed(record, "messages"), "messages", record))


def _from_pair(record: Fields) -> Pair | Chat:
    # Names that models and tools use for the two. What they were taken for is logged once.
    of_messages = isinstance(record.peek("input"), list)
    meaning = "the prompt, in messages" if of_messages else "the prompt, plain text"
    prompt_key = _key_of(record, ("prompt", "input"), meaning)
    completion_key = _key_of(record, COMPLETIONS, "its completion")
    prompt = required(record, prompt_key)
    completion = required(record, completion_key)

    # Keys of other shapes, which nothing below reads.
    if prompt_key == "input" and record.holds("instruction"):
        raise ValueError(
            "has an `instruction` besides `input`, which would be lost; name its answer `output`"
        )
    return Beginning(record, prompt, prompt_key).answered(completion, completion_key)


def _key_of(
    record: Fields,
    names: Sequence[str],
    meaning: str,
) -> str:
    """Return the first of these keys that is not null; if all are, the first that is there, or the first name."""
    not_null = [name for name in names if record.peek(name) is not None]
    if not_null:
        key = not_null[0]
    else:
        key = first_of(names, record) or names[0]
    if key != names[0]:
        record.note_taken(key, meaning)
    return key


def _from_question(record: Fields) -> Chat:
    """Read a question and its answer under one of their names, as a conversation."""
    question_key = _question_key(record)
    answer_key = _only_key(record, ANSWERS, "answer")
    record.note_taken(question_key, "the user's message")
    question = text_of(required(record, question_key), question_key)
    # What the question is about, on a line of its own, as Alpaca has it.
    if question_key != "input" and record.holds("input"):
        record.note_taken("input", "what it is about")
        question = f"{question}\n{_subject(record)}"
    record.note_taken(answer_key, "the assistant's")

    turns = _history(record)
    turns.append(spoken("user", question))
    answer = text_of(required(record, answer_key), answer_key)
    turns.append(_answer(record, answer))
    return chat(Beside(record), turns)


def _question_key(record: Fields) -> str:
    """Return the key of the question. An `input` beside it is what the question is about."""
    names: tuple[str, ...] = (*QUESTIONS, "prompt")
    if not any(record.holds(name) for name in names):
        names = (*names, "input")
    return _only_key(record, names, "question")


def _subject(record: Fields) -> str:
    """Return the text under `input` that an instruction is about; of a list, each text on a line of its own."""
    return text_of(joined_texts(record["input"]), "input", may_be_empty=True)


def _answer(record: Fields, content: str) -> Turn:
    """Return the assistant's message, with the thoughts that stand in a column beside it."""
    message = {"role": "assistant", "content": content}
    for key in REASONING:
        thought = joined_texts(record.peek(key))
        # The first of these names means nothing else; of the others, each value tells the same of its whole column.
        is_sure = key == REASONING[0] and record.holds(key)
        if isinstance(thought, str) and (is_sure or is_thought(thought)):
            if not is_sure and is_number(thought):
                raise ValueError(
                    f"has `{key}: {show(thought)}`, a thought or a number that says something about the record; give "
                    f"`{in_yaml({REASONING[0]: key})}` to learn it before the answer, or leave the column out"
                )
            record.note_taken(key, "the thoughts before it")
            message[key] = text_of(joined_texts(record[key]), key)
            break
    return Turn(message, None, "assistant")


def _only_key(
    record: Fields,
    names: Sequence[str],
    what: str,
) -> str:
    """Return the only one of these keys that holds something, or the only one that `data.train.columns` name."""
    held = [name for name in names if record.holds(name)]
    if len(held) > 1:
        # The user knows them by the names that the file has.
        of_file = quoted(record.columns.get(name, name) for name in held)
        held = [name for name in held if name in record.columns]
        if len(held) != 1:
            raise ValueError(
                f"has {of_file}; expected one {what}, or `data.train.columns` that say which it is"
            )
    if held:
        return held[0]
    return first_of(names, record) or names[0]


def _from_text(record: Fields) -> Text:
    return Text(text_of(required(record, "text"), "text"))


def _from_sharegpt(record: Fields) -> Chat:
    turns = []
    for i, turn in enumerate(listed(record, "conversations")):
        turns.append(read_turn(turn, f"conversations[{i}]", record))
    return chat(Beside(record), turns)


def _from_alpaca(record: Fields) -> Chat:
    # What the instruction is about, on a line of its own. Either of the two may be empty.
    extra = ""
    if record.get("input") is not None:
        extra = _subject(record)
    has_extra = bool(extra.strip())
    instruction = text_of(required(record, "instruction"), "instruction", may_be_empty=has_extra)
    question = "\n".join(filter(None, (instruction, extra)))
    answer = text_of(required(record, "output"), "output")

    turns = _history(record)
    turns.append(spoken("user", question))
    turns.append(_answer(record, answer))
    return chat(Beside(record), turns)


def _history(record: Fields) -> list[Turn]:
    """Return the turns before a question."""
    turns = []
    for message in read_history(record.get("history")):
        turns.append(spoken(message["role"], message["content"]))
    return turns


SHAPES: Final[dict[str, Callable[[Fields], Example]]] = {
    "messages": _from_messages,
    "prompt_completion": _from_pair,
    "text": _from_text,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "question_answer": _from_question,
    "labelled": read_labelled,
}
_MAY_BE_CHATS: Final = frozenset(SHAPES) - {"text", "labelled"}
