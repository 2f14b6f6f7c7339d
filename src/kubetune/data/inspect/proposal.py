"""Looks at data of which nothing is known, and proposes the run that they are for: task, shape, columns.

It reads with the readers of training and understands records as `data check` does; what the names of columns mean when
they are not ours is guessed here, and nowhere else. `kubetune init` writes the proposal down.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from kubetune.base.humanize import counted
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_facts import MOST_CLASSES, Columns
from kubetune.data.column_names import (
    ANSWERS,
    QUESTIONS,
    REASONING,
    TALKS,
    names_thought,
)
from kubetune.data.column_words import lacking, nowhere
from kubetune.data.inspect.answers_as_texts import (
    as_text,
    from_label,
    into_question,
)
from kubetune.data.inspect.bare_images import require_no_bare_images
from kubetune.data.inspect.estimate import taken_by
from kubetune.data.inspect.seen_records import SeenRecords
from kubetune.data.inspect.unknown_columns import unknown
from kubetune.data.prepared.remarks import written_texts
from kubetune.data.question_subjects import left_subjects, subject_columns
from kubetune.data.reading.examples import (
    Chat,
    Example,
    Labelled,
    Pair,
    images_of,
    parts_of,
)
from kubetune.data.reading.formats import detect, read
from kubetune.data.reading.messages import OF_TEMPLATES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.prompts import NO_ANSWER, right_answer
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.record_values import RecordValue, is_prose, key_of
from kubetune.data.text.answer_targets import last_number
from kubetune.data.unread_columns import LeftOut, left_out
from kubetune.errors import DataError

# So many records are looked at.
LOOKED_AT: Final = 1_000

_KINDS: Final[dict[str, RecordKind]] = {
    "preference": "pair",
    "reward_model": "graded",
    "sequence_classification": "labelled",
    "grpo": "prompt",
}
_CLASSES_NAMED: Final = 6
# Words of right answers, on average, up to which an answer may equal one.
_WORDS_TO_MATCH: Final = 8


# Tokens of an answer that an evaluation waits for, and rows that it asks: seconds of a small model on a laptop, before
# training and after each epoch.
_MOST_ANSWER_TOKENS: Final = 256
_ASKED: Final = 50


class ReasonedChoice(NamedTuple):
    """A setting that was chosen, and the reason for it."""

    value: Any
    reason: str


_TASKS: Final[dict[RecordKind, ReasonedChoice]] = {
    "prompt": ReasonedChoice(
        "grpo", "prompts with right answers: answers are drawn, and rewarded if they are right"
    ),
    "pair": ReasonedChoice("preference", "each row has a better and a worse answer"),
    "judged": ReasonedChoice("preference", "each answer has a label that says whether it is good"),
    "labelled": ReasonedChoice(
        "sequence_classification", "each row has a text and a label: a classifier"
    ),
}


@dataclass
class Proposal:
    """A run that data are for."""

    path: str
    task: ReasonedChoice
    kind: RecordKind
    records: Sequence[Record]  # those that were looked at
    loss: ReasonedChoice | None = None  # `preference.loss`, where it is not the default
    reward: ReasonedChoice | None = None  # `rewards`, of prompts
    # `classification.problem_type`, if labels are numbers to predict.
    problem_type: ReasonedChoice | None = None
    format: ReasonedChoice | None = None  # None: it is recognised
    columns: dict[str, ReasonedChoice] = field(default_factory=dict)
    rows: int | None = None
    plain_prompts: bool = False  # prompts and answers are plain texts
    conversations: bool = False  # the chat template of the model is needed
    answers: ReasonedChoice | None = None  # `evaluation.generate`, where answers can be compared
    remarks: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # what nothing reads, in words
    # The columns that have a sentence each there.
    explained: list[str] = field(default_factory=list)


def propose(source: SourceConfig, task: str | None = None) -> Proposal:
    """Return the run that the data of a source are for. Raise DataError, in words, where they are for none.

    `source.columns` are names that the user gives, `task` is the user's too; what is left out is guessed.
    """
    require_no_bare_images(Path(source.path).expanduser())
    problems = Problems()
    records = list(islice(read_source(source, problems), LOOKED_AT))
    if not records:
        problems.raise_if_any()
        raise DataError(f"{source.path} holds no records. Nothing was written.")

    # From what records are to what their columns are called, and only then to reading them.
    seen = SeenRecords.of(records)
    kind = _kind_of(seen, source.columns)
    if task is not None and not (task == "preference" and kind == "judged"):
        of_task = _KINDS.get(task, "text")
        if of_task != kind:
            # Columns mean something else then.
            seen = SeenRecords.of(records)
        kind = of_task
    columns = _columns_of(kind, seen, source)
    keys = {key: choice.value for key, choice in columns.items()}
    seen_as = _read_all(records, source, kind, keys)
    examples = seen_as.examples
    use = _use_of_thoughts(seen_as.unused)
    is_known = isinstance(examples[0], Chat) or _is_plain(examples[0])
    if use and not source.columns and kind == "text" and is_known:
        columns = {
            key: ReasonedChoice(name, f"`{name}` is taken as the {_MEANINGS[key]}")
            for key, name in use.items()
        }
        examples = _read_all(records, source, kind, use).examples

    # The first record stands for all of what is no count.
    first = examples[0]
    choice = _task(kind, examples)
    if task is not None:
        choice = ReasonedChoice(task, "as given")
    proposal = Proposal(source.path, choice, kind, records, columns=columns)
    proposal.rows = taken_by(source)
    proposal.plain_prompts = _is_plain(first)
    proposal.conversations = _is_chat(first)
    _settle(proposal, kind, examples)
    if problems.total:
        proposal.remarks.append(f"{counted(problems.total, 'record')} cannot be read")
    settle_format(proposal, has_template=None)
    return proposal


def settle_format(proposal: Proposal, *, has_template: bool | None) -> None:
    """Choose the shape of records that has to be named, and say what nothing reads of records in this shape.

    Plain prompts go through the chat template of the model, unless it has none.
    """
    proposal.format = None
    if proposal.plain_prompts and has_template is not False:
        reason = "prompts go through the chat template, as in `chat` and `generate`"
        is_compared = proposal.task.value in ("preference", "reward_model")
        shape = "messages" if is_compared else "question_answer"
        proposal.format = ReasonedChoice(shape, reason)
    keys = {key: choice.value for key, choice in proposal.columns.items()}
    source = SourceConfig(path=proposal.path)
    if proposal.format is not None:
        source = source.model_copy(update={"format": proposal.format.value})
    read_so = _read_all(proposal.records, source, proposal.kind, keys)
    proposal.unused = _in_words(read_so.unused)
    proposal.explained = [column.name for column in read_so.unused if column.meaning != "other"]
    for column, number in sorted(read_so.absent.items()):
        proposal.unused.append(f"{lacking(column)}, in {counted(number, 'record')}")
    bad = read_so.problems
    if bad.total:
        proposal.unused.append(
            f"{bad.total:,} of the first {counted(len(proposal.records), 'record')} cannot be used. {bad.sentences()[0]}"
        )


def _settle(proposal: Proposal, kind: RecordKind, examples: Sequence[Example]) -> None:
    """Add what only records of one kind need: a loss, a reward, a kind of labels."""
    if kind == "judged":
        proposal.loss = ReasonedChoice("kto", "answers are judged one by one, not compared")
    if kind == "text":
        proposal.answers = _answers(examples)
    if kind == "prompt":
        proposal.reward = _reward(examples, proposal.path)
    if kind == "labelled":
        proposal.problem_type = _problem_type(examples)
        proposal.remarks.append(_classes_of(examples, proposal.problem_type))


def _answers(examples: Sequence[Example]) -> ReasonedChoice | None:
    """Return what an evaluation asks, and compares with the answers of the data; None for texts without questions.

    A few words are right or wrong; of longer answers the words that both have are counted, since hardly any answer is
    the same to the letter.
    """
    lengths = []  # characters
    words = []
    for example in examples:
        text = None
        if isinstance(example, Pair):
            text = example.completion
        elif isinstance(example, Chat) and not example.images:
            text = example.messages[-1].get("content")
        if isinstance(text, str) and text.strip():
            lengths.append(len(text))
            words.append(len(text.split()))
    if not lengths:
        return None
    metric = "exact_match"
    reason = "short answers: right or wrong"
    if statistics.median(words) > _WORDS_TO_MATCH:
        metric = "token_f1"
        reason = "long answers: the words that they share with the right one"
    # A token is about 4 characters of English, and hardly less than 2 of anything; an answer that ends earlier is not
    # waited for. 100 characters: 56.
    tokens = min(_MOST_ANSWER_TOKENS, max(32, 8 * -(-max(lengths) // 16)))
    generate = {"metric": metric, "max_new_tokens": tokens, "rows": _ASKED}
    return ReasonedChoice(generate, reason)


def _kind_of(seen: SeenRecords, columns: Mapping[str, str]) -> RecordKind:
    """Return the kind of the records."""
    by_name = seen.by_name
    # Two answers to compare, or answers that are judged.
    if by_name["chosen"] and by_name["rejected"]:
        return "pair"
    kinds = Counter(likely_kind(record.value) for record in seen.records)
    kind = kinds.most_common(1)[0][0]
    # Other numbers than 0 and 1 are no verdicts.
    if kind == "judged" and len(kinds) > 1:
        kind = "text"
    if kind != "text":
        return kind
    if "label" in columns:
        return "labelled"
    if not columns and all(_lacks_answer(record.value) for record in seen.records):
        return "prompt"
    return "labelled" if _are_labelled(seen, columns) else "text"


def _are_labelled(seen: SeenRecords, columns: Mapping[str, str]) -> bool:
    """Return True for texts with classes, and note in `seen.by_name` which columns these are."""
    by_name = seen.by_name
    answer = by_name["completion"]
    if answer is not None and not columns and seen.is_class_for_answer(answer):
        by_name["completion"] = None
        by_name["label"] = by_name["label"] or answer
    # A label beside a text, with nothing that is an answer: the classes of a classifier.
    talks = by_name["messages"] or by_name["completion"] or "conversations" in seen.first
    if talks or columns or by_name["image"]:
        return False
    classes = [name for name in seen.classes() if name != by_name["text"]]
    label = by_name["label"] or (classes[0] if len(classes) == 1 else None)
    about = seen.text_with_subject()
    if about is not None and label is not None:
        by_name["text"], by_name["text_pair"] = about
        by_name["label"] = label
        return True
    has_label = by_name["label"] and by_name["text"]
    if has_label or _can_be_read(seen.records[0], "labelled"):
        return True
    # Two texts that are compared, whatever the column with the verdict is called.
    if seen.compares_texts:
        by_name["label"] = label
        by_name["text"] = None
        return label is not None
    if len(classes) == 1 and (by_name["text"] or len(seen.texts()) == 1):
        by_name["label"] = classes[0]
        by_name["text"] = by_name["text"] or seen.texts()[0]
        return True
    return False


def _lacks_answer(value: RecordValue) -> bool:
    """True for a conversation that does not end with an answer, and for a prompt with at most a right answer.

    A right answer with the thoughts that lead to it is an answer to learn.
    """
    for key in TALKS:
        turns = value.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[-1], Mapping):
            speaker = turns[-1].get("role", turns[-1].get("from"))
            return speaker in ("user", "human", "tool", "observation")
    if any(value.get(key) not in (None, "", [], {}) for key in ("text", *TALKS, *ANSWERS)):
        return False
    prompt = value.get("prompt")
    if isinstance(prompt, list):
        return bool(prompt)
    if any(names_thought(key) and is_prose(item) for key, item in value.items()):
        return False
    asks = any(is_prose(value.get(key)) for key in (*QUESTIONS, "prompt"))
    return asks and right_answer(value) is not None


def _columns_of(
    kind: RecordKind, seen: SeenRecords, source: SourceConfig
) -> dict[str, ReasonedChoice]:
    """Return our names of columns that have others. Raise DataError where no column is known."""
    by_name = seen.by_name
    images: dict[str, ReasonedChoice] = {}
    if by_name["image"]:
        images = _other_columns(("image",), by_name)
    if source.columns:
        named = {key: ReasonedChoice(name, "as given") for key, name in source.columns.items()}
        return {**images, **named} if kind == "text" else named
    subject = _with_subject(kind, seen, source.path)
    if subject:
        return {**images, **subject}
    if kind == "labelled" and by_name["text_pair"]:
        return _other_columns(("text", "text_pair", "label"), by_name)
    if kind != "text" and _can_be_read(seen.records[0], kind):
        return {}
    if kind in ("pair", "graded"):
        return _other_columns(("chosen", "rejected", "prompt"), by_name)
    if kind in ("judged", "prompt"):
        return _other_columns(("prompt", "completion"), by_name)
    if kind == "labelled":
        return _other_columns(("text", "label"), by_name)

    # Of two answers the readers say what they are for: none of them is to be taken for the prompt.
    if by_name["chosen"] and by_name["rejected"]:
        return images
    # Texts to write: the shape is known by its keys, or by other names of them.
    if _can_be_read(seen.records[0], "text"):
        # {"prompt": …, "solution": …} is known, but as a prompt whose answers are rewarded.
        names = _other_columns(("prompt", "completion"), by_name)
        has_both = by_name["prompt"] and by_name["completion"]
        if has_both and not _has_answer(seen.records[0], {}):
            keys = {key: choice.value for key, choice in names.items()}
            if _has_answer(seen.records[0], keys):
                return images | names
        return images
    columns = _columns_by_name(seen, source.path)
    # Its names say now which text is the question.
    return images | (_with_subject(kind, seen, source.path) or columns)


def _columns_by_name(seen: SeenRecords, path: str) -> dict[str, ReasonedChoice]:
    """Return our names of columns that only their names tell. Raise DataError where none is known, or two could be."""
    by_name = seen.by_name
    # Of images with a question, the label is the answer.
    if by_name["image"] and by_name["completion"] is None:
        by_name["completion"] = by_name["label"]
    # Of an article with its summary, the article is the prompt.
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
    if kind == "labelled":
        question = seen.by_name["text"] or "text"
        label = seen.by_name["label"] or "label"
        advice = from_label([record.value for record in seen.records], question, label, path)
        if advice:
            raise DataError(advice)
        return {}
    # In the names that the readers know: other names are mapped to these.
    mapped = _other_columns(("prompt", "completion", "chosen", "rejected"), seen.by_name)
    names = {key: choice.value for key, choice in mapped.items()}
    for record in seen.records:
        value = _renamed(record.value, names)
        left = left_subjects(value, {}, needs_answer=kind == "text")
        if not left or any(name not in record.value for group in left for name in group):
            continue
        use = subject_columns(left, record.value, names)
        if use:
            reasons = {
                "instruction": "the question",
                "input": "what the question is about: a part of the prompt",
                "output": "the answer, which is learned",
                "chosen": "the better answer",
                "rejected": "the worse answer",
                "system": "what the conversation is about: the system's message",
            }
            return {
                key: ReasonedChoice(use[key], f"`{use[key]}` is {reason}")
                for key, reason in reasons.items()
                if key in use
            }
        values = [_renamed(record.value, names) for record in seen.records]
        advice = as_text(record.value, names, path) or into_question(values, names, path)
        if advice:
            raise DataError(advice)
    return {}


def _renamed(value: RecordValue, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a record whose columns have our names. `names`: the file's, by ours; a conversation keeps its own."""
    renamed = dict(value)
    if not key_of(TALKS, value, {}):
        for key, name in names.items():
            if name in renamed:
                renamed[key] = renamed.pop(name)
    return renamed


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


