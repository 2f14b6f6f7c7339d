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
    locate,
    no_records,
)
from kubetune.data.row_counts import epoch_size, evaluated_rows, held_out
from kubetune.errors import DataError
from kubetune.plan.model_shapes import hub_folder

if TYPE_CHECKING:
    from kubetune.data.spec import DataSpec
    from kubetune.data.text.tokenizer import Tokenizer


def estimate_rows(data: DataConfig, *, made_by_pod: bool = False) -> tuple[int | None, int | None]:
    """Return the rows of a training epoch and of an evaluation; None for data that are not files of this machine.

    Raise DataError when a source exists nowhere, and no pod is to make it, or when there is no record to train on.
    """
    records = _taken(data.train, made_by_pod=made_by_pod)
    if records is not None and not any(records):
        raise no_records("data.train", data.train)
    weights = [source.weight for source in data.train]
    rows = None
    if records is not None:
        rows = epoch_size(records, weights)
    # Evaluation data of its own, none at all, or a share that is held out of training's.
    if isinstance(data.eval, tuple):
        eval_records = _taken(data.eval, made_by_pod=made_by_pod)
        if eval_records is None:
            return rows, None
        return rows, sum(evaluated_rows(eval_records, [source.weight for source in data.eval]))
    if not data.eval:
        return rows, 0
    if records is None:
        return None, None

    # What is held out is drawn from all sources alike.
    total = sum(records)
    number = held_out(total, data.eval)
    kept = [round(count * (1 - number / total)) for count in records]
    eval_rows = 0
    if number:
        of_sources = [round(number * count / total) for count in records]
        eval_rows = max(1, sum(evaluated_rows(of_sources, weights)))
    return epoch_size(kept, weights), eval_rows


def _taken(sources: Sequence[SourceConfig], *, made_by_pod: bool) -> list[int] | None:
    """Return how many records each source gives; None if that is not known of one."""
    counts = [taken_by(source, made_by_pod=made_by_pod) for source in sources]
    known = [count for count in counts if count is not None]
    return known if len(known) == len(counts) else None


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
