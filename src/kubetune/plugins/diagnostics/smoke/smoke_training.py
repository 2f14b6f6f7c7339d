"""The small training run of the smoke test: a network of two layers on linearly separable data.

It goes the way of every run: a flat gradient, and one all-reduce of it a step. Only data and model are synthetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kubetune.base import logs
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.training import step_digest
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW

_HIDDEN = 64


def train(settings: Settings, world: World, problems: list[str]) -> dict[str, Any]:
    """Train a few epochs, each step with one all-reduce of the flat gradient. Add what is wrong to `problems`."""
    # Each rank draws all samples and the same weights, from the same seed.
    torch.manual_seed(settings.seed)
    features = torch.randn(settings.samples, settings.features)
    # Random planes decide the class of each sample.
    planes = torch.randn(settings.features, settings.classes)
    labels = (features @ planes).argmax(dim=1)
    model = nn.Sequential(
        nn.Linear(settings.features, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, settings.classes),
    ).to(world.device)
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())

    losses = []  # of each step, before its update
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(settings.samples)
        for ids in order.split(settings.batch * world.size):
            # Ranks take the samples of a batch in turns: rank 1 of 2 has those at 1, 3, 5 …
            mine = ids[world.rank :: world.size]
            scores = model(features[mine].to(world.device))
            targets = labels[mine].to(world.device)
            # The sum over this rank's samples, divided by those of all ranks:
            # so the gradients of all ranks add up to that of the mean.
            total = nn.functional.cross_entropy(scores, targets, reduction="sum")
            loss = total / len(ids)
            loss.backward()
            process_group.sum_(optimizer.gradient, world)
            optimizer.update(settings.lr)
            losses += process_group.sum_numbers([loss.item()], world)
        logs.TRAIN.info("epoch %d/%d loss %.4f", epoch, settings.epochs, losses[-1])

    # Any machine that works learns this. Not ">": a loss that is not a number is no improvement either.
    if not losses[-1] < losses[0]:
        problems.append(
            f"training did not improve: loss {losses[0]:.4g} at the first step, "
            f"{losses[-1]:.4g} at the last, with --lr {settings.lr:g}"
        )
    # All ranks took the same steps from the same weights, so their weights are equal to the last bit.
    digest = step_digest.digest(optimizer.master)
    digests = process_group.gather(digest, world)
    if len(set(digests)) > 1:
        problems.append("the ranks ended with different weights")
    return {"losses": losses}