def _has_answer(record: Record, columns: Mapping[str, str]) -> bool:
    """True if a record can be learned from, with these names of columns."""
    try:
        read(record.value, columns=columns, kind="text")
    except ValueError:
        return False
    return True


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
        columns[key] = ReasonedChoice(name, f"`{name}` is taken as the {_MEANINGS[key]}")

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
    "text_pair": "text that it is about",
    "instruction": "question",
    "input": "text that it is about",
    "output": "answer, which is learned",
    "reasoning_content": "thoughts before the answer",
}


class _Readings(NamedTuple):
    """Records as they were understood."""

    examples: Sequence[Example]
    unused: Sequence[LeftOut]  # what nothing reads
    problems: Problems  # of the records that cannot be read
    absent: Counter[str]  # records without a column that is named, and that they can do without


def _read_all(
    records: Sequence[Record], source: SourceConfig, kind: RecordKind, columns: Mapping[str, str]
) -> _Readings:
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
        advice = as_text(records[0].value, columns, source.path)
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
    return _Readings(examples, named, problems, absent)


def _use_of_thoughts(unused: Sequence[LeftOut]) -> Mapping[str, str]:
    """Return all columns by which the only thoughts are read before the answer; none without any, or with several."""
    thoughts = [column for column in unused if column.meaning == "thought"]
    # The shape that `settle_format` chooses reads these names by itself.
    if len(thoughts) != 1 or thoughts[0].name in REASONING:
        return {}
    return thoughts[0].use


