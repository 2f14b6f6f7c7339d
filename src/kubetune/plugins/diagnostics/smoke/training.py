"""The small training run of the smoke test: a network of two layers on linearly separable data.

It goes the way of every run: a flat gradient, and one all-reduce of it a step. Only data and model are synthetic.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kubetune.base import logs
from kubetune.data.prepared.order import mixed_seed
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.plugins.diagnostics.smoke.report import Training
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.training import step_digest
from kubetune.training.optimizer.adamw import AdamSettings, FlatAdamW

_HIDDEN = 64


@dataclass(frozen=True)
class Samples:
    """Linearly separable data."""

    features: Tensor  # fp32 [samples, features]
    labels: Tensor  # int64 [samples] class of each sample


def separable(settings: Settings) -> Samples:
    """Draw samples, and let random planes through the origin decide their classes."""
    draw = torch.Generator().manual_seed(settings.seed)
    features = torch.randn(settings.samples, settings.features, generator=draw)
    planes = torch.randn(settings.features, settings.classes, generator=draw)
    return Samples(features, (features @ planes).argmax(dim=1))


def train(settings: Settings, world: World) -> Training:
    """Train a few epochs, each step with one all-reduce of the flat gradient."""
    logs.STEP.info(
        "seed %d, %d samples, batch %d × %d",
        settings.seed,
        settings.samples,
        settings.batch,
        world.size,
    )

    # Each rank draws all samples, from the same seed, and trains on its part of them.
    on_cpu = separable(settings)
    samples = Samples(on_cpu.features.to(world.device), on_cpu.labels.to(world.device))

    # The same weights on each rank, without sending them.
    torch.manual_seed(settings.seed)
    model = nn.Sequential(
        nn.Linear(settings.features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, settings.classes)
    ).to(world.device)
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    logs.STEP.info("model: %d parameters on %s", optimizer.master.numel(), world.device)

    # Any machine that works learns this: a loss that does not fall means broken sums or numbers.
    loss_before, _ = _evaluate(model, samples, world)
    began = time.perf_counter()
    losses = []
    for epoch in range(settings.epochs):
        loss = _train_epoch(settings, epoch, model, optimizer, samples, world)
        logs.TRAIN.info("epoch %d/%d loss %.4f", epoch + 1, settings.epochs, loss)
        losses.append(loss)
    seconds = time.perf_counter() - began

    loss_after, accuracy = _evaluate(model, samples, world)
    samples_per_second = settings.epochs * settings.samples / seconds
    logs.RESULT.info(
        "loss %.4f -> %.4f, accuracy %.1f %%, %.2f s, %.0f samples/s",
        loss_before,
        loss_after,
        100 * accuracy,
        seconds,
        samples_per_second,
    )

    # All ranks took the same steps from the same weights, so their weights are equal to the last bit.
    digests = process_group.gather(step_digest.digest(optimizer.master), world)
    return Training(
        loss_before=loss_before,
        epoch_losses=tuple(losses),
        loss_after=loss_after,
        accuracy=accuracy,
        seconds=seconds,
        samples_per_second=samples_per_second,
        ranks_agree=len(set(digests)) == 1,
    )


def _train_epoch(
    settings: Settings,
    epoch: int,
    model: nn.Module,
    optimizer: FlatAdamW,
    samples: Samples,
    world: World,
) -> float:
    """Train one epoch, and return the mean loss."""
    draw = torch.Generator().manual_seed(mixed_seed(settings.seed, epoch))
    order = torch.randperm(settings.samples, generator=draw)

    total = 0.0
    for ids in order.split(settings.batch * world.size):
        # Ranks take the samples of a batch in turns: rank 1 of 2 has those at 1, 3, 5 …
        mine = ids[world.rank :: world.size].to(world.device)
        scores = model(samples.features[mine])
        # A sum over this rank's samples, divided by those of all ranks: the gradients of all ranks add up to the mean's.
        loss = nn.functional.cross_entropy(scores, samples.labels[mine], reduction="sum")
        (loss / len(ids)).backward()
        total += float(loss.detach())
        process_group.sum_(optimizer.gradient, world)
        optimizer.update(settings.lr)
    (total_of_all,) = process_group.sum_numbers([total], world)
    return total_of_all / settings.samples


@torch.no_grad()
def _evaluate(model: nn.Module, samples: Samples, world: World) -> tuple[float, float]:
    """Return the mean loss and the share of right answers on all samples, of which each rank scores its part."""
    mine = slice(world.rank, None, world.size)
    labels = samples.labels[mine]
    scores = model(samples.features[mine])
    loss = float(nn.functional.cross_entropy(scores, labels, reduction="sum"))
    right = float((scores.argmax(dim=1) == labels).sum())
    loss, right = process_group.sum_numbers([loss, right], world)
    count = len(samples.labels)
    return loss / count, right / count
