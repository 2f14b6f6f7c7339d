"""Pairs of answers and judged ones for tests, and the losses on them as the papers have them, in the plainest code."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """A question with two answers."""

    prompt: Ids
    answers: tuple[Ids, Ids]  # the chosen one, the rejected one
    reference: tuple[float, float]  # log-probability of each by the reference
    good: bool  # is the first answer good, where answers are judged one by one?


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

    rows = []
    for _ in range(number):
        prompt = ids(9)
        chosen = ids(12)
        rejected = ids(12)
        # About what a model says that knows nothing: log(1/300) is -5.7 a token.
        reference = (-5.8 * len(chosen) - some.random(), -5.8 * len(rejected))
        rows.append(Row(prompt, (chosen, rejected), reference, good=bool(some.getrandbits(1))))
    return rows


def batch_of(rows: Sequence[Row], first: int = 0, lay: Callable[..., Batch] = collate) -> Batch:
    """Return the micro-batch of some rows, whose ids count from `first`; `lay` may share their beginnings."""
    sequences = []
    for row in rows:
        for answer in row.answers:
            ids = np.array(row.prompt + answer, np.uint32)
            trained = np.arange(len(ids)) >= len(row.prompt)
            sequences.append((ids, trained))
    return replace(
        lay(sequences, range(first, first + len(rows))),
        reference=torch.tensor([row.reference for row in rows], dtype=torch.float64),
        targets=torch.tensor([[float(row.good)] for row in rows]),
    )


def work_of(rows: Sequence[Row], size: int, settings: PreferenceConfig) -> Work:
    """Return the rows as a step in micro-batches of `size`."""
    batches = []
    for start in range(0, len(rows), size):
        batch = batch_of(rows[start : start + size], start)
        if settings.loss != "kto":
            batch = replace(batch, targets=None)
        if settings.reference_free:
            batch = replace(batch, reference=None)
        batches.append(batch)
    return Work(batches, 0, sum(batch.num_labels for batch in batches), 0, len(rows))


def logp(model: Any, prompt: Ids, answer: Ids) -> Tensor:
    """Return the summed log-probability of an answer, one sequence at a time, by the model's own code."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return F.log_softmax(logits.double(), -1)[torch.arange(len(answer)), torch.tensor(answer)].sum()


@dataclass(frozen=True)
class Scored:
    """What a model says of the two answers of a row. All but the counts are tensors of one number, fp64."""

    chosen: Tensor  # log-probability of the chosen answer
    rejected: Tensor
    chosen_gain: Tensor  # by how much that is above the reference's
    rejected_gain: Tensor
    chosen_tokens: int
    rejected_tokens: int
    good: bool  # is the first answer good, where answers are judged one by one?

    @classmethod
    def of(cls, model: nn.Module, row: Row) -> Scored:
        chosen, rejected = (logp(model, row.prompt, answer) for answer in row.answers)
        return cls(
            chosen,
            rejected,
            chosen - row.reference[0],
            rejected - row.reference[1],
            len(row.answers[0]),
            len(row.answers[1]),
            row.good,
        )

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def margin_of_gains(self) -> Tensor:
        return self.chosen_gain - self.rejected_gain

    @property
    def margin_of_means(self) -> Tensor:
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


def plain_loss(model: nn.Module, rows: Sequence[Row], settings: PreferenceConfig) -> Tensor:
    """Return the loss of a global batch in fp64, as the papers write it."""
    scored = [Scored.of(model, row) for row in rows]
    if settings.loss == "kto":
        losses = kto_losses(scored, settings)
    else:
        losses = [LOSS_OF[settings.loss](row, settings) for row in scored]
    nll = -sum(row.chosen for row in scored) / sum(row.chosen_tokens for row in scored)
    # ORPO is the loss of fine-tuning on the chosen answers, and a term of its own.
    weight = 1.0 if settings.loss == "orpo" else settings.sft_weight
    return torch.stack(losses).mean() + weight * nll


def dpo_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    epsilon = settings.label_smoothing
    p = probability_of(row, settings)
    return -(1 - epsilon) * torch.log(p) - epsilon * torch.log(1 - p)


def robust_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    epsilon = settings.label_smoothing
    p = probability_of(row, settings)
    return (-(1 - epsilon) * torch.log(p) + epsilon * torch.log(1 - p)) / (1 - 2 * epsilon)


def probability_of(row: Scored, settings: PreferenceConfig) -> Tensor:
    """Return the probability that the chosen answer is the better one, by Bradley and Terry."""
    margin = row.margin if settings.reference_free else row.margin_of_gains
    return torch.sigmoid(settings.beta * margin)


def hinge_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    return torch.clamp(1 - settings.beta * row.margin_of_gains, min=0)


def ipo_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    chosen = row.chosen_gain / row.chosen_tokens
    rejected = row.rejected_gain / row.rejected_tokens
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


def orpo_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    chosen = torch.exp(row.chosen / row.chosen_tokens)
    rejected = torch.exp(row.rejected / row.rejected_tokens)
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -settings.beta * torch.log(torch.sigmoid(torch.log(ratio)))


def simpo_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    assert settings.gamma is not None
    return -torch.log(torch.sigmoid(settings.beta * row.margin_of_means - settings.gamma))


def cpo_loss(row: Scored, settings: PreferenceConfig) -> Tensor:
    return -torch.log(torch.sigmoid(settings.beta * row.margin))


LOSS_OF: dict[str, Callable[[Scored, PreferenceConfig], Tensor]] = {
    "dpo": dpo_loss,
    "robust": robust_loss,
    "hinge": hinge_loss,
    "ipo": ipo_loss,
    "orpo": orpo_loss,
    "simpo": simpo_loss,
    "cpo": cpo_loss,
}


def kto_losses(scored: Sequence[Scored], settings: PreferenceConfig) -> list[Tensor]:
    """Return the losses of first answers, each judged by itself; the second ones estimate the divergence `z`."""
    z = max(0.0, sum(row.rejected_gain.item() for row in scored) / len(scored))
    losses = []
    for row in scored:
        if row.good:
            value = torch.sigmoid(settings.beta * (row.chosen_gain - z))
            losses.append(settings.desirable_weight * (1 - value))
        else:
            value = torch.sigmoid(settings.beta * (z - row.chosen_gain))
            losses.append(settings.undesirable_weight * (1 - value))
    return losses


def write_pairs(folder: Path) -> dict[str, str]:
    """Write 50 pairs, and 13 to hold out, and return `data` of a run on them; the chosen answer says yes."""
    some = random.Random(0)
    for name, rows in (("pairs", 50), ("held-out", 13)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(rows):
                prompt, good, bad = (
                    " ".join(some.choices(WORDS, k=some.randint(1, 12))) for _ in range(3)
                )
                row = {
                    "prompt": f"{number} {prompt}",
                    "chosen": f" {good} yes",
                    "rejected": f" {bad} no",
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
