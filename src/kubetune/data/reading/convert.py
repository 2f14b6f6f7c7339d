"""Turns any supported data into JSON lines of one shape; rows of message trees (OpenAssistant) into threads."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import require_not_read, written_whole
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_words import nowhere
from kubetune.data.reading.examples import (
    Chat,
    Example,
    Judged,
    Labelled,
    Pair,
    Preference,
    Text,
    with_images,
)
from kubetune.data.reading.formats import read
from kubetune.data.reading.images import ADDRESS, image_of_row
from kubetune.data.reading.messages import IMAGE_TAG, OF_TEMPLATES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.reading.taken import read_taken
from kubetune.data.record_values import RecordValue
from kubetune.data.single_messages import TREE_KEYS
from kubetune.errors import DataError


def convert_source(
    source: SourceConfig,
    output: Path,
    to: str,
    seed: int = 42,
) -> tuple[Counter[str], Counter[str]]:
    """Write all records of a source to a JSONL file, whole or not at all.

    `to` is a key of SHAPERS. Returns how many were `read`, `written` and `skipped` (no answer to learn), and how often
    each key was not used. Raise DataError with every record that is bad or cannot take the shape, ConfigError where the
    source holds the output.
    """
    conversion = Conversion(source, output, to, seed)
    conversion.write()
    return conversion.counts, conversion.unused


@dataclass
class Conversion:
    """The records of a source on their way into one shape, and what is counted on the way."""

    source: SourceConfig
    output: Path
    to: str  # a key of SHAPERS
    seed: int
    problems: Problems = field(default_factory=Problems)
    counts: Counter[str] = field(default_factory=lambda: Counter(read=0, written=0, skipped=0))
    unused: Counter[str] = field(default_factory=Counter)  # keys that decided nothing
    absent: Counter[str] = field(default_factory=Counter)  # columns that records lacked
    understood: int = 0  # records that took the shape

    def write(self) -> None:
        """Write all records to the output, whole or not at all."""
        with written_whole(self.output) as file:
            for value in self._values():
                file.write((json.dumps(value, ensure_ascii=False) + "\n").encode())
                self.counts["written"] += 1
            # Inside `written_whole`, so that a problem leaves no file.
            self._require_sound()

    def _values(self) -> Iterator[JsonObject]:
        """Yield what is written for each record; count records on the way."""
        file = None
        records = read_taken(self.source, self.seed, self.problems)
        for record in _threads(records, self.counts):
            # The output must be none of the files that are read, which would lose their records.
            if record.file != file:
                file = record.file
                require_not_read(self.output, file)

            for value in self._shaped(record):
                if value is None:
                    self.counts["skipped"] += 1
                else:
                    yield value

    def _shaped(self, record: Record) -> list[JsonObject | None]:
        """Return what a record is written as, None for what has no answer to learn. A bad one is a problem."""
        try:
            reading = read(
                record.value,
                self.source.format,
                self.source.columns,
                kind=_kind_of(record.value, self.to),
            )
            example = _with_placed_images(reading.example, record.file, self.output)
            values = [SHAPERS[self.to](part) for part in _parts(example, self.to)]
        except ValueError as error:
            self.problems.add(record.where, str(error))
            return []

        # Keys that templates may read are written with the messages.
        self.unused.update(key for key in reading.unused if key not in OF_TEMPLATES)
        self.absent.update(reading.absent)
        self.understood += 1
        return values

    def _require_sound(self) -> None:
        """Raise DataError for a column that no record has, for bad records, or if there is none to write."""
        problem = nowhere(self.absent, self.understood, self.source.path)
        if problem:
            raise DataError(f"{problem}. Nothing was written.")
        self.problems.raise_if_any()
        if not self.counts["written"]:
            raise DataError(f"{self.source.path} holds no record to convert. Nothing was written.")


def _kind_of(value: RecordValue, to: str) -> RecordKind:
    """Return as what kind of record a value is read that is to take a shape."""
    # `graded` keeps the margin of a pair, if the record has one.
    if to == "preference":
        return "graded"
    if to == "judged":
        return "pair" if likely_kind(value) == "pair" else "judged"
    return "text"


def _with_placed_images(
    example: Example,
    data_file: str,
    output: Path,
) -> Example:
    """Return the example with paths of images that hold where it is written; images that it holds stay in it."""
    if Path(data_file).absolute().parent == output.absolute().parent:
        return example

    def placed(image: str) -> str:
        if image.startswith(ADDRESS):
            return image
        return str(image_of_row(data_file, image).absolute())

    return with_images(example, placed)


def _to_messages(example: Example) -> JsonObject | None:
    match example:
        case Chat(messages, tools):
            # Nothing would be learned from it.
            if not any(message["role"] == "assistant" for message in messages):
                return None
            return {"messages": _marked(example)} | _beside(tools, example.images)
        case Pair(prompt, completion):
            return {"messages": _messages(prompt, completion)}
        case Labelled():
            return {"messages": _messages(_labelled_text(example), str(example.label))}
        case _:
            raise ValueError(
                "is a plain text, which nobody says to anybody; convert it with --to text"
            )


def _labelled_text(example: Labelled) -> str:
    if example.second is None:
        return example.text
    return f"{example.text}\n{example.second}"


def _beside(tools: Sequence[Any], images: Sequence[str]) -> JsonObject:
    """Return the keys that are beside the messages of a record, where it has any tools or images."""
    keys: JsonObject = {}
    if tools:
        keys["tools"] = list(tools)
    if images:
        keys["images"] = list(images)
    return keys


def _marked(chat: Chat) -> list[JsonObject]:
    """Return the messages; an answer that is not trained has `train: false`."""
    messages = []
    for i, message in enumerate(chat.messages):
        is_trained = i >= chat.context and i not in chat.not_trained
        if message["role"] == "assistant" and not is_trained:
            message = {**message, "train": False}
        messages.append(message)
    return messages


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _to_pair(example: Example) -> JsonObject | None:
    match example:
        case Pair(prompt, completion):
            return {"prompt": prompt, "completion": completion}
        case Chat():
            return _pair_of_chat(example)
        case Labelled():
            return {"prompt": _labelled_text(example), "completion": str(example.label)}
        case _:
            raise ValueError("is a plain text, which has no prompt; convert it with --to text")


def _pair_of_chat(chat: Chat) -> JsonObject | None:
    """Return the last answer of a conversation with what precedes it; None where it has no answer."""
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not answers:
        return None
    last = answers[-1]
    # A pair has no place to say that its completion is not trained.
    if last in chat.not_trained:
        raise ValueError(
            "ends with an answer that is not trained, as a completion is; convert it --to messages"
        )

    before = list(chat.messages[:last])
    answer = chat.messages[last]

    # What follows the answer is left out, and its images with it.
    tags = sum(message["content"].count(IMAGE_TAG) for message in (*before, answer))
    beside = _beside(chat.tools, chat.images[:tags])

    is_one_question = len(before) == 1 and before[0]["role"] == "user"
    if is_one_question and not beside and "tool_calls" not in answer:
        return {"prompt": before[0]["content"], "completion": answer["content"]}
    return {"prompt": before, "completion": [answer], **beside}


def _to_text(example: Example) -> JsonObject | None:
    match example:
        case Text(text) | Labelled(text, None, _):
            return {"text": text}
        case Pair(prompt, completion):
            return {"text": prompt + completion}
        case _:
            raise ValueError(
                "cannot be one text without a chat template; convert it with --to messages"
            )


def _parts(example: Example, to: str) -> tuple[Example, ...]:
    """Return what a record is written as: itself, or a pair as its two answers where judged ones are asked for."""
    if to == "judged" and isinstance(example, Preference):
        return Judged(example.chosen, True), Judged(example.rejected, False)
    return (example,)


def _to_preference(example: Example) -> JsonObject:
    if not isinstance(example, Preference):
        raise ValueError("has no two answers to compare")
    # Both answers have the same prompt, and the same tools and images.
    prompt, chosen, beside = _halves(example.chosen)
    _, rejected, _ = _halves(example.rejected)
    value = {"prompt": prompt, "chosen": chosen, "rejected": rejected, **beside}
    if example.margin is not None:
        value["margin"] = example.margin
    return value


def _to_judged(example: Example) -> JsonObject:
    if not isinstance(example, Judged):
        raise ValueError("has no answer with a `label`")
    prompt, completion, beside = _halves(example.answer)
    return {
        "prompt": prompt,
        "completion": completion,
        "label": example.is_good,
        **beside,
    }


def _halves(answer: Chat | Pair) -> tuple[Any, Any, JsonObject]:
    """Return the prompt and the answer, as texts or messages, and what is beside them."""
    # Plain texts have no tools and no images beside them.
    if isinstance(answer, Pair):
        return answer.prompt, answer.completion, {}
    # The answer begins after the messages that both answers of a pair share.
    before = list(answer.messages[: answer.context])
    after = _marked(answer)[answer.context :]
    return before, after, _beside(answer.tools, answer.images)


# The shapes that records can be written in.
SHAPERS: Final[dict[str, Callable[[Example], JsonObject | None]]] = {
    "messages": _to_messages,
    "prompt_completion": _to_pair,
    "text": _to_text,
    "preference": _to_preference,
    "judged": _to_judged,
}


def _threads(records: Iterator[Record], counts: Counter[str]) -> Iterator[Record]:
    """Yield records as they are, but the best thread of each message tree in place of its nodes, after all others.

    A row of OpenAssistant's data is a node; only its parent's id says where it belongs:

        message_id  parent_id  role       rank            thread
        a           null       prompter   null            a
        b           a          assistant  1
        c           a          assistant  0               └ c
        d           c          prompter   null              └ d
    """
    roots: list[Record] = []
    replies: defaultdict[str, list[RecordValue]] = defaultdict(list)  # by the parent's id
    for record in records:
        counts["read"] += 1
        if not record.value.keys() >= TREE_KEYS:
            yield record
        elif record.value["parent_id"] is None:
            roots.append(record)
        else:
            replies[record.value["parent_id"]].append(record.value)

    # Only now: the rows of a tree may be in any order.
    for root in roots:
        turns = []
        for node in _best_thread(root.value, replies):
            turns.append({"from": node["role"], "value": node["text"]})
        yield Record(root.file, root.line, {"conversations": turns})


def _best_thread(
    root: RecordValue, replies: Mapping[str, list[RecordValue]]
) -> Iterator[RecordValue]:
    """Yield the root, the reply to it that people ranked best, the best reply to that, and so on."""
    # Only the best reply is followed: what answers a worse one is left out with it.
    node: RecordValue | None = root
    while node is not None:
        yield node
        node = min(replies.get(node["message_id"], []), key=_rank, default=None)


def _rank(reply: RecordValue) -> float:
    """Return the rank that people gave a reply, 0 for the best; the last for one that nobody ranked."""
    rank = reply.get("rank")
    return math.inf if rank is None else rank
