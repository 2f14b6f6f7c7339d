"""The first rows of training, encoded as a run encodes them, to estimate the tokens of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from kubetune.base.humanize import counted
from kubetune.config.schema import ModelConfig, SourceConfig, TrainingConfig
from kubetune.data.inspect.lengths import Lengths
from kubetune.data.inspect.prefix_sharing import saved_share
from kubetune.data.prepared.pipeline import SPLIT_ADVICE, Batch, Result, Tally, Worker
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.reading.formats import Label
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.spec import DataSpec
from kubetune.data.text.encode import SEEING
from kubetune.data.text.encode_labelled import most_tokens
from kubetune.data.text.labels import Labels
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.errors import ConfigError
from kubetune.plan.base_model import embeddings_of

_RECORDS: Final = 200
_RECORDS_WITH_IMAGES: Final = 50  # fewer, since each image has to be opened


class _AnyLabels(Labels):
    """Labels of which every one is good: the real ones are known only once all data are read."""

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

    Raises DataError where no record is good, or one is of a kind that no such run takes; ConfigError for tokens that
    the model does not know.
    """
    labels = None
    data = spec.data
    if spec.task == "sequence_classification":
        labels = _AnyLabels("single_label_classification", ())
        limit = most_tokens(data.max_length, tokenizer)
        data = data.model_copy(update={"max_length": limit})
    if data.overlong == "error":
        data = data.model_copy(update={"overlong": "drop"})  # the plan tells how many there are
    model = spec.model.model_copy(update={"local_files_only": True})
    processor = replace(spec, model=model).image_processor(tokenizer)
    worker = Worker(tokenizer, data, {"train": sources}, labels, processor, kind=spec.record_kind)
    problems = Problems()
    wanted = _RECORDS if processor is None else _RECORDS_WITH_IMAGES
    results = _encode_first(wanted, sources, worker, problems)
    if not any(result.lengths for result in results):
        problems.raise_if_any()
        return None
    rows: list[list[list[int]]] = []
    tally = Tally()
    for result in results:
        rows += _sequences(result.chunk)
        tally.add(result.tally)
    _require_embeddings(spec.model, environ, tokenizer, rows)
    bad = tally.refused + tally.unusable
    return Lengths(
        sampled=tally.records,
        tokens_per_row=tally.tokens / max(1, tally.rows),
        overlong_share=(tally.overlong + tally.truncated + tally.split) / tally.records,
        limit=data.max_length,
        bad_share=bad / tally.records,
        kept_share=tally.rows / tally.records,
        longest=max((len(ids) for row in rows for ids in row), default=0),
        spared=saved_share(rows, spec.task, data, spec.preference, training),
        rows_per_record=tally.rows / (tally.records - bad) if data.overlong == "split" else 1.0,
        bad=tuple(problems.first),
    )


def _encode_first(
    wanted: int, sources: Sequence[SourceConfig], worker: Worker, problems: Problems
) -> list[Result]:
    """Encode so many records, of all sources alike. Raises DataError for those of a kind that no such run takes."""
    results = []
    unfit = Problems()
    for number, source in enumerate(sources):
        records = islice(read_source(source, problems), -(-wanted // len(sources)))
        result = worker.encode(Batch(number, "train", list(enumerate(records))))
        for where, what in result.problems:
            problems.add(where, what)
            if SEEING in what or SPLIT_ADVICE in what:
                unfit.add(where, what)
        results.append(result)
    unfit.raise_if_any()
    return results


def _sequences(chunk: Chunk) -> list[list[list[int]]]:
    """Return the ids of each row's sequences."""
    rows = []
    begin = 0
    for length, split in zip(chunk.lengths, chunk.splits, strict=True):
        ids = chunk.tokens[begin : begin + length].tolist()
        rows.append([ids[:split], ids[split:]] if split else [ids])
        begin += length
    return rows


def _require_embeddings(
    model: ModelConfig,
    environ: Mapping[str, str],
    tokenizer: Tokenizer,
    rows: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Raise ConfigError where one of these rows has a token that the model has no embedding for."""
    embeddings = embeddings_of(model, environ)
    largest = [max(max(ids, default=-1) for ids in row) for row in rows]
    if embeddings is None or max(largest, default=-1) < embeddings.known:
        return
    number = sum(id >= embeddings.known for id in largest)
    holding = f"{number:,} of the first {counted(len(rows), 'row')}"
    token = tokenizer.decode([max(largest)], skip_special_tokens=False)
    raise ConfigError(embeddings.say(max(largest), token, holding))
