"""A model that is ready to train, with all that is known of it. Tasks build it; the rest of a run works with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from kubetune.kernels.pointwise import Kernels
from kubetune.models import fsdp
from kubetune.models.mixtures.routing import Routing
from kubetune.models.padding_free import Route, hidden_states, unwrap

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import DistillConfig, GrpoConfig, PreferenceConfig
    from kubetune.data.text.class_labels import Labels
    from kubetune.distributed.process_group import World
    from kubetune.kernels.cross_entropy import GradientSum
    from kubetune.models.compiled_layers import CompiledLayers


def _hidden(learner: Learner, batch: Batch) -> Tensor:
    """Return the final hidden states `[tokens, hidden]` of a batch of a causal language model."""
    if not learner.route.padding_free and len(batch.cu_seqlens) > 2:
        sequences = lone_sequences(batch)
        return torch.cat([hidden_states(learner.lm, sequence) for sequence in sequences])
    # Without the arguments of packed batches, compiled layers would have to be compiled once more.
    return hidden_states(learner.lm, batch, always_packed=learner.compiled_layers is not None)


def lone_sequences(batch: Batch) -> Iterator[Batch]:
    """Yield each sequence of a batch by itself, for a model that takes one at a time.

    Labels stay those of the whole batch, as only hidden states are computed from these.
    """
    for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        pictures = None
        if batch.pictures is not None:
            pictures = batch.pictures.of([number], batch.cu_seqlens)
        yield replace(
            batch,
            input_ids=batch.input_ids[start:stop],
            position_ids=batch.position_ids[start:stop],
            cu_seqlens=(0, stop - start),
            pictures=pictures,
        )


class ServedTeacher(Protocol):
    """A teacher that servers have, which are asked for a few tokens of each label."""

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest row that it reads."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Begin to ask about the micro-batches of a step, where that needs nothing of the student."""

    def ask(self, batch: Batch, ids: Tensor | None) -> Callable[[], Tensor]:
        """Ask for tokens `[labels, k]`, or for the likeliest ones. Return what waits for the numbers of KeptTeacher."""


@dataclass(frozen=True)
class Learner:
    """A model with what is known of it. It is kept here, and not hung on the model's modules, which are others'."""

    model: nn.Module
    route: Route  # how sequences go through it
    labels: Labels | None = None  # what a classifier tells apart
    preference: PreferenceConfig | None = None  # which answers are to be preferred, and how
    grpo: GrpoConfig | None = None  # how answers are drawn, and learnt from by their rewards
    distill: DistillConfig | None = None  # how a teacher is learnt from
    teacher: Learner | None = None  # the frozen model whose probabilities are learnt
    # Tokens of the vocabulary that are compared with it; None: all.
    compared_tokens: int | None = None
    served_teacher: ServedTeacher | None = None  # the same on servers
    # Computes the final hidden states [tokens, hidden] of a packed batch.
    hidden: Callable[[Learner, Batch], Tensor] = _hidden
    # True if a sharded model keeps whole gradients until the last micro-batch of a step.
    sums_once_per_step: bool = False
    compiled_layers: CompiledLayers | None = None  # compiled when the first step is done
    kernels: Kernels = field(default_factory=Kernels)  # pointwise functions, plain or compiled
    # Sums in which the optimizer adds up the gradients of parameters.
    gradient_sums: Mapping[nn.Parameter, GradientSum] = field(default_factory=dict)
    # Takes back what was changed in transformers for this model.
    undo: ExitStack = field(default_factory=ExitStack)
    # Seconds of parts of the step that is being made, for its timing.
    seconds: dict[str, float] = field(default_factory=dict)
    # How the routers of a mixture load its experts.
    routing: Routing = field(default_factory=Routing)

    @property
    def lm(self) -> Any:
        """Return the transformers model inside a PEFT model, or the model itself."""
        return unwrap(self.model)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Let the model answer as it would to its users while the block runs."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """The same, and behind it, also after an error, give back the weights that were borrowed of other ranks."""
        with self.without_dropout():
            try:
                yield
            finally:
                fsdp.close(self.lm)

    def begin_step(
        self,
        work: Work,
        world: World,
        evaluate: Callable[[Learner, Batch], Any],
    ) -> None:
        """Begin a step. A teacher on servers and the balance loss of routers look at all of its micro-batches first."""
        self.seconds.clear()
        if self.served_teacher is not None:
            self.served_teacher.begin_step(work.batches)
        # It ran the model, and then lets the layers go.
        if self.routing.begin(work, world, partial(evaluate, self)):
            fsdp.close(self.lm)

    def expect_backward(self, *, is_last: bool) -> None:
        """Prepare for a backward. Behind the last micro-batch of a step whole gradients are summed over the ranks."""
        # FSDP sums after each backward, unless it is asked to wait.
        if self.sums_once_per_step:
            cast(Any, self.model).set_requires_gradient_sync(is_last)
