"""Asking a trained classifier about texts: what `kubetune generate` does for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kubetune.batching.batch import Batch, collate_labelled
from kubetune.data.prepared.order import pack
from kubetune.data.text.encode_labelled import frame, within_positions
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.inference.result import open_result
from kubetune.tasks import sequence_classification as task

TOKENS_AT_ONCE = 8192


def classify_texts(
    run_dir: Path, which: str, texts: Sequence[tuple[str, str | None]], model: str | None = None
) -> list[dict[str, Any]]:
    """What the classifier of a run takes each text, or pair of texts, for; overlong ones are cut as in training.

    `model`: its base, where that lies elsewhere here.
    """
    result = open_result(run_dir, which, model)
    config = result.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with result.checked():
        learner = task.load(config, result.checkpoint, device)
        tokenizer = load_tokenizer(config.model)
    limit = within_positions(config, tokenizer).data.max_length
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
