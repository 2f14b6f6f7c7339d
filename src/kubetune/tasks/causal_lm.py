"""Causal language modelling: cross-entropy of the next token, over the tokens that are trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kubetune.batching.batch import Batch
from kubetune.distributed.process_group import World, sum_numbers
from kubetune.kernels.cross_entropy import Head, linear_cross_entropy, score
from kubetune.models import fsdp, loading, padding_free
from kubetune.models.acceleration import Workload, tune
from kubetune.models.adapters import lora
from kubetune.models.attention_hooks import packed
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.tasks.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import TrainingConfig


class Sums(NamedTuple):
    """Sums over one micro-batch of an evaluation."""

    loss: float
    num_right: float  # labels that have the highest logit
    num_labels: float
    samples: NDArray[np.int64]  # [sequences] row ids
    sample_losses: NDArray[np.float64]  # [sequences]
    sample_labels: NDArray[np.float64]  # [sequences] number of labels
    # Of distillation: the divergence from the teacher, and of how many labels it is known.
    divergence: float = 0.0
    num_compared: float = 0.0


class CausalLM(Task):
    """Train a language model on the next token."""

    auto_class = "AutoModelForCausalLM"

    def build(
        self,
        spec: ModelSpec,
        training: TrainingConfig,
        world: World,
        workload: Workload,
    ) -> Learner:
        """Load the model, add adapters, choose the attention, and tune it for the work."""
        from transformers import AutoModelForCausalLM

        spec = spec.decided_for(world)
        model = fsdp.load(AutoModelForCausalLM, spec, training, world)
        if spec.lora is not None:
            model = self.with_adapters(model, spec, training.seed)

        learner = self.learner_of(model.train(), spec)
        return tune(learner, training, workload, world)

    def with_adapters(self, model: nn.Module, spec: ModelSpec, seed: int) -> nn.Module:
        """Return a model with the adapters of `spec.lora` in it. Raise ConfigError for targets that it lacks."""
        assert spec.lora is not None, "asked only of runs with adapters"
        return lora.add_lora(model, spec.lora, task_type="CAUSAL_LM", seed=seed)

    def load(
        self,
        spec: ModelSpec,
        folder: Path,
        device: torch.device,
    ) -> Learner:
        """Return the trained model of a checkpoint folder, to be evaluated."""
        import transformers

        spec = spec.decided_for(World(device=device))
        auto_class = getattr(transformers, self.auto_class)
        model = loading.load_trained(auto_class, spec, folder, device)
        return self.learner_of(model, spec)

    def learner_of(self, model: nn.Module, spec: ModelSpec) -> Learner:
        """Choose how sequences go through a loaded model."""
        # Proved on the model at hand, and not by the name of its family.
        route = padding_free.choose_attention(model, spec.model.attention)
        if not route.padding_free:
            # The check of a padding-free route looks at the head too. This route had no check.
            padding_free.require_head(model)
        return Learner(model, route)

    def plain_logits(self, model: Any, batch: Batch) -> Tensor:
        """Return logits `[tokens, vocabulary]` of a single sequence by the model's own code."""
        return padding_free.plain_logits(model, batch)

    def backward(
        self,
        learner: Learner,
        batch: Batch,
        scale: float,
    ) -> Tensor:
        """Add the gradient of one micro-batch to the parameters, and return its loss."""
        with packed(batch.cu_seqlens, batch.rows, parents=batch.parents):
            value = fsdp.inside(learner.lm, summed_loss, learner, batch, scale)
            learner.routing.backward(value, scale)
        return value.detach()

    @torch.no_grad()
    def evaluate(self, learner: Learner, batch: Batch) -> Any:
        """Return the `Sums` over one micro-batch."""
        with packed(batch.cu_seqlens, parents=batch.parents):
            total, right, losses = fsdp.inside(
                learner.lm,
                score_labels,
                learner,
                batch,
            )

        # Labels lie sequence after sequence. Of 2 sequences with 3 and 1 labels:
        #
        #     losses      0.5  0.1  0.2  0.9
        #     sequence    0    0    0    1        loss_sums 0.8  0.9      label_counts 3  1
        sequence = np.repeat(np.arange(len(batch.label_counts)), batch.label_counts)

        # Summed in fp64, in which a long sequence loses no digits.
        number = len(batch.samples)
        loss_sums = np.bincount(sequence, losses.double().cpu().numpy(), number)
        label_counts = np.bincount(sequence, minlength=number)
        return Sums(
            loss=float(total),
            num_right=float(right.sum()),
            num_labels=float(len(sequence)),
            samples=np.asarray(batch.samples, np.int64),
            sample_losses=loss_sums.astype(np.float64),
            sample_labels=label_counts.astype(np.float64),
        )

    def metrics(
        self,
        learner: Learner,
        parts: Sequence[Any],
        world: World,
    ) -> dict[str, float]:
        """Return loss, perplexity and token accuracy over all batches of all ranks."""
        loss = sum((part.loss for part in parts), 0.0)
        right = sum((part.num_right for part in parts), 0.0)
        labels = sum((part.num_labels for part in parts), 0.0)

        # Sums of all ranks are divided once: a mean of the ranks' means would count short batches too much.
        loss, right, labels = sum_numbers([loss, right, labels], world)
        labels = max(labels, 1.0)
        mean = loss / labels
        return {
            "eval_loss": mean,
            "eval_perplexity": math.exp(min(mean, 700.0)),  # e^710 is no float
            "eval_token_accuracy": right / labels,
        }

    def sample_losses(
        self,
        learner: Learner,
        parts: Sequence[Any],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return ids of this rank's samples, and the summed loss and the number of labels of each."""
        if not parts:
            return np.empty(0, np.int64), np.empty(0), np.empty(0)

        # In the order in which they were run; the caller adds them up by source.
        ids = np.concatenate([part.samples for part in parts])
        losses = np.concatenate([part.sample_losses for part in parts])
        labels = np.concatenate([part.sample_labels for part in parts])
        return ids, losses, labels


TASK: Final = CausalLM()


def head_of(learner: Learner) -> Head:
    """Return the output head, with the place where the optimizer adds up its gradient."""
    layer = learner.lm.get_output_embeddings()
    fsdp.borrow(learner.lm, layer)
    sums = learner.gradient_sums
    bias = getattr(layer, "bias", None)
    sum_of_bias = None
    if bias is not None:
        sum_of_bias = sums.get(bias)
    return Head(
        layer.weight,
        bias,
        padding_free.logit_rule(learner.lm),
        learner.kernels,
        sums.get(layer.weight),
        sum_of_bias,
    )


def summed_loss(
    learner: Learner,
    batch: Batch,
    scale: float,
) -> Tensor:
    """Return `scale × Σ cross-entropy` over the labels of one micro-batch. Call `.backward()` inside `packed`."""
    hidden = learner.hidden(learner, batch)[batch.rows]
    head = head_of(learner)
    tree = batch.tree
    if tree is None:
        return linear_cross_entropy(hidden, batch.labels, head, scale)
    # A label of a beginning that several rows share counts once for each of them. With counts [(3, 2), (4, 1)]:
    #
    #     labels   b b b | r r r r         three of a beginning of two rows, then four of one row
    #     loss     2 × Σ of the first + 1 × Σ of the others
    lengths = [length for length, _ in tree.counts]
    hidden_runs = hidden[tree.places].split(lengths)
    label_runs = batch.labels.split(lengths)

    losses = []
    for run, (_, num_rows) in enumerate(tree.counts):
        run_scale = scale * num_rows
        losses.append(linear_cross_entropy(hidden_runs[run], label_runs[run], head, run_scale))

    return torch.stack(losses).sum()


def score_labels(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return `score` of the labels of one micro-batch, row after row."""
    hidden = learner.hidden(learner, batch)[batch.rows]
    labels = batch.labels
    if batch.tree is not None:
        # Every row gets the labels of the beginning that it shares, as if it stood alone.
        hidden = hidden[batch.tree.places[batch.tree.entries]]
        labels = labels[batch.tree.entries]
    return score(hidden, labels, head_of(learner))
