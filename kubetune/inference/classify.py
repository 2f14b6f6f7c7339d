"""Verdicts of a trained classifier on texts: what `kubetune generate` does for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kubetune.batching.batch import Batch, collate_labelled
from kubetune.data.prepared.order import pack
from kubetune.data.text.encode_labelled import frame, within_positions
from kubetune.inference.result import default_device, open_result
from kubetune.tasks import sequence_classification as task

TOKENS_AT_ONCE = 8192


def classify_texts(
    run_dir: Path, which: str, texts: Sequence[tuple[str, str | None]], model: str | None = None
) -> list[dict[str, Any]]:
    """Verdict of a run's classifier on each text, or pair of texts; overlong ones are cut as in training.

    `model`: its base, where that lies elsewhere here.
    """
    result = open_result(run_dir, which, model)
    device = default_device()
    with result.checked():
        learner = task.load(result.config, result.checkpoint, device)
        tokenizer = result.tokenizer
    limit = within_positions(result.config, tokenizer).data.max_length
    framed = [frame(tokenizer, text, second, limit) for text, second in texts]
    if not framed:
        return []
    lengths = np.array([len(ids) for ids, _ in framed])
    budget = TOKENS_AT_ONCE if learner.route.padding_free else 1
    groups = pack(np.arange(len(framed)), lengths, budget)
    return task.classify(learner, [_batch(framed, group.tolist()).to(device) for group in groups])


def _batch(framed: Sequence[tuple[list[int], list[int]]], chosen: Sequence[int]) -> Batch:
    ids = [np.array(framed[i][0], np.uint32) for i in chosen]
    segments = [np.array(framed[i][1], np.uint8) for i in chosen]
    return collate_labelled(ids, segments, np.zeros((len(chosen), 1), np.float32), chosen)
