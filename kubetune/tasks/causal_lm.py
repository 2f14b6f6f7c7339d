"""Causal language modelling: build the model, loss of a micro-batch, sums of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kubetune.batching.batch import Batch
from kubetune.distributed.process_group import World, sum_numbers
from kubetune.kernels.cross_entropy import Head, linear_cross_entropy, score
from kubetune.models import fsdp, loading, quantization
from kubetune.models.acceleration import Workload, tune
from kubetune.models.adapters import lora
from kubetune.models.attention_hooks import packed
from kubetune.models.learner import Learner
from kubetune.models.padding_free import choose_attention, logit_rule, require_head
from kubetune.models.padding_free import plain_logits as plain_logits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.feed import Work
    from kubetune.config.schema import Config
    from kubetune.data.prepared.rows import Rows


AUTO_CLASS = "AutoModelForCausalLM"
STEP_METRICS: tuple[str, ...] = ()


def build(config: Config, world: World, workload: Workload) -> Learner:
    """Load the model, add adapters, choose the attention, and tune it for the work planned."""
    from transformers import AutoModelForCausalLM

    config = quantization.decide(config, world)
    model = fsdp.load(AutoModelForCausalLM, config, world)
    if config.lora is not None:
        model = lora.add_lora(model, config.lora, task_type="CAUSAL_LM", seed=config.training.seed)
    return tune(ready(model.train(), config), config, workload, world.device)


def load(config: Config, folder: Path, device: torch.device) -> Learner:
    """The trained model of a checkpoint folder, to be evaluated."""
    from transformers import AutoModelForCausalLM

    config = quantization.decide(config, World(device=device))
    return ready(loading.load_trained(AutoModelForCausalLM, config, folder, device), config)


def ready(model: nn.Module, config: Config) -> Learner:
    """Choose how sequences go through a loaded model."""
    learner = Learner(model, choose_attention(model, config.model.attention))
    if not learner.route.padding_free:  # else its check has looked at the head too
        require_head(model)
    return learner


def load_settings(config: Config, folder: Path) -> dict[str, Any]:
    """Settings that `from_pretrained` needs besides, to load the model of a checkpoint folder."""
    return {}


def head_of(learner: Learner) -> Head:
    """The output head, and where the optimizer adds up its gradient."""
    layer, sums = learner.lm.get_output_embeddings(), learner.gradient_sums
    bias = getattr(layer, "bias", None)
    rule, bias_sum = logit_rule(learner.lm), None if bias is None else sums.get(bias)
    return Head(layer.weight, bias, rule, learner.kernels, sums.get(layer.weight), bias_sum)


def loss(learner: Learner, batch: Batch, scale: float) -> Tensor:
    """`scale × Σ cross-entropy` over the labels of one micro-batch. Call it, and `.backward()`, inside `packed`."""
    hidden, head = learner.hidden(learner, batch)[batch.rows], head_of(learner)
    if batch.tree is None:
        return linear_cross_entropy(hidden, batch.labels, head, scale)
    counts = [length for length, _ in batch.tree.counts]
    runs = zip(
        hidden[batch.tree.places].split(counts),
        batch.labels.split(counts),
        batch.tree.counts,
        strict=True,
    )
    return torch.stack(
        [linear_cross_entropy(x, y, head, scale * rows) for x, y, (_, rows) in runs]
    ).sum()


def completed(_: Learner, work: Work, __: World) -> Work:
    """The work as it is, which its labels divide."""
    return work


def backward(learner: Learner, batch: Batch, scale: float) -> Tensor:
    """Add the gradient of one micro-batch to the parameters; return its loss, detached."""
    with packed(batch.cu_seqlens, batch.rows, parents=batch.parents):
        value = fsdp.inside(learner.lm, loss, learner, batch, scale)
        learner.routing.balanced(value, scale).backward()
    return value.detach()


class Sums(NamedTuple):
    """Sums of an evaluation over a micro-batch. `samples` `[sequences]`: row ids, with loss and labels of each."""

    loss: float
    right: float
    labels: float
    samples: NDArray[np.int64]
    sample_losses: NDArray[np.float64]
    sample_labels: NDArray[np.float64]


@torch.no_grad()
def evaluate(learner: Learner, batch: Batch) -> Sums:
    """Sums over one micro-batch."""
    with packed(batch.cu_seqlens, parents=batch.parents):
        total, right, each = fsdp.inside(learner.lm, scored, learner, batch)
    number = len(batch.samples)
    sequence = np.repeat(np.arange(len(batch.label_counts)), batch.label_counts)
    losses = np.bincount(sequence, each.double().cpu().numpy(), number).astype(np.float64)
    counts = np.bincount(sequence, minlength=number).astype(np.float64)
    samples = np.asarray(batch.samples, np.int64)
    return Sums(float(total), float(right.sum()), float(len(sequence)), samples, losses, counts)


def scored(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """`score` of the labels of one micro-batch, those of each row after those of the one before."""
    hidden, labels = learner.hidden(learner, batch)[batch.rows], batch.labels
    if batch.tree is not None:
        hidden, labels = hidden[batch.tree.places[batch.tree.entries]], labels[batch.tree.entries]
    return score(hidden, labels, head_of(learner))


def sample_losses(
    _: Learner, parts: Sequence[Sums]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Ids of this rank's samples, with the summed loss and the number of labels of each."""
    nothing = (np.empty(0, np.int64), np.empty(0), np.empty(0))
    ids, losses, counts = (
        np.concatenate(column) for column in zip(nothing, *(p[3:] for p in parts), strict=True)
    )
    return ids, losses, counts


def metrics(_: Learner, parts: Sequence[Sums], world: World) -> dict[str, float]:
    """Evaluation metrics from the sums of all batches of all ranks."""
    mine = [
        sum(column) for column in zip((0.0, 0.0, 0.0), *(part[:3] for part in parts), strict=True)
    ]
    total, right, labels = sum_numbers(mine, world)
    mean = total / max(labels, 1.0)
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(min(mean, 700.0)),
        "eval_token_accuracy": right / max(labels, 1.0),
    }


def labels_of(folder: Path) -> None:
    """None: a language model tells no labels apart."""


def predictions(learner: Learner, parts: Sequence[Any], rows: Rows) -> None:
    """None: what a language model says is asked by `kubetune generate`."""


def confusion(learner: Learner, parts: Sequence[Any]) -> None:
    """None: there are no classes."""
