"""Whole decoder layers through torch.compile: `training.compile: layers`.

One set of kernels serves all layers of a class, with the number of tokens left open. Two things stay outside of it:

    attention      needs `cu_seqlens`, which differ from micro-batch to micro-batch
    evaluation     would have to be compiled once more, for little gain

If the compiler fails, that is logged once, and the layers run as they are from then on. A base that is cut over the
ranks is gathered around a layer's forward (base_shards), and so outside of what is compiled.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.kernels import pointwise
from kubetune.kernels.compiling import compiling
from kubetune.models.attention_hooks import packed_attention
from kubetune.models.padding_free import (
    RECOMPUTING,
    TOLERANCE,
    language_model,
    recomputable_layers,
    unwrap,
)

Forward = Callable[..., Any]


class CompiledLayers:
    """The layers of a model that are compiled. They run compiled from `warm_up` on, until the compiler fails."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("padding_free", torch.compiler.disable(packed_attention))
        self.layers = layers
        self.dtype = dtype  # of the model's parameters
        self.is_planned = True  # until `warm_up`
        self.is_on = False

        # One compiled function for each class: layers of a class differ only in their weights.
        compiled: dict[type, Forward] = {}
        for layer in layers:
            kind = type(layer)
            if kind not in compiled:
                compiled[kind] = torch.compile(_undecorated_forward(kind), dynamic=True)
            layer.forward = MethodType(self._forward_by(compiled[kind]), layer)

    def _forward_by(self, compiled: Forward) -> Forward:
        recomputes_here = _checkpoints_in_forward()

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with _as_layers_need_it():
                    return compiled(layer, *args, **kwargs)
            except pointwise.compiler_errors() as error:
                self.give_up(error)
                return _undecorated_forward(type(layer))(layer, *args, **kwargs)

        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self.is_on and layer.training and torch.is_grad_enabled()):
                return type(layer).forward(layer, *args, **kwargs)
            if recomputes_here and layer.gradient_checkpointing:
                # As transformers does it. Inside the compiled function there are no layers left to recompute.
                return checkpoint(partial(run, layer, **kwargs), *args, **RECOMPUTING)
            return run(layer, *args, **kwargs)

        return forward

    def give_up(self, error: BaseException) -> None:
        """Run the layers as they are from now on, and log why."""
        pointwise.compile_no_more(error)
        if self.is_on:
            reason = pointwise.reason_of(error.__cause__ or error)
            logs.MODEL.warning(
                "layers run without torch.compile from now on (%s): %s",
                type(error).__name__,
                reason,
            )
        self.is_on = False


def compile_layers(model: nn.Module) -> CompiledLayers | None:
    """Return the decoder layers of a model, to be compiled in `warm_up`; None if none can be."""
    all_layers: list[Any] = recomputable_layers(language_model(unwrap(model)))
    layers = [layer for layer in all_layers if not _changes_its_weights(layer)]

    num_skipped = len(all_layers) - len(layers)
    if num_skipped:
        logs.MODEL.warning(
            "%d of %d layers have adapters on stacked experts: not compiled",
            num_skipped,
            len(all_layers),
        )

    if not layers:
        return None
    return CompiledLayers(layers, next(model.parameters()).dtype)


