"""Pairs of answers and judged ones for tests, and the losses on them as the papers have them, in the plainest code."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kubetune.batching.batch import Batch, collate
from kubetune.batching.feed import Work
from kubetune.config.schema import PreferenceConfig
from tests.toy import WORDS

Ids = list[int]


class Row(NamedTuple):
    """A question, its two answers, what the reference says of them, and whether the first is good (of judged ones)."""

    prompt: Ids
    answers: tuple[Ids, Ids]
    reference: tuple[float, float]
    good: bool


LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "cdpo": {"loss": "dpo", "label_smoothing": 0.1},
    "free": {"loss": "dpo", "reference_free": True},
    "dpo+sft": {"loss": "dpo", "beta": 0.3, "sft_weight": 0.7},
    "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "robust": {"loss": "robust", "label_smoothing": 0.2},
    "orpo": {"loss": "orpo", "beta": 0.4},
    "simpo": {"loss": "simpo", "gamma": 0.5},
    "cpo": {"loss": "cpo"},
    "kto": {"loss": "kto", "beta": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.7},
}


def draw(number: int, seed: int = 0, vocabulary: int = 300) -> list[Row]:
    """Return rows of random ids, of all lengths."""
    some = random.Random(seed)

    def ids(most: int) -> Ids:
        return [some.randrange(3, vocabulary) for _ in range(some.randint(1, most))]

    return [
        Row(
            ids(9),
            (a := ids(12), b := ids(12)),
            (-5.8 * len(a) - some.random(), -5.8 * len(b)),
            bool(some.getrandbits(1)),
        )
        for _ in range(number)
    ]


def batch_of(rows: Sequence[Row], first: int = 0, lay: Callable[..., Batch] = collate) -> Batch:
    """Return the micro-batch of some rows, whose ids count from `first`; `lay` may share their beginnings."""
    laid = [
        (
            np.array(row.prompt + answer, np.uint32),
            np.arange(len(row.prompt) + len(answer)) >= len(row.prompt),
        )
        for row in rows
        for answer in row.answers
    ]
    batch = lay(laid, range(first, first + len(rows)))
    reference = torch.tensor([row.reference for row in rows], dtype=torch.float64)
    return replace(
        batch, reference=reference, targets=torch.tensor([[float(row.good)] for row in rows])
    )


def work_of(rows: Sequence[Row], size: int, settings: PreferenceConfig) -> Work:
    """Return the rows as a step in micro-batches of `size`."""
    batches = [batch_of(rows[start : start + size], start) for start in range(0, len(rows), size)]
    if settings.loss != "kto":
        batches = [replace(batch, targets=None) for batch in batches]
    if settings.reference_free:
        batches = [replace(batch, reference=None) for batch in batches]
    return Work(batches, 0, sum(batch.num_labels for batch in batches), 0, len(rows))


def logp(model: Any, prompt: Ids, answer: Ids) -> Tensor:
    """Return the summed log-probability of an answer, one sequence at a time, by the model's own code."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return F.log_softmax(logits.double(), -1)[torch.arange(len(answer)), torch.tensor(answer)].sum()


def plain_loss(model: nn.Module, rows: Sequence[Row], s: PreferenceConfig) -> Tensor:
    """Return the loss of a global batch in fp64, as the papers write it."""
    both = [tuple(logp(model, row.prompt, answer) for answer in row.answers) for row in rows]
    gained = [
        (w - row.reference[0], lost - row.reference[1])
        for (w, lost), row in zip(both, rows, strict=True)
    ]
    sizes = [tuple(map(len, row.answers)) for row in rows]
    means = [(w / n, lost / m) for (w, lost), (n, m) in zip(both, sizes, strict=True)]
    nll = -sum(w for w, _ in both) / sum(n for n, _ in sizes)
    sigmoid = torch.sigmoid
    eps = s.label_smoothing
    losses: list[Tensor]
    if s.loss in ("dpo", "robust"):
        pairs = both if s.reference_free else gained
        p = [sigmoid(s.beta * (w - lost)) for w, lost in pairs]
        if s.loss == "dpo":
            losses = [-(1 - eps) * torch.log(x) - eps * torch.log(1 - x) for x in p]
        else:
            losses = [
                (-(1 - eps) * torch.log(x) + eps * torch.log(1 - x)) / (1 - 2 * eps) for x in p
            ]
    elif s.loss == "hinge":
        losses = [torch.clamp(1 - s.beta * (w - lost), min=0) for w, lost in gained]
    elif s.loss == "ipo":
        per_token = [(w / n, lost / m) for (w, lost), (n, m) in zip(gained, sizes, strict=True)]
        losses = [(w - lost - 1 / (2 * s.beta)) ** 2 for w, lost in per_token]
    elif s.loss == "orpo":
        odds = [[torch.exp(x) / (1 - torch.exp(x)) for x in pair] for pair in means]
        losses = [-s.beta * torch.log(sigmoid(torch.log(w / lost))) for w, lost in odds]
        return torch.stack(losses).mean() + nll
    elif s.loss == "simpo":
        assert s.gamma is not None
        losses = [-torch.log(sigmoid(s.beta * (w - lost) - s.gamma)) for w, lost in means]
    elif s.loss == "cpo":
        losses = [-torch.log(sigmoid(s.beta * (w - lost))) for w, lost in both]
    else:
        z = max(0.0, sum(lost.item() for _, lost in gained) / len(rows))
        losses = [
            s.desirable_weight * (1 - sigmoid(s.beta * (w - z)))
            if row.good
            else s.undesirable_weight * (1 - sigmoid(s.beta * (z - w)))
            for (w, _), row in zip(gained, rows, strict=True)
        ]
    return torch.stack(losses).mean() + s.sft_weight * nll


def write_pairs(folder: Path) -> dict[str, str]:
    """Return `data` of a run on 50 pairs, whose chosen answer says yes, with 13 held out."""
    some = random.Random(0)
    for name, rows in (("pairs", 50), ("held-out", 13)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(rows):
                prompt, a, b = (
                    " ".join(some.choices(WORDS, k=some.randint(1, 12))) for _ in range(3)
                )
                row = {
                    "prompt": f"{number} {prompt}",
                    "chosen": f" {a} yes",
                    "rejected": f" {b} no",
                }
                file.write(json.dumps(row) + "\n")
    return {"train": str(folder / "pairs.jsonl"), "eval": str(folder / "held-out.jsonl")}


def write_judged(folder: Path) -> dict[str, str]:
    """Return `data` of a run on the same answers, each judged by itself."""
    paths = {}
    for split, file in write_pairs(folder).items():
        path = folder / f"judged-{split}.jsonl"
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        lines = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows
            for side in ("chosen", "rejected")
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths[split] = str(path)
    return paths
