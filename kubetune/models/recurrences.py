"""Recurrent modules of a model, made to start anew at each sequence of a packed batch.

Convolutions, linear attention and state spaces carry what they saw on to the next token, also where that one begins
another sequence, unless their kernels are told where sequences begin (`cu_seqlens`, `seq_idx`). transformers' own code
in torch takes neither. Such modules are found on the model at hand, whatever they are called: each is run again with
another first sequence, and where those behind it notice, it gets the sequences as rows of padded batches from then on.
Padding stands behind the tokens, unseen by what only looks back. All around it stays packed.
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

from kubetune.kernels.attention.blockwise import paths
from kubetune.models.attention_hooks import CURRENT, CannotRunPaddingFree
from kubetune.models.patches import Replaced

VARLEN_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that tell kernels where sequences begin and end."""
CALL_TOKENS = 64
"""Tokens of padding that cost about what one more call of a module does."""
CHUNK = 32
"""Tokens of a chunk on a CPU, whose length changes nothing but the rounding."""
CHANNEL_CHUNK = 8
"""The same where each channel decays by itself, so that all pairs of a chunk's tokens are compared in each."""
NOTICED = {torch.float32: 1e-6}
"""Relative change of other sequences that is no rounding, by dtype; for those that round more, HALF_NOTICED."""
HALF_NOTICED = 1e-2


class Rows(NamedTuple):
    """Sequences of a packed batch as rows of padded ones: `batches` of places `[rows, tokens]`, and where in them, laid
    end to end, each token of the packed batch is found."""

    batches: tuple[Tensor, ...]
    places: Tensor


class Cuts(NamedTuple):
    """Classes of the modules that were cut, and what takes that back."""

    kinds: tuple[str, ...]
    undo: Callable[[], None]


def cut(layers: nn.ModuleList, run: Callable[[], Any]) -> Cuts:
    """Cut what lets sequences see each other while `run` puts packed batches through `layers`, at their boundaries."""
    modules = [module for layer in layers for module in layer.modules()]
    own = {module: vars(module).get("forward") for module in modules}
    leaking: dict[type, bool] = {}
    for module in own:
        module.forward = partial(_watched, leaking, module.forward, type(module))
    with suppress(Exception):  # the judge is asked again, once what was found is cut
        run()
    _restore(own)
    found = [module for module in own if leaking.get(type(module))]
    for module in found:
        module.forward = partial(by_rows, module.forward)
    kinds = sorted({type(module).__name__ for module in found})
    return Cuts(tuple(kinds), partial(_restore, {module: own[module] for module in found}))


def _restore(own: dict[nn.Module, Any]) -> None:
    for module, forward in own.items():
        if forward is None:
            vars(module).pop("forward", None)
        else:
            module.forward = forward


def _watched(leaking: dict[type, bool], stock: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module, by rows where it lets sequences see each other; modules in it are asked first."""
    if CURRENT.cu_seqlens is None or (kind in leaking and not leaking[kind]):
        return stock(*args, **kwargs)
    if kind not in leaking:
        try:
            found = stock(*args, **kwargs)
            leaking[kind] = _leaks(stock, args, kwargs, found)
        except ValueError:  # what transformers' code in torch says to `cu_seqlens`
            leaking[kind] = True
        if not leaking[kind]:
            return found
    try:
        return by_rows(stock, *args, **kwargs)
    except ValueError as error:  # what modules around this one must not take for their own
        raise CannotRunPaddingFree(str(error)) from error


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
    others = tree_leaves(stock(*args, **kwargs))
    for theirs, other in zip(tree_leaves(found), others, strict=True):
        if _is_stream(theirs, total) and theirs.is_floating_point():
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
    rows = _rows(cu_seqlens, parents, device)

    def row(places: Tensor, value: Any) -> Any:
        if _is_stream(value, total):
            return value[0][places]
        if isinstance(value, Tensor) and total in value.shape:
            raise CannotRunPaddingFree(f"a recurrent module takes a tensor {tuple(value.shape)} of a batch")
        return value

    CURRENT.cu_seqlens = None  # modules within are cut by this already
    try:
        with _short_chunks(getattr(stock, "__self__", None), device):
            parts = [_call(stock, tree_map(partial(row, places), (args, kwargs))) for places in rows.batches]
    finally:
        CURRENT.cu_seqlens = cu_seqlens
    return _packed(parts, rows)


def _short_chunks(module: Any, device: torch.device) -> ExitStack:
    """Within, a state space or delta rule on a CPU scans chunks no longer than pays there: it fills up rows to whole
    ones."""
    undo = ExitStack()
    if device.type != "cpu":
        return undo
    size = getattr(module, "chunk_size", None)
    if isinstance(size, int) and size > CHUNK:
        undo.enter_context(Replaced(module, "chunk_size", CHUNK))
    for source, name in _chunked(tuple(base.__module__ for base in type(module).__mro__)):
        undo.enter_context(Replaced(source, name, partial(_in_short_chunks, vars(source)[name])))
    return undo


def _in_short_chunks(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    decay = kwargs.get("g")
    by_channel = isinstance(decay, Tensor) and decay.dim() == 4
    return stock(*args, **{**kwargs, "chunk_size": CHANNEL_CHUNK if by_channel else CHUNK})


@lru_cache
def _chunked(files: tuple[str, ...]) -> tuple[tuple[Any, str], ...]:
    """Functions of source files that have a longer chunk as their default, each with its file."""
    return tuple(
        (source, name)
        for source in {sys.modules[file] for file in files}
        for name, function in inspect.getmembers(source, inspect.isfunction)
        if (chunk := inspect.signature(function).parameters.get("chunk_size"))
        and isinstance(chunk.default, int)
        and chunk.default > CHUNK
    )


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
    return torch.cat([part.flatten(0, 1) for part in parts])[rows.places][None]


@lru_cache(maxsize=2)
def _rows(cu_seqlens: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> Rows:
    """Sequences by length in padded batches, so that little is padded; one that others go on from is in their rows."""
    found = list(paths(cu_seqlens, parents))
    ends = [
        torch.cat([torch.arange(span.start, span.stop) for span in path])
        for n, path in enumerate(found)
        if n not in parents
    ]
    ends.sort(key=len, reverse=True)
    batches: list[Tensor] = []
    places = torch.empty(cu_seqlens[-1], dtype=torch.long)
    offset = 0
    for start, stop in _batches([len(row) for row in ends]):
        rows = ends[start:stop]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for n, row in enumerate(rows):
            places[row] = offset + n * batch.shape[1] + torch.arange(len(row))
        offset += batch.numel()
        batches.append(batch.to(device))
    return Rows(tuple(batches), places.to(device))


def _batches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Boundaries of padded batches of rows in descending order of length: as few as padding is worth."""
    best = [0.0] * (len(lengths) + 1)
    cuts = [0] * (len(lengths) + 1)
    for stop in range(1, len(lengths) + 1):
        best[stop], cuts[stop] = min(
            (best[start] + CALL_TOKENS + lengths[start] * (stop - start), start) for start in range(stop)
        )
    found, stop = [], len(lengths)
    while stop:
        found.append((cuts[stop], stop))
        stop = cuts[stop]
    return found[::-1]
