"""Recurrent modules of a model, made to start anew at each sequence of a packed batch.

Convolutions, linear attention and state spaces carry what they saw on to the next token, also where that one begins
another sequence, unless their kernels are told where sequences begin (`cu_seqlens`, `seq_idx`). transformers' own code
in torch takes neither. Such modules are found on the model at hand, whatever they are called: each is run again with
another first sequence, and where those behind it notice, it gets the sequences as rows of padded batches from then on.
Padding stands behind the tokens, unseen by what only looks back. All around it stays packed; and where the functions
that a module convolves and scans by are known, they alone are cut, if that gives what rows give.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kubetune.kernels.delta_rule import chunks_of, delta_rule
from kubetune.kernels.padded_rows import Rows, rows_of
from kubetune.kernels.short_convolution import short_convolution
from kubetune.models.attention_hooks import CURRENT, CannotRunPaddingFree
from kubetune.models.patches import Replaced

VARLEN_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that tell kernels where sequences begin and end."""
CHUNK = 32
"""Tokens of a chunk on a CPU, whose length changes nothing but the rounding."""
EXACT_CHUNK = 64
"""The same of the delta rule in float32, as in transformers: a packed batch is rounded as its sequences alone."""
CHANNEL_CHUNK = 8
"""The same where each channel decays by itself, so that all pairs of a chunk's tokens are compared in each."""
NOTICED = {torch.float32: 1e-6}
"""Relative change of other sequences that is no rounding, by dtype; for those that round more, HALF_NOTICED."""
HALF_NOTICED = 1e-2


class Cuts(NamedTuple):
    """Classes of the modules that were cut, and what takes that back."""

    kinds: tuple[str, ...]
    undo: Callable[[], None]


def cut(layers: nn.ModuleList, run: Callable[[], Any]) -> Cuts:
    """Cut what lets sequences see each other while `run` puts packed batches through `layers`, at their boundaries."""
    modules = [module for layer in layers for module in layer.modules()]
    own = {module: vars(module).get("forward") for module in modules}
    ways: dict[type, Callable[..., Any] | None] = {}
    for module in own:
        module.forward = partial(_watched, ways, module.forward, type(module))
    with suppress(Exception):  # the judge is asked again, once what was found is cut
        run()
    _restore(own)
    found = {module: way for module in own if (way := ways.get(type(module))) is not None}
    for module, way in found.items():
        module.forward = partial(way, module.forward)
    kinds = sorted({type(module).__name__ for module in found})
    return Cuts(tuple(kinds), partial(_restore, {module: own[module] for module in found}))


def _restore(own: dict[nn.Module, Any]) -> None:
    for module, forward in own.items():
        if forward is None:
            vars(module).pop("forward", None)
        else:
            module.forward = forward


