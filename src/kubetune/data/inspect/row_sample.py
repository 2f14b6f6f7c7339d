"""Encodes the first rows of training as a run does, to estimate the tokens of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from kubetune.base.humanize import counted
from kubetune.config.schema import DataConfig, ModelConfig, SourceConfig, TrainingConfig
from kubetune.data.inspect.lengths import Lengths
from kubetune.data.inspect.saved_share import saved_share
from kubetune.data.prepared.pipeline import BatchResult, RecordBatch
from kubetune.data.prepared.row_maker import SPLIT_ADVICE, RowMaker
from kubetune.data.prepared.tally import Tally, require_rows, summarise
from kubetune.data.reading.examples import Label
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.spec import DataSpec
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.encode import SEEING
from kubetune.data.text.encode_labelled import most_tokens
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import processor_of
from kubetune.errors import ConfigError, DataError
from kubetune.plan.base_model import embeddings_of

# Records that are encoded; with images fewer, since each has to be opened.
_RECORDS: Final = 200
_RECORDS_WITH_IMAGES: Final = 50


class _AnyLabels(Labels):
    """Labels that accept any: the real ones are known only once all data are read."""

    def target(self, label: Label) -> tuple[float, ...]:
        """Return a number for any label."""
        return (0.0,)


def sample_rows(
    spec: DataSpec,
    training: TrainingConfig,
    sources: tuple[SourceConfig, ...],
    tokenizer: Tokenizer,
    environ: Mapping[str, str],
) -> Lengths | None:
    """Return the token counts of the first rows of sources, None where they have no records.

    Raise DataError where no record is good, or one is of a kind that no such run takes; ConfigError for tokens that
    the model does not know.
    """
    problems = Problems()

    data = _lenient(spec, tokenizer)
    worker = _worker(spec, data, sources, tokenizer)
    most_records = _RECORDS if spec.vision is None else _RECORDS_WITH_IMAGES
    results = _encode_first(most_records, sources, worker, problems)
    # Bad records among good ones are counted; only where nothing else is left, there is nothing to estimate from.
    if not any(result.lengths for result in results):
        problems.raise_if_any()
        return None

    rows: list[list[list[int]]] = []
    tally = Tally()
    for result in results:
        for row in result.chunk.sequences():
            rows.append([ids for ids, _ in row])
        tally.add(result.tally)
    _require_embeddings(spec.model, environ, tokenizer, rows)
    lengths = _lengths(spec, training, data, rows, tally, problems)
    if tally.rows:
        return lengths
    try:
        require_rows(data, "train", summarise(sources[:1], [tally]), are_first=True)
    except DataError as error:
        return replace(lengths, refusal=str(error))
    return lengths


def _lenient(spec: DataSpec, tokenizer: Tokenizer) -> DataConfig:
    """Return the settings by which rows are made here: too long ones are no error, since the plan counts them."""
    # What would end a run is counted here, and the plan reports it.
    changes: dict[str, Any] = {}
    if spec.task == "sequence_classification":
        changes["max_length"] = most_tokens(spec.data.max_length, tokenizer)
    if spec.data.overlong == "error":
        changes["overlong"] = "drop"
    return spec.data.model_copy(update=changes)


def _worker(
    spec: DataSpec,
    data: DataConfig,
    sources: tuple[SourceConfig, ...],
    tokenizer: Tokenizer,
) -> RowMaker:
    """Return what encodes rows, from files of this machine alone."""
    labels = None
    if spec.task == "sequence_classification":
        labels = _AnyLabels("single_label_classification", ())

    # An estimate waits for no network: the image processor is loaded if it is here.
    model = spec.model.model_copy(update={"local_files_only": True})
    processor = processor_of(replace(spec, model=model), tokenizer)
    return RowMaker(
        tokenizer,
        data,
        {"train": sources},
        labels,
        processor,
        kind=spec.record_kind,
    )


def _lengths(
    spec: DataSpec,
    training: TrainingConfig,
    data: DataConfig,
    rows: Sequence[Sequence[Sequence[int]]],
    tally: Tally,
    problems: Problems,
) -> Lengths:
    """Return what the first records became. `rows`: the ids of each row's sequences. `data`: by which they were cut."""
    longest = 0
    for row in rows:
        longest = max(longest, *map(len, row))

    bad = tally.refused + tally.unusable
    rows_per_record = 1.0
    # Long texts are split: 150 records may become 600 rows.
    if data.overlong == "split":
        rows_per_record = tally.rows / (tally.records - bad)
    return Lengths(
        sampled=tally.records,
        tokens_per_row=tally.tokens / max(1, tally.rows),
        overlong_share=(tally.overlong + tally.truncated + tally.split) / tally.records,
        limit=data.max_length,
        bad_share=bad / tally.records,
        kept_share=tally.rows / tally.records,
        longest=longest,
        saved_share=saved_share(rows, spec.task, data, spec.preference, training),
        rows_per_record=rows_per_record,
        bad=tuple(problems.sentences()),
        lost_share=tally.lost_share,
    )


def _encode_first(
    most_records: int,
    sources: Sequence[SourceConfig],
    worker: RowMaker,
    problems: Problems,
) -> list[BatchResult]:
    """Encode the first records, of all sources alike. Raise DataError for those of a kind that no such run takes."""
    results = []
    unfit = Problems()
    per_source = -(-most_records // len(sources))  # rounded up
    for number, source in enumerate(sources):
        records = islice(read_source(source, problems), per_source)
        result = worker.encode(RecordBatch(number, "train", list(enumerate(records))))
        for where, what in result.problems:
            problems.add(where, what)
            # These are no faults of single records: the config asks for what such data cannot be.
            if SEEING in what or SPLIT_ADVICE in what:
                unfit.add(where, what)

        results.append(result)

    unfit.raise_if_any()
    return results


def _require_embeddings(
    model: ModelConfig,
    environ: Mapping[str, str],
    tokenizer: Tokenizer,
    rows: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Raise ConfigError where one of these rows has a token that the model has no embedding for."""
    # Without the model's shapes on this machine nothing is known.
    embeddings = embeddings_of(model, environ)
    if embeddings is None:
        return

    # Ids are compared row by row: the message says how many rows have one, and shows the largest.
    largest = -1
    num_unknown = 0  # rows
    for row in rows:
        largest_of_row = max(max(ids, default=-1) for ids in row)
        largest = max(largest, largest_of_row)
        num_unknown += largest_of_row >= embeddings.known

    if num_unknown:
        holding = f"{num_unknown:,} of the first {counted(len(rows), 'row')}"
        token = tokenizer.decode([largest], skip_special_tokens=False)
        raise ConfigError(embeddings.say(largest, token, holding))
