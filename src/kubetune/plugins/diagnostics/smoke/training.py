"""The small training run of the smoke test: a network of two layers on linearly separable data.

It goes the way of every run: a flat gradient, and one all-reduce of it a step. Only data and model are synthetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.data.prepared.order import mixed_seed
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.training import step_digest
from kubetune.training.optimizer.adamw import AdamSettings, FlatAdamW

_HIDDEN = 64


def separable(settings: Settings) -> tuple[Tensor, Tensor]:
    """Return samples, fp32 [samples, features], and the class of each, which random planes decide."""
    draw = torch.Generator().manual_seed(settings.seed)
    features = torch.randn(settings.samples, settings.features, generator=draw)
    planes = torch.randn(settings.features, settings.classes, generator=draw)
    return features, (features @ planes).argmax(dim=1)


def train(settings: Settings, world: World, problems: list[str]) -> dict[str, Any]:
    """Train a few epochs, each step with one all-reduce of the flat gradient. Add what is wrong to `problems`."""
    # Each rank draws all samples, from the same seed, and trains on its part of them.
    features, labels = separable(settings)
    # The same weights on each rank, without sending them.
    torch.manual_seed(settings.seed)
    model = nn.Sequential(
        nn.Linear(settings.features, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, settings.classes),
    ).to(world.device)
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())

    losses = []  # of each step, before its update
    for epoch in range(settings.epochs):
        draw = torch.Generator().manual_seed(mixed_seed(settings.seed, epoch))
        order = torch.randperm(settings.samples, generator=draw)
        for ids in order.split(settings.batch * world.size):
            # Ranks take the samples of a batch in turns: rank 1 of 2 has those at 1, 3, 5 …
            mine = ids[world.rank :: world.size]
            scores = model(features[mine].to(world.device))
            targets = labels[mine].to(world.device)
            # A sum over this rank's samples, divided by those of all ranks: all ranks' gradients add up to the mean's.
            loss = nn.functional.cross_entropy(scores, targets, reduction="sum") / len(ids)
            loss.backward()
            process_group.sum_(optimizer.gradient, world)
            optimizer.update(settings.lr)
            losses += process_group.sum_numbers([float(loss.detach())], world)
        logs.TRAIN.info("epoch %d/%d loss %.4f", epoch + 1, settings.epochs, losses[-1])

    # Any machine that works learns this. Not ">": a loss that is not a number is no improvement either.
    if not losses[-1] < losses[0]:
        epochs = counted(settings.epochs, "epoch")
        problems.append(
            f"training did not improve: loss {losses[0]:.4g} before, {losses[-1]:.4g} after {epochs} "
            f"at --lr {settings.lr:g}"
        )
    # All ranks took the same steps from the same weights, so their weights are equal to the last bit.
    digests = process_group.gather(step_digest.digest(optimizer.master), world)
    ranks_agree = len(set(digests)) == 1
    if not ranks_agree:
        problems.append("the ranks ended with different weights")
    return {"losses": losses, "ranks_agree": ranks_agree}