def _watched(ways: dict[type, Any], stock: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module, cut where it lets sequences see each other; modules in it are asked first."""
    if CURRENT.cu_seqlens is None or (kind in ways and ways[kind] is None):
        return stock(*args, **kwargs)
    if kind not in ways:
        way = by_functions if _functions(sys.modules[kind.__module__]) else by_rows
        try:
            found = stock(*args, **kwargs)
            ways[kind] = way if _leaks(stock, args, kwargs, found) else None
        except ValueError:  # what transformers' code in torch says to `cu_seqlens`
            ways[kind] = way
        if ways[kind] is None:
            return found
    try:
        found = by_rows(stock, *args, **kwargs)
    except ValueError as error:  # what modules around this one must not take for their own
        raise CannotRunPaddingFree(str(error)) from error
    if ways[kind] is by_functions:
        ways[kind] = by_rows
        with suppress(Exception):  # functions of others, called as they may be
            if not _differ(by_functions(stock, *args, **kwargs), found, 0):
                ways[kind] = by_functions
    return found


def _leaks(stock: Callable[..., Any], args: Any, kwargs: Any, found: Any) -> bool:
    """Change of what a module gives for later sequences of a packed batch, when the first one is turned round."""
    assert CURRENT.cu_seqlens is not None
    _, first, *_, total = CURRENT.cu_seqlens

    def turned(value: Any) -> Any:
        if not _is_stream(value, total):
            return value
        return torch.cat([value[:, :first].flip(1), value[:, first:]], 1)

    if not any(_is_stream(leaf, total) for leaf in tree_leaves((args, kwargs))):
        return False
    args, kwargs = tree_map(turned, (args, kwargs))
    return _differ(stock(*args, **kwargs), found, first)


def _differ(found: Any, expected: Any, first: int) -> bool:
    """Difference of two outputs, for tokens from the `first` on, that is no rounding."""
    assert CURRENT.cu_seqlens is not None
    for theirs, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        if _is_stream(theirs, CURRENT.cu_seqlens[-1]) and theirs.is_floating_point():
            kept, now = theirs[:, first:].float(), other[:, first:].float()
            if not float((kept - now).norm()) <= NOTICED.get(theirs.dtype, HALF_NOTICED) * float(kept.norm()):
                return True
    return False


def _is_stream(value: Any, total: int) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (1, total)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_rows(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`stock`, each sequence of the packed batch a row of its own; as it is outside of packed batches."""
    cu_seqlens, parents = CURRENT.cu_seqlens, CURRENT.parents
    if cu_seqlens is None:
        return stock(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in VARLEN_KWARGS}
    if len(cu_seqlens) == 2:
        return stock(*args, **kwargs)
    total = cu_seqlens[-1]
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if _is_stream(leaf, total))
    rows = rows_of(cu_seqlens, parents, device)

    def row(places: Tensor, value: Any) -> Any:
        if _is_stream(value, total):
            return value[0].index_select(0, places.flatten()).unflatten(0, places.shape)
        if isinstance(value, Tensor) and total in value.shape:
            raise CannotRunPaddingFree(f"a recurrent module takes a tensor {tuple(value.shape)} of a batch")
        return value

    CURRENT.cu_seqlens = None  # modules within are cut by this already
    try:
        with _replaced(stock, short=device.type == "cpu"):
            parts = [_call(stock, tree_map(partial(row, places), (args, kwargs))) for places in rows.batches]
    finally:
        CURRENT.cu_seqlens = cu_seqlens
    return _packed(parts, rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_functions(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`stock`, of which only what convolves and scans keeps the sequences of the packed batch apart."""
    if CURRENT.cu_seqlens is None or len(CURRENT.cu_seqlens) == 2 or CURRENT.parents:
        return by_rows(stock, *args, **kwargs)
    with _replaced(stock, cut=True):
        return stock(*args, **{name: value for name, value in kwargs.items() if name not in VARLEN_KWARGS})


def _replaced(stock: Any, *, cut: bool = False, short: bool = False) -> ExitStack:
    """Within, functions of a module's source file are `cut`, or those that scan take chunks no longer than pays."""
    undo = ExitStack()
    source = sys.modules[type(getattr(stock, "__self__", None)).__module__]
    for name in _functions(source) if cut or short else ():
        theirs = vars(source)[name]
        if cut:
            undo.enter_context(Replaced(source, name, partial(CUT.get(name, _scanned), theirs)))
        elif name != CONVOLUTION:
            undo.enter_context(Replaced(source, name, partial(_in_short_chunks, theirs)))
    return undo


@lru_cache
def _functions(source: Any) -> tuple[str, ...]:
    """Names in a source file of what convolves, and of what scans chunks from a state on."""
    return tuple(
        name
        for name, function in inspect.getmembers(source, inspect.isfunction)
        if name == CONVOLUTION
        or ("chunk" in name and {"initial_state", "initial_states"} & set(inspect.signature(function).parameters))
    )


def _in_short_chunks(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    decay = kwargs.get("g")
    chunk = CHANNEL_CHUNK if isinstance(decay, Tensor) and decay.dim() == 4 else CHUNK
    return stock(*args, **{**kwargs, "chunk_size": min(chunk, kwargs.get("chunk_size", chunk))})


def _scanned(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    short = partial(_in_short_chunks, stock) if args[0].device.type == "cpu" else stock
    return by_rows(short, *args, **kwargs)


def _convolved(_: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
    activation = kwargs.get("activation")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation}")
    return short_convolution(x[0].t(), weight, bias, CURRENT.cu_seqlens or (), silu=activation is not None).t()[None]


def _learned_by_differences(stock: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    if not kwargs.get("use_qk_l2norm_in_kernel"):
        return _scanned(stock, q, k, v, **kwargs)
    size = EXACT_CHUNK if q.dtype is torch.float32 else CHUNK
    chunks = chunks_of(CURRENT.cu_seqlens or (), size, q.device)
    return delta_rule(q[0], k[0], v[0], kwargs["g"][0], kwargs["beta"][0], chunks)[None], None


CONVOLUTION = "causal_conv1d_fn"
CUT: dict[str, Callable[..., Any]] = {CONVOLUTION: _convolved, "torch_chunk_gated_delta_rule": _learned_by_differences}
"""Functions of transformers that have one of ours in their place; what scans otherwise gets rows."""


def _call(stock: Callable[..., Any], arguments: tuple[Any, Any]) -> Any:
    args, kwargs = arguments
    return stock(*args, **kwargs)


def _packed(parts: Sequence[Any], rows: Rows) -> Any:
    """Outputs of padded batches as one of the packed batch; final states of sequences, which only caches want, go."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_packed(each, rows) for each in zip(*parts, strict=True))
    if not isinstance(first, Tensor):
        return first
    if first.shape[:2] != rows.batches[0].shape:
        return None
    return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, rows.places)[None]
