"""EleutherAI's lm-evaluation-harness: its tasks, prompts and metrics, with our forward.

Everything but the log-likelihoods is the harness's own Hugging Face model; those come from padding-free packed batches.
Task files of one's own, or copies of the harness's where there is no network, are found in a folder that is named.
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
from kubetune.batching.prefix_sharing import collate_shared
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

BATCH_TOKENS = 4096
"""Of a packed batch; requests are of some hundred tokens."""

Request = tuple[tuple[str, str], list[int], list[int]]


@dataclass(frozen=True)
class Benchmark:
    """Results of one task: `values` by metric as the harness names it, such as `acc,none`, and the `scores` of rows by
    number, of metrics that are the mean of them."""

    values: dict[str, float]
    scores: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def task_manager(wanted: BenchmarksConfig) -> Any:
    """The harness's list of tasks. Raises ConfigError where it is not installed, or does not know one that is wanted.

    To read all task files takes the harness some seconds.
    """
    folder = Path(wanted.tasks_folder).expanduser() if wanted.tasks_folder else None
    if folder is not None and not folder.is_dir():
        raise errors.ConfigError(
            f"benchmarks: tasks_folder {folder} is no folder. Nothing was written."
        )
    require("evaluation.benchmarks", "lm_eval")
    from lm_eval.tasks import TaskManager

    if folder is not None:  # to read the harness's own 15,000 tasks takes it long
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        if set(wanted.tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=str(folder) if folder else None)
    if unknown := [task for task in wanted.tasks if task not in manager.all_tasks]:
        raise errors.ConfigError(
            f"benchmarks: the harness knows no {', '.join(unknown)}; `lm-eval ls tasks` lists those it has, and "
            "tasks_folder names a folder with task files of your own. Nothing was written."
        )
    return manager


def run(
    learner: Learner, tokenizer: Path, wanted: BenchmarksConfig, manager: Any
) -> dict[str, Benchmark]:
    """Results of every task that is wanted, and of the parts of those that are groups, by the files of `manager`."""
    from lm_eval.evaluator import simple_evaluate

    learner.model.eval()
    harness = harness_model(learner, tokenizer)
    found: Any = simple_evaluate(
        harness,
        tasks=list(wanted.tasks),
        limit=wanted.limit,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {
        task: Benchmark(
            numbers := {name: value for name, value in values.items() if isinstance(value, float)},
            dict(_scores(numbers, found["samples"].get(task, ()))),
        )
        for task, values in found["results"].items()
    }


def _scores(
    values: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, dict[int, float]]]:
    """The scores of rows, by metric, of those metrics that are their mean."""
    for name, value in values.items():
        metric, _, kind = name.partition(",")
        of_rows = [line for line in samples if line.get("filter") == kind and metric in line]
        scores = {line["doc_id"]: line[metric] for line in of_rows}
        if scores and all(isinstance(score, (int, float, np.number)) for score in scores.values()):
            numbers = {row: float(score) for row, score in scores.items()}
            if math.isclose(
                math.fsum(numbers.values()) / len(numbers), value, rel_tol=1e-9, abs_tol=1e-12
            ):
                yield name, numbers


def compared(
    base: Mapping[str, Benchmark], tuned: Mapping[str, Benchmark], tasks: Sequence[str]
) -> list[dict[str, Any]]:
    """A line for each metric of the tasks, or of their parts where they have no results of their own.

    As the verdict has those of answers, but without intervals and test where the metric is no mean of rows.
    """
    lines = []
    for task in [task for task in tuned if task in tasks] or list(tuned):
        first, second = base[task], tuned[task]
        for name, after in second.values.items():
            label, before = f"{task}/{name.removesuffix(',none')}", first.values[name]
            line: dict[str, Any] = {"metric": label, "before": before, "after": after}
            if name in first.scores and name in second.scores:
                rows = sorted(first.scores[name].keys() & second.scores[name].keys())
                ours, theirs = (
                    [side.scores[name][row] for row in rows] for side in (second, first)
                )
                test = compare(theirs, ours)
                line = Measured(
                    label, len(rows), before, after, interval(theirs), interval(ours), test
                ).facts()
            lines.append(line)
    return lines


def harness_model(learner: Learner, tokenizer: Path) -> Any:
    """The harness's Hugging Face model around a learner, of which log-likelihoods are computed in packed batches."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    class Packed(HFLM):  # type: ignore[misc]
        def _loglikelihood_tokens(
            self, requests: list[Request], **settings: Any
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
    learner: Learner, pairs: Sequence[tuple[list[int], list[int]]], max_length: int
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation after its context, and whether greedy decoding would have said it.

    `pairs`: ids of both. What exceeds `max_length` is cut off on the left, as the harness does. Contexts that several
    have, such as the question of a choice or the examples before it, are computed once for a packed batch.
    """
    laid = collate if prefix_sharing.why_not(learner) else collate_shared
    cut = [np.array((context + said)[-(max_length + 1) :], np.uint32) for context, said in pairs]
    rows = [
        (ids, np.arange(len(ids)) >= len(ids) - len(said))
        for ids, (_, said) in zip(cut, pairs, strict=True)
    ]
    fitting = [i for i, ids in enumerate(cut) if len(ids) <= max_length]
    batches = [(taken, laid([rows[i] for i in taken])) for taken in _batches(cut, fitting)]
    batches += [([i], _longest(*rows[i])) for i, ids in enumerate(cut) if len(ids) > max_length]
    device, found = next(learner.model.parameters()).device, dict[int, tuple[float, bool]]()
    for taken, laid_out in batches:
        batch = laid_out.to(device)
        with packed(batch.cu_seqlens, parents=batch.parents):
            _, right, each = fsdp.inside(learner.lm, score_labels, learner, batch)
        sizes = [int(rows[i][1].sum()) for i in taken]
        for i, losses, hits in zip(
            taken, each.double().split(sizes), right.split(sizes), strict=True
        ):
            found[i] = (-float(losses.sum()), bool(hits.all()))
    return [found[i] for i in range(len(pairs))]


def _longest(ids: NDArray[np.uint32], is_asked: NDArray[np.bool_]) -> Batch:
    """A batch of one sequence without its last token, which predicts nothing and for which the model has no place."""
    where = np.flatnonzero(is_asked) - 1
    batch = collate([(ids[:-1], is_asked[:-1] & False)])
    return replace(
        batch,
        rows=torch.from_numpy(where),
        labels=torch.from_numpy(ids[where + 1].astype(np.int64)),
    )


def _batches(sequences: Sequence[NDArray[np.uint32]], wanted: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of sequences that go together: like beginnings, up to BATCH_TOKENS of what is not shared."""
    order, shared = sort_by_prefix([sequences[i] for i in wanted])
    taken, tokens = list[int](), 0
    for place, common in zip(order.tolist(), shared.tolist(), strict=True):
        length = len(sequences[wanted[place]])
        if taken and tokens + length - common > BATCH_TOKENS:
            yield taken
            taken, tokens = [], common
        taken.append(wanted[place])
        tokens += length - common
    if taken:
        yield taken
