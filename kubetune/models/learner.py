"""A model ready to train, and all that is known of it: what tasks build, and the rest of a run is handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kubetune.kernels.pointwise import Kernels
from kubetune.models import fsdp
from kubetune.models.mixtures.routing import Routing
from kubetune.models.padding_free import Route, hidden_states, unwrap

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import PreferenceConfig
    from kubetune.data.text.labels import Labels
    from kubetune.distributed.process_group import World
    from kubetune.kernels.cross_entropy import GradientSum
    from kubetune.models.compiled_layers import CompiledLayers


def _hidden(learner: Learner, batch: Batch) -> Tensor:
    if not learner.route.padding_free and len(batch.cu_seqlens) > 2:
        return torch.cat([hidden_states(learner.lm, one) for one in lone_sequences(batch)])
    # Packed batches of one sequence would lack some arguments of the layers, which makes another kind of them.
    return hidden_states(learner.lm, batch, always_packed=learner.compiled_layers is not None)


def lone_sequences(batch: Batch) -> Iterator[Batch]:
    """The sequences of a batch each alone, for a model that takes one at a time; without their labels."""
    for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        ids, positions = batch.input_ids[start:stop], batch.position_ids[start:stop]
        pictures = batch.pictures and batch.pictures.of([number], batch.cu_seqlens)
        yield replace(
            batch,
            input_ids=ids,
            position_ids=positions,
            cu_seqlens=(0, stop - start),
            pictures=pictures,
        )


@dataclass(frozen=True)
class Learner:
    """A model, with what is known of it written here and not on its modules, which are others'."""

    model: nn.Module
    route: Route  # how sequences go through it
    labels: Labels | None = None  # what a classifier tells apart
    preference: PreferenceConfig | None = None  # which answers are to be preferred, and how
    # Computes the final hidden states [tokens, hidden] of a packed batch.
    hidden: Callable[[Learner, Batch], Tensor] = _hidden
    sums_once_per_step: bool = (
        False  # a sharded model keeps whole gradients until the last micro-batch of a step
    )
    compiled_layers: CompiledLayers | None = (
        None  # decoder layers, compiled once the first step is done
    )
    kernels: Kernels = field(default_factory=Kernels)  # pointwise functions, plain or compiled
    # Where the optimizer adds up the gradients of parameters.
    gradient_sums: Mapping[nn.Parameter, GradientSum] = field(default_factory=dict)
    undo: ExitStack = field(
        default_factory=ExitStack
    )  # takes back what was changed in transformers for this model
    routing: Routing = field(
        default_factory=Routing
    )  # how the routers of a mixture load its experts

    @property
    def lm(self) -> Any:
        """The transformers model inside a PEFT model, or the model itself."""
        return unwrap(self.model)

    def begin_step(
        self, work: Work, world: World, evaluate: Callable[[Learner, Batch], Any]
    ) -> None:
        """Begin a step of micro-batches, which some parts of the loss must have seen all of."""
        if self.routing.begin(work, world, partial(evaluate, self)):
            fsdp.close(self.lm)

    def expect_backward(self, *, is_last: bool) -> None:
        """Say before each micro-batch of a step whether it is the last one, after which whole gradients are summed."""
        if self.sums_once_per_step:
            cast(Any, self.model).set_requires_gradient_sync(is_last)
