"""What a task is: the part of training that differs between language models, classifiers, pairs of answers and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import TrainingConfig
    from kubetune.data.prepared.rows import Rows
    from kubetune.data.text.class_labels import Labels
    from kubetune.distributed.process_group import World
    from kubetune.models.acceleration import Workload
    from kubetune.models.learner import Learner
    from kubetune.models.model_spec import ModelSpec


class Task:
    """Say how one kind of thing is trained. A new task is a subclass in a file of its own and one line in `TASKS`.

    A task has no state: what it works with is in the learner. The loop calls it in this order:

        learner = task.build(...)                              once
        work = task.with_batch_totals(learner, work, world)    each step
        task.backward(learner, batch, scale)                   each micro-batch of the step
        parts = [task.evaluate(learner, batch), ...]           each batch of an evaluation
        task.metrics(learner, parts, world)
    """

    auto_class: str  # name of the transformers class that loads what is exported
    pipeline: str = "text-generation"  # the hub's name of what an exported model is for
    step_metrics: tuple[str, ...] = ()  # what `backward` measures besides the loss

    # What every task has to define: a learner, its training and its evaluation.
    def build(
        self,
        spec: ModelSpec,
        training: TrainingConfig,
        world: World,
        workload: Workload,
    ) -> Learner:
        """Return a learner ready to train: loaded, adapted, with its attention proved, tuned for the work."""
        raise NotImplementedError

    def with_adapters(self, model: nn.Module, spec: ModelSpec, seed: int) -> nn.Module:
        """Return a model with the adapters of `spec.lora` in it. Raise ConfigError for targets that it lacks."""
        raise NotImplementedError

    def load(
        self,
        spec: ModelSpec,
        folder: Path,
        device: torch.device,
    ) -> Learner:
        """Return the trained model of a checkpoint folder, to be evaluated."""
        raise NotImplementedError

    def load_settings(self, spec: ModelSpec, folder: Path) -> dict[str, Any]:
        """Return further settings that `from_pretrained` needs for the model of a checkpoint folder."""
        return {}

    def plain_logits(self, model: Any, batch: Batch) -> Tensor:
        """Return logits of a single sequence by the model's own code: `[tokens, vocabulary]` or `[1, labels]`."""
        raise NotImplementedError

    def with_batch_totals(
        self,
        learner: Learner,
        work: Work,
        world: World,
    ) -> Work:
        """Return the work of a step with its divisor, and batches that know the sums over the whole global batch.

        By default the divisor is the number of labels, and no batch needs more.
        """
        return work

    def backward(
        self,
        learner: Learner,
        batch: Batch,
        scale: float,
    ) -> Tensor:
        """Add `scale` times the gradient of a micro-batch to the parameters.

        Return the loss and `step_metrics`, times `scale`, detached: `[1 + metrics]`, or a scalar without metrics.
        Over all micro-batches and ranks of a step they add up to means.
        """
        raise NotImplementedError

    def evaluate(self, learner: Learner, batch: Batch) -> Any:
        """Return what `metrics` needs of one micro-batch."""
        raise NotImplementedError

    def metrics(
        self,
        learner: Learner,
        parts: Sequence[Any],
        world: World,
    ) -> dict[str, float]:
        """Return the metrics over all ranks. `parts` are the results of `evaluate` on this rank."""
        raise NotImplementedError

    # What evaluations by source, and charts, are made of.
    def sample_losses(
        self,
        learner: Learner,
        parts: Sequence[Any],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return ids of this rank's samples, and the summed loss and the number of labels of each."""
        raise NotImplementedError

    # What only classifiers have. Other tasks keep these answers.
    def labels_of(self, folder: Path) -> Labels | None:
        """Return the labels that the model of a checkpoint folder tells apart, or None if it tells none apart."""
        return None

    def predictions(
        self,
        learner: Learner,
        parts: Sequence[Any],
        rows: Rows,
    ) -> Iterator[dict[str, Any]] | None:
        """Return predictions for each row in order, or None for a model that predicts no labels."""
        return None

    def confusion(self, learner: Learner, parts: Sequence[Any]) -> list[list[int]] | None:
        """Return the confusion matrix, class i (row) taken for class j (column), or None without single classes."""
        return None
