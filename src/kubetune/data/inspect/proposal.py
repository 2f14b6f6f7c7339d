"""Looks at data of which nothing is known, and proposes the run that they are for: task, shape, columns.

It reads with the readers of training and understands records as `data check` does; what the names of columns mean when
they are not ours is guessed here, and nowhere else. `kubetune init` writes the proposal down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from kubetune.base.humanize import counted
from kubetune.config.data_files import ending_of, is_read
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.inspect.estimate import taken_by
from kubetune.data.reading.fields import quoted
from kubetune.data.reading.formats import (
    ANSWERS,
    QUESTIONS,
    Example,
    Judged,
    Labelled,
    Pair,
    Preference,
    detect,
    images_of,
    read,
)
from kubetune.data.reading.images import IMAGE_SUFFIXES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.data.reading.sources import read_source
from kubetune.errors import DataError

# So many records are looked at.
LOOKED_AT: Final = 1_000

# What columns are called elsewhere: our name, and the others in the order in which they are believed.
_OTHER_NAMES: Final = {
    "messages": ("messages", "conversation", "dialog", "dialogue", "chat", "turns"),
    "chosen": ("chosen", "preferred", "winner", "accepted", "better", "response_chosen"),
    "rejected": ("rejected", "dispreferred", "loser", "worse", "response_rejected"),
    "image": ("image", "image_path", "image_file", "file_name", "filename", "img", "picture"),
    "prompt": (
        "prompt", *QUESTIONS, "input", "request", "user", "human", "source", "context", "q",
    ),
    "completion": (
        *ANSWERS, "reply", "assistant", "bot", "target", "summary", "translation", "final_answer", "a",
    ),
    "label": ("label", "labels", "class", "category", "sentiment", "intent", "topic", "rating", "stars"),
    "text": ("text", "sentence", "review", "comment", "body", "content", "document", "article", "message"),
}  # fmt: skip
_TASKS: Final[dict[RecordKind, str]] = {
    "pair": "preference",
    "judged": "preference",
    "labelled": "sequence_classification",
}
_KINDS: Final[dict[str, RecordKind]] = {
    "preference": "pair",
    "reward_model": "graded",
    "sequence_classification": "labelled",
    "grpo": "prompt",
}
_CLASSES_NAMED: Final = 6


class Choice(NamedTuple):
    """A setting that was chosen, and the reason for it."""

    value: Any
    reason: str


@dataclass
class Proposal:
    """A run that data are for."""

    path: str
    task: Choice
    loss: Choice | None = None  # `preference.loss`, where it is not the default
    format: Choice | None = None  # None: it is recognised
    columns: dict[str, Choice] = field(default_factory=dict)
    rows: int | None = None
    plain_prompts: bool = False  # prompts and answers are plain texts
    conversations: bool = False  # the chat template of the model is needed
    remarks: list[str] = field(default_factory=list)


def propose(source: SourceConfig, task: str | None = None) -> Proposal:
    """Return the run that the data of a source are for. Raise DataError, in words, where they are for none.

    `source.columns` are names that the user gives, `task` is the user's too; what is left out is guessed.
    """
    _require_no_bare_images(Path(source.path).expanduser())
    problems = Problems()
    records = list(islice(read_source(source, problems), LOOKED_AT))
    if not records:
        problems.raise_if_any()
        raise DataError(f"{source.path} holds no records. Nothing was written.")

    # From what records are to what their columns are called, and only then to reading them.
    names = _names_in(records)
    by_name = _by_our_names(names, records)
    kind = _kind_of(records, by_name, source.columns)
    if task is not None and not (task == "preference" and kind == "judged"):
        kind = _KINDS.get(task, "text")
    columns = _columns_of(kind, records, names, source)
    keys = {key: choice.value for key, choice in columns.items()}
    examples = _read_all(records, source, kind, keys)

    # The first record stands for all of what is no count.
    first = examples[0]
    choice = _task(kind, examples)
    if task is not None:
        choice = Choice(task, "as given")
    proposal = Proposal(source.path, choice, columns=columns)
    proposal.rows = taken_by(source)
    proposal.plain_prompts = _is_plain(first)
    proposal.conversations = _is_chat(first)
    if kind == "judged":
        proposal.loss = Choice("kto", "answers are judged one by one, not compared")
    if kind == "labelled":
        proposal.remarks.append(_classes_of(examples))
    bad = len(records) - len(examples) + problems.total
    if bad:
        proposal.remarks.append(
            f"{counted(bad, 'record')} of the first {len(records):,} cannot be used: `kubetune data check` names them"
        )

    return proposal


def _names_in(records: Sequence[Record]) -> dict[str, str]:
    """Return the keys of records that hold something, by their names as one compares them.

    {"Question": …, "Final Answer": …}  →  {"question": "Question", "final_answer": "Final Answer"}
    """
    names: dict[str, str] = {}
    for record in records:
        for key, value in record.value.items():
            if value not in (None, "", [], {}):
                names.setdefault(key.strip().lower().replace(" ", "_").replace("-", "_"), key)
    return names


def _by_our_names(names: Mapping[str, str], records: Sequence[Record]) -> dict[str, str | None]:
    """Return the key that stands for each of our names."""
    by_name = {expected: _find(expected, names) for expected in _OTHER_NAMES}
    # A `filename` may be that of the text, too.
    image = by_name["image"]
    if image is not None:
        values = [record.value.get(image) for record in records]
        if not any(_is_image(value) for value in values):
            by_name["image"] = None
    return by_name


def _is_image(value: Any) -> bool:
    """True if a value may be an image: its path, its bytes, or a list of these."""
    if isinstance(value, str):
        return value.lower().endswith(IMAGE_SUFFIXES) or value.startswith("data:image")
    return isinstance(value, (dict, list))


def _find(expected: str, names: Mapping[str, str]) -> str | None:
    """Return the key that stands for one of our names; None where there is none."""
    # In the order in which they are believed.
    for name in _OTHER_NAMES[expected]:
        if name in names:
            return names[name]
    return None


def _kind_of(
    records: Sequence[Record], by_name: Mapping[str, str | None], columns: Mapping[str, Any]
) -> RecordKind:
    """Return the kind of the records."""
    # Two answers to compare, or answers that are judged.
    if by_name["chosen"] and by_name["rejected"]:
        return "pair"
    kinds = Counter(likely_kind(record.value) for record in records)
    kind = kinds.most_common(1)[0][0]
    if kind != "text":
        return kind
    # A label beside a text, with nothing that is an answer: the classes of a classifier.
    if "label" in columns:
        return "labelled"
    talks = by_name["messages"] or by_name["completion"] or "conversations" in records[0].value
    has_text = by_name["text"] or _can_be_read(records[0], "labelled")
    if by_name["label"] and has_text and not talks:
        return "labelled"
    return "text"


def _columns_of(
    kind: RecordKind, records: Sequence[Record], names: Mapping[str, str], source: SourceConfig
) -> dict[str, Choice]:
    """Return our names of columns that have others. Raise DataError where no column is known."""
    by_name = _by_our_names(names, records)
    images: dict[str, Choice] = {}
    if by_name["image"]:
        images = _other_columns(("image",), by_name)
    if source.columns:
        named = {key: Choice(name, "as given") for key, name in source.columns.items()}
        return {**images, **named} if kind == "text" else named
    if kind != "text" and _can_be_read(records[0], kind):
        return {}
    if kind in ("pair", "graded"):
        return _other_columns(("chosen", "rejected", "prompt"), by_name)
    if kind == "judged":
        return _other_columns(("prompt", "completion"), by_name)
    if kind == "labelled":
        return _other_columns(("text", "label"), by_name)

    # Texts to write: the shape is known by its keys, or by other names of them.
    if _can_be_read(records[0], "text"):
        return images
    # Of images with a question, the label is the answer.
    if by_name["image"] and by_name["completion"] is None:
        by_name["completion"] = by_name["label"]
    for expected in (("prompt", "completion"), ("messages",), ("text",)):
        if all(by_name[key] for key in expected):
            return images | _other_columns(expected, by_name)
    raise DataError(_unknown(names, source.path, bool(by_name["image"])))


def _can_be_read(record: Record, kind: RecordKind) -> bool:
    """True if the readers know what a record is, without other names."""
    try:
        if kind == "text":
            detect(record.value)
        else:
            read(record.value, kind=kind)
    except ValueError:
        return False
    return True


def _other_columns(expected: Sequence[str], by_name: Mapping[str, str | None]) -> dict[str, Choice]:
    """Return the columns that have another name than the expected one, as `data.train.columns` has them."""
    columns: dict[str, Choice] = {}
    for key in expected:
        name = by_name[key]
        if name is None or name == key:
            continue
        # The readers know this name by themselves.
        if key == "image" and name == "images":
            continue
        columns[key] = Choice(name, f"`{name}` is taken as the {_MEANINGS[key]}")

    return columns


_MEANINGS: Final = {
    "messages": "conversation",
    "chosen": "better answer",
    "rejected": "worse answer",
    "image": "image",
    "prompt": "question",
    "completion": "answer, which is learned",
    "label": "class",
    "text": "text",
}


def _read_all(
    records: Sequence[Record], source: SourceConfig, kind: RecordKind, columns: Mapping[str, str]
) -> list[Example]:
    """Return the records that can be read. Raise DataError, with the first reason, where none can."""
    examples = []
    problems = Problems()
    for record in records:
        try:
            examples.append(read(record.value, source.format, columns, kind=kind).example)
        except ValueError as error:
            problems.add(record.where, str(error))

    if not examples:
        raise problems.error()
    return examples


def _task(kind: RecordKind, examples: Sequence[Example]) -> Choice:
    """Return the task, and why."""
    task = _TASKS.get(kind)
    if kind == "pair":
        return Choice(task, "each row has a better and a worse answer")
    if kind == "judged":
        return Choice(task, "each answer has a label that says whether it is good")
    if kind == "labelled":
        return Choice(task, "each row has a text and a label: a classifier")
    if any(images_of(example) for example in examples):
        return Choice("vision_language", "the rows have images")
    if _is_chat(examples[0]):
        return Choice("causal_lm", "conversations: the answers are learned")
    if isinstance(examples[0], Pair):
        return Choice("causal_lm", "prompts and answers: the answers are learned")
    return Choice("causal_lm", "plain texts: every token is learned")


def _is_chat(example: Example) -> bool:
    match example:
        case Preference(answer) | Judged(answer):
            return _is_chat(answer)
    return hasattr(example, "messages")


def _is_plain(example: Example) -> bool:
    """True if a prompt is plain text, whose answer does not go on in the middle of a line.

    A completion that begins with a space is meant to follow its prompt as it is.
    """
    match example:
        case Preference(answer) | Judged(answer):
            return _is_plain(answer)
        case Pair(_, completion):
            return not completion[:1].isspace()
    return False


def _classes_of(examples: Sequence[Example]) -> str:
    """Return in words what the labels are."""
    labels: Counter[str] = Counter()
    for example in examples:
        if isinstance(example, Labelled):
            labels[str(example.label)] += 1
    most_common = [f"{name} × {number:,}" for name, number in labels.most_common(_CLASSES_NAMED)]
    more = f" and {len(labels) - _CLASSES_NAMED:,} more" if len(labels) > _CLASSES_NAMED else ""
    return f"{counted(len(labels), 'label')}: {', '.join(most_common)}{more}"


def _unknown(
    names: Mapping[str, str],
    path: str,
    has_images: bool,
) -> str:
    """Return what a user should do where no column is known."""
    columns = list(names.values())
    text = f"{path} has the columns {quoted(columns[:12])}, and none is known as a question with its answer"
    if has_images:
        text = f"{path} has images ({quoted(columns[:12])}), but no question and answer about them"
        return (
            f"{text}; add a column `prompt` (such as: What is this?); the label, or "
            "`--columns completion=NAME`, is its answer"
        )
    first = columns[0] if columns else "A"
    last = columns[-1] if columns else "B"
    return (
        f"{text}, a text, or a text with its label. Say which is which: "
        f"`--columns prompt={first} completion={last}`, `--columns text={first}`, or `--columns text={first} label={last}`"
    )


def _require_no_bare_images(folder: Path) -> None:
    """Raise DataError for a folder of images without a file that says what is to be learned about them."""
    if not folder.is_dir():
        return
    images = list(_images_in(folder))
    # Texts beside images are their captions, and no records that name them.
    has_records = False
    for file in folder.rglob("*"):
        if is_read(file) and ending_of(file) != ".txt":
            has_records = True
    if not images or has_records:
        return
    image = images[0].relative_to(folder)
    answer = image.parent.name or "…"
    raise DataError(
        f"{folder} holds {counted(len(images), 'image')} and no file of records; a run needs one that says what is to be "
        f'learned about each image. Write {folder}/train.jsonl with lines such as {{"image": "{image}", "prompt": '
        f'"What is this?", "completion": "{answer}"}}'
    )


def _images_in(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in IMAGE_SUFFIXES:
            yield file
