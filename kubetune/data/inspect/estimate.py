"""Estimate of the rows and tokens in a config's data, made in well under a second: for `kubetune plan`.

Counts records where they lie and tokenises a few. What the checks will leave out is known only once data are prepared.
Images take some seconds, nearly all of them for importing the image processor of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kubetune.base.humanize import counted
from kubetune.config.schema import Config, SourceConfig
from kubetune.data.reading.hub import is_local
from kubetune.data.reading.sources import Located, count_rows, evaluated_rows, locate, read_source
from kubetune.errors import ConfigError, DataError
from kubetune.plan.base_model import embeddings_of
from kubetune.plan.model_shapes import hub_folder

if TYPE_CHECKING:
    from kubetune.data.reading.formats import Example
    from kubetune.data.reading.problems import Problems
    from kubetune.data.text.encode import Encoder
    from kubetune.data.text.encode_preferences import PreferenceEncoder
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.data.vision.encode import VisionEncoder

SAMPLE_ROWS = 200
SAMPLE_PICTURED_ROWS = 50
"""Of data with images, each of which has to be opened."""


@dataclass(frozen=True)
class Lengths:
    """Statistics of `sampled` rows: tokens of a row that is kept, on average, and shares of them all.

    `limit`, `longest`: of a sequence's tokens; `spared`: of its tokens, the share in beginnings that rows share,
    computed once.
    """

    sampled: int
    tokens_per_row: float
    overlong_share: float
    limit: int
    bad_share: float
    kept_share: float
    longest: int
    spared: float = 0.0
    rows_per_record: float = 1.0
    """More than one where long texts are split."""
    bad: tuple[str, ...] = ()
    """The first bad ones of the sample: file, line, and what was found."""

    def rows(self, records: int | None) -> int | None:
        """Rows that so many records become, before any are left out."""
        return None if records is None else round(records * self.rows_per_record)

    def longest_of(self, rows: int | None) -> int:
        """Tokens that no row of so many has more of: with a quarter to spare where not all of them were sampled."""
        return (
            self.longest
            if rows is not None and rows <= self.sampled
            else min(self.limit, -(-5 * self.longest // 4))
        )

    def tokens(self, rows: int | None) -> int | None:
        """Of so many rows, those that are not kept counted as nothing."""
        return None if rows is None else round(rows * self.kept_share * self.tokens_per_row)


def estimate_rows(config: Config) -> tuple[int | None, int | None]:
    """Rows of a training epoch and of an evaluation; None for data that are not on this machine as files.

    Raises DataError when a source exists nowhere, and no pod is to make it.
    """
    taken = [taken_by(config, source) for source in config.data.train]
    total = _total(taken)
    eval_rows: int | None = 0
    if isinstance(config.data.eval, tuple):
        eval_taken = [taken_by(config, source) for source in config.data.eval]
        eval_rows = _total(eval_taken)
        if eval_rows is not None:
            eval_rows = sum(
                evaluated_rows([n or 0 for n in eval_taken], [s.weight for s in config.data.eval])
            )
    elif config.data.eval and total is None:
        eval_rows = None
    elif config.data.eval and total:
        eval_rows = min(max(1, round(config.data.eval * total)), total - 1)
    if total is None:
        return None, eval_rows
    # What is held out is drawn from all sources alike.
    left = 1.0 if isinstance(config.data.eval, tuple) else 1 - (eval_rows or 0) / max(1, total)
    kept = [
        (round((rows or 0) * left), source.weight)
        for rows, source in zip(taken, config.data.train, strict=True)
    ]
    if isinstance(config.data.eval, float) and eval_rows and total:
        held_out = [round(eval_rows * (rows or 0) / total) for rows in taken]
        eval_rows = max(
            1, sum(evaluated_rows(held_out, [source.weight for source in config.data.train]))
        )
    return sum(max(1, round(rows * weight)) for rows, weight in kept if rows), eval_rows


def _total(counts: Sequence[int | None]) -> int | None:
    return None if None in counts else sum(filter(None, counts))


def is_upper_bound(config: Config, sources: Sequence[SourceConfig]) -> bool:
    """Some source is known by its `#N` alone: it may have fewer rows than that, never more."""
    located = [where_is(config, source) for source in sources]
    return any(
        found is not None and not found.files and found.sample is not None for found in located
    )


def makes_data(config: Config) -> bool:
    """A pod makes the data before training."""
    return config.kubernetes is not None and config.kubernetes.preprocess is not None


def where_is(config: Config, source: SourceConfig) -> Located | None:
    """The data that a source stands for; None where it is yet to be made by `kubernetes.preprocess`."""
    try:
        return locate(source)
    except DataError:
        if not makes_data(config):
            raise
        return None


def estimate_forget(config: Config) -> int:
    """Rows of `evaluation.forget`, as far as they are on this machine as files. Raises DataError as `estimate_rows`."""
    return sum(taken_by(config, source) or 0 for source in config.sources["forget"])


def taken_by(config: Config, source: SourceConfig) -> int | None:
    """Records of a source that `#N` and `range` take."""
    located = where_is(config, source)
    if located is None:
        return None
    if not located.files:
        return located.sample
    taken = count_rows(source)
    if located.sample is not None:
        taken = min(taken, located.sample)
    if source.range is not None:
        taken = max(0, min(taken, source.range[1]) - source.range[0])
    return taken


def load_here(config: Config) -> Tokenizer:
    """Return the tokenizer of a config, from files of this machine alone."""
    from kubetune.data.text.tokenizer import cache_folder, load_tokenizer
    from kubetune.rundir.starts import day_of

    model = config.model.model_copy(update={"local_files_only": True})
    return load_tokenizer(model, cache_folder(config.data.cache), date=day_of(config))


def estimate_lengths(
    config: Config, environ: Mapping[str, str], load: Callable[[], Tokenizer] | None = None
) -> Lengths | None:
    """Token counts of the first rows, or None when the tokenizer or the data are not here.

    `load`: of the tokenizer, which is asked for only where it is on this machine.
    Raises ModelError or DataError when they are, but of no use, ConfigError for tokens that the model does not know.
    """
    sources = [
        source
        for source in config.data.train
        if (found := where_is(config, source)) and found.files
    ]
    if not sources or not is_on_disk(config.model.tokenizer or config.model.path, environ):
        return None
    from kubetune.data.inspect.sharing import spared_share
    from kubetune.data.prepared.pipeline import not_to_split
    from kubetune.data.reading.formats import Labelled
    from kubetune.data.reading.problems import Problems
    from kubetune.data.text.encode import SEEING, split_at
    from kubetune.data.text.encode_labelled import framed_ids, within_positions

    config = config.model_copy(
        update={"model": config.model.model_copy(update={"local_files_only": True})}
    )
    tokenizer = load() if load is not None else load_here(config)
    labelled = config.task == "sequence_classification"
    problems, unfit = Problems(), Problems()
    examples = list(
        _first_examples(
            config, sources, SAMPLE_PICTURED_ROWS if config.sees else SAMPLE_ROWS, problems
        )
    )
    sampled = len(examples)
    if labelled:
        rows = [
            [ids]
            for ids in framed_ids(tokenizer, [e for _, e in examples if isinstance(e, Labelled)])
        ]
    else:
        good = [(where, example) for where, example in examples if example is not None]
        encoded = _encoder(config, tokenizer).encode_batch([example for _, example in good])
        rows = [[ids for ids, _ in row.sequences] for row in encoded if not isinstance(row, str)]
        for (where, example), row in zip(good, encoded, strict=True):
            if isinstance(row, str):
                (unfit if SEEING in row else problems).add(where, row)
            elif said := not_to_split(config.data, example, row):
                unfit.add(where, said)
        unfit.raise_if_any()
    if not rows:
        problems.raise_if_any()
        return None
    _require_embeddings(config, environ, tokenizer, [ids for row in rows for ids in row])
    lengths = [[len(ids) for ids in row] for row in rows]
    limit = (within_positions(config, tokenizer) if labelled else config).data.max_length
    overlong = sum(max(row) > limit for row in lengths)
    cuts = config.data.overlong in ("truncate", "split")
    kept = [[min(length, limit) for length in row] for row in lengths if cuts or max(row) <= limit]
    per_record = 1.0
    if config.data.overlong == "split":
        kept = [[piece.stop - piece.start] for row in lengths for piece in split_at(row[0], limit)]
        per_record = len(kept) / len(lengths)
    whole = [row for row, each in zip(rows, lengths, strict=True) if max(each) <= limit]
    return Lengths(
        sampled=sampled,
        tokens_per_row=sum(map(sum, kept)) / max(1, len(kept)),
        overlong_share=overlong / sampled,
        limit=limit,
        bad_share=1 - len(lengths) / sampled,
        kept_share=len(kept) / sampled,
        longest=max(map(max, kept), default=0),
        spared=spared_share(config, whole),
        rows_per_record=per_record,
        bad=tuple(problems.first),
    )


def _first_examples(
    config: Config, sources: Sequence[SourceConfig], wanted: int, problems: Problems
) -> Iterator[tuple[str, Example | None]]:
    """The first records, each with its place; None for a bad one, which is noted."""
    from kubetune.data.prepared.pipeline import located
    from kubetune.data.reading.formats import convert
    from kubetune.data.reading.preferences import Unusable

    for source in sources:
        for record in islice(read_source(source, problems), -(-wanted // len(sources))):
            example = None
            try:
                read = convert(record.value, source.format, source.columns, kind=config.record_kind)
                example = located(read, record.file, config.data.cache)
            except ValueError as error:
                if not isinstance(error, Unusable) or config.data.unusable_pairs == "error":
                    problems.add(record.where, str(error))
            yield record.where, example


def _require_embeddings(
    config: Config, environ: Mapping[str, str], tokenizer: Tokenizer, rows: Sequence[Sequence[int]]
) -> None:
    """Raise ConfigError where one of these rows has a token that the model has no embedding for."""
    embeddings, largest = embeddings_of(config, environ), [max(row, default=-1) for row in rows]
    if embeddings is not None and max(largest) >= embeddings.known:
        holding = f"{sum(id >= embeddings.known for id in largest):,} of the first {counted(len(rows), 'row')}"
        token = tokenizer.decode([max(largest)], skip_special_tokens=False)
        raise ConfigError(embeddings.say(max(largest), token, holding))


def _encoder(config: Config, tokenizer: Tokenizer) -> Encoder | PreferenceEncoder | VisionEncoder:
    from kubetune.data.text.encode import Encoder
    from kubetune.data.text.encode_preferences import PreferenceEncoder
    from kubetune.data.vision.encode import VisionEncoder
    from kubetune.data.vision.image_processor import load_image_processor

    encoder = Encoder(
        tokenizer,
        train_on=config.data.train_on,
        add_special_tokens=config.data.add_special_tokens,
        keeps_prompts=config.record_kind != "text",
    )
    processor = load_image_processor(config, tokenizer)
    seeing = encoder if processor is None else VisionEncoder(encoder, processor)
    return seeing if config.record_kind == "text" else PreferenceEncoder(seeing)


def is_on_disk(path: str, environ: Mapping[str, str]) -> bool:
    """The model is a local folder or in the hub's cache."""
    return is_local(path) or hub_folder(path, environ).is_dir()
