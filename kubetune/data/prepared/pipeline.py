"""Records to encoded rows, by as many processes as there are, in order and in flat memory.

`check` looks at what comes out, `prepare` keeps it.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from typing import Any, Final, Literal

from kubetune.config.schema import DataConfig, RecordKind, SourceConfig
from kubetune.data.findings.finding import MOST_PLACES
from kubetune.data.prepared.profile import Profile
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.prepared.workers import map_in_processes
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
from kubetune.data.reading.images import image_file
from kubetune.data.reading.preferences import Unusable
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.data.text.encode import Encoded, Encoder, pieces
from kubetune.data.text.encode_labelled import LabelledEncoder
from kubetune.data.text.encode_preferences import PreferenceEncoder
from kubetune.data.text.find_labels import names_of_numbers
from kubetune.data.text.labels import Labels, with_names
from kubetune.data.text.tokenizer import Tokenizer, cache_folder
from kubetune.data.text.turns.marks import REASONING_FIELDS
from kubetune.data.vision.encode import VisionEncoder
from kubetune.data.vision.image_processor import ImageProcessor

BATCH_RECORDS: Final = 256
FEW_BATCHES: Final = 8
"""Up to here starting processes takes longer than the work."""

SPLIT_ADVICE: Final = "data.overlong: split is for plain texts alone (choose drop or truncate)"

_KILLED: Final = (
    "a process that tokenises was killed, probably for want of memory; set data.num_proc lower and run the same "
    "command again. Nothing was written."
)

Split = Literal["train", "eval", "forget"]


class Places(dict[str, list[int]]):
    """The first records of a source that something is said about, by what that is: their indices."""

    def note(self, what: str, record: int) -> None:
        """Keep a record, unless enough are kept."""
        kept = self.setdefault(what, [])
        if len(kept) < MOST_PLACES:
            kept.append(record)

    def __add__(self, other: Places) -> Places:
        """Return the first ones of both, these before the other's."""
        merged = Places()
        for places in (self, other):
            for what, records in places.items():
                for record in records:
                    merged.note(what, record)
        return merged


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one source and one split, each with its index in the source."""

    source: int
    split: Split
    records: list[tuple[int, Record]]


@dataclass
class Tally:
    """Records counted by what became of them. `overlong` and `no_label` were left out, `truncated` cut to `max_length`,
    `split` into `pieces`, each a row.

    `refused` could be read and are bad, `unreadable` are no records. With these, rows (of a record that was split,
    one) and what is left out are all. Of `reasoning_dropped` the chat template left out reasoning that the record
    holds; `unlike_prompt` train an answer elsewhere than where the generation prompt ends;
    `rewrites_answer`: the chat template writes a trained answer otherwise; `begins_inside_token`: a token lies across
    the end of an answer's prompt; the texts of `special_texts` hold what the tokenizer takes for special tokens;
    `bos_twice` begin with what the tokenizer writes before a text too. Of the images of all records,
    `images_above_budget` have more tokens than `vision.image_max_tokens`, `images_animated` lose all frames but the
    first, and `images_deep` lose what 8 bits of grey cannot hold. `unused_keys` hold something in so many records and
    decide nothing. `unusable` pairs have no difference to be trained, and were left out; `answers` are counts of
    those that are compared or judged. `plain_prompts` are prompts that no chat template goes around, though the model
    has one. `places` name the first records of these kinds.
    """

    records: int = 0
    rows: int = 0
    overlong: int = 0
    truncated: int = 0
    split: int = 0
    pieces: int = 0
    no_label: int = 0
    unusable: int = 0
    refused: int = 0
    unreadable: int = 0
    blank_lines: int = 0
    reasoning_dropped: int = 0
    unlike_prompt: int = 0
    rewrites_answer: int = 0
    begins_inside_token: int = 0
    special_texts: int = 0
    bos_twice: int = 0
    plain_prompts: int = 0
    images: int = 0
    images_above_budget: int = 0
    images_animated: int = 0
    images_deep: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    unused_keys: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    places: Places = field(default_factory=Places)

    def count(self, what: str, record: int, number: int = 1) -> None:
        """Count one more of a kind, or none where `number` is 0, and keep its place."""
        if number:
            setattr(self, what, getattr(self, what) + number)
            self.places.note(what, record)

    @property
    def lost_share(self) -> float:
        """Share of the records that no row was made of."""
        return (
            (self.overlong + self.no_label + self.unusable) / self.records if self.records else 0.0
        )

    def add(self, other: Tally) -> None:
        """Count the other's records too."""
        longest = max(self.longest, other.longest)
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.longest = longest