def _in_words(unused: Sequence[LeftOut]) -> list[str]:
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


def _task(kind: RecordKind, examples: Sequence[Example]) -> ReasonedChoice:
    """Return the task, and why."""
    if kind in _TASKS:
        return _TASKS[kind]
    if any(images_of(example) for example in examples):
        return ReasonedChoice("vision_language", "the rows have images")
    if _is_chat(examples[0]):
        return ReasonedChoice("causal_lm", "conversations: the answers are learned")
    if isinstance(examples[0], Pair):
        return ReasonedChoice("causal_lm", "prompts and answers: the answers are learned")
    return ReasonedChoice("causal_lm", "plain texts: every token is learned")


def _is_chat(example: Example) -> bool:
    return isinstance(parts_of(example)[0], Chat)


def _is_plain(example: Example) -> bool:
    """True if a prompt is plain text, whose answer does not go on in the middle of a line.

    A completion that begins with a space is meant to follow its prompt as it is.
    """
    answer = parts_of(example)[0]
    return isinstance(answer, Pair) and not answer.completion[:1].isspace()


def _problem_type(examples: Sequence[Example]) -> ReasonedChoice | None:
    """Return regression for labels that are numbers to predict, None for classes."""
    labels = [example.label for example in examples if isinstance(example, Labelled)]
    numbers = {label for label in labels if isinstance(label, (int, float))}
    texts = [label for label in labels if isinstance(label, str)]
    numbers |= {float(text) for text in texts if re.fullmatch(r"-?\d+(\.\d+)?", text)}
    has_fraction = any(number != int(number) for number in numbers)
    is_count = bool(numbers) and numbers == set(range(len(numbers)))
    is_many = len(numbers) > MOST_CLASSES and not is_count
    if not (has_fraction or is_many) or 2 * len(numbers) <= len({str(label) for label in labels}):
        return None
    reason = (
        f"{counted(len(numbers), 'number')} from {min(numbers):g} to {max(numbers):g}: no classes"
    )
    return ReasonedChoice("regression", reason)


