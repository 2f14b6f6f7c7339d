"""Attention and masks for packed batches, hooked into transformers, so that any Hugging Face model runs padding-free.

A packed batch is several sequences laid end to end; each must attend to itself only. Two documented hooks do it: an
attention function ("padding_free") that works sequence by sequence, and a mask function that *probes* the rule the
model asks for (causal, sliding window) instead of building a `[tokens, tokens]` tensor. It refuses with
`CannotRunPaddingFree` what it cannot compute exactly; `padding_free.py` then falls back to one sequence at a time.

The sequences a a a and b b, with `cu_seqlens` (0, 3, 5), and who sees whom:

               a0 a1 a2 b0 b1
    a0          x
    a1          x  x                 nothing of it is ever a tensor: `attend` cuts q, k and v at 3
    a2          x  x  x
    b0                   x
    b1                   x  x
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kubetune.kernels.attention import joined
from kubetune.kernels.attention.blockwise import Rule, block_attention, paths
from kubetune.kernels.attention.padded import padded_attention
from kubetune.kernels.attention.varlen import varlen_attention, varlen_fits
from kubetune.models import patches

# Beyond this many tokens the quadratic memory of block attention costs more than SDPA's slower kernel.
LONG = 1024
# The same of rows with shared beginnings: there only what each row has by itself meets all of the row's keys.
LONG_SHARED = 2 * LONG


class CannotRunPaddingFree(RuntimeError):
    """The model asks for something that a packed batch cannot give exactly."""


@dataclass
class Packing:
    """The packed batch that is being run."""

    # where its sequences begin and end; None: no batch is run
    cu_seqlens: tuple[int, ...] | None = None
    rows: Tensor | None = None  # int64 [rows] the tokens whose output is wanted, None: all
    causal: bool = True  # False for an encoder
    parents: tuple[int, ...] = ()  # which sequences continue which others (PrefixTree)


# One per process, not thread-local: activation checkpointing runs the forward again in autograd's own threads.
CURRENT = Packing()


@contextmanager
def packed(
    cu_seqlens: tuple[int, ...],
    rows: Tensor | None = None,
    causal: bool = True,
    parents: tuple[int, ...] = (),
) -> Iterator[None]:
    """Make this the packed batch that "padding_free" attention runs while the block runs. Without one it refuses.

    It must enclose the backward too: recomputed layers attend again there.
    """
    _set_current(Packing(cu_seqlens, rows, causal, parents))
    try:
        with patches.packing_by(_packing_in_positions):
            yield
    finally:
        _set_current(Packing())


def _set_current(packing: Packing) -> None:
    # In place: other modules have imported the object.
    CURRENT.cu_seqlens = packing.cu_seqlens
    CURRENT.rows = packing.rows
    CURRENT.causal = packing.causal
    CURRENT.parents = packing.parents


def _packing_in_positions(find: patches.Find, position_ids: Tensor) -> Any:
    """Return the sequences that restarting positions tell apart; on a GPU None, as to look at them is to wait."""
    if position_ids.device.type != "cpu":
        return None
    return find(position_ids)


@lru_cache(maxsize=2)
def longest_path(cu_seqlens: tuple[int, ...], parents: tuple[int, ...]) -> tuple[int, int]:
    """Return where the longest sequence of a packed batch starts and stops, with its shared beginnings.

    A PrefixTree puts it right after them. Of "s s a" and "s s b b", with s s shared:

        place      0 1 2 3 4
        token      s s b b a        longest: 0 to 4
    """

    def length(path: tuple[slice, ...]) -> int:
        return sum(span.stop - span.start for span in path)

    longest = max(paths(cu_seqlens, parents), key=length)
    for before, after in pairwise(longest):
        if before.stop != after.start:
            raise CannotRunPaddingFree("a shared beginning is not followed by its longest sequence")
    return longest[0].start, longest[-1].stop


class MaskRule:
    """Passed to layers in place of a mask tensor. A model that computes with its mask itself fails loudly."""

    def __init__(self, window: int, unknown: str = "") -> None:
        # How many keys a query sees: itself and those before it, of an encoder as many after it too; 0: all.
        self.window = window
        # Why the rule cannot be run. It is raised only when a layer uses it: some models make masks that no layer uses.
        self.unknown = unknown

    def __getattr__(self, name: str) -> Any:
        raise CannotRunPaddingFree("the model computes with the attention mask itself")

    __getitem__ = __getattr__


def probe_mask(
    *,
    mask_function: Callable[..., Tensor],
    q_length: int = 0,
    cache_position: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> MaskRule:
    """Return the rule of the model's mask, by asking about three queries of the longest sequence.

    On a CPU the positions, which restart in each sequence, are in `mask_function` as transformers' own packing rule,
    so that `cu_seqlens` which disagree with them are caught here too. On a GPU they are not, and a rule that
    depends only on places is asked on the CPU: nothing waits for the GPU.
    """
    cu_seqlens = CURRENT.cu_seqlens
    # Before transformers 5.4 queries are told by their places.
    if cache_position is not None:
        q_length = len(cache_position)
    if cu_seqlens is None or q_length != cu_seqlens[-1]:
        raise CannotRunPaddingFree("a mask is made outside a packed batch")
    # Some models make one of ones.
    if attention_mask is not None and not bool(attention_mask.all()):
        raise CannotRunPaddingFree("a packed batch with padding")
    # The longest sequence, as a window shows only in what is longer than the window.
    start, stop = longest_path(cu_seqlens, CURRENT.parents)
    device = settings.get("device", "cpu")
    if torch.device(device).type != "cpu" and not _holds_tensors(mask_function):
        device = "cpu"
        start, stop = 0, stop - start
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(start, stop, device=device)

    def sees(query: int) -> Tensor:
        """Return which keys of the sequence a query sees, bool `[length]`."""
        of_query = torch.tensor(query, device=device)
        return mask_function(zero, zero, of_query, keys).expand(len(keys))

    # In one copy: a GPU is waited for in each.
    rows = torch.stack([sees(start), sees(max(start, stop - 2)), sees(stop - 1)]).cpu()
    return _rule_of(*rows.bool())


def _rule_of(
    first: Tensor,
    last_but_one: Tensor,
    last: Tensor,
) -> MaskRule:
    """Return the rule by which the first and the last two queries of a sequence see its keys, bool `[length]` each."""
    # For a sequence of 6 tokens:
    #
    #                  causal         window of 3    encoder's window of 3    chunks of 4: refused
    #     first        x . . . . .    x . . . . .    x x x . . .              x . . . . .
    #     last but one x x x x x .    . . x x x .    . . x x x x              . . . . x .
    #     last         x x x x x x    . . . x x x    . . . x x x              . . . . x x
    #
    # The last query tells how long the window is. The other two must see what they see through a window of that length
    # that slides. One of chunks does not, unless the sequence fits into it; then it is the same as none.
    # That no query sees another sequence is not asked: `attend` never leaves the sequence. After all this comes the
    # self-check on the whole model.
    length = len(last)
    window = int(last.sum())
    keys = torch.arange(length)

    def expected(query: int) -> Tensor:
        distances = query - keys
        if CURRENT.causal:
            return (distances >= 0) & (distances < window)
        return distances.abs() < window

    is_known = torch.equal(first, expected(0))
    is_known = is_known and torch.equal(last_but_one, expected(max(0, length - 2)))
    is_known = is_known and torch.equal(last, expected(length - 1))
    if is_known:
        return MaskRule(0 if window == length else window)
    if CURRENT.causal:
        return MaskRule(
            0, "attention that is neither causal nor a sliding window, but of chunks or the like"
        )

    return MaskRule(0, "attention that is neither full nor a sliding window")


def _holds_tensors(function: Callable[..., Any]) -> bool:
    """True if a mask function, or one that it is made of, looks at a tensor, and not only at places."""
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if isinstance(part, Tensor):
                return True
            if callable(part) and _holds_tensors(part):
                return True
    return False


UNSUPPORTED = ("position_bias", "alibi", "head_mask", "indexer_mask")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of the packed batch, `[1, tokens, heads, dim]`, and no probabilities.

    The signature is transformers' for attention functions. q, k and v are `[1, heads, tokens, dim]`.
    """
    # Whatever is not exactly what `attend` computes is refused, before anything is computed.
    cu_seqlens = _require_batch(query, key)
    unsupported = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported:
        raise CannotRunPaddingFree(f"attention with {', '.join(unsupported)}")
    window = _require_window(attention_mask, sliding_window, cu_seqlens)
    # `sliding_window` counts even if the sequences at hand are shorter: the next ones may be longer.
    is_plain = s_aux is None and not (softcap or window or sliding_window)
    if _dropout_in_training(module, dropout) and not is_plain:
        raise CannotRunPaddingFree("attention with dropout beside a window, a soft cap or sinks")
    if CURRENT.causal and not getattr(module, "is_causal", True):
        raise CannotRunPaddingFree("attention that is not causal")

    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    rule = Rule(scale, CURRENT.causal, window, softcap or 0.0, dropout)
    if CURRENT.parents:
        output = shared_attention(
            q,
            k,
            v,
            s_aux,
            (cu_seqlens, CURRENT.parents),
            rule,
        )
    else:
        output = attend(q, k, v, s_aux, cu_seqlens, rule)

    return output[None], None


def _dropout_in_training(module: nn.Module, dropout: float) -> float:
    """Return the dropout that a layer has when it trains. The self-check runs without, and must refuse it all the same."""
    stated = getattr(module, "attention_dropout", 0.0)
    if isinstance(stated, float):
        return max(dropout, stated)
    return dropout


def _require_batch(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the `cu_seqlens` of the batch that is run. Raise CannotRunPaddingFree for tokens of anything else."""
    cu_seqlens = CURRENT.cu_seqlens
    if cu_seqlens is None or query.shape[0] != 1 or cu_seqlens[-1] != query.shape[2]:
        raise CannotRunPaddingFree("attention outside a packed batch")
    if key.shape[2] != query.shape[2]:
        raise CannotRunPaddingFree("attention to keys that are not the tokens of the batch")
    return cu_seqlens


def _require_window(
    attention_mask: MaskRule | None,
    sliding_window: int | None,
    cu_seqlens: tuple[int, ...],
) -> int:
    """Return the window of a layer, 0 for none. Raise CannotRunPaddingFree if its mask is no rule that can be run."""
    if not isinstance(attention_mask, MaskRule):
        raise CannotRunPaddingFree("attention with a mask of its own")
    if attention_mask.unknown:
        raise CannotRunPaddingFree(attention_mask.unknown)
    start, stop = longest_path(cu_seqlens, CURRENT.parents)
    # The mask's rule was read off this sequence. A window that is as long as it does not show there.
    length = stop - start
    if sliding_window and sliding_window < length and sliding_window != attention_mask.window:
        raise CannotRunPaddingFree("mask and sliding_window disagree")
    return attention_mask.window


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: tuple[int, ...],
    rule: Rule,
) -> Tensor:
    """Return the attention within each sequence, by the best kernel at hand. It has the shape of q.

    q is `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`. The kernels:

        dropout, or every token sees all others    padded_attention
        on a GPU                                   torch's own for packed batches, if it can be used
        window, soft cap, sinks                    block_attention
        else causal                                block_attention of short sequences, SDPA of each long one
    """
    plain = not rule.softcap and sinks is None
    if rule.dropout:
        return padded_attention(q, k, v, cu_seqlens, rule)
    if q.is_cuda and plain and varlen_fits(q, v):
        return varlen_attention(q, k, v, cu_seqlens, rule)
    if not rule.causal and plain and not rule.window:
        return padded_attention(q, k, v, cu_seqlens, rule)
    if not plain or rule.window:
        return block_attention(q, k, v, sinks, cu_seqlens, rule)
    parts = []
    for run in _runs(cu_seqlens):
        span = slice(run[0], run[-1])
        if len(run) == 2 and run[1] - run[0] > LONG:
            parts.append(_sdpa(q[span], k[span], v[span], rule))
        else:
            ends = tuple(end - run[0] for end in run)
            parts.append(block_attention(q[span], k[span], v[span], None, ends, rule))

    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: tuple[tuple[int, ...], tuple[int, ...]],
    rule: Rule,
) -> Tensor:
    """Return the output of `attend` for sequences that continue others. `layout` is `cu_seqlens` and `parents`."""
    if rule.dropout or not rule.causal:
        raise CannotRunPaddingFree(
            "shared beginnings with attention dropout, or without a causal mask"
        )

    cu_seqlens, parents = layout
    plain = sinks is None and not rule.softcap and not rule.window
    if plain and q.shape[-1] == v.shape[-1]:
        if q.is_cuda:
            keeps_no_scores = varlen_fits(q, v)
        else:
            start, stop = longest_path(cu_seqlens, parents)
            keeps_no_scores = stop - start > LONG_SHARED
        if keeps_no_scores and joined.is_available(q.device.type):
            return joined.joined_attention(q, k, v, cu_seqlens, parents, rule.scale)

    return block_attention(q, k, v, sinks, cu_seqlens, rule, parents)


def _runs(cu_seqlens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the ends of neighbouring short sequences together, and those of each long one by itself.

    With LONG = 1024: (0, 5, 9, 2000, 2003) is (0, 5, 9), (9, 2000) and (2000, 2003).
    """
    run = [cu_seqlens[0]]
    for start, stop in pairwise(cu_seqlens):
        if stop - start <= LONG:
            run.append(stop)
            continue
        if len(run) > 1:
            yield tuple(run)
        yield start, stop
        run = [stop]

    if len(run) > 1:
        yield tuple(run)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
) -> Tensor:
    """Return torch's attention of one sequence. q, k and v are `[tokens, heads, dim]`."""
    output = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=rule.causal,
        scale=rule.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return output[0].transpose(0, 1)


AttentionInterface.register("padding_free", packed_attention)
AttentionMaskInterface.register("padding_free", probe_mask)
