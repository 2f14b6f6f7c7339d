"""EleutherAI's lm-evaluation-harness: its tasks, prompts and metrics, with our forward.

Log-likelihoods come from padding-free packed batches; everything else is the harness's own Hugging Face model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kubetune import errors
from kubetune.batching.batch import Batch, collate
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.data.prepared.prefixes import sort_by_prefix
from kubetune.extras import require
from kubetune.models import fsdp, prefix_sharing
from kubetune.models.attention_hooks import packed
from kubetune.models.learner import Learner
from kubetune.models.padding_free import own_attention
from kubetune.scoring.comparison import Measured
from kubetune.scoring.statistics import compare, interval
from kubetune.tasks.causal_lm import score_labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema.evaluation import BenchmarksConfig

# Tokens of a packed batch. A request has a few hundred.
BATCH_TOKENS = 4096

# The harness's request: the texts of context and continuation, then the ids of both.
Request = tuple[tuple[str, str], list[int], list[int]]


@dataclass(frozen=True)
class Benchmark:
    """Results of one task, by metric as the harness names it, such as `acc,none`."""

    values: dict[str, float]  # by metric
    # by metric, the score of each row by its number; only of metrics that are the mean of their rows
    scores: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def task_manager(wanted: BenchmarksConfig) -> Any:
    """Return the harness's list of tasks.

    Raise ConfigError if the harness is not installed or does not know a task that is wanted.
    """
    folder = Path(wanted.tasks_folder).expanduser() if wanted.tasks_folder else None
    if folder is not None and not folder.is_dir():
        raise errors.ConfigError(
            f"benchmarks: tasks_folder {folder} is no folder. Nothing was written."
        )

    require("evaluation.benchmarks", "lm_eval")
    from lm_eval.tasks import TaskManager

    if folder is not None:
        # The harness needs seconds to read its own 15,000 tasks, so look without them first.
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        if set(wanted.tasks) <= set(manager.all_subtasks):
            return manager

    manager = TaskManager(include_path=str(folder) if folder else None)
    unknown = [task for task in wanted.tasks if task not in manager.all_tasks]
    if unknown:
        raise errors.ConfigError(
            f"benchmarks: the harness knows no {', '.join(unknown)}; `lm-eval ls tasks` lists those it has, and "
            "tasks_folder names a folder with task files of your own. Nothing was written."
        )

    return manager


def run(
    learner: Learner,
    tokenizer: Path,
    wanted: BenchmarksConfig,
    manager: Any,
) -> dict[str, Benchmark]:
    """Return the results of every task that is wanted, and of the parts of those that are groups."""
    from lm_eval.evaluator import simple_evaluate

    learner.model.eval()

    # `bootstrap_iters` 0: intervals are ours, by rows and paired, so the harness need not draw its own.
    results: Any = simple_evaluate(
        harness_model(learner, tokenizer),
        tasks=list(wanted.tasks),
        limit=wanted.limit,
        task_manager=manager,
        bootstrap_iters=0,
    )
    benchmarks = {}
    for task, of_task in results["results"].items():
        samples = results["samples"].get(task, ())
        values = {}
        scores = {}
        for name, value in of_task.items():
            # Next to metrics are the task's name and other texts.
            if not isinstance(value, float):
                continue
            values[name] = value
            of_rows = _scores(name, value, samples)
            if of_rows:
                scores[name] = of_rows

        benchmarks[task] = Benchmark(values, scores)

    return benchmarks


def _scores(
    name: str,
    value: float,
    samples: Sequence[Mapping[str, Any]],
) -> dict[int, float]:
    """Return the score of each row by its number; nothing if `value`, the metric, is not their mean."""
    # `exact_match,strict-match`: of what the harness's filter strict-match leaves of an answer.
    metric, _, answer_filter = name.partition(",")
    scores: dict[int, float] = {}
    for line in samples:
        if line.get("filter") != answer_filter or metric not in line:
            continue
        if not isinstance(line[metric], (int, float, np.number)):
            return {}
        scores[line["doc_id"]] = float(line[metric])

    if not scores:
        return {}

    # A metric such as perplexity or F1 is no mean of rows, and has no interval or test by rows.
    mean = math.fsum(scores.values()) / len(scores)
    is_mean = math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12)
    return scores if is_mean else {}


def compared(
    base: Mapping[str, Benchmark],
    tuned: Mapping[str, Benchmark],
    tasks: Sequence[str],
) -> list[dict[str, Any]]:
    """Return a line for each metric of the tasks, or of their parts if the tasks have no results themselves.

    Lines are as in the verdict on answers, but without intervals and test if the metric is no mean of rows.
    """
    names = [task for task in tuned if task in tasks] or list(tuned)
    lines = []
    for task in names:
        for metric in tuned[task].values:
            lines.append(_compared_metric(task, metric, base[task], tuned[task]))
    return lines


def _compared_metric(
    task: str,
    metric: str,
    base: Benchmark,
    tuned: Benchmark,
) -> dict[str, Any]:
    """Return the line of one metric of a task."""
    label = f"{task}/{metric.removesuffix(',none')}"
    before = base.values[metric]
    after = tuned.values[metric]
    # Without the scores of rows there are only the two numbers.
    of_base = base.scores.get(metric)
    of_tuned = tuned.scores.get(metric)
    if of_base is None or of_tuned is None:
        return {"metric": label, "before": before, "after": after}

    # Paired: both models answered the same rows.
    rows = sorted(of_base.keys() & of_tuned.keys())
    first = [of_base[row] for row in rows]
    second = [of_tuned[row] for row in rows]
    measured = Measured(
        metric=label,
        rows=len(rows),
        before=before,
        after=after,
        before_interval=interval(first),
        after_interval=interval(second),
        paired=compare(first, second),
    )
    return measured.facts()


def harness_model(learner: Learner, tokenizer: Path) -> Any:
    """Return the harness's Hugging Face model around a learner; log-likelihoods come from packed batches."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    class Packed(HFLM):  # type: ignore[misc]
        # Names of the harness. Only log-likelihoods are ours; its generation runs transformers' own forward.
        def _loglikelihood_tokens(
            self,
            requests: list[Request],
            **settings: Any,
        ) -> list[tuple[float, bool]]:
            if not learner.route.padding_free:
                return super()._loglikelihood_tokens(requests, **settings)  # type: ignore[no-any-return]
            return log_likelihoods(learner, [request[1:] for request in requests], self.max_length)

        def _model_generate(self, *arguments: Any, **settings: Any) -> Tensor:
            with own_attention(learner.lm):
                return super()._model_generate(*arguments, **settings)  # type: ignore[no-any-return]

        def _model_call(self, *arguments: Any, **settings: Any) -> Tensor:
            with own_attention(learner.lm):
                return super()._model_call(*arguments, **settings)  # type: ignore[no-any-return]

    reader = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    return Packed(learner.lm, tokenizer=reader, batch_size=16)


