"""Whole decoder layers through torch.compile: `training.compile: layers`.

One set of kernels serves all layers of a kind, with the number of tokens left open. Attention stays outside of what is
compiled: it goes by `cu_seqlens`, which are others in every micro-batch, and so does the evaluation,
which would be compiled once more for little. What cannot be compiled is said once, and the layers then run as they are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.base.signals import compiling
from kubetune.kernels import pointwise
from kubetune.models.attention_hooks import packed_attention
from kubetune.models.padding_free import TOLERANCE, language_model, recomputable_layers, unwrap


class CompiledLayers:
    """The layers of a model that are compiled, from `warm_up` on and until something stands in the way."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("padding_free", torch.compiler.disable(packed_attention))
        self.layers, self.dtype = layers, dtype
        self.is_planned, self.is_on = True, False
        compiled: dict[type, Callable[..., Any]] = {}
        for layer in layers:
            if type(layer) not in compiled:
                compiled[type(layer)] = torch.compile(_forward_itself(type(layer)), dynamic=True)
            layer.forward = MethodType(self._forward_by(compiled[type(layer)]), layer)

    def _forward_by(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        recomputes_here = _checkpoints_in_forward()

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with _failing_at_the_limit():
                    return compiled(layer, *args, **kwargs)
            except pointwise.compiler_errors() as error:
                self.give_up(error)
                return _forward_itself(type(layer))(layer, *args, **kwargs)

        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self.is_on and layer.training and torch.is_grad_enabled()):
                return type(layer).forward(layer, *args, **kwargs)
            if recomputes_here and layer.gradient_checkpointing:
                # As transformers does it; around what is compiled, since nothing within could be taken apart.
                return layer._gradient_checkpointing_func(partial(run, layer, **kwargs), *args)
            return run(layer, *args, **kwargs)

        return forward

    def give_up(self, error: BaseException) -> None:
        """Run the layers as they are from now on, and say why."""
        pointwise.compile_no_more(error)
        if self.is_on:
            said = pointwise.reason_of(error.__cause__ or error)
            logs.MODEL.warning(
                "layers run without torch.compile from now on (%s): %s", type(error).__name__, said
            )
        self.is_on = False


def compile_layers(model: nn.Module) -> CompiledLayers | None:
    """Decoder layers of a model whose forward in training is compiled from `warm_up` on; None where none can be."""
    lm = unwrap(model)
    found: list[Any] = recomputable_layers(language_model(lm))
    layers = [layer for layer in found if not _changes_itself(layer)]
    if left := len(found) - len(layers):
        logs.MODEL.warning(
            "%d of %d layers have adapters on stacked experts: not compiled", left, len(found)
        )
    return CompiledLayers(layers, next(model.parameters()).dtype) if layers else None


def warm_up(
    compiled: CompiledLayers, learn: Callable[[], tuple[float, float]], *, may_leave: bool = True
) -> None:
    """Compile the layers, once, by `learn`: loss and norm of the gradient of one micro-batch, and nothing left.

    Kernels are laid out for the sizes they first meet. A resumed run gives bit for bit what the uninterrupted one does
    only where these are the same, so `learn` must not depend on the step. What it gives must be as without compiling,
    where it is at all the same from one seed to the next.

    `may_leave`: a stop may break `learn` off. Not where other ranks wait for this one's part of it.
    """
    if not compiled.is_planned:
        return
    # The same micro-batch is trained on up to three times, and its gradient thrown away:
    #   1. as it is, with seed 0: what compiling has to reproduce;
    #   2. as it is, with seed 1: where that differs (dropout), masks are drawn in another order by fused kernels, so
    #      numbers cannot be compared, and the layers are trusted as far as the compiler is;
    #   3. compiled, with seed 0: traces, compiles and measures in one. Beyond rounding it must equal the first.
    # The order matters: the plain passes come first, so that a failure of theirs is the run's own and shows as such;
    # errors of the compiler alone lead back to the plain form, which every later step then takes without asking.
    plain = _with_seed(0, learn)
    is_random = not _agree(_with_seed(1, learn), plain, 1e-6)
    began, before = time.perf_counter(), graphs()
    compiled.is_planned, compiled.is_on = False, True
    try:
        with compiling() if may_leave else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the tracer itself looks at and makes
            found = _with_seed(0, learn)
    except pointwise.compiler_errors() as error:
        compiled.give_up(error)
    else:
        # What is computed with, where the first weights are integers or 8-bit floats.
        tolerance = TOLERANCE.get(compiled.dtype, TOLERANCE[torch.bfloat16])
        if not (is_random or _agree(found, plain, tolerance)):
            compiled.give_up(
                ValueError(f"(loss, norm of the gradient) became {found}, without it {plain}")
            )
    if compiled.is_on:
        seconds = time.perf_counter() - began
        layers, made = counted(len(compiled.layers), "layer"), counted(graphs() - before, "graph")
        logs.MODEL.info("%s compiled: %s, %.0f s", layers, made, seconds)


def _with_seed(seed: int, learn: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    torch.manual_seed(seed)
    return learn()


def _agree(found: tuple[float, float], expected: tuple[float, float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance * abs(b) for a, b in zip(found, expected, strict=True))


def _changes_itself(layer: nn.Module) -> bool:
    """Presence of adapters on stacked experts in a layer: where nothing else runs them, PEFT puts these in and out of
    the weights in every forward.

    That is no work for a compiler, and a forward given up halfway could not be run again.
    """
    from peft.tuners.lora.layer import ParamWrapper

    return any(isinstance(module, ParamWrapper) for module in layer.modules())


def graphs() -> int:
    """Number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def _failing_at_the_limit() -> Iterator[None]:
    # Such settings belong to a thread, and layers are run again in autograd's own.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def _checkpoints_in_forward() -> bool:
    """Recomputation stands around the forward of layers, as in transformers of late, and not in `__call__`."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return False
    return "__call__" not in vars(GradientCheckpointingLayer)


def _forward_itself(layer: Any) -> Callable[..., Any]:
    """The forward of a class of layers without recomputation around it."""
    forward: Callable[..., Any] = (
        layer.forward.__wrapped__ if _checkpoints_in_forward() else layer.forward
    )
    return forward