def _classes_of(examples: Sequence[Example], problem_type: ReasonedChoice | None) -> str:
    """Return in words what the labels are."""
    if problem_type is not None:
        return f"The labels are numbers to predict: {problem_type.reason}"
    labels: Counter[str] = Counter()
    for example in examples:
        if isinstance(example, Labelled):
            labels[str(example.label)] += 1
    most_common = [f"{name} × {number:,}" for name, number in labels.most_common(_CLASSES_NAMED)]
    more = f" and {len(labels) - _CLASSES_NAMED:,} more" if len(labels) > _CLASSES_NAMED else ""
    return f"{counted(len(labels), 'label')}: {', '.join(most_common)}{more}"


def _reward(examples: Sequence[Example], path: str) -> ReasonedChoice:
    """Return the reward that right answers allow. Raise DataError where none of the built-in ones can be got."""
    answers = []
    for example in examples:
        if isinstance(example, Chat):
            answers.append(example.messages[-1]["content"])
        elif isinstance(example, Pair):
            answers.append(example.completion)
    answers = [answer for answer in answers if answer != NO_ANSWER]
    advice = (
        "a function of yours can reward answers: begin with `kubetune init --task grpo -o run.yaml` and write "
        "`rewards: [{file: rewards.py, function: score}]` (docs/grpo.md). Nothing was written."
    )
    if not answers:
        talks = [example.messages[:-1] for example in examples if isinstance(example, Chat)]
        if any(message["role"] == "assistant" for talk in talks for message in talk):
            raise DataError(
                f"{path} holds conversations that end with a message of the user. `--task causal_lm` learns the answers "
                f"within them; if answers to the last message are to be drawn, {advice}"
            )
        raise DataError(
            f"{path} holds prompts without right answers, so none can be compared; {advice}"
        )
    numbers = sum(_ends_with_number(answer) for answer in answers)
    if numbers >= 0.9 * len(answers):
        return ReasonedChoice("numeric", "the right answers end with a number, which is compared")
    words = sum(len(answer.split()) for answer in answers) / len(answers)
    if words > _WORDS_TO_MATCH:
        raise DataError(
            f"{path} has right answers of {words:.0f} words on average, which no answer equals word by word; {advice}"
        )
    return ReasonedChoice(
        "exact_match", "right answers are rewarded; others, and functions of yours: docs/grpo.md"
    )


def _ends_with_number(answer: str) -> bool:
    """True for `72`, and for steps that end with `#### 72`."""
    is_last = re.search(r"\d\S{0,3}\s*$", answer)
    return is_last is not None and last_number(answer) is not None
