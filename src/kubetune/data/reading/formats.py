"""The shapes that records come in, and the one normal form each is turned into.

A shape is recognised by its keys. Conversations of any spelling become `Chat`; nothing here knows tokens or files.
Adding a shape is one function and one line in SHAPES.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from kubetune.config.schema import RecordKind
from kubetune.data.columns import (
    ANSWERS,
    QUESTIONS,
    fitting,
    in_words,
    in_yaml,
    is_prose,
    joined_texts,
    require_subjects,
)
from kubetune.data.reading.fields import (
    Fields,
    first_of,
    keys,
    listed,
    parsed,
    quoted,
    required,
    show,
    text_of,
)
from kubetune.data.reading.images import data_address
from kubetune.data.reading.messages import IMAGE_TAG as IMAGE_TAG
from kubetune.data.reading.messages import (
    REASONING,
    Turn,
    join_calls,
    read_history,
    read_message,
    read_tools,
    read_turn,
    require_known_calls,
)
from kubetune.data.reading.preferences import Side, Unusable, judged_side_of, sides_of
from kubetune.data.reading.prompts import with_answer
from kubetune.data.reading.refusals import (
    DECIDING,
    is_obeyed,
    require_no_preference,
    require_readable,
    require_trained,
)

Value = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, of which the assistant's answers are trained."""

    # with `role` and `content` and, where the answer calls tools, `tool_calls`
    messages: tuple[dict[str, Any], ...]
    # schemas of functions
    tools: tuple[Any, ...] = ()
    # number of messages at the beginning that are never trained, whoever speaks them
    context: int = 0
    # paths, or addresses of data (images.py); the contents hold one `<image>` for each, in their order
    images: tuple[str, ...] = ()
    # indices of other messages that are not trained, since the data say so
    not_trained: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt, and the completion that is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text, trained from its start to its end."""

    text: str


Label = str | int | float | tuple[str | int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two, and its label."""

    text: str
    second: str | None
    # the name or number of a class, several of them, a 0.0 or 1.0 for every class, or a number to predict
    label: Label


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, each as an example that begins with the prompt."""

    chosen: Chat | Pair
    rejected: Chat | Pair
    # by how much the chosen answer is better; None where nobody says
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt with one answer to it, good or bad."""

    answer: Chat | Pair
    is_good: bool


Example = Chat | Pair | Text | Labelled | Preference | Judged
_E = TypeVar("_E", bound=Example)


def images_of(example: Example) -> tuple[str, ...]:
    """Return the images of a record; those of a pair once, since both answers have the same."""
    match example:
        case Preference(answer) | Judged(answer):
            return images_of(answer)
        case Chat():
            return example.images
    return ()


def with_images(example: _E, place: Callable[[str], str]) -> _E:
    """Return the record with another place of each image."""
    match example:
        case Preference():
            return replace(
                example,
                chosen=with_images(example.chosen, place),
                rejected=with_images(example.rejected, place),
            )
        case Judged():
            return replace(example, answer=with_images(example.answer, place))
        case Chat() if example.images:
            return replace(example, images=tuple(map(place, example.images)))
    return example


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
    taken: str = ""  # what keys were taken as whose names alone do not say it


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
    value, replaced = _renamed(value, columns)

    # What must be refused is looked for before the texts are read.
    require_trained(value)
    if kind == "prompt":
        value = with_answer(value)
    is_classified = kind == "labelled" or shape == "labelled"
    if kind == "text" and not is_classified and shape != "text":
        require_no_preference(value, columns)
    if not is_classified and shape != "text":
        require_subjects(value, columns, needs_answer=kind == "text")
    if kind not in ("text", "labelled", "prompt"):
        # Of answers that are compared, preferences.py knows the shapes.
        answers, unused = _read_preference(value, shape, kind)
        return Reading(answers, _without_obeyed(sorted({*unused, *replaced}), value))

    record = Fields(value, columns)
    for key in replaced:
        record.note_unused(key)
    if shape == "auto":
        shape = detect(value, kind=kind)
    if shape in _MAY_BE_CHATS:
        require_readable(record)
    example = SHAPES[shape](record)
    _require_used_columns(record, columns, shape)
    if kind == "prompt":
        return Reading(
            example, (), record.taken
        )  # functions that reward answers are given all columns

    return Reading(example, _without_obeyed(record.unused, value), record.taken)


