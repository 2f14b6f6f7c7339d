"""Cut a frozen base over the ranks: its layers and its token tables.

Small tensors (norms, biases), towers, tensors that layers share and modules that learn stay whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from kubetune.base import logs
from kubetune.base.humanize import size
from kubetune.distributed.process_group import Group, World
from kubetune.models.sharded_base.base_shards import SHARDS, BaseShards
from kubetune.models.sharded_base.units import Unit
from kubetune.plan.linears import learns_whole
from kubetune.plan.model_shapes import TOWERS

# Share of a base that may stay whole on every rank without a warning: its norms and biases.
MOST_LEFT = 0.05
# Names of what is whole on every rank: one that has no image in its share never runs a tower.
_TOWERS = frozenset(TOWERS)


def cut(
    lm: Any,
    world: World,
    trained: Collection[str] = (),
    read: Mapping[nn.Module, Unit] | None = None,
    group: Group = None,
) -> None:
    """Cut a loaded model over the ranks of `world`, which are a `group`. All ranks call it.

    `trained`: names of modules that learn whole. `read`: layers that were cut when they were read.
    """
    lm.tie_weights()
    read = read or {}
    whole = named(lm, trained)

    modules, layers = cut_modules(lm)
    tensors = {module: tensors_of(module, whole) for module in modules if module not in read}
    # How many layers have a tensor. Zamba's layers share some, which stay whole, and so do tables that learn.
    holders = Counter(place for module in layers for place in tensors.get(module, ()))
    learning = {place for module in whole for place in tensors_of(module, set())}

    units: dict[nn.Module, Unit] = {}
    by_place: dict[tuple[int, int], Unit] = {}
    for module in modules:
        if module in read:
            units[module] = read[module]
            continue
        # A head that is tied to the embeddings has the same weight.
        tied = [by_place[place] for place in tensors[module] if place in by_place]

        to_cut = []
        for place, views in tensors[module].items():
            if place not in learning and holders[place] <= 1:
                to_cut.append(views)

        if tied:
            units[module] = tied[0]
        elif to_cut:
            units[module] = Unit(to_cut, world, group)
            by_place.update(dict.fromkeys(tensors[module], units[module]))
            units[module].give_back()

    shards = BaseShards(units, layers)
    setattr(lm, SHARDS, shards)
    _log(shards, _bytes_left(lm, whole), world)


def cut_modules(lm: Any) -> tuple[list[nn.Module], list[nn.Module]]:
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


def tensors_of(module: nn.Module, whole: set[nn.Module]) -> dict[tuple[int, int], list[Tensor]]:
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
                views = tensors.setdefault((tensor.data_ptr(), tensor.nbytes), [])
                if not any(view is tensor for view in views):
                    views.append(tensor)
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


def named(lm: nn.Module, parts: Collection[str]) -> set[nn.Module]:
    """Return the modules whose names end with one of `parts`, and all that is in them."""
    return {module for name, module in lm.named_modules() if learns_whole(f"{name}.", parts)}


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


def _is_in_tower(name: str) -> bool:
    return not _TOWERS.isdisjoint(name.split("."))


def _log(shards: BaseShards, left: int, world: World) -> None:
    if left > MOST_LEFT * shards.nbytes:
        logs.MODEL.warning(
            "%s of the base stay whole on each rank: weights that are tied to what learns, or of a kind that is not cut",
            size(left),
        )
    logs.MODEL.info(
        "the base is cut over %d ranks: each holds %s of %s, and at most two layers whole, of up to %s",
        world.size,
        size(shards.held_bytes),
        size(shards.nbytes),
        size(max(unit.nbytes for unit in shards.units)),
    )
