"""Every change to transformers and torch that holds for a whole process: what, checked with which versions, and undone.

Each is a context manager; leaving it undoes the change. A version that a patch was not checked with, or that lacks the
name, runs by its own code: what the patch makes faster or smaller is done without it, with the same results. Tests look
for the names in the versions that are installed, and train without any patch.
Documented hooks (attention functions registered by name) and forwards set on modules of one model are no patches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import TracebackType
from typing import Any

from packaging.requirements import Requirement


@dataclass(frozen=True)
class Patch:
    """A name that is replaced: `place` (a module, or `module:class`), `name` in it, and the versions checked with."""

    place: str
    name: str
    checked: str

    def owner(self) -> Any:
        """The module or class that holds the name; ImportError or AttributeError where this version has none."""
        module, _, inner = self.place.partition(":")
        found = import_module(module)
        return getattr(found, inner) if inner else found

    @cache  # noqa: B019  # there are as many as are written below
    def is_known(self) -> bool:
        """True if the installed version is one that the patch was checked with, and has the name."""
        wanted = Requirement(self.checked)
        if not wanted.specifier.contains(version(wanted.name), prereleases=True):
            return False
        try:
            return hasattr(self.owner(), self.name)
        except (ImportError, AttributeError):
            return False


CUTTING = Patch(
    "transformers.distributed.mixin:DistributedMixin",
    "maybe_distribute_model",
    "transformers>=5.23,<5.24",
)
"""Sharding within `from_pretrained`: transformers' own plans know some architectures only (fsdp.py)."""

TURNING = Patch("transformers.core_model_loading:Transpose", "convert", "transformers>=5.23,<5.24")
"""Turning of experts that may lie in files the other way, which it takes slices for (Qwen3-VL-MoE)."""

SLICING = Patch(
    "transformers.distributed.sharding_utils:DtensorShardOperation", "shard_tensor", TURNING.checked
)
"""Reading of a rank's slice from a file, also of what a weight is joined from (Kimi-Linear, OLMo-hybrid)."""

CONVERTING = Patch("transformers.core_model_loading:WeightConverter", "convert", TURNING.checked)
"""Making of weights from those in files, which gives whole ones of whole ones."""

BEGINNING = Patch(
    "transformers.modeling_utils:PreTrainedModel", "_initialize_weights", TURNING.checked
)
"""First values of what no file has. FSDP's classes count as code of others, whose modules are passed over where all of
their tensors were read, or where they have none, as that which fills in a buffer of its layers (Falcon-H1)."""

ROTARY = Patch(
    "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb", "transformers>=5.0,<5.24"
)
"""Rotary embedding: a function of the file of each architecture, of which Llama's is named for all."""

LOAD_REPORT = Patch("transformers.modeling_utils", "logger", "transformers>=5.0,<5.24")
"""The table of weights that a checkpoint lacks, which `loading` says in one line."""

PACKING = Patch(
    "transformers.masking_utils", "find_packed_sequence_indices", "transformers>=5.0,<5.24"
)
"""Boundaries of sequences, read off their positions by asking a GPU in every forward; `cu_seqlens` say them anyway."""


PATCHES = (
    CUTTING,
    TURNING,
    SLICING,
    CONVERTING,
    BEGINNING,
    ROTARY,
    LOAD_REPORT,
    PACKING,
)


Find = Callable[[Any], Any]
"""Finds the sequences of a packed batch by their positions."""


class Replaced(AbstractContextManager[None]):
    """`owner.name` is `new`, until the end. No generator: one that is thrown away would undo itself."""

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self.owner, self.name, self.new = owner, name, new

    def __enter__(self) -> None:
        self.theirs = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.new)

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(self.owner, self.name, self.theirs)


def can_shard_while_loading() -> bool:
    """True if `cutting_by` and `reading_slices` fit the installed version."""
    return all(patch.is_known() for patch in (CUTTING, TURNING, SLICING, CONVERTING, BEGINNING))


def left_out() -> str:
    """Say which speed is left out as the installed version is unknown; empty where none is."""
    if ROTARY.is_known() and PACKING.is_known():
        return ""
    return (
        f"transformers {version('transformers')} is none that this kubetune was checked with ({PACKING.checked}): it runs "
        "by its own code alone, which gives the same and may be slower on a GPU"
    )


def cutting_by(cut: Any) -> Replaced:
    """`from_pretrained` shards by `cut(model, …)`."""
    return Replaced(CUTTING.owner(), CUTTING.name, staticmethod(cut))


def reading_slices() -> ExitStack:
    """Within, what a rank reads of a sharded model is what it would cut from the whole one.

    Weights that lie in files the other way are turned by the shape of a slice; where a file holds parts of a weight, or
    several in one, their slices are none of the weight's: those are read whole and cut when they are made.
    """
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    places, slicing = (TURNING, SLICING, CONVERTING, BEGINNING), SLICING.owner()
    parameters = cache(lambda model: dict(model.named_parameters()))
    undo, (turn, read, make, begin) = (
        ExitStack(),
        (vars(place.owner())[place.name] for place in places),
    )

    def turned(self: Any, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> Any:
        ((name, each),) = input_dict.items()
        whole = kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape
        found = each[0] if isinstance(each, list) else each
        fits = self.check_dims and found.shape[1:] == whole[1:]
        return {name: found} if fits else turn(self, input_dict, *patterns, **kwargs)

    def sliced(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        shape = source.shape if isinstance(source, Tensor) else source.get_shape()
        is_other = len(shape) == self.param_ndim and shape[0] != self._axis0_size
        return (
            source[...].to(kwargs["device"], kwargs["dtype"])
            if is_other
            else read(self, source, *args, **kwargs)
        )

    def made(self: Any, *args: Any, model: Any, **kwargs: Any) -> Any:
        def own(name: str, value: Any) -> Any:
            parameter = parameters(model).get(name)
            if not (
                isinstance(value, Tensor)
                and isinstance(parameter, DTensor)
                and parameter.shape == value.shape
            ):
                return value
            return read(slicing(parameter), value, device=value.device, dtype=value.dtype)

        found = make(self, *args, model=model, **kwargs)
        return {name: own(name, value) for name, value in found.items()}

    def begun(self: Any, module: Any, is_custom_code: bool = False) -> None:
        begin(self, module, is_custom_code and bool({*module._parameters} | {*module._buffers}))

    for patch, new in zip(places, (turned, sliced, made, begun), strict=True):
        undo.enter_context(Replaced(patch.owner(), patch.name, new))
    return undo


def rotary_by(source: Any, apply: Any) -> Replaced:
    """The models of transformers' file `source` turn queries and keys by `apply`."""
    return Replaced(source, ROTARY.name, apply)


def packing_by(find: Callable[[Find, Any], Any]) -> AbstractContextManager[None]:
    """transformers finds the sequences of a packed batch by `find(its own function, position_ids)`."""
    if not PACKING.is_known():
        return nullcontext()
    theirs: Find = vars(PACKING.owner())[PACKING.name]

    def found(position_ids: Any) -> Any:
        return find(theirs, position_ids)

    return Replaced(PACKING.owner(), PACKING.name, found)


@contextmanager
def without_load_report() -> Iterator[None]:
    """transformers does not print its table of weights that a checkpoint lacks."""

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger(LOAD_REPORT.place)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