def _renamed(value: Value, columns: Mapping[str, str]) -> tuple[Value, list[str]]:
    """Return a record with its keys named as expected, and those of its keys that another took the name of.

    {"text": "Hi", "body": "Ho"} with the columns {"text": "body"} becomes {"text": "Ho"}, and "text" was replaced.
    """
    replaced = []
    for expected in columns:
        # Where two columns exchange their names, neither is lost.
        if value.get(expected) is not None and expected not in columns.values():
            replaced.append(expected)

    of_file = value
    for expected, column in columns.items():
        if column not in value:
            raise ValueError(
                f"has no column {column!r}, which data.train.columns gives for {expected!r}; {keys(of_file)}"
            )
        # A copy: the record is shown to the user as it is in the file.
        renamed = dict(value)
        item = renamed.pop(column)
        renamed[expected] = item
        value = renamed

    return value, replaced


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


def _read_preference(
    value: Value,
    shape: str,
    kind: RecordKind,
) -> tuple[Preference | Judged, set[str]]:
    """Return answers to be compared or judged, and the keys that hold something and decide nothing."""
    if shape in ("text", "labelled"):
        raise ValueError(
            f"is read as {shape} by `data.train.format`, which has no answers to compare; expected auto"
        )

    if kind == "judged":
        side, is_good = judged_side_of(value, shape)
        answer, unused = _read_side(side)
        return Judged(answer, is_good), unused

    margin = None
    if kind == "graded":
        value = dict(value)
        margin = _margin(value.pop("margin", None))

    chosen_side, rejected_side = sides_of(value, shape)
    chosen, unused = _read_side(chosen_side)
    rejected, unused_of_rejected = _read_side(rejected_side)
    if chosen == rejected:
        raise Unusable("has the same answer as chosen and as rejected; expected two that differ")
    return Preference(chosen, rejected, margin), unused | unused_of_rejected


def _margin(margin: Any) -> float | None:
    if margin is None:
        return None
    # True and False are numbers to Python.
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise ValueError(
            f"margin is {show(margin)}; expected a number: by how much the chosen answer is better"
        )
    return float(margin)


def _read_side(side: Side) -> tuple[Chat | Pair, set[str]]:
    """Return one of the answers with its prompt, and the keys that hold something and decide nothing."""
    record = Fields(side.record)
    require_readable(record)
    try:
        answer = _from_pair(record)
    except ValueError as error:
        # The record is one that preferences.py made: the file has another name for its completion.
        kind = Unusable if "is empty" in str(error) else ValueError
        raise kind(str(error).replace("completion", side.name)) from None

    # A list of messages may end with the user's.
    if isinstance(answer, Chat):
        roles = {message["role"] for message in answer.messages[answer.context :]}
        if "assistant" not in roles:
            raise ValueError(f"{side.name} holds no message of the assistant; expected the answer")

    return answer, set(record.unused)


def detect(value: Value, *, kind: RecordKind = "text") -> str:
    """Return the shape of a record by the keys it has. Raise ValueError when it has none."""
    if kind == "labelled":
        return "labelled"
    # Tables give every row all their columns, so keys that are null decide only where no others do.
    held = {key for key in value if value[key] is not None}
    for present in (held, value.keys()):
        for shape, groups in _MARKS:
            if all(first_of(group, present) is not None for group in groups):
                if shape == "text" and present is held:
                    _require_one_reading(value)
                return shape

    raise ValueError(
        f"{keys(value)}; expected `messages`, `prompt` and `completion`, `text`, `conversations`, `instruction` "
        f"and `output`, or `question` and `answer`{_other_names(value)}"
    )


def _other_names(value: Value) -> str:
    """Return what one may paste, with columns of this record that fit."""
    columns = fitting(value)
    if columns:
        return (
            f"; other names are given so: `data: {{train: {{path: FILE, {in_yaml(columns)}}}}}`, or `{in_words(columns)}` "
            "beside `--data`; `kubetune init FILE` proposes them"
        )
    if value.get("prompt"):
        return "; prompts without an answer are for `task: grpo`"
    return ""


def _require_one_reading(value: Value) -> None:
    """Raise ValueError for a `text` beside a question with its answer that it does not hold: one of both would be lost."""
    text = value["text"]
    for key in QUESTIONS:
        answer_key = next((name for name in ANSWERS if is_prose(value.get(name))), "")
        if not answer_key or not is_prose(value.get(key)):
            continue
        if isinstance(text, str) and str(value[answer_key]).strip() in text:
            return
        raise ValueError(
            f"has `text` beside {quoted((key, answer_key))}, and either would be lost; give `columns: {{instruction: "
            f"{key}, input: text, output: {answer_key}}}` if the question is about it, or `format: text` to learn the "
            "text alone"
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
)


def _from_messages(record: Fields) -> Chat:
    return _chat(record, _read_all(listed(record, "messages"), "messages", record))


def _read_all(
    messages: Sequence[Any],
    key: str,
    record: Fields,
) -> list[Turn]:
    return [_read_any(message, f"{key}[{i}]", record) for i, message in enumerate(messages)]


def _read_any(message: Any, where: str, record: Fields) -> Turn:
    """Return a message that is spelt as OpenAI does, or as ShareGPT does, in a list that may hold either."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        return read_turn(message, where, record)
    return read_message(message, where, record)


def _from_pair(record: Fields) -> Pair | Chat:
    # Names that models and tools use for the two. What they were taken for is logged once.
    of_messages = isinstance(record.peek("input"), list)
    meaning = "the prompt, in messages" if of_messages else "the prompt, plain text"
    prompt_key = _key_of(record, ("prompt", "input"), meaning)
    completion_key = _key_of(
        record, ("completion", "output", "response", "answer"), "its completion"
    )
    prompt = required(record, prompt_key)
    completion = required(record, completion_key)

    # Keys of other shapes, which nothing below reads.
    if prompt_key == "input" and record.holds("instruction"):
        raise ValueError(
            "has an `instruction` beside `input`, which would be lost; name its answer `output`"
        )
    if record.holds("history"):
        raise ValueError(
            "has a `history` beside its prompt, which would be lost; put all of it into `messages`"
        )

    # A prompt in messages, with an answer in messages or as text.
    if isinstance(prompt, list) and isinstance(completion, (list, dict, str)):
        if isinstance(completion, str):
            completion = {"role": "assistant", "content": completion}
        if isinstance(completion, dict):
            completion = [completion]
        before = _read_all(prompt, prompt_key, record)
        after = _read_all(completion, completion_key, record)
        for key, turns in ((prompt_key, before), (completion_key, after)):
            if not turns:
                raise ValueError(f"{key} is empty; expected messages")
        return _chat(record, [*before, *after], context=len(before))

    # Two texts, which go through the chat template only where there are images.
    prompt = text_of(prompt, prompt_key, may_be_empty=True)
    completion = text_of(completion, completion_key)
    if _images(record):
        return _chat(record, [_spoken("user", prompt), _spoken("assistant", completion)], context=1)

    for key in ("system", "system_prompt", "tools", "functions"):
        if record.holds(key):
            raise ValueError(
                f"has `{key}` beside a prompt that is plain text and goes through no chat template, so it would be "
                "lost; put it into the prompt, or write `messages`"
            )

    return Pair(prompt, completion)


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
    turns.append(_spoken("user", question))
    answer = text_of(required(record, answer_key), answer_key)
    turns.append(_answer(record, answer))
    return _chat(record, turns)


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
        # A number beside it, or the name of an effort, is no thought.
        if isinstance(thought, str) and is_prose(thought):
            record.note_taken(key, "the thoughts before it")
            message[key] = text_of(joined_texts(record[key]), key)
            break
    return Turn(message, None, "assistant")


def _only_key(
    record: Fields,
    names: Sequence[str],
    what: str,
) -> str:
    """Return the only one of these keys that holds something."""
    held = [name for name in names if record.holds(name)]
    if len(held) > 1:
        raise ValueError(
            f"has {quoted(held)}; expected one {what}, or `data.train.columns` that say which it is"
        )
    if held:
        return held[0]
    return first_of(names, record) or names[0]


def _spoken(role: str, content: str) -> Turn:
    return Turn({"role": role, "content": content}, None, role)


def _from_text(record: Fields) -> Text:
    return Text(text_of(required(record, "text"), "text"))


def _from_sharegpt(record: Fields) -> Chat:
    turns = []
    for i, turn in enumerate(listed(record, "conversations")):
        turns.append(read_turn(turn, f"conversations[{i}]", record))
    return _chat(record, turns)


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
    turns.append(_spoken("user", question))
    turns.append(_answer(record, answer))
    return _chat(record, turns)


def _history(record: Fields) -> list[Turn]:
    """Return the turns before a question."""
    turns = []
    for message in read_history(record.get("history")):
        turns.append(_spoken(message["role"], message["content"]))
    return turns


# Characters of a class by its name; a longer text is to be classified.
_LONGEST_CLASS: Final = 40
# Names of two texts that are compared.
_PAIRS: Final = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)


# Names of what is classified.
_TEXTS: Final = frozenset({"sentence", "text", *(name for pair in _PAIRS for name in pair)})


def _from_labelled(value: Fields) -> Labelled:
    text, second = texts_of(value)
    key = label_key(value, is_pair=second is not None)
    try:
        label = required(value, key)
    except ValueError as error:
        raise ValueError(f"{error}{_other_label(value)}") from None
    return Labelled(text, second, _label(label))


def _other_label(value: Fields) -> str:
    """Return what one may paste where a record has its label under another name, by what its columns hold."""
    for key, item in value.items():
        is_class = isinstance(item, (bool, int)) or (
            isinstance(item, str) and 0 < len(item) <= _LONGEST_CLASS
        )
        if is_class and key not in _TEXTS:
            columns = [f"{name}={column}" for name, column in value.columns.items()]
            pairs = " ".join([*columns, f"label={key}"])
            return f"; if `{key}` is the label, write `--columns {pairs}`"
    return ""


def label_key(value: Value, *, is_pair: bool) -> str:
    """Return the key that a record's label is under.

    Data sets with several labels write `labels`; those with pairs to compare have a `score`.
    """
    names = ("label", "labels", "score") if is_pair else ("label", "labels")
    return first_of(names, value) or "label"


def texts_of(value: Value) -> tuple[str, str | None]:
    """Return the text, or two, of a record to be classified. Raise ValueError where there is none."""
    for first, second in _PAIRS:
        if first in value and second in value:
            return text_of(value[first], first), text_of(value[second], second)

    key = first_of(("sentence", "text"), value)
    if key is None:
        raise ValueError(
            f"{keys(value)}; expected `sentence`, `text`, or `premise` and `hypothesis`, with `label`"
        )
    return text_of(value[key], key), None


# A text that is a number, as a table writes it; `01`, `1_000` and `１` are names.
_WHOLE_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)", re.ASCII)


def _label(label: Any) -> Label:
    """Return a label as it is read: without the space around a name, `true` and `false` as tables name them."""
    if isinstance(label, str):
        label = label.strip()
        # Tables hold a list of labels as JSON.
        if label.startswith("["):
            label = parsed(label, "label")

    if isinstance(label, list):
        return _several(label)
    if isinstance(label, bool):
        return str(label)
    # Files without types have numbers as text.
    if isinstance(label, str) and _WHOLE_NUMBER.fullmatch(label):
        label = int(label)

    is_no_number = isinstance(label, float) and not math.isfinite(label)
    if is_no_number or not isinstance(label, (int, float, str)) or label == "":
        raise ValueError(
            f"label is {show(label)}; expected a class by name or number, a list of them, or a number"
        )

    return label


def _several(labels: list[Any]) -> Label:
    """Return several labels: the classes that apply, or a 0.0 or 1.0 for every class.

    [2, 5] are two classes, [0.0, 1.0, 1.0] and [false, true, true] say of three classes whether each applies.
    """
    are_flags = all(isinstance(label, bool) for label in labels)
    # 0 and 1 as whole numbers may be classes, so at least one has to be written as a float.
    if any(isinstance(label, float) for label in labels):
        are_flags = all(label in (0, 1) for label in labels)
    if labels and are_flags:
        return tuple(1.0 if label else 0.0 for label in labels)

    classes = []
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, (int, str)):
            what = "a list of names or numbers of classes, or 0.0 or 1.0 for every class"
            raise ValueError(f"label is {show(labels)}; expected {what}")
        classes.append(label.strip() if isinstance(label, str) else label)

    if len(set(classes)) < len(classes):
        # [1, 0, 1] is refused here: it would be read as classes 1 and 0, and was hardly meant so.
        what = "each class that applies once, by name or number; a 0 or 1 for every class is written 0.0 or 1.0"
        raise ValueError(f"label is {show(classes)}; expected {what}")

    return tuple(classes)


SHAPES: Final[dict[str, Callable[[Fields], Example]]] = {
    "messages": _from_messages,
    "prompt_completion": _from_pair,
    "text": _from_text,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "question_answer": _from_question,
    "labelled": _from_labelled,
}
_MAY_BE_CHATS: Final = frozenset(SHAPES) - {"text", "labelled"}


def _chat(
    record: Fields,
    turns: list[Turn],
    context: int = 0,
) -> Chat:
    """Return a conversation with what is beside its messages. `context`: how many of them are a prompt."""
    system = _system(record, turns)
    if system is not None:
        turns = [system, *turns]
        if context:
            context += 1

    for turn in turns[:context]:
        if turn.trained:
            raise ValueError(f"{turn.where} says that it is trained; a prompt never is")
    require_known_calls(turns)
    turns, context = join_calls(turns, context)

    messages = [turn.message for turn in turns]
    images = _images(record)
    tools = read_tools(record)
    if images is not None:  # without images the tag is text like any other
        messages = _place_tags(messages, len(images))
    not_trained = frozenset(i for i, turn in enumerate(turns) if turn.trained is False)
    return Chat(tuple(messages), tools, context, images or (), not_trained)


def _system(record: Fields, turns: list[Turn]) -> Turn | None:
    """Return the message of the system that is beside the messages; None where they begin with it."""
    # The same text may be written several times.
    texts = {}
    for key in ("system", "system_prompt"):
        text = record.get(key)
        if text not in (None, ""):
            texts[key] = text

    if not texts:
        return None
    key, text = next(iter(texts.items()))

    system = text_of(text, key)
    # Whoever repeats it must say the same, or one of the two would be lost.
    has_system = turns[0].message["role"] == "system"
    others = list(texts.values())
    if has_system:
        others.append(turns[0].message["content"])
    if any(other != system for other in others):
        raise ValueError(
            f"has `{key}` and another message of the system, which says something else; expected one"
        )

    return None if has_system else _spoken("system", system)


def _images(record: Fields) -> tuple[str, ...] | None:
    """Return the images of a record, each a path or an address of data; None where it has no place for any."""
    columns = {}
    for key in ("images", "image"):
        images = record.get(key)
        if images is not None:
            columns[key] = images

    # Two columns may be there, as tables have them, but only one place may hold images.
    filled = [key for key, images in columns.items() if images]
    if len(filled) + bool(record.images) > 1:
        places = [f"`{key}`" for key in columns]
        if record.images:
            places.append("its messages")
        raise ValueError(f"has images in {' and '.join(places)}; expected them in one place")

    if record.images:
        return tuple(
            _image(image, f"image {i} of its messages") for i, image in enumerate(record.images, 1)
        )
    if not columns:
        return None

    key = filled[0] if filled else next(iter(columns))
    images = columns[key]
    if isinstance(images, str | dict):
        images = [images]
    if not isinstance(images, list):
        raise ValueError(f"{key} is {show(images)}; expected a list of paths")
    return tuple(_image(image, f"{key}[{i}]") for i, image in enumerate(images))


def _image(image: Any, where: str) -> str:
    """Return the path of an image, or its bytes as an address of data; `datasets` gives both, and means the bytes."""
    if not isinstance(image, dict):
        return text_of(image, where)
    content = image.get("bytes")
    if not image.keys() <= {"path", "bytes"} or not isinstance(content, bytes | None):
        raise ValueError(
            f"{where} is {show(image)}; expected a path, an address `data:image/…;base64,…`, or `path`"
        )
    if content is not None:
        return data_address(content)
    return text_of(image.get("path"), f"{where}.path")


def _place_tags(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return the messages with as many tags as images. Missing tags go before the first text of the user:

    two images and the question "Which is older?"    →    "<image>\n<image>\nWhich is older?"
    """
    tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tags > images:
        raise ValueError(
            f"has {tags} {IMAGE_TAG} tags for {images} images; expected one tag for each image"
        )
    if tags == images:
        return messages
    for i, message in enumerate(messages):
        if message["role"] == "user":
            content = f"{IMAGE_TAG}\n" * (images - tags) + message["content"]
            return [
                *messages[:i],
                {**message, "content": content},
                *messages[i + 1 :],
            ]

    raise ValueError(
        f"has {images} images, {tags} {IMAGE_TAG} tags and no message of the user to put more into"
    )
