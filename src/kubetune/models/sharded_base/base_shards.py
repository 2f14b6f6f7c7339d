"""A frozen base over all ranks: each holds a part of every layer's bytes and borrows the rest while the layer runs.

A frozen base has neither gradients nor an optimizer, so it is nothing but bytes, whatever a quantiser made of them. Two
ranks, three layers, one step:

                        layer 0           layer 1           layer 2           layer 1           layer 0
                        forward           forward           both              backward          backward
    between two steps   the half of each layer's bytes
    whole meanwhile     0, 1              1, 2              2, 1              1, 0              0
    on the way          1                 2                 1                 0

Adapters, new heads and modules that learn are whole on every rank, and their
gradients are summed as those of any run. What is small (norms, biases) or used by some ranks only (towers) is whole too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import patches
from kubetune.models.patch import replaced
from kubetune.models.sharded_base.units import Unit
from kubetune.plan.memory import ROOM_TO_DRAW

# The variable by which `kubetune bench` has each unit gathered when it is used, and not before.
GATHER_LATE = "KUBETUNE_GATHER_LATE"
# The attribute of a model that says how its base is cut.
SHARDS = "kubetune_base_shards"


class BaseShards:
    """The units of a model, and which of them are whole. All ranks borrow the same units in the same order."""

    def __init__(self, units: Mapping[nn.Module, Unit], layers: Sequence[nn.Module]) -> None:
        """Hang the units of modules, which are in the order of the model, on them. `layers`: all that are no tables."""
        self.units = list(dict.fromkeys(units.values()))
        self._current: Unit | None = None
        self._is_kept = False
        self._is_late = GATHER_LATE in os.environ
        self._owners: dict[Tensor, Unit] = {}
        for unit in self.units:
            self._owners.update(dict.fromkeys(unit.tensors, unit))

        of_layers = [unit for module, unit in units.items() if module in layers]
        self._last_layer = of_layers[-1] if of_layers else None
        in_order = list(units.values())
        for number, (module, unit) in enumerate(units.items()):
            following = in_order[number + 1] if number + 1 < len(in_order) else None
            before = in_order[number - 1] if number and in_order[number - 1] in of_layers else None
            module.register_forward_pre_hook(partial(self._use, unit, following))
            module.register_forward_hook(partial(self._after_forward, unit, before))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole base, as far as it is cut."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def held_bytes(self) -> int:
        """Bytes that are here now: this rank's parts, and units that are whole or on the way."""
        whole = sum(unit.nbytes for unit in self.units if unit.is_asked_for)
        return whole + sum(unit.part.nbytes for unit in self.units)

    def borrow(self, weight: Tensor) -> None:
        """Have a weight here that is read without a call of its module, with all of its unit."""
        unit = self._owners.get(weight)
        if unit is not None:
            self._use(unit, None)

    @contextmanager
    def lending(self, weights: Iterable[Tensor], *_: object, **__: object) -> Iterator[None]:
        """Have some weights here while the block runs. PEFT asks for them where DoRA measures what it adapts."""
        for weight in weights:
            self.borrow(weight)
        yield

    def keep(self) -> None:
        """Have all units here until `close`."""
        for unit in self.units:
            unit.borrow()
        self._is_kept = True

    def close(self) -> None:
        """Give all units back."""
        self._is_kept = False
        self._current = None
        self._give_back(())

    def has_room(self, world: World) -> bool:
        """True if every rank has room for the whole base, and for answers that are drawn with it. All ranks call it."""
        has_room = False
        if world.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(world.device)
            free += torch.cuda.memory_reserved(world.device)
            free -= torch.cuda.memory_allocated(world.device)
            has_room = free >= ROOM_TO_DRAW * self.nbytes
        return not process_group.agree(not has_room, world)

    @contextmanager
    def apart(
        self, decoder: nn.Module, along: Callable[[], object], world: World
    ) -> Iterator[None]:
        """Let ranks run the decoder a different number of times while the block runs. All ranks leave it together.

        A rank that is done goes `along` with the others by a forward of its own, as they need its parts:

            rank 0    forward    forward    forward
            rank 1    forward    along      along
        """

        def begin(*_: object) -> None:
            self.close()
            process_group.agree(True, world)

        hook = decoder.register_forward_pre_hook(begin)
        try:
            yield
        finally:
            hook.remove()
            self.close()
        # Not after an error: this rank ends then, and the others notice.
        while process_group.agree(False, world):
            along()
            self.close()

    def _after_forward(
        self, unit: Unit, before: Unit | None, _: nn.Module, __: object, output: Any
    ) -> None:
        if not torch.is_grad_enabled():
            return
        # The gradient of what a layer returns is there before the layer's own backward begins.
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._use, unit, before))

    def _use(self, unit: Unit, following: Unit | None, *_: object) -> None:
        """Have a unit here, and ask for the one that is used next. The others are given back. Hooks call it."""
        # A layer that is recomputed in the backward is called while its backward is on.
        if unit is self._current or self._is_kept:
            return
        self._current = unit
        last = self._last_layer
        if following is None and last is not None and last.is_asked_for and torch.is_grad_enabled():
            # Behind the head comes the backward of the last layer.
            following = last
        if self._is_late:
            following = None

        unit.borrow()
        self._give_back((unit, following))
        if following is not None:
            following.ask()

    def _give_back(self, keeping: Sequence[Unit | None]) -> None:
        # In the order of the model, as all ranks do.
        for unit in self.units:
            if unit.is_asked_for and unit not in keeping:
                unit.give_back()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def of(lm: nn.Module) -> BaseShards | None:
    """Return how the base of a model, or of the one inside a PEFT model, is cut; None if it is not."""
    get_base_model: Any = getattr(lm, "get_base_model", None)
    inner = lm if get_base_model is None else get_base_model()
    return getattr(inner, SHARDS, None)


@contextmanager
def measured(lm: nn.Module, *, by_dora: bool) -> Iterator[None]:
    """Let adapters be put into a model while the block runs. DoRA reads the weights, a layer at a time if PEFT says when."""
    shards = of(lm)
    if shards is None or not by_dora:
        yield
        return
    if patches.READ_BY_DORA.is_known():
        with replaced(patches.READ_BY_DORA, shards.lending):
            yield
    else:
        shards.keep()
        yield
    shards.close()