@dataclass
class Result:
    """One batch encoded. `lengths` are those of all its rows, before any was cut or left out, and so is `profile`.

    It is there where the worker was asked for it. Equal rows have equal `digests`, of 64 bits so that lists of them
    stay small; `reversed_digests` are those that pairs would have with their answers exchanged. `largest_id` is that of
    all tokens.
    """

    source: int
    split: Split
    chunk: Chunk = field(default_factory=Chunk)
    tally: Tally = field(default_factory=Tally)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    problems: list[tuple[str, str]] = field(default_factory=list)
    profile: Profile | None = None
    digests: array[int] = field(default_factory=lambda: array("Q"))
    reversed_digests: array[int] = field(default_factory=lambda: array("Q"))
    largest_id: int = -1


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
        """`labels`: those of a classifier; `processor`: what images go through, where there may be any; `limits`: what
        rows are profiled by, if at all; `kind`: what records hold."""
        self._encoder: Encoder | LabelledEncoder | PreferenceEncoder | VisionEncoder
        if labels is not None:
            self._encoder = LabelledEncoder(tokenizer, labels)
        else:
            compares = kind not in ("text", "labelled")
            encoder = Encoder(
                tokenizer,
                train_on=data.train_on,
                add_special_tokens=data.add_special_tokens,
                keeps_prompts=compares,
            )
            seeing = encoder if processor is None else VisionEncoder(encoder, processor)
            self._encoder = (
                PreferenceEncoder(seeing, margins=kind == "graded") if compares else seeing
            )
        self._kind: RecordKind = "labelled" if labels is not None else kind
        self._labels = labels
        self._names_of_numbers: dict[tuple[Split, int], tuple[str, ...]] = {}  # by source
        self._find_special = None if labels is not None else tokenizer.find_special
        self._prefix = tokenizer.prefix
        self._data = data
        self._sources = sources
        self._limits = limits
        template = tokenizer.chat.source if labels is None and tokenizer.chat is not None else ""
        self._named_by_template = _keys_of_messages(template)
        self._image_token = processor.placeholder.token if processor is not None else None
        self._has_template = bool(template)

    def encode(self, batch: Batch) -> Result:
        """Encode a batch. Bad records become problems of the result."""
        source = self._sources[batch.split][batch.source]
        result = Result(batch.source, batch.split)
        if self._limits:
            result.profile = Profile(self._limits, self._image_token)
        good, examples = [], []
        for index, record in batch.records:
            try:
                reading = read(record.value, source.format, source.columns, kind=self._kind)
                example = located(reading.example, record.file, self._data.cache)
                examples.append(self._named(example, batch))
                good.append((index, record.where))
                result.tally.unused_keys.update(
                    key for key in reading.unused if not self._is_read_by_template(key)
                )
                if reading.taken:
                    result.tally.taken[reading.taken] += 1
            except Unusable as error:
                if self._data.unusable_pairs == "drop":
                    result.tally.records += 1
                    result.tally.count("unusable", index)
                else:
                    result.problems.append((record.where, str(error)))
            except ValueError as error:
                result.problems.append((record.where, str(error)))
        rows = self._encoder.encode_batch(examples)
        for (index, where), example, encoded in zip(good, examples, rows, strict=True):
            if isinstance(encoded, str):
                result.problems.append((where, encoded))
            else:
                self._keep(result, index, where, example, encoded)
        bad = len(batch.records) - result.tally.records
        result.tally.records += bad
        result.tally.refused += bad
        _add_digests(result)
        return result

    def _named(self, example: Example, batch: Batch) -> Example:
        """Return a labelled example with names for numbers that its source counts otherwise than the run."""
        if self._labels is None or not isinstance(example, Labelled):
            return example
        place = (batch.split, batch.source)
        if place not in self._names_of_numbers:
            source = self._sources[batch.split][batch.source]
            self._names_of_numbers[place] = names_of_numbers(source, self._labels.names)
        names = self._names_of_numbers[place]
        return replace(example, label=with_names(example.label, names)) if names else example

    def _is_read_by_template(self, key: str) -> bool:
        """A key of messages that the chat template names: it is given them whole."""
        place, _, name = key.rpartition("[].")
        return place == "messages" and name in self._named_by_template

    def _keep(
        self, result: Result, index: int, where: str, example: Example, encoded: Encoded
    ) -> None:
        """Add a row to a result, unless it is too long or teaches nothing, and count what became of it."""
        tally, limit = result.tally, self._data.max_length
        tally.records += 1
        tally.longest = max(tally.longest, encoded.longest)
        tally.count("special_texts", index, self._holds_special_tokens(example))
        tally.count("bos_twice", index, self._begins_twice(encoded))
        tally.count("plain_prompts", index, self._has_template and _is_plain_prompt(example))
        for note in encoded.image_notes:
            tally.count(note, index)
        result.lengths.extend(len(ids) for ids, _ in encoded.sequences)
        if result.profile is not None:
            result.profile.add_row(encoded)
        if encoded.longest > limit:
            if self._data.overlong == "error":
                result.problems.append(
                    (where, f"has {encoded.longest:,} tokens; data.max_length is {limit:,}")
                )
                tally.refused += 1
                return
            if self._data.overlong == "drop":
                tally.count("overlong", index)
                return
            if self._data.overlong == "split":
                if said := not_to_split(self._data, example, encoded):
                    result.problems.append((where, said))
                    tally.refused += 1
                    return
                found = pieces(encoded, limit)
                tally.count("split", index)
                tally.pieces += len(found)
                for piece in found:
                    self._add(result, index, example, piece)
                return
            encoded = self._encoder.cut(example, encoded, limit)
            tally.count("truncated", index)
        if not _teaches(encoded):
            tally.count("no_label", index)
            return
        self._add(result, index, example, encoded)

    def _add(self, result: Result, index: int, example: Example, encoded: Encoded) -> None:
        tally = result.tally
        tally.rows += 1
        tally.tokens += len(encoded.ids)
        tally.answers.update(_answers(example, encoded))
        tally.count("reasoning_dropped", index, encoded.drops_reasoning)
        tally.count("unlike_prompt", index, encoded.unlike_prompt)
        tally.count("rewrites_answer", index, encoded.rewrites_answer)
        tally.count("begins_inside_token", index, encoded.begins_inside_token)
        tally.images += len(encoded.images)
        result.chunk.add(index, encoded)
        tally.trained_tokens += result.chunk.labels[-1]

    def _begins_twice(self, encoded: Encoded) -> bool:
        """True if a text begins with the tokens (BOS) that the tokenizer writes before it too."""
        once = len(self._prefix)
        return once > 0 and encoded.ids[: 2 * once] == self._prefix * 2

    def _holds_special_tokens(self, example: Example) -> bool:
        """Some text of the record holds what the tokenizer takes for a special token, as transformers' does."""
        return self._find_special is not None and any(map(self._find_special, _texts_of(example)))


