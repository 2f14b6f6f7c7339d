"""Look whether every trained tensor moves: a run that trains only a part of its weights looks like any other.

A tensor moves if it has a gradient, if the optimizer's update takes that up, and if the weights that the model computes
with are then those of the optimizer. The first two are looked at on every rank, for its own slices, until each tensor
has moved; the third after the first update. LoRA, where B begins at zero and A has no gradient as long as it is zero:

    step    A      B      looked for      has not moved
    1       -      yes    A, B            A
    2       yes    yes    A               none: nothing more is looked at

Only steps count whose gradient is not zero, as all is in a step of equal rewards, and whose learning rate is not. Some
tensors may wait for their data for long, and are spoken of at the end: experts without a token, a tower without an
image. Of a table, such as embeddings, one rank's rows may not occur at all: that any rank's move is enough.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.distributed.process_group import World, gather, local
from kubetune.models import fsdp
from kubetune.plan.linears import is_expert
from kubetune.plan.model_shapes import HEARING, PROJECTORS, TOWERS
from kubetune.training.optimizer.adamw import FlatAdamW

# The first steps are all looked at, and then those whose number is a power of two.
FIRST_STEPS = 10
# Names in a message.
MOST_NAMED = 8
# Parts of names of what sees and hears.
SENSES = {*TOWERS, *PROJECTORS, *HEARING}


class Movement:
    """Looks at the updates of one start of a run. All ranks call it."""

    def __init__(self, model: nn.Module, optimizer: FlatAdamW, world: World) -> None:
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._names = list(optimizer.layout)
        self._tables = _tables(model, self._names)
        self._num_steps = 0  # updates
        self._num_counted = 0  # those that count
        # Numbers of the tensors of which this rank has not seen a move, and those of which some rank has not.
        self._unseen = set(range(len(self._names)))
        self._waiting: dict[int, list[int]] = {}  # with the ranks
        self._is_done = False
        self._has_followed = False

    @contextmanager
    def watching(
        self, norm: float, learning_rate: float, measured: Mapping[str, float]
    ) -> Iterator[None]:
        """Look at the update within the block. `norm`: of the gradient. `measured`: what is known of the step's data."""
        self._num_steps += 1
        # Answers with equal rewards teach nothing, though routers may still balance their experts.
        teaches = norm > 0 and measured.get("zero_variance", 0.0) < 1
        counts = teaches and learning_rate > 0
        self._num_counted += counts
        if not counts or self._is_done or not _is_looked_at(self._num_counted):
            yield
            return

        numbers = sorted(self._unseen)
        has_gradient = _have_gradient(self._optimizer, numbers)
        yield
        has_learnt = _have_learnt(self._optimizer, numbers)
        for number, *seen in zip(numbers, has_gradient, has_learnt, strict=True):
            if all(seen):
                self._unseen.discard(number)

        self._compare_ranks()
        if not self._has_followed:
            self._has_followed = True
            self._require_followed()
        if self._num_counted == FIRST_STEPS:
            self._warn(number for number in self._waiting if not self._may_wait(number))

    def conclude(self) -> None:
        """Say at the end of the run what has never moved."""
        if self._num_steps and not self._num_counted:
            logs.MODEL.warning(
                "nothing was learnt in %s: none had a gradient of the loss and a learning rate",
                counted(self._num_steps, "step"),
            )
        # After one step LoRA's A has had no gradient yet.
        if self._is_done or self._num_counted < 2:
            return

        late = [number for number in self._waiting if self._may_wait(number)]
        if self._num_counted < FIRST_STEPS:
            self._warn(number for number in self._waiting if number not in late)
        if late:
            logs.MODEL.info(
                "%s got no data in %s, so that they are as before: %s",
                counted(len(late), "trained tensor"),
                counted(self._num_counted, "step"),
                self._listed(late),
            )

    def _compare_ranks(self) -> None:
        """Note which tensors have not moved on which ranks."""
        empty = {n for n, (_, span) in enumerate(self._optimizer.parts) if span.start == span.stop}
        seen = gather((sorted(self._unseen - empty), sorted(empty)), self._world)
        self._waiting = {}
        for number in range(len(self._names)):
            ranks = [rank for rank, (unseen, _) in enumerate(seen) if number in unseen]
            holders = [rank for rank, (_, without) in enumerate(seen) if number not in without]
            if number in self._tables and len(ranks) < len(holders):
                ranks = []
            if ranks:
                self._waiting[number] = ranks

        self._is_done = not self._waiting
        if self._is_done:
            logs.MODEL.debug(
                "all %s have moved, on every rank, after %s",
                counted(len(self._names), "trained tensor"),
                counted(self._num_steps, "step"),
            )

    def _may_wait(self, number: int) -> bool:
        """True if a tensor may wait for data long after the first steps."""
        name = self._names[number]
        return is_expert(name) or not SENSES.isdisjoint(name.split("."))

    def _warn(self, numbers: Iterable[int]) -> None:
        still = list(numbers)
        if still:
            logs.MODEL.warning(
                "%d of %s have not moved in %s: %s. The loss does not depend on them, or their gradient is lost",
                len(still),
                counted(len(self._names), "trained tensor"),
                counted(self._num_counted, "step"),
                self._listed(still),
            )

    def _listed(self, numbers: Iterable[int]) -> str:
        """Return the names of tensors, those of layers together, and on which ranks if it is not all."""
        # "model.layers.*.self_attn.q_proj.weight (2, on rank 1)"
        groups = Counter[tuple[str, str]]()
        for number in numbers:
            ranks = self._waiting[number]
            where = ""
            if len(ranks) < self._world.size:
                where = f", on rank {', '.join(str(rank) for rank in ranks)}"
            groups[(re.sub(r"\.\d+\.", ".*.", self._names[number]), where)] += 1

        shown = [f"{name} ({count}{where})" for (name, where), count in groups.items()]
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        return ", ".join(shown[:MOST_NAMED]) + more

    def _require_followed(self) -> None:
        """Warn of weights in the model that are not those of the optimizer after its update."""
        differing = [name for name, weight, value in self._pairs() if not _is_copy(weight, value)]
        lost: list[str] = []
        for rank, names in enumerate(gather(differing, self._world)):
            lost += [f"{name} (rank {rank})" for name in names[:MOST_NAMED]]
        if lost:
            logs.MODEL.warning(
                "the model does not compute with the weights that are trained: %s. Its result is of no use; please report "
                "this with the versions of torch and transformers",
                ", ".join(lost),
            )

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield, of each trained tensor, its name, the numbers of this rank in the model, and those of the optimizer."""
        parts = dict(zip(self._names, self._optimizer.parts, strict=True))
        master = self._optimizer.state()["master"]
        slices = {}
        for name, parameter in self._model.named_parameters():
            if name in parts and isinstance(parameter, DTensor):
                slices[name] = parameter
            elif name in parts:
                yield name, local(parameter).reshape(-1), master[parts[name][1]]
        if not slices:
            return

        # Where this rank's slice begins in each tensor.
        begins = {}
        first = 0
        for (name, shape), shard in zip(
            self._optimizer.layout.items(), self._optimizer.shards, strict=True
        ):
            begins[name] = shard.start - first
            first += torch.Size(shape).numel()

        for weights in fsdp.gathered(self._model):
            for name in weights.keys() & slices.keys():
                span = parts[name][1]
                stop = begins[name] + span.stop - span.start
                yield name, weights[name].reshape(-1)[begins[name] : stop], master[span]


def _is_looked_at(step: int) -> bool:
    return step <= FIRST_STEPS or step & (step - 1) == 0


def _is_copy(weight: Tensor, value: Tensor) -> bool:
    return torch.equal(weight, value.to(weight.dtype))


def _tables(model: Any, names: list[str]) -> set[int]:
    """Return the numbers of the trained tensors that are tables, of which a step reads a few rows."""
    of_tables: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            of_tables.update(f"{path}.{name}" for name, _ in module.named_parameters())
    return {number for number, name in enumerate(names) if name in of_tables}


def _have_gradient(optimizer: FlatAdamW, numbers: Sequence[int]) -> list[bool]:
    """Return, for these of `parts`, whether a number of this rank has a gradient in the step that is under way."""
    flags = []
    for number in numbers:
        parameter, span = optimizer.parts[number]
        collected = optimizer.collected.get(parameter)
        gradient = optimizer.gradient[span]
        if collected is not None and collected.occurring is not None:
            gradient = collected.occurring.gradient()
        flags.append(gradient.any())
    return _values(flags)


def _have_learnt(optimizer: FlatAdamW, numbers: Sequence[int]) -> list[bool]:
    """Return, for these of `parts`, whether updates have taken up a gradient of a number of this rank."""
    state = optimizer.state()
    flags = []
    for number in numbers:
        _, span = optimizer.parts[number]
        flags.append(optimizer.moments_of(state, span).any())
    return _values(flags)


def _values(flags: Sequence[Tensor]) -> list[bool]:
    """Return the values of flags, by one copy from the device."""
    if not flags:
        return []
    return [bool(value) for value in torch.stack(list(flags)).tolist()]
