"""The protocol of tasks: functions and names that each module of this room has. mypy and a test hold them to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import Config
    from kubetune.data.prepared.rows import Rows
    from kubetune.data.text.labels import Labels
    from kubetune.distributed.process_group import World
    from kubetune.models.acceleration import Workload
    from kubetune.models.learner import Learner


class Task(Protocol):
    """A module that says how something is trained. What a task cannot do gives None."""

    @property
    def AUTO_CLASS(self) -> str:  # a constant of the module
        """Name of transformers' class that loads what is exported."""

    @property
    def STEP_METRICS(self) -> tuple[str, ...]:  # a constant of the module
        """Names of what `backward` measures besides the loss."""

    def build(self, config: Config, world: World, workload: Workload, /) -> Learner:
        """A learner ready to train: loaded, adapted, its attention proved, tuned for the work."""

    def load(self, config: Config, folder: Path, device: torch.device, /) -> Learner:
        """The trained model of a checkpoint folder, to be evaluated."""

    def load_settings(self, config: Config, folder: Path, /) -> dict[str, Any]:
        """Settings that `from_pretrained` needs besides, to load the model of a checkpoint folder."""

    def completed(self, learner: Learner, work: Work, world: World, /) -> Work:
        """The work of a step with its divisor, in batches that know what they need of the whole global batch."""

    def backward(self, learner: Learner, batch: Batch, scale: float, /) -> Tensor:
        """Add `scale` times the gradient of a micro-batch to the parameters; return loss and STEP_METRICS so scaled,
        detached, `[1 + metrics]` or a scalar. Over a step's micro-batches and ranks they add up to means."""

    def evaluate(self, learner: Learner, batch: Batch, /) -> Any:
        """One micro-batch evaluated, in the form that `metrics` takes."""

    def metrics(self, learner: Learner, parts: Sequence[Any], world: World, /) -> dict[str, float]:
        """Metrics of all batches of all ranks, from what `evaluate` gave for those of this rank."""

    def sample_losses(
        self, learner: Learner, parts: Sequence[Any], /
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Ids of this rank's samples, with the summed loss and the number of labels of each."""

    def plain_logits(self, model: Any, batch: Batch, /) -> Tensor:
        """Logits of a single sequence, by the model's own code: `[tokens, vocabulary]` or `[1, labels]`."""

    def labels_of(self, folder: Path, /) -> Labels | None:
        """Labels that the model of a checkpoint folder tells apart; None where it tells none."""

    def predictions(
        self, learner: Learner, parts: Sequence[Any], rows: Rows, /
    ) -> Iterator[dict[str, Any]] | None:
        """Predictions for each row, in order; None for models that say no label."""

    def confusion(self, learner: Learner, parts: Sequence[Any], /) -> list[list[int]] | None:
        """Confusion matrix, class i (row) taken for class j (column); None where rows have no single class."""
