"""Turn the records of a batch into rows: read, encoded, shortened where they are too long, and counted."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final, assert_never

from kubetune.config.schema import DataConfig, RecordKind, SourceConfig
from kubetune.data.prepared.pipeline import BatchResult, RecordBatch, add_digests
from kubetune.data.prepared.profile import Profile
from kubetune.data.prepared.remarks import (
    answers_of,
    flaws_of,
    has_plain_prompt,
    keys_of_messages,
    written_texts,
)
from kubetune.data.prepared.tally import Tally
from kubetune.data.reading.examples import (
    Example,
    Labelled,
    Text,
    with_images,
)
from kubetune.data.reading.formats import read
from kubetune.data.reading.images import image_file
from kubetune.data.reading.preferences import Unusable
from kubetune.data.reading.record import Record
from kubetune.data.spec import Split
from kubetune.data.text.class_labels import Labels, with_names
from kubetune.data.text.encode import Encoded, pieces
from kubetune.data.text.find_labels import names_of_numbers
from kubetune.data.text.tokenizer import Tokenizer, cache_folder
from kubetune.data.vision.encoders import encoder_for
from kubetune.data.vision.image_processor import ImageProcessor

SPLIT_ADVICE: Final = "data.overlong: split is only for plain texts (choose drop or truncate)"


@dataclass(frozen=True, slots=True)
class _ReadRecord:
    """A record that could be read."""

    index: int  # in its source
    where: str  # its place, for messages
    example: Example


class RecordReader:
    """Reads records as examples of the kind that a task learns from, and counts what of them is left aside."""

    def __init__(
        self,
        sources: dict[Split, tuple[SourceConfig, ...]],
        kind: RecordKind,
        labels: Labels | None,
        cache: str | None,
        template: str,
    ) -> None:
        """`cache`: for images that records hold. `template`: the chat template, which may read keys of messages."""
        self._sources = sources
        self._kind = kind
        self._labels = labels
        self._cache = cache
        self._named_by_template = keys_of_messages(template)
        # Of each source that has been seen, the names that its numbers stand for; empty if they are the run's.
        self._names_of_numbers: dict[tuple[Split, int], tuple[str, ...]] = {}

    def read(
        self,
        record: Record,
        batch: RecordBatch,
        tally: Tally,
    ) -> Example:
        """Return the example of a record. Raise ValueError if it is none, Unusable for a pair without a difference."""
        source = self._sources[batch.split][batch.source]
        reading = read(
            record.value,
            source.format,
            source.columns,
            kind=self._kind,
        )
        example = located(reading.example, record.file, self._cache)
        if self._labels is not None and isinstance(example, Labelled):
            names = self._names(batch, source, self._labels)
            if names:
                example = replace(example, label=with_names(example.label, names))
        texts: list[str] | None = None
        for key in reading.unused:
            if self._is_read_by_template(key):
                continue
            tally.unused_keys[key] += 1
            if texts is None:
                texts = list(written_texts(example))
            tally.unused_columns.note(key, record.value, source.columns, texts)
        tally.absent.update(reading.absent)
        if reading.taken:
            tally.taken[reading.taken] += 1
        return example

    def _names(
        self,
        batch: RecordBatch,
        source: SourceConfig,
        labels: Labels,
    ) -> tuple[str, ...]:
        """Return the names of numbers that the source of a batch counts differently from the run."""
        place = (batch.split, batch.source)
        if place not in self._names_of_numbers:
            self._names_of_numbers[place] = names_of_numbers(source, labels.names)
        return self._names_of_numbers[place]

    def _is_read_by_template(self, key: str) -> bool:
        """True for a key of messages that the chat template names: it gets whole messages."""
        place, _, name = key.rpartition("[].")
        return place == "messages" and name in self._named_by_template


class RowMaker:
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
        if labels is not None:
            kind = "labelled"
        self._encoder = encoder_for(tokenizer, data, labels, processor, kind)
        self._find_special = tokenizer.find_special if labels is None else None
        self._prefix = tokenizer.prefix
        self._data = data
        self._limits = limits

        template = ""
        if labels is None and tokenizer.chat is not None:
            template = tokenizer.chat.source
        self._template = template
        self._reader = RecordReader(sources, kind, labels, data.cache, template)
        self._image_token = processor.placeholder.token if processor is not None else None

    def encode(self, batch: RecordBatch) -> BatchResult:
        """Encode a batch. Bad records become problems of the result."""
        result = BatchResult(batch.source, batch.split)
        if self._limits:
            result.profile = Profile(self._limits, self._image_token)

        # Read the records. A record that cannot be read becomes a problem.
        good: list[_ReadRecord] = []
        for index, record in batch.records:
            try:
                example = self._reader.read(record, batch, result.tally)
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
        add_digests(result)
        return result

    def _keep(
        self,
        result: BatchResult,
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
            "plain_prompts", record.index, bool(self._template) and has_plain_prompt(record.example)
        )
        for note in encoded.image_notes:
            tally.count(note, record.index)
        for note in flaws_of(record.example, self._template):
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
        result: BatchResult,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        """Do with a record that is too long what data.overlong says."""
        tally = result.tally
        limit = self._data.max_length
        match self._data.overlong:
            case "drop":
                # It makes no row.
                tally.count("overlong", record.index)
            case "error":
                problem = f"has {encoded.longest:,} tokens; data.max_length is {limit:,}"
                result.problems.append((record.where, problem))
                tally.refused += 1
            case "split":
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
            case "truncate":
                tally.count("truncated", record.index)
                # What is left of it may have nothing that is trained.
                shorter = self._encoder.cut(record.example, encoded, limit)
                self._add_if_it_teaches(result, record, shorter)
            case unknown:
                assert_never(unknown)

    def _add_if_it_teaches(
        self,
        result: BatchResult,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        if _teaches(encoded):
            self._add(result, record, encoded)
        else:
            result.tally.count("no_label", record.index)

    def _add(
        self,
        result: BatchResult,
        record: _ReadRecord,
        encoded: Encoded,
    ) -> None:
        """Add a row to the result, and count the remarks on it."""
        tally = result.tally
        tally.rows += 1
        tally.tokens += len(encoded.ids)
        tally.answers.update(answers_of(record.example, encoded))
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


def not_to_split(
    data: DataConfig,
    example: Example,
    encoded: Encoded,
) -> str:
    """Return what is wrong with a long record that `data.overlong: split` cannot split; empty if nothing is."""
    if data.overlong != "split" or encoded.longest <= data.max_length or isinstance(example, Text):
        return ""
    return f"has {encoded.longest:,} tokens of {data.max_length:,}, and {SPLIT_ADVICE}"


def _teaches(encoded: Encoded) -> bool:
    """True if a row has a trained token. Both answers of a pair need one, and the answers have to differ."""
    if not encoded.split:
        return encoded.labels > 0
    (chosen, chosen_trained), (rejected, rejected_trained) = encoded.sequences
    return any(chosen_trained) and any(rejected_trained) and chosen != rejected


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