def not_to_split(data: DataConfig, example: Example, encoded: Encoded) -> str:
    """Words for a record that `data.overlong: split` is not for, though it is too long; empty for others."""
    if data.overlong != "split" or encoded.longest <= data.max_length or isinstance(example, Text):
        return ""
    return f"has {encoded.longest:,} tokens of {data.max_length:,}, and {SPLIT_ADVICE}"


def _answers(example: Example, encoded: Encoded) -> dict[str, int]:
    """Counts of the answers of a row, and of their labels."""
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
    if isinstance(example, Preference):
        example = example.chosen
    if isinstance(example, Judged):
        example = example.answer
    return isinstance(example, Pair)


def _add_digests(result: Result) -> None:
    """Put a number for each row into the result, which equal rows share, and the largest of all ids."""
    chunk = result.chunk
    stream = memoryview(chunk.tokens)
    end = 0
    for length, split, images in zip(chunk.lengths, chunk.splits, chunk.images, strict=True):
        begin, end = end, end + length
        crcs = b"".join(image.crc.to_bytes(4) for image in images)
        row = stream[begin:end]
        result.digests.append(_digest(row, crcs))
        if split:
            result.reversed_digests.append(_digest(row[split:], bytes(row[:split]), crcs))
    result.largest_id = max(chunk.tokens, default=-1)


