"""Attention and masks for packed batches, hooked into transformers, so that any Hugging Face model runs padding-free.

A packed batch is several sequences laid end to end; each must attend to itself only. Two documented hooks do it: an
attention function ("padding_free") that works sequence by sequence, and a mask function that *probes* the rule the
model asks for (causal, sliding window) instead of building a `[tokens, tokens]` tensor. What it cannot do exactly it
refuses with `CannotRunPaddingFree`; `padding_free.py` then falls back to one sequence at a time.
"""

from __future__ import annotations

import inspect
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

from kubetune.kernels.attention.blockwise import Rule, block_attention, paths
from kubetune.kernels.attention.joined import joined_attention
from kubetune.kernels.attention.padded import padded_attention
from kubetune.kernels.attention.varlen import varlen_attention, varlen_fits
from kubetune.models import patches

LONG = 1024  # beyond this many tokens the quadratic memory of BlockAttention costs more than SDPA's slower kernel
LONG_SHARED = (
    2 * LONG
)  # of rows with shared beginnings, whose own parts alone meet all of their keys


class CannotRunPaddingFree(RuntimeError):
    """The model asks for something that a packed batch cannot give exactly."""


@dataclass
class Packing:
    """The packed batch being run: its `cu_seqlens`, the rows whose output is wanted (None: all), and which sequences go
    on from which others (`parents` of a PrefixTree)."""

    cu_seqlens: tuple[int, ...] | None = None
    rows: Tensor | None = None
    causal: bool = True
    parents: tuple[int, ...] = ()


# One per process, not thread-local: activation checkpointing runs the forward again in autograd's own threads.
CURRENT = Packing()


@contextmanager
def packed(
    cu_seqlens: tuple[int, ...],
    rows: Tensor | None = None,
    causal: bool = True,
    parents: tuple[int, ...] = (),
) -> Iterator[None]:
    """Say what is being run. Must enclose the backward too; without it "padding_free" attention refuses to run."""
    CURRENT.cu_seqlens, CURRENT.rows, CURRENT.causal, CURRENT.parents = (
        cu_seqlens,
        rows,
        causal,
        parents,
    )
    try:
        with patches.packing_by(_packing_in_positions):
            yield
    finally:
        CURRENT.cu_seqlens, CURRENT.rows, CURRENT.causal, CURRENT.parents = None, None, True, ()


def _packing_in_positions(find: patches.Find, position_ids: Tensor) -> Any:
    """Sequences that restarting positions tell apart: on a GPU none, which would be waited for to look at them."""
    return find(position_ids) if position_ids.device.type == "cpu" else None


@lru_cache(maxsize=2)
def longest_path(cu_seqlens: tuple[int, ...], parents: tuple[int, ...]) -> tuple[int, int]:
    """Place of the longest sequence of a packed batch, with its shared beginnings, right behind which a PrefixTree puts
    it."""
    spans = max(
        paths(cu_seqlens, parents), key=lambda path: sum(span.stop - span.start for span in path)
    )
    if any(before.stop != after.start for before, after in pairwise(spans)):
        raise CannotRunPaddingFree("a shared beginning is not followed by its longest sequence")
    return spans[0].start, spans[-1].stop


class MaskRule:
    """Rule that layers get in place of a mask tensor. A model that computes with its mask fails loudly.

    `unknown`: what is wrong with it, said where a layer uses it; some models make masks that none of theirs does.
    """

    def __init__(self, window: int, unknown: str = "") -> None:
        self.window, self.unknown = window, unknown

    def __getattr__(self, name: str) -> Any:
        raise CannotRunPaddingFree(f"{_module_at_work()} computes with the attention mask itself")

    __getitem__ = __getattr__


