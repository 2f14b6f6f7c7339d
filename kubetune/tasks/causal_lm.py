"""Causal language modelling: build the model, loss of a micro-batch, sums of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kubetune.batching.batch import Batch
from kubetune.distributed.process_group import World, sum_numbers
from kubetune.models import fsdp, loading, lora, quantization
from kubetune.models.acceleration import Workload, tune
from kubetune.models.attention.hooks import packed
from kubetune.models.kernels.cross_entropy import Head, linear_cross_entropy, score
from kubetune.models.padding_free import Route, choose_attention, hidden_states, logit_rule, unwrap

if TYPE_CHECKING:
    from kubetune.config.schema import Config


AUTO_CLASS = "AutoModelForCausalLM"


@dataclass(frozen=True)
class CausalLM:
    """A model ready to train, how sequences go through it, and what gives the final hidden states of a packed batch."""

    model: nn.Module
    route: Route
    hidden: Callable[[Any, Batch], Tensor] = hidden_states


def build(config: Config, world: World, workload: Workload) -> CausalLM:
    """Load the model, add adapters, choose the attention, and tune it for the work planned."""
    from transformers import AutoModelForCausalLM

    config = quantization.decide(config, world)
    model = fsdp.load(AutoModelForCausalLM, config, world)
    if config.lora is not None:
        model = lora.add_lora(model, config.lora, task_type="CAUSAL_LM", seed=config.training.seed)
    learner = ready(model.train(), config)
    tune(model, learner.route, config, workload, world.device)
    return learner


def load(config: Config, folder: Path, device: torch.device) -> CausalLM:
    """The trained model of a checkpoint folder, to be evaluated."""
    from transformers import AutoModelForCausalLM

    config = quantization.decide(config, World(device=device))
    return ready(loading.load_trained(AutoModelForCausalLM, config, folder, device), config)


def ready(model: nn.Module, config: Config) -> CausalLM:
    """Choose how sequences go through a loaded model."""
    return CausalLM(model, choose_attention(model, config.model.attention))


def load_settings(config: Config, folder: Path) -> dict[str, Any]:
    """What `from_pretrained` must be told besides, to load the model of a checkpoint folder."""
    return {}


def plain_logits(model: Any, batch: Batch) -> Tensor:
    """Logits `[tokens, vocabulary]` of a single sequence, by the model's own code."""
    return cast(Tensor, model(input_ids=batch.input_ids[None], use_cache=False).logits[0])


def head_of(model: nn.Module) -> Head:
    lm = unwrap(model)
    layer = lm.get_output_embeddings()
    return Head(layer.weight, getattr(layer, "bias", None), logit_rule(lm))


def loss(task: CausalLM, batch: Batch, scale: float) -> Tensor:
    """`scale × Σ cross-entropy` over the labels of one micro-batch. Call it, and `.backward()`, inside `packed`."""
    hidden = task.hidden(unwrap(task.model), batch)[batch.rows]
    return linear_cross_entropy(hidden, batch.labels, head_of(task.model), scale)


def backward(task: CausalLM, batch: Batch, scale: float) -> Tensor:
    """Add the gradient of one micro-batch to the parameters; return its loss, detached."""
    with packed(batch.cu_seqlens, batch.rows):
        value = fsdp.inside(unwrap(task.model), loss, task, batch, scale)
        value.backward()
    return value.detach()


@torch.no_grad()
def evaluate(task: CausalLM, batch: Batch) -> tuple[float, float, float]:
    """Sums over one micro-batch: loss, labels told rightly, labels. They add up over batches and ranks."""
    with packed(batch.cu_seqlens):
        total, right = fsdp.inside(unwrap(task.model), _score, task, batch)
    return float(total), float(right), float(batch.num_labels)


def _score(task: CausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    hidden = task.hidden(unwrap(task.model), batch)[batch.rows]
    return score(hidden, batch.labels, head_of(task.model))


def metrics(_: CausalLM, parts: Sequence[tuple[float, float, float]], world: World) -> dict[str, float]:
    """Evaluation metrics from the sums of all batches of all ranks."""
    mine = [sum(column) for column in zip((0.0, 0.0, 0.0), *parts, strict=True)]
    total, right, labels = sum_numbers(mine, world)
    mean = total / max(labels, 1.0)
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(min(mean, 700.0)),
        "eval_token_accuracy": right / max(labels, 1.0),
    }
