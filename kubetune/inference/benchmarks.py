"""Benchmarks by EleutherAI's lm-evaluation-harness: its tasks, prompts and metrics, with our forward.

Everything but the log-likelihoods is the harness's own Hugging Face model; those come from padding-free packed batches.
Task files of one's own, or copies of the harness's where there is no network, are found in a folder that is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kubetune import errors
from kubetune.base.files import write_atomic
from kubetune.batching.batch import Batch, collate
from kubetune.inference.result import default_device, open_result
from kubetune.models import fsdp
from kubetune.models.attention_hooks import packed
from kubetune.models.learner import Learner
from kubetune.models.padding_free import own_attention
from kubetune.rundir.metrics import now
from kubetune.tasks.causal_lm import ready, scored

BENCHMARKS = "benchmarks.json"
BATCH_TOKENS = 4096
"""Of a packed batch; requests are of some hundred tokens."""

Request = tuple[tuple[str, str], list[int], list[int]]


def evaluate_benchmarks(
    run_dir: Path,
    tasks: Sequence[str],
    which: str = "best",
    *,
    with_base: bool = False,
    limit: int | None = None,
    tasks_folder: Path | None = None,
    model: str | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """`{"tuned": {task: {metric: value}}}` of a run's checkpoint, with `base` beside it where that is wanted.

    Written to benchmarks.json of the run. Raises ConfigError for tasks that are unknown, another task than
    causal_lm, and where the harness is not installed.
    """
    if not find_spec("lm_eval"):
        raise errors.ConfigError("benchmarks need lm_eval, which is not installed: pip install 'kubetune[benchmarks]'")
    result = open_result(run_dir, which, model)
    if result.config.task != "causal_lm":
        raise errors.ConfigError(f"benchmarks are for causal_lm; {run_dir} is a run of task {result.config.task}")
    with result.checked():
        learner = result.task.load(result.config, result.checkpoint, default_device())
    found = {"tuned": _run(learner, result.checkpoint, tasks, limit, tasks_folder)}
    if with_base:
        with result.as_base(learner.model) as base:
            asked = learner if base is learner.model else ready(base, result.config)
            found["base"] = _run(asked, result.checkpoint, tasks, limit, tasks_folder)
    facts = {"checkpoint": which, "limit": limit, "time": now(), **found}
    write_atomic(run_dir / BENCHMARKS, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    return found


def _run(
    learner: Learner, tokenizer: Path, tasks: Sequence[str], limit: int | None, folder: Path | None
) -> dict[str, dict[str, float]]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder) if folder else None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise errors.ConfigError(
            f"benchmarks: the harness knows no {', '.join(unknown)}; `lm-eval ls tasks` lists those it has, and "
            "--tasks-folder names a folder with task files of your own"
        )
    learner.model.eval()
    harness = harness_model(learner, tokenizer)
    found = simple_evaluate(harness, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0)
    results: dict[str, dict[str, Any]] = (found or {})["results"]
    return {task: {k: v for k, v in values.items() if isinstance(v, float)} for task, values in results.items()}


def harness_model(learner: Learner, tokenizer: Path) -> Any:
    """The harness's Hugging Face model around a learner, of which log-likelihoods are computed in packed batches."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    class Packed(HFLM):  # type: ignore[misc]
        def _loglikelihood_tokens(self, requests: list[Request], **settings: Any) -> list[tuple[float, bool]]:
            if not learner.route.padding_free:
                return super()._loglikelihood_tokens(requests, **settings)  # type: ignore[no-any-return]
            return log_likelihoods(learner, [request[1:] for request in requests], self.max_length)

        def _model_generate(self, *arguments: Any, **settings: Any) -> Tensor:
            with own_attention(learner.lm):
                return super()._model_generate(*arguments, **settings)  # type: ignore[no-any-return]

        def _model_call(self, *arguments: Any, **settings: Any) -> Tensor:
            with own_attention(learner.lm):
                return super()._model_call(*arguments, **settings)  # type: ignore[no-any-return]

    return Packed(learner.lm, tokenizer=AutoTokenizer.from_pretrained(tokenizer), batch_size=16)


@torch.no_grad()
def log_likelihoods(
    learner: Learner, pairs: Sequence[tuple[list[int], list[int]]], max_length: int
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation after its context, and whether greedy decoding would have said it.

    `pairs`: ids of both. What exceeds `max_length` is cut off on the left, as the harness does.
    """
    # The last token predicts nothing that is asked, and so is no input.
    inputs = [(context + continuation)[-(max_length + 1) :][:-1] for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -len(inputs[i]))
    found: dict[int, tuple[float, bool]] = {}
    while order:
        taken, tokens = [order.pop(0)], 0
        tokens = len(inputs[taken[0]])
        while order and tokens + len(inputs[order[0]]) <= BATCH_TOKENS:
            tokens += len(inputs[order[0]])
            taken.append(order.pop(0))
        batch = _batch([(inputs[i], pairs[i][1]) for i in taken]).to(default_device())
        with packed(batch.cu_seqlens):
            _, right, each = fsdp.inside(learner.lm, scored, learner, batch)
        sizes = [len(pairs[i][1]) for i in taken]
        for i, losses, hits in zip(taken, each.double().split(sizes), right.split(sizes), strict=True):
            found[i] = (-float(losses.sum()), bool(hits.all()))
    return [found[i] for i in range(len(pairs))]


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """A packed batch of (input, continuation): the last positions of each sequence predict its continuation."""
    laid = collate([(np.array(ids, np.uint32), np.zeros(len(ids), bool)) for ids, _ in rows])
    ends = laid.cu_seqlens[1:]
    where = [np.arange(end - len(said), end) for end, (_, said) in zip(ends, rows, strict=True)]
    labels = np.concatenate([np.array(said, np.int64) for _, said in rows])
    return replace(laid, rows=torch.from_numpy(np.concatenate(where)), labels=torch.from_numpy(labels))
