"""A frozen base over all ranks: each holds a part of every layer's bytes and borrows the rest while the layer runs.

A frozen base has neither gradients nor an optimizer, so it is nothing but bytes, whatever a quantiser made of them. They
are never seen as numbers: copies of floats may rewrite NaN patterns. Two ranks, three layers, one step:

                        layer 0           layer 1           layer 2           layer 1           layer 0
                        forward           forward           both              backward          backward
    between two steps   the half of each layer's bytes
    whole meanwhile     0, 1              1, 2              2, 1              1, 0              0
    on the way          1                 2                 1                 0

The tensors of a layer are views of one storage. It is emptied and filled again in place, so that what autograd has saved
for the backward is filled again too. Adapters, new heads and modules that learn are whole on every rank, and their
gradients are summed as those of any run. What is small (norms, biases) or used by some ranks only (towers) is whole too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kubetune import errors
from kubetune.base import fault_injection, logs
from kubetune.base.humanize import size
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.distributed.process_group import World
from kubetune.models import patches, weight_files
from kubetune.models.patch import replaced
from kubetune.plan.memory import ROOM_TO_DRAW
from kubetune.plan.model_shapes import TOWERS

# Tensors begin at multiples of so many bytes, as kernels expect of memory that is allocated.
ALIGNMENT = 256
# Share of a base that may stay whole on every rank without a warning: its norms and biases.
MOST_LEFT = 0.05
# Names of what is whole on every rank: one that has no image in its share never runs a tower.
_TOWERS = frozenset(TOWERS)
# torch 2.13 has renamed it, and warns of the old name.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# transformers' variable that keeps it from reading in threads.
READS_AHEAD_NOT = "HF_DEACTIVATE_ASYNC_LOAD"
# The variable by which `kubetune bench` has each unit gathered when it is used, and not before.
GATHER_LATE = "KUBETUNE_GATHER_LATE"
# The attribute of a model that says how its base is cut.
SHARDS = "kubetune_base_shards"


class Unit:
    """Tensors that are borrowed together: of a decoder layer, or a table of tokens."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]], world: World) -> None:
        """Keep this rank's part of the bytes. `tensors`: those with the same memory together, which become views."""
        self._arrival: Any = None  # of bytes that are on the way
        self._is_whole = True

        # Alike on all ranks, and parts of equal size:
        #
        #     tensor a     tensor b             room
        #     aaaaaaaa.... bbbbbbbbbbbbbbbb.... ....
        #     part of rank 0        part of rank 1
        places = []
        end = 0
        for tensor, *_ in tensors:
            places.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        share = -(-end // (world.size * ALIGNMENT)) * ALIGNMENT
        self._whole = torch.zeros(share * world.size, dtype=torch.uint8, device=world.device)
        for names, place in zip(tensors, places, strict=True):
            _move(names, self._whole, place)

        first = world.rank * share
        self.tensors = [tensor for names in tensors for tensor in names]
        self.part = self._whole[first : first + share].clone()
        self.nbytes = self._whole.nbytes

    @property
    def is_asked_for(self) -> bool:
        """True if the whole bytes are here or on the way."""
        return self._is_whole or self._arrival is not None

    def ask(self) -> None:
        """Begin to gather the bytes of all ranks, if they are neither here nor on the way."""
        if self.is_asked_for:
            return
        self._whole.untyped_storage().resize_(self.nbytes)
        with process_group.noticing_losses():
            self._arrival = _ALL_GATHER(self._whole, self.part, async_op=True)

    def borrow(self) -> None:
        """Have the whole bytes here."""
        if self._is_whole:
            return
        self.ask()
        with process_group.peers():
            fault_injection.reach("gather")
            self._arrival.wait()
        self._arrival = None
        self._is_whole = True

    def give_back(self) -> None:
        """Keep this rank's part alone."""
        if self._arrival is not None:
            self.borrow()
        if self._is_whole:
            self._whole.untyped_storage().resize_(0)
            self._is_whole = False


def _move(tensors: Sequence[Tensor], room: Tensor, place: int) -> None:
    """Move the bytes of a dense tensor into `room`. All `tensors`, which have this memory, become views of them."""
    data = tensors[0].data
    stretch = room[place : place + data.nbytes]
    # As they lie, whatever the order of the dimensions is.
    stretch.copy_(data.as_strided((data.numel(),), (1,)).view(torch.uint8))
    numbers = stretch.view(data.dtype)
    for tensor in tensors:
        # `.data` has a version of its own. Else each time that `room` is filled would count as a change of the weight.
        tensor.data = numbers.as_strided(
            tensor.shape, tensor.stride(), numbers.storage_offset()
        ).data


class BaseShards:
    """The units of a model, and which of them are whole. All ranks borrow the same units in the same order."""

    def __init__(self, units: Mapping[nn.Module, Unit], layers: Sequence[nn.Module]) -> None:
        """Hang the units of modules, which are in the order of the model, on them. `layers`: all that are no tables."""
        self.units = list(dict.fromkeys(units.values()))
        self._borrowed: set[Unit] = set()
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
            module.register_forward_pre_hook(partial(self._before_forward, unit, following))
            module.register_forward_hook(partial(self._after_forward, unit, before))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole base, as far as it is cut."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest unit."""
        return max(unit.nbytes for unit in self.units)

    @property
    def held_bytes(self) -> int:
        """Bytes that are here now: this rank's parts, and units that are whole or on the way."""
        whole = sum(unit.nbytes for unit in self._borrowed)
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
        self._borrowed.update(self.units)
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

    def _before_forward(self, unit: Unit, following: Unit | None, *_: object) -> None:
        self._use(unit, following)

    def _after_forward(
        self, unit: Unit, before: Unit | None, _: nn.Module, __: object, output: Any
    ) -> None:
        if not torch.is_grad_enabled():
            return
        # The gradient of what a layer returns is there before the layer's own backward begins.
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit, before))

    def _before_backward(self, unit: Unit, before: Unit | None, _: Tensor) -> None:
        self._use(unit, before)

    def _use(self, unit: Unit, following: Unit | None) -> None:
        """Have a unit here, and ask for the one that is used next. The others are given back."""
        # A layer that is recomputed in the backward is called while its backward is on.
        if unit is self._current or self._is_kept:
            return
        self._current = unit
        if following is None and torch.is_grad_enabled() and self._last_layer in self._borrowed:
            # Behind the head comes the backward of the last layer.
            following = self._last_layer
        if self._is_late:
            following = None

        keeping = [unit] if following is None else [unit, following]
        unit.borrow()
        self._give_back(keeping)
        self._borrowed.update(keeping)
        if following is not None:
            following.ask()

    def _give_back(self, keeping: Sequence[Unit]) -> None:
        # In the order of the model, as all ranks do.
        for unit in self.units:
            if unit in self._borrowed and unit not in keeping:
                unit.give_back()
                self._borrowed.discard(unit)


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