@torch.no_grad()
def log_likelihoods(
    learner: Learner,
    pairs: Sequence[tuple[list[int], list[int]]],
    max_length: int,
) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation after its context, and whether greedy decoding would choose it.

    `pairs`: ids of both. Tokens beyond `max_length` are cut off on the left, as in the harness. Contexts that several
    pairs have, such as the question of a choice or the examples before it, are computed once for a packed batch.
    """
    rows = []
    for context, continuation in pairs:
        # The last token predicts nothing, so a row of one token more than fit still has all its labels.
        ids = np.array((context + continuation)[-(max_length + 1) :], np.uint32)
        is_label = np.arange(len(ids)) >= len(ids) - len(continuation)
        rows.append((ids, is_label))

    # Rows of one token more than the model takes go each in a batch of its own.
    fitting = []
    results: dict[int, tuple[float, bool]] = {}
    for number, (ids, is_label) in enumerate(rows):
        if len(ids) <= max_length:
            fitting.append(number)
        else:
            (results[number],) = _results(learner, _longest(ids, is_label))

    # Proved on this model: some cannot continue a beginning that they computed once.
    shares_prefixes = not prefix_sharing.why_not(learner)
    lay_out = collate_shared if shares_prefixes else collate
    for numbers in _batches([ids for ids, _ in rows], fitting):
        batch = lay_out([rows[number] for number in numbers])
        for number, result in zip(numbers, _results(learner, batch), strict=True):
            results[number] = result

    # In the order of the harness's requests.
    return [results[number] for number in range(len(pairs))]


def _results(learner: Learner, batch: Batch) -> Iterator[tuple[float, bool]]:
    """Yield what `log_likelihoods` returns, for each row of a batch."""
    device = next(learner.model.parameters()).device
    batch = batch.to(device)
    with packed(batch.cu_seqlens, parents=batch.parents):
        # [labels]: whether each label is the likeliest token, and its loss
        _, hits, losses = fsdp.inside(learner.lm, score_labels, learner, batch)

    # The labels of all rows lie end to end.
    losses = losses.double()
    begin = 0
    for count in batch.label_counts:
        row = slice(begin, begin + count)
        begin = row.stop
        yield -float(losses[row].sum()), bool(hits[row].all())


def _longest(ids: NDArray[np.uint32], is_label: NDArray[np.bool_]) -> Batch:
    """Return a batch of one row without its last token, which is a label that the model has no position for.

    With `max_length` 4, context `a b c`, continuation `d e`:

        ids       a b c d e     one more than the model takes
        input     a b c d
        labels        d e       predicted at positions 2 and 3
    """
    predicting = np.flatnonzero(is_label) - 1
    batch = collate([(ids[:-1], np.zeros(len(ids) - 1, bool))])
    return replace(
        batch,
        rows=torch.from_numpy(predicting),
        labels=torch.from_numpy(ids[predicting + 1].astype(np.int64)),
        label_counts=(len(predicting),),
    )


def _batches(sequences: Sequence[NDArray[np.uint32]], wanted: Sequence[int]) -> Iterator[list[int]]:
    """Yield numbers of sequences that go together: like beginnings, up to BATCH_TOKENS of what is not shared."""
    order, shared = sort_by_prefix([sequences[number] for number in wanted])

    numbers: list[int] = []
    num_tokens = 0
    for place, num_shared in zip(order.tolist(), shared.tolist(), strict=True):
        number = wanted[place]
        # Tokens that the sequence before it does not have.
        num_new = len(sequences[number]) - num_shared
        if numbers and num_tokens + num_new > BATCH_TOKENS:
            yield numbers
            numbers = []
            # The first of a batch shares its beginning with none, so all its tokens count.
            num_tokens = num_shared
        numbers.append(number)
        num_tokens += num_new

    if numbers:
        yield numbers
