"""Turn records into encoded rows, in several processes, in order and in flat memory.

    records ──make_batches──▶ Batch ──Worker.encode──▶ Result: a Chunk of rows, and a Tally of what became of records

`data/inspect` looks at the results, `prepare` keeps them.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any, Final

from kubetune.config.schema import DataConfig, RecordKind, SourceConfig
from kubetune.data.prepared.profile import Profile
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.prepared.tally import Tally
from kubetune.data.prepared.workers import map_in_processes
from kubetune.data.reading.examples import (
    Chat,
    Example,
    Judged,
    Labelled,
    Pair,
    Text,
    parts_of,
    with_images,
)
from kubetune.data.reading.formats import read
from kubetune.data.reading.images import image_file
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.data.reading.preferences import Unusable
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.data.spec import Split
from kubetune.data.text.encode import Encoded, Encoder, RowEncoder, pieces
from kubetune.data.text.encode_labelled import LabelledEncoder
from kubetune.data.text.encode_preferences import PreferenceEncoder
from kubetune.data.text.encode_prompts import PromptEncoder
from kubetune.data.text.find_labels import names_of_numbers
from kubetune.data.text.labels import Labels, with_names
from kubetune.data.text.tokenizer import Tokenizer, cache_folder
from kubetune.data.text.turns.marks import REASONING_FIELDS
from kubetune.data.vision.encode import VisionEncoder
from kubetune.data.vision.image_processor import ImageProcessor

BATCH_RECORDS: Final = 256
# Up to here starting processes takes longer than the work.
FEW_BATCHES: Final = 8

SPLIT_ADVICE: Final = "data.overlong: split is for plain texts alone (choose drop or truncate)"

_KILLED: Final = (
    "a process that tokenises was killed, probably for lack of memory; set data.num_proc lower and run the same "
    "command again. Nothing was written."
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one source and one split, each with its index in the source."""

    source: int
    split: Split
    records: list[tuple[int, Record]]


@dataclass
class Result:
    """One batch encoded."""

    source: int
    split: Split
    chunk: Chunk = field(default_factory=Chunk)
    tally: Tally = field(default_factory=Tally)
    # Tokens of every sequence, before any was cut or left out. So is the profile, if the worker makes any.
    lengths: array[int] = field(default_factory=lambda: array("I"))
    profile: Profile | None = None
    # (place of a record, what is wrong with it)
    problems: list[tuple[str, str]] = field(default_factory=list)
    # [rows] a number that equal rows share; of 64 bits, so that lists of them stay small
    digests: array[int] = field(default_factory=lambda: array("Q"))
    # [pairs] the digest that a pair would have with its answers exchanged
    reversed_digests: array[int] = field(default_factory=lambda: array("Q"))
    largest_id: int = -1


@dataclass(frozen=True, slots=True)
class _ReadRecord:
    """A record that could be read."""

    index: int  # in its source
    where: str  # its place, for messages
    example: Example


