"""Let each rank of a sharded model read only its slices of the weights, by four patches of transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

from kubetune.models.patch import original_of, replaced
from kubetune.models.patches import CONVERT_WEIGHTS, INIT_MISSING, READ_SLICE, TRANSPOSE_EXPERTS


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
