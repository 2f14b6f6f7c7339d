"""Sequence classification and regression: a label, several labels or a number for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, assert_never, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from kubetune import errors
from kubetune.batching.batch import Batch
from kubetune.config.metric_names import ProblemType
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.text.tokenizer_files import read_json
from kubetune.distributed.process_group import World, gather_parts
from kubetune.models import fsdp, loading
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
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import unwrap
from kubetune.tasks.classification_metrics import (
    count_confusions,
    losses_of,
    measure,
    probabilities,
)
from kubetune.tasks.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import TrainingConfig
    from kubetune.data.prepared.rows import Rows


class Outputs(NamedTuple):
    """The model's outputs for some samples."""

    samples: NDArray[np.int64]  # [samples] row ids
    logits: NDArray[np.float64]  # [samples, outputs]
    targets: NDArray[np.float64]  # [samples, width]


class SequenceClassification(Task):
    """Train a model with a head for labels or for numbers."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline = "text-classification"
    step_metrics: tuple[str, ...] = ("accuracy",)

    def build(
        self,
        spec: ModelSpec,
        training: TrainingConfig,
        world: World,
        workload: Workload,
    ) -> Learner:
        """Load the model with a head for the labels, add adapters, choose the attention, tune it for the work."""
        labels = workload.labels
        assert labels is not None, "prepared data of this task have labels"
        spec = spec.decided_for(world)
        seed = training.seed
        # A new head is drawn at random, alike on every rank.
        torch.manual_seed(seed)

        # A base may bring a head for other labels, of another size: it is left out, and ours takes its place.
        settings = {"ignore_mismatched_sizes": True, **labels.model_settings()}
        model = fsdp.load(
            AutoModelForSequenceClassification,
            spec,
            training,
            world,
            **settings,
        )

        is_cut = fsdp.is_wanted(training.parallelism, world)
        if is_cut and spec.lora is None and not pools_last(model):
            raise errors.ConfigError(
                "training.parallelism: fsdp shards the layers of decoders, and "
                f"{spec.model.path} is an encoder. Use ddp, which gives each rank a whole copy: encoders are small"
            )

        name_padding(model, load_tokenizer(spec.model).pad_id)
        if spec.lora is not None:
            model = self.with_adapters(model, spec, seed)

        learner = Learner(model.train(), prepare_pooling(model, spec.model.attention), labels)
        if not pools_last(unwrap(model)):
            # Encoders have none of the parts that gain by it.
            training = without_compiler(training)
        return tune(learner, training, workload, world)

    def with_adapters(self, model: nn.Module, spec: ModelSpec, seed: int) -> nn.Module:
        """Return a model with adapters, whose new heads learn whole. Raise ConfigError for targets that it lacks."""
        assert spec.lora is not None, "asked only of runs with adapters"
        return lora.add_lora(model, spec.lora, task_type="SEQ_CLS", seed=seed, heads=heads(model))

    def load(
        self,
        spec: ModelSpec,
        folder: Path,
        device: torch.device,
    ) -> Learner:
        """Return the trained model of a checkpoint folder, to be evaluated."""
        spec = spec.decided_for(World(device=device))
        labels = labels_in(folder)
        settings = self.load_settings(spec, folder)

        model = loading.load_trained(
            AutoModelForSequenceClassification,
            spec,
            folder,
            device,
            **settings,
        )
        return Learner(model.eval(), prepare_pooling(model, spec.model.attention), labels)

    def load_settings(self, spec: ModelSpec, folder: Path) -> dict[str, Any]:
        """Return what loads the head of a checkpoint folder."""
        if spec.lora is None:
            return {}
        # The base of adapters knows nothing of the labels.
        return labels_in(folder).model_settings() | {"ignore_mismatched_sizes": True}

    def plain_logits(self, model: Any, batch: Batch) -> Tensor:
        """Return logits `[1, outputs]` of a single sequence by the model's own code."""
        return lone_logits(unwrap(model), batch)

    def labels_of(self, folder: Path) -> Labels | None:
        """Return the labels that the model of a checkpoint folder tells apart."""
        return labels_in(folder)

    def backward(
        self,
        learner: Learner,
        batch: Batch,
        scale: float,
    ) -> Tensor:
        """Add the gradient of one micro-batch to the parameters; return loss and accuracy, scaled, detached."""
        with running(learner, batch):
            # Behind the rows may be a sequence without one, which keeps a rank without work in step.
            outputs = logits(learner, batch)[: len(batch.labels)]
            value = summed_loss(learner, batch, outputs, scale)
            learner.routing.backward(value, scale)
        right = _right(learner, batch, outputs.detach())
        return torch.stack([value.detach(), right * scale])

    @torch.no_grad()
    def evaluate(self, learner: Learner, batch: Batch) -> Any:
        """Return the `Outputs` for one micro-batch."""
        with running(learner, batch):
            outputs = logits(learner, batch)[: len(batch.labels)].double().cpu().numpy()
        # fp64 on the CPU: metrics are computed once for all ranks, after all outputs are gathered.
        targets = batch.labels.double().cpu().numpy()
        return Outputs(np.asarray(batch.samples, np.int64), outputs, targets)

    def metrics(
        self,
        learner: Learner,
        parts: Sequence[Any],
        world: World,
    ) -> dict[str, float]:
        """Return metrics over all samples of all ranks, each sample once."""
        outputs = join(gather_parts(parts, world))
        return measure(_labels(learner), outputs.logits, outputs.targets)

    def sample_losses(
        self,
        learner: Learner,
        parts: Sequence[Any],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return ids of this rank's samples and the loss of each, which counts as that of one label."""
        if not parts:
            return np.empty(0, np.int64), np.empty(0), np.empty(0)
        outputs = join(parts)

        losses = losses_of(_labels(learner), outputs.logits, outputs.targets)
        return outputs.samples, losses, np.ones(len(losses))

    def predictions(
        self,
        learner: Learner,
        parts: Sequence[Any],
        rows: Rows,
    ) -> Iterator[dict[str, Any]] | None:
        """Return for each row, in order, `source`, `record` (from 0), `label`, and what `verdicts` gives."""
        return _predictions(_labels(learner), join(parts), rows)

    def confusion(self, learner: Learner, parts: Sequence[Any]) -> list[list[int]] | None:
        """Return the confusion matrix, class i (row) taken for class j (column), or None without single classes."""
        labels = _labels(learner)
        if labels.problem_type != "single_label_classification":
            return None
        outputs = join(parts)
        return count_confusions(labels, outputs.logits, outputs.targets)


TASK: Final = SequenceClassification()


def labels_in(folder: Path) -> Labels:
    """Return the labels that config.json of a checkpoint folder names."""
    facts: Any = PreTrainedConfig.from_dict(read_json(folder / "config.json"))

    # A mapping has no order that holds, so names are taken by their numbers.
    names = tuple(facts.id2label[i] for i in range(facts.num_labels))
    return Labels(cast(ProblemType, facts.problem_type), names)


def _labels(learner: Learner) -> Labels:
    assert learner.labels is not None, "a classifier has labels"
    return learner.labels


def running(learner: Learner, batch: Batch) -> AbstractContextManager[None]:
    """Return the context of forward and backward: the packed batch, or nothing where the model's own code runs."""
    if not learner.route.padding_free:
        return nullcontext()
    return flow(learner.lm, batch)


def logits(learner: Learner, batch: Batch) -> Tensor:
    """Return fp32 logits `[sequences, outputs]`. Call it, and `.backward()`, inside `running`."""
    run = packed_logits if learner.route.padding_free else lone_logits
    return run(learner.lm, batch).float()


def summed_loss(
    learner: Learner,
    batch: Batch,
    outputs: Tensor,  # [sequences, outputs] logits
    scale: float,
) -> Tensor:
    """Return `scale × Σ loss` over the sequences of one micro-batch."""
    # For logits z of the classes, p = softmax(z), σ the logistic function:
    #
    #     one label          -log p of the label                        z = (2, 0), label 0: 0.127
    #     several labels     mean over the classes of -log σ(±z)        z = (2, 0), labels (1, 0): (0.127 + 0.693) / 2
    #     a number           (z - y)²                                   z = 2, y = 1.5: 0.25
    #
    match _labels(learner).problem_type:
        case "single_label_classification":
            return scale * F.cross_entropy(outputs, batch.labels[:, 0].long(), reduction="sum")
        case "multi_label_classification":
            losses = F.binary_cross_entropy_with_logits(outputs, batch.labels, reduction="none")
            return scale * losses.mean(1).sum()
        case "regression":
            return scale * F.mse_loss(outputs, batch.labels, reduction="sum")
        case unknown:
            assert_never(unknown)


def _right(learner: Learner, batch: Batch, outputs: Tensor) -> Tensor:
    """Return how many rows have the right label, or all the right labels; NaN where labels are numbers to predict."""
    match _labels(learner).problem_type:
        case "single_label_classification":
            return (outputs.argmax(1) == batch.labels[:, 0]).sum().to(outputs)
        case "multi_label_classification":
            return ((outputs > 0) == (batch.labels > 0.5)).all(1).sum().to(outputs)
        case "regression":
            return outputs.new_full((), float("nan"))
        case unknown:
            assert_never(unknown)


def join(parts: Sequence[Outputs]) -> Outputs:
    """Return all outputs in the order of the samples, whichever rank ran them."""
    samples = np.concatenate([part.samples for part in parts])
    outputs = np.concatenate([part.logits for part in parts])
    targets = np.concatenate([part.targets for part in parts])

    # Sums of floating-point numbers depend on their order, which must not depend on the number of ranks.
    order = np.argsort(samples, kind="stable")
    return Outputs(samples[order], outputs[order], targets[order])


def _predictions(
    labels: Labels,
    outputs: Outputs,
    rows: Rows,
) -> Iterator[dict[str, Any]]:
    all_verdicts = verdicts(labels, outputs.logits)
    # The row says which record of which file a sample is from.
    for index, sample in enumerate(outputs.samples):
        yield {
            "source": int(rows.source[sample]),
            "record": int(rows.record[sample]),
            "label": labels.name(outputs.targets[index]),
            **all_verdicts[index],
        }


def classify(learner: Learner, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return verdicts on the texts of some batches, in the order of their samples."""
    outputs = join([TASK.evaluate(learner, batch) for batch in batches])
    return verdicts(_labels(learner), outputs.logits)


def verdicts(labels: Labels, logits: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Return for each sample `predicted`, what the model takes it for, and the `probabilities` of all classes."""
    # As targets are: the number of the class, or for each class whether it applies.
    match labels.problem_type:
        case "regression":
            return [{"predicted": float(value)} for value in logits[:, 0]]
        case "single_label_classification":
            chosen = logits.argmax(1)[:, None]
        case "multi_label_classification":
            chosen = logits > 0
        case unknown:
            assert_never(unknown)

    results = []
    for choice, of_classes in zip(chosen, probabilities(labels, logits), strict=True):
        by_name = {}
        for name, probability in zip(labels.names, of_classes, strict=True):
            by_name[name] = round(float(probability), 6)
        results.append({"predicted": labels.name(choice), "probabilities": by_name})

    return results
