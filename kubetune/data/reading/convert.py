"""Turns any supported data into JSON lines of one shape; rows of message trees (OpenAssistant) into threads."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import require_not_read, written_whole
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.reading.formats import (
    IMAGE_TAG,
    Chat,
    Example,
    Judged,
    Labelled,
    Pair,
    Preference,
    Text,
    read,
    with_images,
)
from kubetune.data.reading.images import ADDRESS, image_of_row
from kubetune.data.reading.messages import OF_TEMPLATES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.data.reading.splits import read_taken
from kubetune.errors import DataError

_TREE_KEYS: Final = frozenset(("message_id", "parent_id", "role", "text"))


def convert_source(
    source: SourceConfig, output: Path, to: str, seed: int = 42
) -> tuple[Counter[str], Counter[str]]:
    """Write all records of a source to a JSONL file, whole or not at all.

    `to` is a key of SHAPERS. Returns how many were `read`, `written` and `skipped` (no answer to learn), and how often
    each key was not used. Raises DataError with every record that is bad or cannot take the shape, ConfigError where the
    source holds the output.
    """
    problems, counts, unused = (
        Problems(),
        Counter[str](read=0, written=0, skipped=0),
        Counter[str](),
    )
    with written_whole(output) as file:
        for value in _converted(source, output, to, seed, problems, counts, unused):
            file.write((json.dumps(value, ensure_ascii=False) + "\n").encode())
            counts["written"] += 1
        problems.raise_if_any()
        if not counts["written"]:
            raise DataError(f"{source.path} holds no record to convert. Nothing was written.")
    return counts, unused


def _converted(
    source: SourceConfig,
    output: Path,
    to: str,
    seed: int,
    problems: Problems,
    *counters: Counter[str],
) -> Iterator[dict[str, Any]]:
    counts, unused = counters
    file = None
    for record in _threads(read_taken(source, seed, problems), counts):
        if record.file != file:
            file = record.file
            require_not_read(output, file)
        try:
            kind = _KINDS[to](record.value) if to in _KINDS else "text"
            example, ignored, _ = read(record.value, source.format, source.columns, kind=kind)
            example = _placed(example, record.file, output)
            found = [SHAPERS[to](part) for part in _parts(example, to)]
        except ValueError as error:
            problems.add(record.where, str(error))
            continue
        counts["skipped"] += found.count(None)
        unused.update(key for key in ignored if key not in OF_TEMPLATES)  # those are written
        yield from (value for value in found if value is not None)


def _placed(example: Example, data_file: str, output: Path) -> Example:
    """The example with paths of images that hold from where it is written to; images that it holds stay in it."""
    if Path(data_file).absolute().parent == output.absolute().parent:
        return example
    return with_images(
        example,
        lambda image: (
            image if image.startswith(ADDRESS) else str(image_of_row(data_file, image).absolute())
        ),
    )


def _to_messages(example: Example) -> dict[str, Any] | None:
    match example:
        case Chat(messages, tools):
            if not any(message["role"] == "assistant" for message in messages):
                return None
            return {"messages": _marked(example)} | _beside(tools, example.images)
        case Pair(prompt, completion):
            return {"messages": _messages(prompt, completion)}
        case Labelled(text, second, label):
            return {
                "messages": _messages(text if second is None else f"{text}\n{second}", str(label))
            }
        case _:
            raise ValueError(
                "is a plain text, which nobody says to anybody; convert it with --to text"
            )


def _beside(tools: Sequence[Any], images: Sequence[str]) -> dict[str, Any]:
    return ({"tools": list(tools)} if tools else {}) | ({"images": list(images)} if images else {})


def _marked(chat: Chat) -> list[dict[str, Any]]:
    """The messages; an answer that is not trained says so."""
    untrained = {*range(chat.context), *chat.not_trained}
    return [
        {**message, "train": False}
        if i in untrained and message["role"] == "assistant"
        else message
        for i, message in enumerate(chat.messages)
    ]


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _to_pair(example: Example) -> dict[str, Any] | None:
    match example:
        case Pair(prompt, completion):
            return {"prompt": prompt, "completion": completion}
        case Chat(messages, tools):
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if not answers:
                return None
            if answers[-1] in example.not_trained:
                raise ValueError(
                    "ends with an answer that is not trained, as a completion is; convert it --to messages"
                )
            before, answer = list(messages[: answers[-1]]), messages[answers[-1]]
            tags = sum(message["content"].count(IMAGE_TAG) for message in (*before, answer))
            more = _beside(tools, example.images[:tags])
            if (
                [message["role"] for message in before] == ["user"]
                and not more
                and "tool_calls" not in answer
            ):
                return {"prompt": before[0]["content"], "completion": answer["content"]}
            return {"prompt": before, "completion": [answer]} | more
        case Labelled(text, second, label):
            return {
                "prompt": text if second is None else f"{text}\n{second}",
                "completion": str(label),
            }
        case _:
            raise ValueError("is a plain text, which has no prompt; convert it with --to text")


def _to_text(example: Example) -> dict[str, Any] | None:
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
    """The example, or a pair as its two answers, where judged ones are asked for."""
    if to == "judged" and isinstance(example, Preference):
        return Judged(example.chosen, True), Judged(example.rejected, False)
    return (example,)


def _to_preference(example: Example) -> dict[str, Any]:
    if not isinstance(example, Preference):
        raise ValueError("has no two answers to compare")
    prompt, chosen, beside = _halves(example.chosen)
    margin = {} if example.margin is None else {"margin": example.margin}
    return (
        {"prompt": prompt, "chosen": chosen, "rejected": _halves(example.rejected)[1]}
        | beside
        | margin
    )


def _to_judged(example: Example) -> dict[str, Any]:
    if not isinstance(example, Judged):
        raise ValueError("has no answer with a `label`")
    prompt, completion, beside = _halves(example.answer)
    return {"prompt": prompt, "completion": completion, "label": example.is_good} | beside


def _halves(answer: Chat | Pair) -> tuple[Any, Any, dict[str, Any]]:
    """The prompt and the answer, as texts or messages, and what stands beside them."""
    if isinstance(answer, Pair):
        return answer.prompt, answer.completion, {}
    before, after = list(answer.messages[: answer.context]), _marked(answer)[answer.context :]
    return before, after, _beside(answer.tools, answer.images)


SHAPERS: Final[dict[str, Callable[[Example], dict[str, Any] | None]]] = {
    "messages": _to_messages,
    "prompt_completion": _to_pair,
    "text": _to_text,
    "preference": _to_preference,
    "judged": _to_judged,
}
"""The shapes that records can be written in."""

_KINDS: Final[dict[str, Callable[[Mapping[str, Any]], RecordKind]]] = {
    "preference": lambda _: "graded",
    "judged": lambda value: "pair" if likely_kind(value) == "pair" else "judged",
}


def _threads(records: Iterator[Record], counts: Counter[str]) -> Iterator[Record]:
    """Records as they are; those that are nodes of message trees are gathered, and the best thread of each follows."""
    roots: list[Record] = []
    children: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        counts["read"] += 1
        if not record.value.keys() >= _TREE_KEYS:
            yield record
        elif record.value["parent_id"] is None:
            roots.append(record)
        else:
            children[record.value["parent_id"]].append(record.value)
    for root in roots:
        turns = [
            {"from": node["role"], "value": node["text"]}
            for node in _best_thread(root.value, children)
        ]
        yield Record(root.file, root.line, {"conversations": turns})


def _best_thread(
    root: Mapping[str, Any], children: Mapping[str, list[Mapping[str, Any]]]
) -> Iterator[Mapping[str, Any]]:
    """From the root always to the reply that people ranked best (rank 0); unranked ones come last."""
    node: Mapping[str, Any] | None = root
    while node is not None:
        yield node
        replies = children.get(node["message_id"], [])
        node = min(
            replies,
            key=lambda reply: math.inf if reply.get("rank") is None else reply["rank"],
            default=None,
        )
