"""Every change to transformers or PEFT that holds for a whole process: what, and how it is undone.

    patch                 without it
    SHARD_ON_LOAD …       a sharded model is read whole by each rank, and cut afterwards
    ROTARY                rotary embeddings run by the model's own code
    PACKING               a GPU is waited for in every forward
    SET_WEIGHT            a base that is cut over the ranks is whole on each while it is read
    READ_BY_DORA          a base that is cut over the ranks is whole on each while DoRA measures it

Whether a patch fits is read from the installed code, not from the number of its release: the name, what it takes, and
how its callers use it. If one of these is otherwise, the results are the same, slower or in more memory. Tests look
at the release that is installed, and train without any patch. Documented hooks (attention functions registered by name)
and forwards set on modules of one model are no patches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

from kubetune.models.patch import Patch, Replaced, Use, original_of, replaced

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
# The logger of the table of weights that a checkpoint lacks. loading.py says the same in one line.
LOAD_REPORT = "transformers.modeling_utils"
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

# PEFT's hook for gathering sharded weights before DoRA measures them. It knows only DeepSpeed. Without this patch all
# weights are gathered for that time.
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
PATCHES = (*SHARDING_PATCHES, ROTARY, PACKING, READ_BY_DORA, SET_WEIGHT)

# Finds the sequences of a packed batch by their positions.
Find = Callable[[Any], Any]


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

    logger = logging.getLogger(LOAD_REPORT)
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