class Worker:
    """Turns batches into results; every process has one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        data: DataConfig,
        sources: dict[Split, tuple[SourceConfig, ...]],
        labels: Labels | None = None,
        processor: ImageProcessor | None = None,
        limits: tuple[int, ...] = (),
        kind: RecordKind = "text",
    ) -> None:
        """`labels`: a classifier's. `processor`: for images. `limits`: what rows are profiled by, none for no profile."""
        self._encoder = _encoder_for(tokenizer, data, labels, processor, kind)
        self._kind: RecordKind = "labelled" if labels is not None else kind
        self._labels = labels
        # Of each source that has been seen, the names that its numbers stand for; empty if they are the run's.
        self._names_of_numbers: dict[tuple[Split, int], tuple[str, ...]] = {}
        self._find_special = tokenizer.find_special if labels is None else None
        self._prefix = tokenizer.prefix
        self._data = data
        self._sources = sources
        self._limits = limits

        template = ""
        if labels is None and tokenizer.chat is not None:
            template = tokenizer.chat.source
        self._template = template
        self._named_by_template = _keys_of_messages(template)
        self._image_token = processor.placeholder.token if processor is not None else None

    def encode(self, batch: Batch) -> Result:
        """Encode a batch. Bad records become problems of the result."""
        source = self._sources[batch.split][batch.source]
        result = Result(batch.source, batch.split)
        if self._limits:
            result.profile = Profile(self._limits, self._image_token)

        # Read the records. What cannot be read becomes a problem, and the others go on.
        good: list[_ReadRecord] = []
        for index, record in batch.records:
            try:
                example = self._read(record, source, batch, result.tally)
            except Unusable as error:
                if self._data.unusable_pairs == "drop":
                    result.tally.records += 1
                    result.tally.count("unusable", index)
                else:
                    result.problems.append((record.where, str(error)))
            except ValueError as error:
                result.problems.append((record.where, str(error)))
            else:
                good.append(_ReadRecord(index, record.where, example))

        # Encode them all at once, which is much faster than one by one.
        rows = self._encoder.encode_batch([read_record.example for read_record in good])
        for read_record, encoded in zip(good, rows, strict=True):
            if isinstance(encoded, str):  # why it cannot be encoded
                result.problems.append((read_record.where, encoded))
            else:
                self._keep(result, read_record, encoded)

        # What `_keep` and the tally have not seen became a problem above.
        bad = len(batch.records) - result.tally.records
        result.tally.records += bad
        result.tally.refused += bad
        _add_digests(result)
        return result

    def _read(
        self,
        record: Record,
        source: SourceConfig,
        batch: Batch,
        tally: Tally,
    ) -> Example:
        """Return the example of a record. Raise ValueError if it is none, Unusable for a pair without a difference."""
        reading = read(
            record.value,
            source.format,
            source.columns,
            kind=self._kind,
        )
        example = located(reading.example, record.file, self._data.cache)
        example = self._named(example, batch)
        texts: list[str] | None = None
        for key in reading.unused:
            if self._is_read_by_template(key):
                continue
            tally.unused_keys[key] += 1
            if texts is None:
                texts = list(written_texts(example))
            tally.unused_columns.note(key, record.value, source.columns, texts)
        if reading.taken:
            tally.taken[reading.taken] += 1
        return example

    def _named(self, example: Example, batch: Batch) -> Example:
        """Return a labelled example with a name for a number that its source counts differently from the run."""
        if self._labels is None or not isinstance(example, Labelled):
            return example
        source = self._sources[batch.split][batch.source]
        place = (batch.split, batch.source)
        if place not in self._names_of_numbers:
            self._names_of_numbers[place] = names_of_numbers(source, self._labels.names)
        names = self._names_of_numbers[place]
        if not names:
            return example
        return replace(example, label=with_names(example.label, names))

    def _is_read_by_template(self, key: str) -> bool:
        """True for a key of messages that the chat template names: it gets whole messages."""
        place, _, name = key.rpartition("[].")
        return place == "messages" and name in self._named_by_template

    def _keep(
        self,
        result: Result,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        """Add a record's row to the result, unless it is too long or teaches nothing, and count what became of it."""
        # These are counted before anything is cut or left out.
        tally = result.tally
        tally.records += 1
        tally.longest = max(tally.longest, encoded.longest)
        tally.count("special_texts", record.index, self._holds_special_tokens(record.example))
        tally.count("bos_twice", record.index, self._begins_twice(encoded))
        tally.count(
            "plain_prompts", record.index, bool(self._template) and _is_plain_prompt(record.example)
        )
        for note in encoded.image_notes:
            tally.count(note, record.index)
        for note in _flaws_of(record.example, self._template):
            tally.count(note, record.index)
        result.lengths.extend(len(ids) for ids, _ in encoded.sequences)
        if result.profile is not None:
            result.profile.add_row(encoded)

        if encoded.longest > self._data.max_length:
            self._shorten(result, record, encoded)
        else:
            self._add_if_it_teaches(result, record, encoded)

    def _shorten(
        self,
        result: Result,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        """Do with a record that is too long what data.overlong says."""
        tally = result.tally
        limit = self._data.max_length
        overlong = self._data.overlong
        if overlong == "drop":
            # It makes no row.
            tally.count("overlong", record.index)
        elif overlong == "error":
            problem = f"has {encoded.longest:,} tokens; data.max_length is {limit:,}"
            result.problems.append((record.where, problem))
            tally.refused += 1
        elif overlong == "split":
            problem = not_to_split(self._data, record.example, encoded)
            if problem:
                result.problems.append((record.where, problem))
                tally.refused += 1
                return
            # Each piece is a row of its own.
            parts = pieces(encoded, limit)
            tally.count("split", record.index)
            tally.pieces += len(parts)
            for part in parts:
                self._add(result, record, part)
        else:
            tally.count("truncated", record.index)
            # What is left of it may have nothing that is trained.
            shorter = self._encoder.cut(record.example, encoded, limit)
            self._add_if_it_teaches(result, record, shorter)

    def _add_if_it_teaches(
        self,
        result: Result,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        if _teaches(encoded):
            self._add(result, record, encoded)
        else:
            result.tally.count("no_label", record.index)

    def _add(
        self,
        result: Result,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        """Add a row to the result, and count the remarks on it."""
        tally = result.tally
        tally.rows += 1
        tally.tokens += len(encoded.ids)
        tally.answers.update(_answers(record.example, encoded))
        for note in sorted(encoded.notes):  # in a fixed order, as the places are written to a file
            tally.count(note, record.index)
        tally.images += len(encoded.images)
        result.chunk.add(record.index, encoded)
        tally.trained_tokens += result.chunk.labels[-1]

    def _begins_twice(self, encoded: Encoded) -> bool:
        """True if a text begins with the tokens (BOS) that the tokenizer writes before it too."""
        once = len(self._prefix)
        return once > 0 and encoded.ids[: 2 * once] == self._prefix * 2

    def _holds_special_tokens(self, example: Example) -> bool:
        """True if some text of the record holds what the tokenizer takes for a special token, as transformers' does."""
        return self._find_special is not None and any(
            map(self._find_special, written_texts(example))
        )


def _encoder_for(
    tokenizer: Tokenizer,
    data: DataConfig,
    labels: Labels | None,
    processor: ImageProcessor | None,
    kind: RecordKind,
) -> RowEncoder:
    """Return what encodes records of a kind; encoders for images and for pairs are wrapped around that for texts."""
    if labels is not None:
        return LabelledEncoder(tokenizer, labels)
    # Answers come from the model, so only what is asked is encoded.
    if kind == "prompt":
        return PromptEncoder(tokenizer, add_special_tokens=data.add_special_tokens)

    compares_answers = kind not in ("text", "labelled")
    text_encoder = Encoder(
        tokenizer,
        train_on=data.train_on,
        add_special_tokens=data.add_special_tokens,
        keeps_prompts=compares_answers,
    )

    # Images go into conversations, and answers that are compared are conversations.
    encoder: RowEncoder = text_encoder
    if processor is not None:
        encoder = VisionEncoder(text_encoder, processor)
    if compares_answers:
        return PreferenceEncoder(encoder, margins=kind == "graded")
    return encoder


def not_to_split(
    data: DataConfig,
    example: Example,
    encoded: Encoded,
) -> str:
    """Return what is wrong with a long record that `data.overlong: split` cannot split; empty if nothing is."""
    if data.overlong != "split" or encoded.longest <= data.max_length or isinstance(example, Text):
        return ""
    return f"has {encoded.longest:,} tokens of {data.max_length:,}, and {SPLIT_ADVICE}"


def _answers(example: Example, encoded: Encoded) -> dict[str, int]:
    """Return counts of a row's answers and of their labels, for rows that have compared or judged answers."""
    if isinstance(example, Judged):
        return {"good" if example.is_good else "bad": 1}
    if not encoded.split:
        return {}
    chosen, rejected = (sum(trained) for _, trained in encoded.sequences)
    return {
        "chosen_tokens": chosen,
        "rejected_tokens": rejected,
        "chosen_longer": int(chosen > rejected),
    }


def _is_plain_prompt(example: Example) -> bool:
    """True if the record has a prompt that is not a conversation."""
    return isinstance(parts_of(example)[0], Pair)


def _flaws_of(example: Example, template: str) -> list[str]:
    """Return the names, as a tally has them, of what conversations hold that their author hardly meant."""
    flaws = []
    for chat in parts_of(example):
        if not isinstance(chat, Chat):
            continue
        pairs = pairwise(message["role"] for message in chat.messages)
        if ("assistant", "assistant") in pairs:
            flaws.append("answers_in_a_row")
        if any(_thinks_twice(message) for message in chat.messages):
            flaws.append("thoughts_twice")
        if any(_is_wrapped(message, template) for message in chat.messages):
            flaws.append("results_wrapped")
    # Both answers of a pair may have the same.
    return list(dict.fromkeys(flaws))


def _thinks_twice(message: dict[str, Any]) -> bool:
    """True if an answer has thoughts in a field, and its content begins with thoughts between tags."""
    has_thoughts = any(message.get(key) for key in REASONING_FIELDS)
    return has_thoughts and message["content"].lstrip().startswith(("<think>", "<thinking>"))


def _is_wrapped(message: dict[str, Any], template: str) -> bool:
    """True if the result of a tool begins with a tag that the template writes itself."""
    if message["role"] != "tool":
        return False
    tag = re.match(r"\s*(<[^<>\s]{1,40}>)", message["content"])
    return tag is not None and tag[1] in template


def _add_digests(result: Result) -> None:
    """Put the digests of the chunk's rows into the result, and the largest of all ids."""
    chunk = result.chunk
    stream = memoryview(chunk.tokens)
    start = 0
    for length, split, images in zip(chunk.lengths, chunk.splits, chunk.images, strict=True):
        row = stream[start : start + length]
        start += length
        # Rows with the same text about different images are not equal.
        crcs = b"".join(image.crc.to_bytes(4) for image in images)
        result.digests.append(_digest(row, crcs))
        if split:
            result.reversed_digests.append(_digest(row[split:], bytes(row[:split]), crcs))

    result.largest_id = max(chunk.tokens, default=-1)


def _digest(*parts: bytes | memoryview[int]) -> int:
    """Return a number of 64 bits for some bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest())


def _teaches(encoded: Encoded) -> bool:
    """True if a row has a trained token. Both answers of a pair need one, and the answers have to differ."""
    if not encoded.split:
        return encoded.labels > 0
    (chosen, chosen_trained), (rejected, rejected_trained) = encoded.sequences
    return any(chosen_trained) and any(rejected_trained) and chosen != rejected


def written_texts(example: Example) -> Iterator[str]:
    """Yield the texts that somebody wrote into a record: contents, reasoning, tools and calls, or its plain texts."""
    for part in parts_of(example):
        match part:
            case Chat():
                for message in part.messages:
                    yield from _texts_of_message(message, has_images=bool(part.images))
                if part.tools:
                    yield from _leaves(part.tools)
            case Pair():
                yield from (part.prompt, part.completion)
            case Text():
                yield part.text
            case Labelled(text, second):
                yield text
                if second is not None:
                    yield second


def _texts_of_message(message: dict[str, Any], *, has_images: bool) -> Iterator[str]:
    content = message["content"]
    if has_images:
        content = content.replace(IMAGE_TAG, "")  # tags stand for images, they are no text
    yield content
    for key in REASONING_FIELDS:
        reasoning = message.get(key)
        if isinstance(reasoning, str):
            yield reasoning
    calls = message.get("tool_calls")
    if calls:
        yield from _leaves(calls)


def _leaves(value: Any) -> Iterator[str]:
    """Yield all texts within a value, keys too."""
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield str(key)
                yield from _leaves(item)
        case list() | tuple():
            for item in value:
                yield from _leaves(item)


def _keys_of_messages(template: str) -> frozenset[str]:
    """Return the keys of messages that a chat template reads, such as `message.name` or `messages[0]['name']`."""
    # Names of a message: `m` in `for m in messages`, `message`, and `messages[…]`.
    loop_variables = re.findall(r"\bfor\s+(\w+)\s+in\s+[^%]*messages", template)
    message = "|".join({"message", r"messages\s*\[[^\]]+\]", *map(re.escape, loop_variables)})
    # A key behind it: `.key`, `.get('key'` or `['key'`.
    access = r"(?:\.(?!get\()|\.get\(\s*['\"]|\[\s*['\"])"
    return frozenset(re.findall(rf"\b(?:{message})\s*{access}\s*(\w+)", template))


def located(
    example: Example,
    data_file: str,
    cache: str | None,
) -> Example:
    """Return the example with absolute paths of its images; in a data file they are relative to its folder.

    Images that the record itself holds are written into the cache. Raise UnusableImage as `image_file` does.
    """
    return with_images(
        example, lambda image: os.path.abspath(image_file(data_file, image, cache_folder(cache)))
    )


def encode_batches(
    worker: Worker,
    batches: Iterator[Batch],
    problems: Problems,
    num_proc: int | None = None,
) -> Generator[Result]:
    """Yield the results of all batches, in order. Raise EnvironmentFault if a process was killed."""
    # Read ahead, to see whether there is enough work for several processes.
    first = list(islice(batches, FEW_BATCHES + 1))
    processes = num_proc or len(os.sched_getaffinity(0))
    everything = chain(first, batches)
    results: Iterable[Result]
    if processes == 1 or len(first) <= FEW_BATCHES:
        results = map(worker.encode, everything)
    else:
        results = map_in_processes(
            worker.encode,
            everything,
            processes,
            if_killed=_KILLED,
        )

    try:
        for result in results:
            for where, what in result.problems:
                problems.add(where, what)
            yield result
    finally:
        if isinstance(results, Generator):
            results.close()  # ends the processes now, not when the garbage is collected


def make_batches(
    records: Iterator[Record],
    source: int,
    split_of: Callable[[int], Split | None],
) -> Iterator[Batch]:
    """Group the records of one source by split. `split_of(index)` is None for records that are not used."""
    # A batch of each split is filled; a full one goes out, the others at the end.
    open_batches: dict[Split, Batch] = {}
    for index, record in enumerate(records):
        split = split_of(index)
        if split is None:
            continue
        batch = open_batches.setdefault(split, Batch(source, split, []))
        batch.records.append((index, record))
        if len(batch.records) == BATCH_RECORDS:
            yield open_batches.pop(split)

    yield from open_batches.values()
