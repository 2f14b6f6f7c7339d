"""Every change to transformers that holds for a whole process: what, and how it is undone.

    patch                 without it
    SHARD_ON_LOAD …       a sharded model is read whole by each rank, and cut afterwards
    ROTARY                rotary embeddings run by the model's own code
    LOAD_REPORT           transformers prints a table of weights that a checkpoint lacks
    PACKING               a GPU is waited for in every forward
    SET_WEIGHT            a base that is cut over the ranks is whole on each while it is read
    READ_BY_DORA          a base that is cut over the ranks is whole on each while DoRA measures it

Whether a patch fits is read from the installed code, not from the number of its release: the name, what it takes, and
how its callers use it. If one of these is otherwise, the results are the same, slower or in more memory. Tests look
at the release that is installed, and train without any patch. Documented hooks (attention functions registered by name)
and forwards set on modules of one model are no patches.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple


class Use(NamedTuple):
    """Something in other code that a patch relies on: a text in the source of a function."""

    place: str  # `module:function`, or `module:class.method`
    text: str  # white space aside


@dataclass(frozen=True)
class Patch:
    """A name of another package that is replaced."""

    place: str  # what holds the name: `module`, or `module:class`
    name: str
    parameters: tuple[str, ...] = ()  # the first ones that it takes
    uses: tuple[Use, ...] = ()

    def owner(self) -> Any:
        """Return what holds the name. Raise ImportError or AttributeError if this version has no such place."""
        return _find(self.place)

    @cache  # noqa: B019  # the patches of this file live as long as the process
    def misfit(self) -> str:
        """Return why the patch does not fit the installed version, nothing if it fits."""
        try:
            content = vars(self.owner())[self.name]
            # The attribute that is bound to a class, as callers that name the class see it.
            is_bound = isinstance(content, classmethod)
            function = content.__func__ if is_bound else content
            if self.parameters:
                names = tuple(inspect.signature(function).parameters)[is_bound:]
                if names[: len(self.parameters)] != self.parameters:
                    return f"{self.name} takes ({', '.join(names)}); expected ({', '.join(self.parameters)})"
            for use in self.uses:
                if _squeezed(use.text) not in _squeezed(inspect.getsource(_find(use.place))):
                    return f"{use.place.rpartition(':')[2]} has no `{use.text}`"
        except (ImportError, AttributeError, KeyError):
            return f"{self.place} has no {self.name}, or has it elsewhere"
        except (OSError, TypeError, ValueError, SyntaxError) as error:
            return f"the source of {self.name} cannot be read ({error})"
        return ""

    def is_known(self) -> bool:
        """True if the installed version has the name, and uses it as the patch expects."""
        return not self.misfit()


def _find(place: str) -> Any:
    module_name, _, path = place.partition(":")
    value = import_module(module_name)
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    return value


def _squeezed(source: str) -> str:
    return "".join(source.split())


_LOADING = "transformers.core_model_loading"
_SLICING = "transformers.distributed.sharding_utils:DtensorShardOperation"

# Sharding within `from_pretrained`. transformers' own plans know some architectures only (fsdp.py).
SHARD_ON_LOAD = Patch(
    "transformers.distributed.mixin:DistributedMixin",
    "maybe_distribute_model",
    ("model", "distributed_config"),
    (
        Use(
            "transformers.modeling_utils:PreTrainedModel.from_pretrained",
            "cls.maybe_distribute_model(model,",
        ),
    ),
)
# Transposes experts that may lie in files the other way (Qwen3-VL-MoE). It would take a slice for those.
TRANSPOSE_EXPERTS = Patch(
    f"{_LOADING}:Transpose",
    "convert",
    ("self", "input_dict"),
    (
        Use(
            f"{_LOADING}:Transpose.convert",
            'kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape',
        ),
        Use(f"{_LOADING}:Transpose.convert", "if not self.check_dims:"),
    ),
)
# Reads a rank's slice from a file, also of parts that a weight is joined from (Kimi-Linear, OLMo-hybrid).
READ_SLICE = Patch(
    _SLICING,
    "shard_tensor",
    ("self", "source", "tensor_idx", "device", "dtype"),
    (
        Use(f"{_SLICING}.__init__", "self.param_ndim = param.ndim"),
        Use(f"{_SLICING}.__init__", "self._axis0_size = param.shape[0]"),
        Use(f"{_LOADING}:spawn_materialize", "device=device, dtype=dtype)"),
    ),
)
# Converts the tensors of files to weights: whole tensors become whole weights.
CONVERT_WEIGHTS = Patch(
    f"{_LOADING}:WeightConverter",
    "convert",
    ("self", "layer_name", "model"),
    (
        Use(
            f"{_LOADING}:convert_and_load_state_dict_in_model",
            "mapping.convert(first_param_name, model=model,",
        ),
        # The returned tensor is a rank's slice. Its shape is compared.
        Use(f"{_LOADING}:set_param_for_module", "expected_shape = ref._local_tensor.shape"),
        Use(f"{_LOADING}:set_param_for_module", "_dtensor_from_local_like(local_param, ref)"),
    ),
)
# Gives what no file has its first values. It takes FSDP's classes for custom code, and skips modules of custom code
# if all of their tensors were read, or if they have none, such as one that fills in a buffer of its layers (Falcon-H1).
INIT_MISSING = Patch(
    "transformers.modeling_utils:PreTrainedModel",
    "_initialize_weights",
    ("self", "module", "is_custom_code"),
    (
        Use(
            "transformers.modeling_utils:PreTrainedModel.initialize_weights",
            "smart_apply(child, child._initialize_weights, is_custom_code)",
        ),
    ),
)
# Rotary embedding, a function of the source file of each architecture, of which Llama's stands here. Each is tried on
# random input before it is replaced (fused_forwards.py).
ROTARY = Patch(
    "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb", ("q", "k", "cos", "sin")
)
# The table of weights that a checkpoint lacks, which loading.py logs in one line.
LOAD_REPORT = Patch("transformers.modeling_utils", "logger")
# Finds where sequences of a packed batch begin, by their positions. On a GPU that is waited for in every forward, and
# `cu_seqlens` tell it anyway.
PACKING = Patch(
    "transformers.masking_utils",
    "find_packed_sequence_indices",
    ("position_ids",),
    (
        Use(
            "transformers.masking_utils:_preprocess_mask_arguments",
            "packed_sequence_mask = find_packed_sequence_indices(position_ids)",
        ),
        # So nothing is done if it finds none.
        Use(
            "transformers.masking_utils:create_causal_mask",
            "if packed_sequence_mask is not None:",
        ),
    ),
)

# PEFT's way to ask others for weights that DoRA measures. It would ask DeepSpeed. Else all weights are gathered meanwhile.
READ_BY_DORA = Patch(
    "peft.tuners.lora.dora",
    "gather_params_ctx",
    ("param",),
    (
        Use(
            "peft.tuners.lora.dora:DoraLinearLayer.update_layer",
            "with gather_params_ctx(base_layer.parameters()):",
        ),
    ),
)

# Sets a weight that was read, and quantised. Else each rank holds the whole of a base that is cut, before it is.
SET_WEIGHT = Patch(
    _LOADING,
    "set_param_for_module",
    ("model", "target_name"),
    (
        Use(
            f"{_LOADING}:convert_and_load_state_dict_in_model",
            "set_param_for_module( model, target_name, param, loading_info, hf_quantizer,",
        ),
    ),
)

SHARDING_PATCHES = (
    SHARD_ON_LOAD,
    TRANSPOSE_EXPERTS,
    READ_SLICE,
    CONVERT_WEIGHTS,
    INIT_MISSING,
)
PATCHES = (*SHARDING_PATCHES, ROTARY, LOAD_REPORT, PACKING, READ_BY_DORA, SET_WEIGHT)

# Finds the sequences of a packed batch by their positions.
Find = Callable[[Any], Any]


class Replaced(AbstractContextManager[None]):
    """Within, `owner.name` is `new`."""

    # No generator: one that nobody holds any more would undo itself.

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self.owner = owner
        self.name = name
        self.new = new

    def __enter__(self) -> None:
        self.original = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.new)

    def __exit__(self, *error: object) -> None:
        setattr(self.owner, self.name, self.original)


def replaced(patch: Patch, new: Any) -> Replaced:
    """Return the context in which the name of a patch is `new`."""
    return Replaced(patch.owner(), patch.name, new)


def original_of(patch: Patch) -> Any:
    """Return what the name of a patch is now."""
    return vars(patch.owner())[patch.name]


def why_slower() -> str:
    """Return a line for the log if the patch for speed does not fit the installed version, else nothing."""
    if PACKING.is_known():
        return ""
    return (
        f"transformers {version('transformers')} finds packed sequences in a way that this kubetune does not know "
        f"({PACKING.misfit()}): its own code runs, which gives the same results and may be slower on a GPU"
    )


def why_whole() -> str:
    """Return why a model cannot be sharded while transformers reads it, nothing if it can."""
    for patch in SHARDING_PATCHES:
        if patch.misfit():
            return patch.misfit()
    return ""


def cutting_by(cut: Any) -> Replaced:
    """Return the context in which `from_pretrained` shards a model by `cut(model, …)`."""
    return replaced(SHARD_ON_LOAD, staticmethod(cut))


def reading_slices(new_head: str = "") -> ExitStack:
    """Return the context in which each rank reads its slices of a model's weights, and only these.

    `new_head`: the name of a module that transformers does not touch if no file has it: the caller draws its values.

    A rank gets the slice that it would cut from the whole weight. A weight `[4 experts, 6, 3]` on 2 ranks:

        in the file          the rank reads
        [4, 6, 3]            [2, 6, 3], a slice
        [4, 3, 6]            [2, 3, 6], which is transposed: the comparison is with the shape of a slice
        one expert a time    each whole, [6, 3]: a slice of a part is no slice of the weight. The weight that is made
                             of them is cut when it is complete
    """
    # All are made before the first is put in place, as they call transformers' own.
    replacements = [
        replaced(TRANSPOSE_EXPERTS, _transposing_slices()),
        replaced(READ_SLICE, _reading_parts_whole()),
        replaced(CONVERT_WEIGHTS, _cutting_what_is_made()),
        replaced(INIT_MISSING, _initializing_sharded(new_head)),
    ]
    undo = ExitStack()
    for replacement in replacements:
        undo.enter_context(replacement)
    return undo


def _transposing_slices() -> Callable[..., Any]:
    original = original_of(TRANSPOSE_EXPERTS)

    def convert(self: Any, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> Any:
        ((name, tensors),) = input_dict.items()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        whole_shape = kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape
        # Only the first dimension, the experts, is cut.
        if self.check_dims and tensor.shape[1:] == whole_shape[1:]:
            return {name: tensor}
        return original(self, input_dict, *patterns, **kwargs)

    return convert


def _reading_parts_whole() -> Callable[..., Any]:
    from torch import Tensor

    original = original_of(READ_SLICE)

    def shard_tensor(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        shape = source.shape if isinstance(source, Tensor) else source.get_shape()
        is_part = len(shape) == self.param_ndim and shape[0] != self._axis0_size
        if is_part:
            return source[...].to(kwargs["device"], kwargs["dtype"])
        return original(self, source, *args, **kwargs)

    return shard_tensor


def _cutting_what_is_made() -> Callable[..., Any]:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    original = original_of(CONVERT_WEIGHTS)
    cut = original_of(READ_SLICE)
    slicing = READ_SLICE.owner()
    parameters_of = cache(lambda model: dict(model.named_parameters()))

    def convert(self: Any, *args: Any, model: Any, **kwargs: Any) -> Any:
        weights = original(self, *args, model=model, **kwargs)
        return {name: cut_value(model, name, value) for name, value in weights.items()}

    def cut_value(model: Any, name: str, value: Any) -> Any:
        parameter = parameters_of(model).get(name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
            return value
        if parameter.shape != value.shape:
            return value
        return cut(
            slicing(parameter),
            value,
            device=value.device,
            dtype=value.dtype,
        )

    return convert


def _initializing_sharded(new_head: str) -> Callable[..., Any]:
    original = original_of(INIT_MISSING)

    def initialize(self: Any, module: Any, is_custom_code: bool = False) -> None:
        if new_head and module is getattr(self, new_head, None):
            return
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        has_tensors = bool(tensors)
        original(self, module, is_custom_code and has_tensors)

    return initialize


def setting_weights(note: Callable[[Any, str], None]) -> Replaced:
    """Return the context in which `note(model, name)` is called after each weight that `from_pretrained` sets."""
    original = original_of(SET_WEIGHT)

    def set_weight(model: Any, target_name: str, *args: Any, **kwargs: Any) -> None:
        original(model, target_name, *args, **kwargs)
        note(model, target_name)

    return replaced(SET_WEIGHT, set_weight)


def rotary_by(source: Any, apply: Any) -> Replaced:
    """Return the context in which the models of transformers' file `source` rotate queries and keys by `apply`."""
    return Replaced(source, ROTARY.name, apply)


def packing_by(find: Callable[[Find, Any], Any]) -> AbstractContextManager[None]:
    """Return the context in which transformers finds the sequences of a packed batch by `find(original, positions)`."""
    if not PACKING.is_known():
        return nullcontext()
    original: Find = original_of(PACKING)

    def find_sequences(position_ids: Any) -> Any:
        return find(original, position_ids)

    return replaced(PACKING, find_sequences)


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers from printing its table of weights that a checkpoint lacks."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger(LOAD_REPORT.place)
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