def _digest(*parts: bytes | memoryview[int]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest())


def _teaches(encoded: Encoded) -> bool:
    """True for a row with a token that is trained: of a pair, the difference between its answers."""
    if not encoded.split:
        return encoded.labels > 0
    (chosen, _), (rejected, _) = sequences = encoded.sequences
    return all(any(trained) for _, trained in sequences) and chosen != rejected


def _texts_of(example: Example) -> Iterator[str]:
    """Texts that were written into a record: contents, reasoning, tools and calls of them, or its plain texts."""
    match example:
        case Chat():
            for message in example.messages:
                content = message["content"]
                yield content.replace(IMAGE_TAG, "") if example.images else content
                yield from (
                    text for key in REASONING_FIELDS if isinstance(text := message.get(key), str)
                )
                if calls := message.get("tool_calls"):
                    yield from _leaves(calls)
            if example.tools:
                yield from _leaves(example.tools)
        case Preference():
            yield from _texts_of(example.chosen)
            yield from _texts_of(example.rejected)
        case Judged():
            yield from _texts_of(example.answer)
        case Pair():
            yield from (example.prompt, example.completion)
        case Text():
            yield example.text


def _leaves(value: Any) -> Iterator[str]:
    """All texts within a value, keys too."""
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
    """The keys of messages that a chat template names, such as `message.name` or `messages[0]['name']`."""
    loops = re.findall(r"\bfor\s+(\w+)\s+in\s+[^%]*messages", template)
    message = "|".join({"message", r"messages\s*\[[^\]]+\]", *map(re.escape, loops)})
    return frozenset(
        re.findall(
            rf"\b(?:{message})\s*(?:\.(?!get\()|\.get\(\s*['\"]|\[\s*['\"])\s*(\w+)", template
        )
    )


def located(example: Example, data_file: str, cache: str | None) -> Example:
    """The example with absolute paths of its images, which a file gives as seen from its own folder.

    `cache`: where those are kept that the record itself holds. Raises UnusableImage as `image_file` does.
    """
    return with_images(
        example, lambda image: os.path.abspath(image_file(data_file, image, cache_folder(cache)))
    )


def encode_batches(
    worker: Worker, batches: Iterator[Batch], problems: Problems, num_proc: int | None = None
) -> Generator[Result]:
    """The results of all batches, in order. Raises EnvironmentFault when a process was killed."""
    first = list(islice(batches, FEW_BATCHES + 1))
    processes = num_proc or len(os.sched_getaffinity(0))
    everything = chain(first, batches)
    if processes == 1 or len(first) <= FEW_BATCHES:
        results: Iterable[Result] = map(worker.encode, everything)
    else:
        results = map_in_processes(worker.encode, everything, processes, if_killed=_KILLED)
    try:
        for result in results:
            for where, what in result.problems:
                problems.add(where, what)
            yield result
    finally:
        if isinstance(results, Generator):
            results.close()  # ends the processes now, not when the garbage is collected


def make_batches(
    records: Iterator[Record], source: int, split_of: Callable[[int], Split | None]
) -> Iterator[Batch]:
    """Group the records of one source by split; `split_of(index)` is None for those not taken."""
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