def warm_up(
    compiled: CompiledLayers,
    learn: Callable[[], tuple[float, float]],
    *,
    may_leave: bool = True,
) -> None:
    """Compile the layers, once, and keep that only if it gives what the plain layers give.

    `learn` returns the loss of one micro-batch and the norm of its gradient, and leaves no gradient behind. Kernels are
    laid out for the sizes that they first meet, and a resumed run is bit for bit the uninterrupted one only if these
    are the same: the micro-batch must not depend on the step.

    `may_leave`: a request to stop may interrupt `learn`. It may not if other ranks wait for this one's part of it.
    """
    if not compiled.is_planned:
        return
    # The same micro-batch is learned up to three times:
    #
    #     plain,    seed 0    loss 2.31, norm 1.70      what compiling has to reproduce
    #     plain,    seed 1    loss 2.29, norm 1.68      differs: the model has dropout
    #     compiled, seed 0    loss 2.28, norm 1.69      traces, compiles and measures in one
    #
    # Fused kernels draw the masks of dropout in another order. So with dropout numbers cannot be compared, and the
    # layers are trusted as far as the compiler is. The plain passes come first: an error in them is one of the run
    # itself, and is raised. Only errors of the compiler lead back to the plain layers.
    plain = _with_seed(0, learn)
    is_random = not _agree(_with_seed(1, learn), plain, 1e-6)

    start = time.perf_counter()
    graphs_before = graphs()
    compiled.is_planned = False
    compiled.is_on = True
    try:
        with compiling() if may_leave else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer looks at deprecated attributes
            result = _with_seed(0, learn)
    except pointwise.compiler_errors() as error:
        compiled.give_up(error)
    else:
        # Weights may be integers or 8-bit floats. Then the arithmetic is in bf16.
        tolerance = TOLERANCE.get(compiled.dtype, TOLERANCE[torch.bfloat16])
        if not (is_random or _agree(result, plain, tolerance)):
            compiled.give_up(
                ValueError(f"(loss, norm of the gradient) became {result}, without it {plain}")
            )

    if compiled.is_on:
        logs.MODEL.info(
            "%s compiled: %s, %.0f s",
            counted(len(compiled.layers), "layer"),
            counted(graphs() - graphs_before, "graph"),
            time.perf_counter() - start,
        )


def _with_seed(seed: int, learn: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    # So that two passes draw the same masks of dropout.
    torch.manual_seed(seed)
    return learn()


def _agree(
    result: tuple[float, float],
    expected: tuple[float, float],
    tolerance: float,
) -> bool:
    for number, expected_number in zip(result, expected, strict=True):
        # `not (<=)` instead of `>`: NaN must count as a difference.
        if not abs(number - expected_number) <= tolerance * abs(expected_number):
            return False
    return True


def _changes_its_weights(layer: nn.Module) -> bool:
    """True if a layer has adapters that PEFT adds to the weights in every forward, and takes out again.

    So it does for stacked experts that nothing else runs. A compiler cannot do that, and a forward that was
    given up halfway could not be run again.
    """
    from peft.tuners.lora.layer import ParamWrapper

    return any(isinstance(module, ParamWrapper) for module in layer.modules())


def graphs() -> int:
    """Return how many graphs torch.compile has made in this process; 0 if this version of torch does not count them."""
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return 0
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def _as_layers_need_it() -> Iterator[None]:
    """Set the compiler for layers, as far as this torch knows the settings."""
    of_tracer = {
        # Raise at the limit of variants, instead of running a layer plainly without a word.
        "fail_on_recompile_limit_hit": True,
        # The floats of a layer, such as the epsilon of its norms, are constants. As inputs of a graph they are lost on the
        # way to the backward of a norm's second call (qwen3).
        "specialize_float": True,
    }
    # Compile the backward with the forward, where `run` catches what fails. A rank that left a backward halfway would
    # not gather the layers that others wait for.
    of_autograd = {"force_non_lazy_backward_lowering": True}
    # Set in each forward: the settings belong to a thread, and layers are run again in autograd's own threads.
    with _set(torch._dynamo.config, of_tracer), _set(torch._functorch.config, of_autograd):
        yield


def _set(config: Any, wanted: Mapping[str, bool]) -> AbstractContextManager[None]:
    """Set what `config`, a module of settings of torch, has of what is wanted."""
    known = {name: value for name, value in wanted.items() if hasattr(config, name)}
    patch: AbstractContextManager[None] = config.patch(known)
    return patch


def _checkpoints_in_forward() -> bool:
    """True if transformers recomputes around the `forward` of layers, as new versions do, and not in `__call__`."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return False
    return "__call__" not in vars(GradientCheckpointingLayer)


def _undecorated_forward(layer: Any) -> Forward:
    """Return the forward of a class of layers without the recomputation that transformers puts around it."""
    forward: Forward = layer.forward
    if _checkpoints_in_forward():
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward
