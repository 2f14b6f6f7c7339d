"""Make recurrent modules of a model start again at each sequence of a packed batch.

Convolutions, linear attention and state spaces carry what they saw on to the next token, even if that token begins
another sequence. The kernels that transformers loads on a GPU take an argument for the starts of sequences:
flash-linear-attention by `cu_seqlens`, causal-conv1d and mamba-ssm by `seq_idx`. transformers' own code in torch
cannot. So each class of modules is tried on the model at hand, whatever it is called: the first sequence is
changed, and a module that gives another output for the other sequences, or refuses those arguments, gets the
sequences as rows of padded batches from then on. All around it stays packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kubetune.kernels.padded_rows import PaddedRows, rows_of
from kubetune.models.attention_hooks import CURRENT, CannotRunPaddingFree

Forward = Callable[..., Any]

# Arguments that tell kernels where sequences begin and end.
VARLEN_KWARGS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
# A larger relative change of other sequences is no rounding. In 16 bits more is rounded.
NOTICED = 1e-6
NOTICED_IN_HALF = 1e-2
# Most tokens of a chunk of Mamba-2's scan on a CPU. transformers fills every row up to 256 of them.
SCAN_CHUNK = 32


@dataclass(frozen=True)
class KeptApart:
    """The recurrent modules of a model with replaced forwards, and how to take that back."""

    modules: int  # how many forwards were replaced
    in_rows: tuple[str, ...]  # names of the classes that get sequences as rows of padded batches
    undo: Callable[[], None]  # gives the modules their own forwards back


def keep_apart(layers: nn.ModuleList, run: Callable[[], Any]) -> KeptApart:
    """Replace the forwards of modules in `layers` that let sequences see each other.

    `run` puts packed batches through the model. It may raise: the caller checks the model again afterwards.
    """
    # 1. Every module tries out, in one run, what its class needs.
    before: dict[nn.Module, Forward | None] = {}  # forwards that were set on the module itself
    for layer in layers:
        for module in layer.modules():
            before[module] = vars(module).get("forward")

    ways: dict[type, Forward | None] = {}
    for module in before:
        module.forward = partial(
            _try_module,
            ways,
            module.forward,
            type(module),
        )
    with suppress(Exception):
        run()
    _restore(before)

    # 2. Modules of a class that needs something keep it.
    replaced: dict[nn.Module, Forward | None] = {}
    in_rows: set[str] = set()
    for module, forward in before.items():
        way = ways.get(type(module))
        if way is None:
            continue
        replaced[module] = forward
        module.forward = partial(way, module.forward)
        if way is IN_ROWS:
            in_rows.add(type(module).__name__)

    return KeptApart(len(replaced), tuple(sorted(in_rows)), partial(_restore, replaced))


def _restore(before: dict[nn.Module, Forward | None]) -> None:
    for module, forward in before.items():
        # The class's own forward is seen again once nothing hides it.
        if forward is None:
            vars(module).pop("forward", None)
        else:
            module.forward = forward


def _try_module(
    ways: dict[type, Forward | None],
    stock: Forward,
    kind: type,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a module in the way that its class needs. Find out that way at the first module of the class."""
    if CURRENT.cu_seqlens is None:
        return stock(*args, **kwargs)
    if kind not in ways:
        # This runs the modules inside first, so that the innermost one that needs it is replaced.
        ways[kind] = _way_of(stock, args, kwargs)
    way = ways[kind]
    if way is None:
        return stock(*args, **kwargs)
    try:
        return way(stock, *args, **kwargs)
    except ValueError as error:
        # A ValueError would read as a refusal of `seq_idx` by the module around this one.
        raise CannotRunPaddingFree(str(error)) from error


def _way_of(
    stock: Forward,
    args: Any,
    kwargs: dict[str, Any],
) -> Forward | None:
    """Return how a module's sequences stay apart: None as it is, `with_cu_seqlens`, or `by_rows`."""
    try:
        if not _leaks(stock, args, kwargs):
            return None
    except ValueError:
        # transformers' code in torch refuses `cu_seqlens` and `seq_idx` in this way.
        return IN_ROWS

    if "cu_seq_lens_q" in kwargs:
        with suppress(Exception):  # code of others, called with an argument that it may not know
            if not _leaks(partial(with_cu_seqlens, stock), args, kwargs):
                return with_cu_seqlens

    return IN_ROWS


def _leaks(
    forward: Forward,
    args: Any,
    kwargs: dict[str, Any],
) -> bool:
    """True if later sequences of a packed batch come out otherwise once the first one is reversed."""
    assert CURRENT.cu_seqlens is not None
    first = CURRENT.cu_seqlens[1]  # tokens of the first sequence
    total = CURRENT.cu_seqlens[-1]  # of the whole batch

    def reverse_first(value: Any) -> Any:
        if not _is_stream(value, total):
            return value
        return torch.cat([value[:, :first].flip(1), value[:, first:]], 1)

    output = forward(*args, **kwargs)
    if not any(_is_stream(leaf, total) for leaf in _leaves((args, kwargs))):
        return False

    # Sequence 0 is turned round: a b c | d e becomes c b a | d e. The output for d and e must stay the same.
    changed_args, changed_kwargs = _changed(reverse_first, (args, kwargs))
    return _differ(
        forward(*changed_args, **changed_kwargs),
        output,
        first,
        total,
    )


