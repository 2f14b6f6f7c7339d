"""Estimate of the rows and tokens in a config's data, made in well under a second: for `kubetune plan`.

Counts records where they lie and tokenises a few. What the checks will leave out is known only once data are prepared.
Images take some seconds, nearly all of them for importing the image processor of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kubetune.config.schema import (
    DataConfig,
    KubernetesConfig,
    ModelConfig,
    SourceConfig,
    TrainingConfig,
)
from kubetune.data.inspect.lengths import Lengths
from kubetune.data.reading.hub import is_local
from kubetune.data.reading.sources import (
    Located,
    count_rows,
    empty_range,
    evaluated_rows,
    locate,
    no_records,
)
from kubetune.errors import DataError
from kubetune.plan.model_shapes import hub_folder

if TYPE_CHECKING:
    from kubetune.data.spec import DataSpec
    from kubetune.data.text.tokenizer import Tokenizer


def estimate_rows(data: DataConfig, *, made_by_pod: bool = False) -> tuple[int | None, int | None]:
    """Return the rows of a training epoch and of an evaluation; None for data that are not files of this machine.

    Raise DataError when a source exists nowhere, and no pod is to make it, or when there is no record to train on.
    """
    records = [taken_by(source, made_by_pod=made_by_pod) for source in data.train]
    if all(count == 0 for count in records):
        raise no_records("data.train", data.train)
    weights = [source.weight for source in data.train]
    # Evaluation data of its own, none at all, or a share that is held out of training's.
    if isinstance(data.eval, tuple):
        eval_records = [taken_by(source, made_by_pod=made_by_pod) for source in data.eval]
        eval_rows = _evaluated(eval_records, [source.weight for source in data.eval])
        return _trained(records, weights, 0.0), eval_rows
    if not data.eval:
        return _trained(records, weights, 0.0), 0
    total = _total(records)
    if total is None:
        return None, None

    # What is held out is drawn from all sources alike.
    held_out = min(max(1, round(data.eval * total)), total - 1) if total else 0
    held_out_share = held_out / max(1, total)
    eval_rows = 0
    if held_out:
        eval_rows = _evaluated([round(held_out * (n or 0) / total) for n in records], weights)
        eval_rows = max(1, eval_rows or 0)
    return _trained(records, weights, held_out_share), eval_rows


def _trained(
    records: Sequence[int | None],
    weights: Sequence[float],
    held_out_share: float,
) -> int | None:
    """Return the number of rows in an epoch. Each source has at least one."""
    if None in records:
        return None
    # As `prepared/order.epoch_size` counts them: 100 records of weight 2.5 are 250 rows.
    rows = 0
    for number, weight in zip(records, weights, strict=True):
        kept = round((number or 0) * (1 - held_out_share))
        if kept:
            rows += max(1, round(kept * weight))

    return rows


def _evaluated(records: Sequence[int | None], weights: Sequence[float]) -> int | None:
    """Return the rows of an evaluation, which have the mix of training."""
    if None in records:
        return None
    return sum(evaluated_rows([number or 0 for number in records], weights))


def _total(records: Sequence[int | None]) -> int | None:
    """Return the sum; None where one of them is not known."""
    if None in records:
        return None
    return sum(filter(None, records))


def is_upper_bound(sources: Sequence[SourceConfig], *, made_by_pod: bool = False) -> bool:
    """True if a source is known by its `#N` alone: it may have fewer rows than that, never more."""
    for source in sources:
        located = where_is(source, made_by_pod=made_by_pod)
        if located is not None and not located.files and located.sample is not None:
            return True
    return False


def makes_data(kubernetes: KubernetesConfig | None) -> bool:
    """True if a pod makes the data before training."""
    return kubernetes is not None and kubernetes.preprocess is not None


def where_is(source: SourceConfig, *, made_by_pod: bool = False) -> Located | None:
    """Return the data that a source stands for; None where a pod is yet to make them."""
    try:
        return locate(source)
    except DataError:
        if not made_by_pod:
            raise
        return None


def taken_by(source: SourceConfig, *, made_by_pod: bool = False) -> int | None:
    """Return how many records of a source `#N` and `range` take; None for data that are not files of this machine.

    Raise DataError for a range that takes none.
    """
    located = where_is(source, made_by_pod=made_by_pod)
    if located is None:
        return None
    if not located.files:
        return located.sample

    # `#N` takes the first N of the shuffled records, `range` a slice of those.
    taken = count_rows(source)
    if located.sample is not None:
        taken = min(taken, located.sample)
    if source.range is not None:
        # Of 100 records, the range 90 to 120 takes 10.
        begin, end = source.range
        if taken and not begin < min(taken, end):
            raise empty_range(source, taken)
        taken = max(0, min(taken, end) - begin)

    return taken


def load_here(
    model: ModelConfig,
    data: DataConfig,
    date: str | None = None,
) -> Tokenizer:
    """Return the tokenizer of a model, from files of this machine alone."""
    from kubetune.data.text.tokenizer import cache_folder, load_tokenizer

    model = model.model_copy(update={"local_files_only": True})
    return load_tokenizer(model, cache_folder(data.cache), date=date)


def estimate_lengths(
    spec: DataSpec,
    training: TrainingConfig,
    environ: Mapping[str, str],
    load: Callable[[], Tokenizer] | None = None,
    *,
    made_by_pod: bool = False,
) -> Lengths | None:
    """Return the token counts of the first rows, or None when the tokenizer or the data are not here.

    `load`: of the tokenizer, which is asked for only where it is on this machine.

    Raise ModelError or DataError when they are, but of no use, ConfigError for tokens that the model does not know.
    """
    # Sources of the hub, and those that a pod will make, have no rows to look at yet.
    sources = []
    for source in spec.data.train:
        located = where_is(source, made_by_pod=made_by_pod)
        if located is not None and located.files:
            sources.append(source)

    if not sources or not is_on_disk(spec.model.tokenizer or spec.model.path, environ):
        return None
    # It imports tokenizers, which a plan without data does without.
    from kubetune.data.inspect.row_sample import sample_rows

    if load is None:
        tokenizer = load_here(spec.model, spec.data)
    else:
        tokenizer = load()

    return sample_rows(spec, training, tuple(sources), tokenizer, environ)


def is_on_disk(path: str, environ: Mapping[str, str]) -> bool:
    """True if the model is a local folder or in the hub's cache."""
    return is_local(path) or hub_folder(path, environ).is_dir()
