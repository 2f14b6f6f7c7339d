"""Sequence classification and regression: build the model, loss of a micro-batch, outputs of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from kubetune import errors
from kubetune.batching.batch import Batch
from kubetune.batching.filling import filled_up
from kubetune.config.metric_names import ProblemType
from kubetune.data.text.labels import Labels
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.text.tokenizer_files import read_json
from kubetune.distributed.process_group import World, gather
from kubetune.models import fsdp, loading, quantization
from kubetune.models.acceleration import Workload, tune, without_compiler
from kubetune.models.adapters import lora
from kubetune.models.classifier_pooling import (
    flow,
    heads,
    lone_logits,
    name_padding,
    packed_logits,
    pools_last,
    prepare_pooling,
)
from kubetune.models.learner import Learner
from kubetune.models.padding_free import unwrap
from kubetune.tasks.causal_lm import STEP_METRICS as STEP_METRICS
from kubetune.tasks.causal_lm import completed as completed
from kubetune.tasks.classification_metrics import (
    count_confusions,
    losses_of,
    measure,
    probabilities,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import Config
    from kubetune.data.prepared.rows import Rows


AUTO_CLASS = "AutoModelForSequenceClassification"

SMALL_WORK = 2**33
"""Weights of layers × tokens up to which products for a new number of tokens cost more to compile than a few tokens."""

_WEIGHTS: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
"""Of a model's linear layers: they are counted once, not in every micro-batch."""


class Outputs(NamedTuple):
    """Outputs for some samples: `samples` `[n]`, `logits` `[n, outputs]`, `targets` `[n, width]`."""

    samples: NDArray[np.int64]
    logits: NDArray[np.float64]
    targets: NDArray[np.float64]


def build(config: Config, world: World, workload: Workload) -> Learner:
    """Load the model with a head for the labels, add adapters, choose the attention, and tune it for the work."""
    labels = workload.labels
    assert labels is not None, "prepared data of this task have labels"
    config = quantization.decide(config, world)
    torch.manual_seed(config.training.seed)  # a new head is drawn at random, alike on every rank
    settings = {"ignore_mismatched_sizes": True, **labels.model_settings()}
    model = fsdp.load(AutoModelForSequenceClassification, config, world, **settings)
    if fsdp.is_wanted(config, world) and not pools_last(model):
        raise errors.ConfigError(
            f"training.parallelism: fsdp is for decoders, of which layers and the one row of the head are sharded, and "
            f"{config.model.path} is none; encoders are small: use ddp, which leaves each rank a whole copy"
        )
    name_padding(model, load_tokenizer(config.model).pad_id)
    if config.lora is not None:
        seed = config.training.seed
        model = lora.add_lora(
            model, config.lora, task_type="SEQ_CLS", seed=seed, heads=heads(model)
        )
    learner = Learner(model.train(), prepare_pooling(model, config.model.attention), labels)
    if not pools_last(unwrap(model)) and config.training.compile == "auto":
        config = without_compiler(config)  # encoders have none of the parts that gain by it
    return tune(learner, config, workload, world.device)


def load(config: Config, folder: Path, device: torch.device) -> Learner:
    """The trained model of a checkpoint folder, to be evaluated."""
    config = quantization.decide(config, World(device=device))
    settings = load_settings(config, folder)
    model = loading.load_trained(
        AutoModelForSequenceClassification, config, folder, device, **settings
    )
    return Learner(model.eval(), prepare_pooling(model, config.model.attention), labels_of(folder))


def load_settings(config: Config, folder: Path) -> dict[str, Any]:
    """Settings that `from_pretrained` needs besides, to load the model of a checkpoint folder.

    The base of an adapter knows nothing of the labels.
    """
    return (
        labels_of(folder).model_settings() | {"ignore_mismatched_sizes": True}
        if config.lora is not None
        else {}
    )


def plain_logits(model: Any, batch: Batch) -> Tensor:
    """Logits `[1, outputs]` of a single sequence, by the model's own code."""
    return lone_logits(unwrap(model), batch)


def labels_of(folder: Path) -> Labels:
    """The labels that the model of a checkpoint folder tells apart."""
    facts: Any = PreTrainedConfig.from_dict(read_json(folder / "config.json"))
    return Labels(
        cast(ProblemType, facts.problem_type),
        tuple(facts.id2label[i] for i in range(facts.num_labels)),
    )


def _labels(learner: Learner) -> Labels:
    assert learner.labels is not None, "a classifier has them"
    return learner.labels


def running(learner: Learner, batch: Batch) -> AbstractContextManager[None]:
    """Context of forward and backward: the packed batch, or nothing where the model's own code runs."""
    return flow(learner.lm, batch) if learner.route.padding_free else nullcontext()


def logits(learner: Learner, batch: Batch) -> Tensor:
    """fp32 logits `[sequences, outputs]`. Call it, and `.backward()`, inside `running`."""
    lm = learner.lm
    return (packed_logits if learner.route.padding_free else lone_logits)(lm, batch).float()


def even_length(learner: Learner, batch: Batch) -> Batch:
    """The batch, filled up to one of few lengths where that costs less than oneDNN's compiling of products for another:
    with small layers in bf16 on a CPU. Of a small BERT's step it took a fifth."""
    is_exact = learner.lm.dtype == torch.float32 or batch.input_ids.device.type != "cpu"
    if (
        is_exact or not learner.route.padding_free or learner.routing.counts is not None
    ):  # experts count what they do
        return batch
    if learner.lm not in _WEIGHTS:
        linear = (m for m in learner.lm.modules() if isinstance(m, torch.nn.Linear))
        _WEIGHTS[learner.lm] = sum(m.weight.numel() for m in linear)
    return filled_up(batch) if _WEIGHTS[learner.lm] * batch.num_tokens < SMALL_WORK else batch


def loss(learner: Learner, batch: Batch, scale: float) -> Tensor:
    """`scale × Σ loss` over the sequences of one micro-batch: cross-entropy, mean binary one, or squared error."""
    said = logits(learner, batch)[: len(batch.labels)]  # behind them is what fills the batch up
    if _labels(learner).problem_type == "single_label_classification":
        return scale * F.cross_entropy(said, batch.labels[:, 0].long(), reduction="sum")
    if _labels(learner).problem_type == "multi_label_classification":
        return (
            scale
            * F.binary_cross_entropy_with_logits(said, batch.labels, reduction="none").mean(1).sum()
        )
    return scale * F.mse_loss(said, batch.labels, reduction="sum")


def backward(learner: Learner, batch: Batch, scale: float) -> Tensor:
    """Add the gradient of one micro-batch to the parameters; return its loss, detached."""
    batch = even_length(learner, batch)
    with running(learner, batch):
        value = loss(learner, batch, scale)
        learner.routing.balanced(value, scale).backward()
    return value.detach()


@torch.no_grad()
def evaluate(learner: Learner, batch: Batch) -> Outputs:
    """Outputs for one micro-batch."""
    batch = even_length(learner, batch)
    with running(learner, batch):
        said = logits(learner, batch)[: len(batch.labels)].double().cpu().numpy()
    return Outputs(np.asarray(batch.samples, np.int64), said, batch.labels.double().cpu().numpy())


def metrics(learner: Learner, parts: Sequence[Outputs], world: World) -> dict[str, float]:
    """Evaluation metrics of all samples of all ranks, each once."""
    everything = join([part for share in gather(list(parts), world) for part in share])
    return measure(_labels(learner), everything.logits, everything.targets)


def sample_losses(
    learner: Learner, parts: Sequence[Outputs]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Ids of this rank's samples, with the loss of each, which counts as that of one label."""
    if not parts:
        return np.empty(0, np.int64), np.empty(0), np.empty(0)
    mine = join(parts)
    losses = losses_of(_labels(learner), mine.logits, mine.targets)
    return mine.samples, losses, np.ones(len(losses))


def join(parts: Sequence[Outputs]) -> Outputs:
    """Outputs in the order of the samples, whoever ran them."""
    samples, said, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(samples, kind="stable")
    return Outputs(samples[order], said[order], targets[order])


def predictions(learner: Learner, parts: Sequence[Outputs], rows: Rows) -> Iterator[dict[str, Any]]:
    """Predictions for each row, in order: `source`, `record` (from 0), `label`, and what `verdicts` gives."""
    everything = join(parts)
    said = verdicts(_labels(learner), everything.logits)
    for sample, target, verdict in zip(everything.samples, everything.targets, said, strict=True):
        place = {"source": int(rows.source[sample]), "record": int(rows.record[sample])}
        yield {**place, "label": _labels(learner).name(target), **verdict}


def confusion(learner: Learner, parts: Sequence[Outputs]) -> list[list[int]] | None:
    """Confusion matrix, class i (row) taken for class j (column); None where there is more or less than one class."""
    if _labels(learner).problem_type != "single_label_classification":
        return None
    everything = join(parts)
    return count_confusions(_labels(learner), everything.logits, everything.targets)


def classify(learner: Learner, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Verdicts on the texts of some batches, in the order of their samples."""
    return verdicts(_labels(learner), join([evaluate(learner, batch) for batch in batches]).logits)


def verdicts(labels: Labels, logits: NDArray[np.float64]) -> list[dict[str, Any]]:
    """For each sample `predicted`, what the model takes it for, and the `probabilities` of all classes."""
    if labels.problem_type == "regression":
        return [{"predicted": float(value)} for value in logits[:, 0]]
    single = labels.problem_type == "single_label_classification"
    chosen = logits.argmax(1)[:, None] if single else logits > 0
    return [
        {
            "predicted": labels.name(choice),
            "probabilities": {
                name: round(float(p), 6) for name, p in zip(labels.names, row, strict=True)
            },
        }
        for choice, row in zip(chosen, probabilities(labels, logits), strict=True)
    ]