def _module_at_work() -> str:
    """Class of the innermost module whose code runs just now."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    return "the model" if frame is None else type(frame.f_locals["self"]).__name__


def probe_mask(
    *,
    q_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> MaskRule:
    """Rule of the model's mask, found by asking it about three rows of the longest sequence.

    On a CPU the positions, which restart in each sequence, are in `mask_function` as transformers' own packing rule,
    and `cu_seqlens` that disagree with them are caught here too. On a GPU they are not, and where the rule is of places
    alone it is asked here: nothing waits for the GPU.
    """
    cu_seqlens, device = CURRENT.cu_seqlens, settings.get("device", "cpu")
    if cu_seqlens is None or q_length != cu_seqlens[-1]:
        raise CannotRunPaddingFree("a mask is made outside a packed batch")
    if attention_mask is not None and not bool(
        attention_mask.all()
    ):  # some models make one of ones
        raise CannotRunPaddingFree("a packed batch with padding")
    start, stop = longest_path(cu_seqlens, CURRENT.parents)
    length = stop - start
    if torch.device(device).type != "cpu" and not _holds_tensors(mask_function):
        start, stop, device = 0, length, "cpu"
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(start, stop, device=device)

    def row(query: int) -> Tensor:
        return mask_function(zero, zero, torch.tensor(query, device=device), keys).expand(length)

    # A mask function says of a query and keys which of them the query sees. Asked of all pairs it would fill
    # `[tokens, tokens]`; three queries tell the rules apart that we can run, and refuse the others:
    #   the first of the sequence must see itself alone, or the model is not causal (an encoder is asked otherwise);
    #   the last sees `seen` keys, which must be the nearest ones, itself included: all of them, or a window;
    #   the last but one must then see as many, one place further left: a window slides. One that does not (chunks, as
    #   in Llama 4) gives itself away here, unless the sequence fits into it, where it is the same as no window.
    # The longest sequence is asked, as a window shows only where it is shorter than what it is laid over; in others it
    # cuts nothing off. That no query sees another sequence is not asked here: keys are those of one sequence, and
    # `attend` never leaves it. The self-check on the whole model stands behind all this.
    # In one copy: a GPU is waited for in each.
    first, middle, last = torch.stack([row(start), row(max(start, stop - 2)), row(stop - 1)]).cpu()
    seen = int(last.sum())
    if not CURRENT.causal:
        if bool(first.all()) and bool(last.all()):
            return MaskRule(0)
        return MaskRule(0, "the model wants neither full nor causal attention")
    ends_with_itself = (
        bool(last[length - seen :].all()) and int(first.sum()) == 1 and bool(first[0])
    )
    slides = seen == length or (int(middle.sum()) == seen and bool(middle[length - seen - 1]))
    if not (ends_with_itself and slides):
        return MaskRule(
            0, "attention that is neither causal nor a sliding window, but of chunks or the like"
        )
    return MaskRule(0 if seen == length else seen)


def _holds_tensors(function: Callable[..., Any]) -> bool:
    """A function made of others goes by numbers of some tensor, and not only by places."""
    held = (cell.cell_contents for cell in function.__closure__ or ())
    parts = [
        each for content in held for each in (content if isinstance(content, tuple) else (content,))
    ]
    return any(
        isinstance(part, Tensor) or (callable(part) and _holds_tensors(part)) for part in parts
    )


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
    """transformers' attention signature: q, k, v `[1, heads, tokens, dim]` -> `[1, tokens, heads, dim]`."""
    cu_seqlens = CURRENT.cu_seqlens
    if cu_seqlens is None or query.shape[0] != 1 or cu_seqlens[-1] != query.shape[2]:
        raise CannotRunPaddingFree("attention outside a packed batch")
    if key.shape[2] != query.shape[2]:
        raise CannotRunPaddingFree("attention to keys that are not the tokens of the batch")
    odd = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if dropout and (
        softcap or s_aux is not None or attention_mask is None or attention_mask.window
    ):
        odd.append("attention dropout")
    if odd or not isinstance(attention_mask, MaskRule):
        raise CannotRunPaddingFree(f"attention with {', '.join(odd) or 'a mask of its own'}")
    if attention_mask.unknown:
        raise CannotRunPaddingFree(attention_mask.unknown)
    if CURRENT.causal and not getattr(module, "is_causal", True):
        raise CannotRunPaddingFree("attention that is not causal")
    window = attention_mask.window
    start, stop = longest_path(cu_seqlens, CURRENT.parents)
    if sliding_window and sliding_window < stop - start and window != sliding_window:
        raise CannotRunPaddingFree("mask and sliding_window disagree")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    rule = Rule(scale, CURRENT.causal, window, softcap or 0.0, dropout)
    if CURRENT.parents:
        return shared_attention(q, k, v, s_aux, (cu_seqlens, CURRENT.parents), rule)[None], None
    return attend(q, k, v, s_aux, cu_seqlens, rule)[None], None


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: tuple[int, ...], rule: Rule
) -> Tensor:
    """Attention within each sequence, by the best kernel at hand. q `[tokens, heads, dim]` -> the same shape."""
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
    for run, long in _runs(cu_seqlens):
        span = slice(run[0], run[-1])
        if long:
            parts.append(_sdpa(q[span], k[span], v[span], rule))
        else:
            local = tuple(end - run[0] for end in run)
            parts.append(block_attention(q[span], k[span], v[span], None, local, rule))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: tuple[tuple[int, ...], tuple[int, ...]],
    rule: Rule,
) -> Tensor:
    """The same where sequences go on from others: `layout` is `cu_seqlens` and `parents`."""
    if rule.dropout or not rule.causal:
        raise CannotRunPaddingFree(
            "shared beginnings with attention dropout, or without a causal mask"
        )
    cu_seqlens, parents = layout
    if sinks is None and not rule.softcap and not rule.window and q.shape[-1] == v.shape[-1]:
        start, stop = longest_path(cu_seqlens, parents)
        if varlen_fits(q, v) if q.is_cuda else stop - start > LONG_SHARED:
            return joined_attention(q, k, v, cu_seqlens, parents, rule.scale)
    return block_attention(q, k, v, sinks, cu_seqlens, rule, parents)


def _runs(cu_seqlens: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Stretches of short sequences together, long ones alone."""
    run = [cu_seqlens[0]]
    for start, stop in pairwise(cu_seqlens):
        if stop - start > LONG:
            if len(run) > 1:
                yield tuple(run), False
            yield (start, stop), True
            run = [stop]
        else:
            run.append(stop)
    if len(run) > 1:
        yield tuple(run), False


def _sdpa(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=rule.causal, scale=rule.scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


AttentionInterface.register("padding_free", packed_attention)
AttentionMaskInterface.register("padding_free", probe_mask)
