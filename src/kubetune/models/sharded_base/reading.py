"""A frozen base that is cut while transformers reads it, so that no rank ever holds the whole.

transformers reads weights in the order of their names, and so a layer at a time, with its quantiser.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from kubetune import errors
from kubetune.base import logs
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.distributed.process_group import World
from kubetune.models import patches, weight_files
from kubetune.models.sharded_base.cutting import cut, cut_modules, named, tensors_of
from kubetune.models.sharded_base.units import Unit

# transformers' variable that keeps it from reading in threads.
READS_AHEAD_NOT = "HF_DEACTIVATE_ASYNC_LOAD"


class Reader:
    """Cuts each layer of a model as soon as transformers has read it, and the rest at the end. All ranks have one."""

    def __init__(self, world: World, copy_size: int, trained: Collection[str]) -> None:
        """Prepare to read one model. `copy_size`: ranks that share a copy. `trained`: names of modules that learn whole."""
        self._world = world
        self._copy, self._group = process_group.copy_of(world, copy_size)
        self._trained = trained
        self._units: dict[nn.Module, Unit] = {}
        self._failure: errors.KubetuneError | None = None  # of the first weight that is not finite
        self._layer_of: dict[str, nn.Module] | None = None
        self._unread: Counter[nn.Module] = Counter()
        self._whole: set[nn.Module] = set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Cut what `from_pretrained` reads while the block runs, if transformers can be made to say what it reads."""
        misfit = patches.SET_WEIGHT.misfit()
        if misfit:
            logs.MODEL.info(
                "this kubetune cannot cut a base while transformers reads it (%s): at the start each rank holds all of it "
                "once",
                misfit,
            )
            yield
            return
        # Threads would read ahead, faster than layers are cut. Other models are then read without them too.
        os.environ[READS_AHEAD_NOT] = "1"
        with patches.setting_weights(self._note):
            yield

    def cut(self, lm: Any) -> None:
        """Cut the rest of what was read. Raise ModelError on all ranks if a weight that one has read is not finite."""
        self._look_at(lm, lm)
        raise_first(process_group.gather(self._failure, self._world))
        cut(lm, self._copy, self._trained, self._units, self._group)

    def _look_at(self, lm: Any, part: nn.Module) -> None:
        """Note the first weight of a part that is not finite. Alone, this rank could not raise an error."""
        try:
            weight_files.require_finite(f"model {lm.name_or_path}", part.named_parameters())
        except errors.ModelError as error:
            self._failure = self._failure or error

    def _note(self, lm: Any, name: str) -> None:
        """Cut the layer that the weight `name` completes."""
        if self._layer_of is None:
            self._layer_of = self._layers_by_weight(lm)
            self._unread.update(self._layer_of.values())
            self._whole = named(lm, self._trained)
        layer = self._layer_of.pop(name, None)
        if layer is None:
            return
        self._unread[layer] -= 1
        if self._unread[layer]:
            return
        self._look_at(lm, layer)
        tensors = list(tensors_of(layer, self._whole).values())
        if tensors:
            self._units[layer] = Unit(tensors, self._copy, self._group)
            self._units[layer].give_back()

    def _layers_by_weight(self, lm: Any) -> dict[str, nn.Module]:
        """Return the layer of each weight, without layers that share weights with others: these are tied afterwards."""
        tied_keys = getattr(lm, "get_expanded_tied_weights_keys", None)
        if tied_keys is None:
            return {}
        tied = tied_keys(all_submodels=True)
        shared = {*tied.keys(), *tied.values()}
        names = {module: name for name, module in lm.named_modules()}
        by_weight = {}
        for layer in cut_modules(lm)[1]:
            of_layer = {f"{names[layer]}.{name}" for name, _ in layer.named_parameters()}
            if of_layer.isdisjoint(shared):
                by_weight.update(dict.fromkeys(of_layer, layer))
        return by_weight