def _differ(
    output: Any,
    expected: Any,
    first: int,
    total: int,
) -> bool:
    """True if two outputs differ by more than rounding, for tokens from the `first` on."""
    for theirs, ours in zip(_leaves(expected), _leaves(output), strict=True):
        if not (_is_stream(theirs, total) and theirs.is_floating_point()):
            continue
        kept = theirs[:, first:].float()
        difference = float((kept - ours[:, first:].float()).norm())
        noticed = NOTICED if theirs.dtype == torch.float32 else NOTICED_IN_HALF
        # `not (<=)` instead of `>`: NaN must count as a difference.
        if not difference <= noticed * float(kept.norm()):
            return True

    return False


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists and dicts hold, at any depth."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `change` made to all that its tuples, lists and dicts hold, at any depth."""
    if isinstance(value, dict):
        return {key: _changed(change, part) for key, part in value.items()}
    if isinstance(value, list):
        return [_changed(change, part) for part in value]
    if isinstance(value, tuple):
        parts = [_changed(change, part) for part in value]
        # A named tuple takes its parts one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return change(value)


def _is_stream(value: Any, total: int) -> bool:
    """True for a tensor `[1, total, …]`, which holds something for each token of the packed batch."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (1, total)


def with_cu_seqlens(stock: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run `stock` with `cu_seqlens` too, the argument that tells flash-linear-attention the sequences.

    Some modules of transformers hand on the arguments that they get, but do not make this one of `cu_seq_lens_q`.
    """
    if CURRENT.parents:  # the kernel cannot let one sequence continue another
        return by_rows(stock, *args, **kwargs)
    if "cu_seq_lens_q" in kwargs:
        kwargs["cu_seqlens"] = kwargs["cu_seq_lens_q"]
    return stock(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_rows(stock: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run `stock` on padded batches with the sequences of the packed batch as rows; without a packed batch, as it is.

    Padding is after the tokens, so that what only looks back never sees it. The sequences a a a | b | c c:

        packed batch     a a a b c c
        padded batch     a a a
                         c c .           . is a copy of the first token; its output is dropped, its gradient is 0
                         b . .
    """
    cu_seqlens = CURRENT.cu_seqlens
    if cu_seqlens is None:
        return stock(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in VARLEN_KWARGS}
    if len(cu_seqlens) == 2:
        return stock(*args, **kwargs)

    total = cu_seqlens[-1]
    device = next(leaf.device for leaf in _leaves((args, kwargs)) if _is_stream(leaf, total))
    rows = rows_of(cu_seqlens, CURRENT.parents, device)
    outputs = []
    CURRENT.cu_seqlens = None  # modules inside get padded batches, and no packed one
    try:
        for places in rows.batches:
            row_args, row_kwargs = _changed(partial(_padded, places, total), (args, kwargs))
            with _short_chunks(getattr(stock, "__self__", None), device):
                outputs.append(stock(*row_args, **row_kwargs))
    finally:
        CURRENT.cu_seqlens = cu_seqlens

    return _packed(outputs, rows)


IN_ROWS: Forward = by_rows


@contextmanager
def _short_chunks(module: Any, device: torch.device) -> Iterator[None]:
    """On a CPU, let a module that names the length of its chunks use short ones. That changes only the rounding."""
    size = getattr(module, "chunk_size", None)
    if device.type != "cpu" or not isinstance(size, int) or size <= SCAN_CHUNK:
        yield
        return
    module.chunk_size = SCAN_CHUNK
    try:
        yield
    finally:
        module.chunk_size = size


def _padded(places: Tensor, total: int, value: Any) -> Any:
    """Return what an argument is for one padded batch, `[rows, tokens, …]` of `[1, total, …]`."""
    if _is_stream(value, total):
        return value[0].index_select(0, places.flatten()).unflatten(0, places.shape)
    if isinstance(value, Tensor) and total in value.shape:
        raise CannotRunPaddingFree(
            f"a recurrent module takes a tensor {tuple(value.shape)} of a batch"
        )
    return value


def _packed(outputs: Sequence[Any], rows: PaddedRows) -> Any:
    """Return the outputs of padded batches as one of the packed batch, without final states, which only caches need."""
    # Outputs of all padded batches are of one shape of tuples, since one module made them.
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_packed(parts, rows) for parts in zip(*outputs, strict=True))
    if not isinstance(first, Tensor):
        return first
    # Not one vector for each token, so a state.
    if first.shape[:2] != rows.batches[0].shape:
        return None

    # `places` says for each token of the packed batch where it is in the batches laid end to end.
    return torch.cat([part.flatten(0, 1) for part in outputs]).index_select(0, rows.places)[None]