def _is_in_tower(name: str) -> bool:
    return not _TOWERS.isdisjoint(name.split("."))


def _cut_modules(lm: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that are cut, in their order, and which of them are layers: others are tables of tokens."""
    vocabulary = lm.config.get_text_config().vocab_size
    head = lm.get_output_embeddings()
    modules: list[nn.Module] = []
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for name, module in lm.named_modules():
        if module in inside or _is_in_tower(name):
            continue
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings >= vocabulary
        if is_table or module is head:
            modules.append(module)
        if isinstance(module, nn.ModuleList):
            modules.extend(module)
            layers.extend(module)
            inside.update(module.modules())
    return modules, layers


def _tensors_of(module: nn.Module, whole: set[nn.Module]) -> dict[tuple[int, int], list[Tensor]]:
    """Return the large tensors of a module, those with the same memory together; none of modules that stay `whole`."""
    tensors: dict[tuple[int, int], list[Tensor]] = {}
    for part in module.modules():
        if part in whole:
            continue
        of_part = list(part.parameters(recurse=False))
        candidates: list[Tensor] = [tensor for tensor in of_part if tensor.dim() > 1]
        for holder in (part, *of_part):
            candidates.extend(_of_quantiser(vars(holder)))
        for tensor in candidates:
            # From the first number to the last without a gap, in whatever order.
            extents = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((number - 1) * step for number, step in extents)
            if tensor.untyped_storage().nbytes() and last == tensor.numel() - 1:
                names = tensors.setdefault((tensor.data_ptr(), tensor.nbytes), [])
                if not any(known is tensor for known in names):
                    names.append(tensor)
    return tensors


def _of_quantiser(attributes: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield what bitsandbytes has hung on a module or a parameter: its codes, and the scales of blocks.

    What is smaller stays: scales of rows, and scales of scales, which it reads to make a state dict.
    """
    for name, value in attributes.items():
        if isinstance(value, Tensor) and name in ("CB", "absmax"):
            yield value
        elif type(value).__name__ in ("QuantState", "MatmulLtState") and name != "state2":
            yield from _of_quantiser(vars(value))


class Reader:
    """Cuts each layer as soon as transformers has read it, so that no rank ever holds the whole base.

    transformers reads weights in the order of their names, and so a layer at a time, with its quantiser.
    """

    def __init__(self, world: World, trained: Collection[str]) -> None:
        """Prepare to read one model. `trained`: names of modules that learn whole."""
        self.units: dict[nn.Module, Unit] = {}
        self.failure: errors.KubetuneError | None = None  # of the first weight that is not finite
        self._world = world
        self._trained = trained
        self._layer_of: dict[str, nn.Module] | None = None
        self._unread: Counter[nn.Module] = Counter()
        self._whole: set[nn.Module] = set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let `loading.load_pretrained` return a model that is cut, each layer as soon as it is read.

        They are cut when all is read if transformers cannot be made to say what it reads.
        """
        token = _READER.set(self)
        try:
            with self._noting():
                yield
        finally:
            _READER.reset(token)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        misfit = patches.SET_WEIGHT.misfit()
        if misfit:
            logs.MODEL.info(
                "this kubetune cannot cut a base while transformers reads it (%s): at the start each rank holds all of it "
                "once",
                misfit,
            )
            yield
            return
        # Threads would read ahead, faster than layers are cut.
        with patches.setting_weights(self._note), _one_at_a_time():
            yield

    def cut(self, lm: Any) -> None:
        """Cut the rest of what was read. Raise ModelError on all ranks if a weight that one has read is not finite."""
        raise_first(process_group.gather(self.failure, self._world))
        cut(lm, self._world, self._trained, self.units)

    def _note(self, lm: Any, name: str) -> None:
        """Cut the layer that the weight `name` completes."""
        if self._layer_of is None:
            self._layer_of = self._layers_by_weight(lm)
            self._unread.update(self._layer_of.values())
            self._whole = _named(lm, self._trained)
        layer = self._layer_of.pop(name, None)
        if layer is None:
            return
        self._unread[layer] -= 1
        if self._unread[layer]:
            return
        try:
            weight_files.require_finite(f"model {lm.name_or_path}", layer.named_parameters())
        except errors.ModelError as error:
            self.failure = self.failure or error
        tensors = list(_tensors_of(layer, self._whole).values())
        if tensors:
            self.units[layer] = Unit(tensors, self._world)
            self.units[layer].give_back()

    def _layers_by_weight(self, lm: Any) -> dict[str, nn.Module]:
        """Return the layer of each weight, without layers that share weights with others: these are tied afterwards."""
        tied_keys = getattr(lm, "get_expanded_tied_weights_keys", None)
        if tied_keys is None:
            return {}
        tied = tied_keys(all_submodels=True)
        shared = {*tied.keys(), *tied.values()}
        names = {module: name for name, module in lm.named_modules()}
        by_weight = {}
        for layer in _cut_modules(lm)[1]:
            of_layer = {f"{names[layer]}.{name}" for name, _ in layer.named_parameters()}
            if of_layer.isdisjoint(shared):
                by_weight.update(dict.fromkeys(of_layer, layer))
        return by_weight


# Of the model that is loaded now, if it is to be cut.
_READER: ContextVar[Reader | None] = ContextVar("_READER", default=None)


def cut_if_wanted(lm: Any) -> None:
    """Cut a model that was loaded in a block of `Reader.reading`."""
    reader = _READER.get()
    if reader is not None:
        reader.cut(lm)


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


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep transformers from reading weights in threads while the block runs."""
    before = os.environ.get(READS_AHEAD_NOT)
    os.environ[READS_AHEAD_NOT] = "1"
    try:
        yield
    finally:
        del os.environ[READS_AHEAD_NOT]
        if before is not None:
            os.environ[READS_AHEAD_NOT] = before


def _named(lm: nn.Module, parts: Collection[str]) -> set[nn.Module]:
    """Return the modules whose names end with one of `parts`, and all that is in them."""
    modules = set()
    for name, module in lm.named_modules():
        if any(f".{part}." in f".{name}." for part in parts):
            modules.add(module)
    return modules


def _bytes_left(lm: nn.Module, whole: set[nn.Module]) -> int:
    """Return the bytes outside of towers that are in no unit: they have memory though all units are given back."""
    left: dict[int, int] = {}
    for name, part in lm.named_modules():
        if part in whole or _is_in_tower(name):
            continue
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            storage = tensor.untyped_storage()
            left[storage.data_ptr()] = storage.nbytes()
    return sum(left.values())


def cut(
    lm: Any,
    world: World,
    trained: Collection[str] = (),
    read: Mapping[nn.Module, Unit] = MappingProxyType({}),
) -> None:
    """Cut a loaded model over the ranks. All ranks call it.

    `trained`: names of modules that learn whole. `read`: layers that were cut when they were read.
    """
    lm.tie_weights()
    whole = _named(lm, trained)
    modules, layers = _cut_modules(lm)
    tensors = {module: _tensors_of(module, whole) for module in modules if module not in read}
    # How many layers have a tensor. Zamba's layers share some, which stay whole, and so do tables that learn.
    holders = Counter(place for module in layers for place in tensors.get(module, ()))
    learning = {place for module in whole for place in _tensors_of(module, set())}

    units: dict[nn.Module, Unit] = {}
    by_place: dict[tuple[int, int], Unit] = {}
    for module in modules:
        if module in read:
            units[module] = read[module]
            continue
        # A head that is tied to the embeddings has the same weight.
        known = [by_place[place] for place in tensors[module] if place in by_place]
        cuttable = []
        for place, names in tensors[module].items():
            if place not in learning and holders[place] <= 1:
                cuttable.append(names)
        if known:
            units[module] = known[0]
        elif cuttable:
            units[module] = Unit(cuttable, world)
            by_place.update(dict.fromkeys(tensors[module], units[module]))
            units[module].give_back()

    shards = BaseShards(units, layers)
    setattr(lm, SHARDS, shards)
    left = _bytes_left(lm, whole)
    if left > MOST_LEFT * shards.nbytes:
        logs.MODEL.warning(
            "%s of the base stay whole on each rank: this kind of weights is not cut yet",
            size(left),
        )
    logs.MODEL.info(
        "the base is cut over %d ranks: each holds %s of %s, and at most two layers whole, of up to %s",
        world.size,
        size(shards.held_bytes),
        size(shards.nbytes),
        size(shards.largest_bytes),
    )
