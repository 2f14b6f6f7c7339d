"""The gated delta rule (arXiv 2412.06464) over sequences laid end to end, forward and backward written out.

Sequences are cut into chunks, those of the same number of tokens before them side by side, the longest sequence first:
what happens within chunks is a few products of all of them, and states go on from each chunk to the next of all
sequences that have one. Only last chunks are filled up.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

EPSILON = 1e-6
"""Added to the squared length of a key or query, which 0 would be divided by."""


class Chunks(NamedTuple):
    """Chunks of a packed batch: the token at each of their places, `tokens` `[chunks, size]`, which are `filled`, the
    `places` `[tokens]` of the batch's tokens among them, and how many sequences have a first, second … chunk; and where
    the sequences begin and end."""

    tokens: Tensor
    filled: Tensor
    places: Tensor
    alive: tuple[int, ...]
    cu_seqlens: tuple[int, ...]


@lru_cache(maxsize=4)
def chunks_of(cu_seqlens: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    """Chunks of `size` tokens of a packed batch."""
    spans = sorted(pairwise(cu_seqlens), key=lambda span: span[0] - span[1])
    counts = np.array([-(-(stop - start) // size) for start, stop in spans])
    alive = [int((counts > step).sum()) for step in range(counts[0])]
    first = np.concatenate([[0], np.cumsum(alive)])
    places = np.empty(cu_seqlens[-1], np.int64)
    for row, (start, stop) in enumerate(spans):
        step, place = np.divmod(np.arange(stop - start), size)
        places[start:stop] = (first[step] + row) * size + place
    tokens, filled = np.zeros(first[-1] * size, np.int64), np.zeros(first[-1] * size, bool)
    tokens[places], filled[places] = np.arange(len(places)), True
    found = (torch.from_numpy(each).to(device) for each in (tokens, filled, places))
    flat_tokens, flat_filled, where = found
    return Chunks(flat_tokens.view(-1, size), flat_filled.view(-1, size), where, tuple(alive), cu_seqlens)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """`[tokens, heads, value width]`, of `q` and `k` `[tokens, key heads, width]`, which are made of length 1, `v`, and
    of each head the logarithm of its decay, `g`, and its rate, `beta`, `[tokens, heads]`."""
    return cast(Tensor, _DeltaRule.apply(q, k, v, g, beta, chunks))  # type: ignore[no-untyped-call]


class _Layout(NamedTuple):
    """Order of what belongs to tokens, `[parts, tokens, heads, width]`, and of the same in chunks, `[chunks, heads,
    parts × size, width]`."""

    chunks: Chunks
    heads: int

    def spread(self, x: Tensor) -> Tensor:
        """Chunks of `x`, whose heads may be fewer: each is several then."""
        parts, total, own, width = x.shape
        head = torch.arange(self.heads, device=x.device) // (self.heads // own)
        part = torch.arange(parts, device=x.device) * total
        rows = (self.chunks.tokens[:, None, None] + part[:, None]) * own + head[:, None, None]
        return x.reshape(-1, width).index_select(0, rows.flatten()).view(len(rows), self.heads, -1, width)

    def gather(self, x: Tensor) -> Tensor:
        """Tokens of chunks."""
        size = self.chunks.tokens.shape[1]
        parts = x.shape[2] // size
        head, part = (torch.arange(n, device=x.device) for n in (self.heads, parts))
        chunk, place = self.chunks.places // size, self.chunks.places % size
        rows = ((chunk[:, None] * self.heads + head) * parts + part[:, None, None]) * size + place[:, None]
        return x.reshape(-1, x.shape[-1]).index_select(0, rows.flatten()).view(*rows.shape, -1)

    def spread_numbers(self, x: Tensor) -> Tensor:
        """`[chunks, heads, size, 1]` of `x` `[tokens, heads]`, 0 where nothing is filled."""
        found = x.float()[self.chunks.tokens].mul_(self.chunks.filled[..., None])
        return found.transpose(1, 2).contiguous().unsqueeze(-1)

    def gather_numbers(self, x: Tensor) -> Tensor:
        """`[tokens, heads]` of `x` `[chunks, heads, size]`."""
        return x.transpose(1, 2).reshape(-1, self.heads).index_select(0, self.chunks.places)

    def steps(self) -> list[slice]:
        """Chunks that are gone through at once, in the order of their states."""
        return [slice(*span) for span in pairwise(accumulate(self.chunks.alive, initial=0))]


class _Decayed(NamedTuple):
    """Of chunks: queries and keys times their rates, side by side, `left`, and `keys`; `left` after the decays since
    the chunk's beginning, `kept`, and keys until its end, `late`; those decays, `grown` and `rest`, and from each token
    to a later one, `pairs`."""

    left: Tensor
    keys: Tensor
    kept: Tensor
    late: Tensor
    grown: Tensor
    rest: Tensor
    pairs: Tensor


def _decayed(left: Tensor, rate: Tensor, sums: Tensor) -> _Decayed:
    """Decays of queries and keys of length 1, side by side, which become `left`."""
    size = sums.shape[2]
    keys = left[:, :, size:].clone()
    left[:, :, :size] *= left.shape[-1] ** -0.5
    left[:, :, size:] *= rate
    grown, rest = sums.exp(), (sums[:, :, -1:] - sums).exp_()
    pairs = (sums - sums.mT).tril_().exp_().tril_()  # above the diagonal they would overflow
    return _Decayed(left, keys, _halves(left).mul(grown.unsqueeze(2)).flatten(2, 3), keys * rest, grown, rest, pairs)


def _halves(both: Tensor) -> Tensor:
    """Of queries and of keys, `[chunks, heads, 2, size, …]`."""
    return cast(Tensor, both.unflatten(2, (2, -1)))


def _unit(q: Tensor, k: Tensor, spans: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Vectors of length 1, `[2, tokens, heads, width]`, and what they were multiplied by. A CPU adds squares in an
    order that depends on number and strides of the vectors: those of each of `spans` are added by themselves."""
    wide, scales = (q.float(), k.float()), []
    for x in wide:
        squares = (x * x).transpose(0, 1)
        found = [squares[:, start:stop].sum(-1) for start, stop in spans]
        scales.append(torch.cat(found, 1).add_(EPSILON).rsqrt_().t())
    scale = torch.stack(scales).unsqueeze(-1)
    return torch.stack(wide) * scale, scale


def _unit_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of vectors; that of a head which was several is their sum."""
    grad = grad.unflatten(2, (unit.shape[2], -1)).sum(3)
    return grad.addcmul_(unit, torch.linalg.vecdot(grad, unit).unsqueeze(-1), value=-1).mul_(scale)


class _DeltaRule(Function):
    """Of each chunk, with q and k of length 1, q divided by the root of their width, b = β k, c the sums of g within it
    and S the state before it:

    A = (q kᵀ) e^(cᵢ - cⱼ), j ≤ i        M = (b kᵀ) e^(cᵢ - cⱼ), j < i        U, W = (1 + M)⁻¹ (β v, e^c b)
    u = U - W S        o = e^c (q S) + A u        S' = e^(c_end) S + (e^(c_end - c) k)ᵀ u

    All of it is rounded where transformers rounds, whose models make a difference of the last digit tenfold.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
        layout, size, width = _Layout(chunks, v.shape[1]), chunks.tokens.shape[1], v.shape[-1]
        spans = tuple(pairwise(chunks.cu_seqlens))
        if k.shape[1] != v.shape[1] or q.device.type != "cpu":  # transformers repeats them, one vector after another
            q, k, spans = q.contiguous(), k.contiguous(), ((0, len(q)),)
        unit, scale = _unit(q, k, spans)
        rate, sums = layout.spread_numbers(beta), layout.spread_numbers(g).cumsum(2)
        decayed = _decayed(layout.spread(unit), rate, sums)
        scores = _halves(torch.matmul(decayed.left, decayed.keys.mT)).mul_(decayed.pairs.unsqueeze(2))
        x = layout.spread(v.float()[None])
        known = torch.cat([x * rate, decayed.kept[:, :, size:]], -1)
        mixing = scores[:, :, 1].contiguous()  # strided, it would be solved by sums in another order
        solved = torch.linalg.solve_triangular(mixing, known, upper=False, unitriangular=True)
        made, new, states = torch.empty_like(x), torch.empty_like(x), list[Tensor]()
        state = x.new_zeros(chunks.alive[0], layout.heads, q.shape[-1], width)
        for at in layout.steps():
            states.append(state[: at.stop - at.start])
            torch.sub(solved[at, ..., :width], torch.matmul(solved[at, ..., width:], states[-1]), out=new[at])
            made[at] = torch.matmul(decayed.kept[at, :, :size], states[-1])
            state = (states[-1] * decayed.grown[at, :, -1:]).add_(torch.matmul(decayed.late[at].mT, new[at]))
        made += torch.matmul(scores[:, :, 0], new)
        ctx.save_for_backward(unit, scale, sums, rate, scores, solved, x, new, torch.cat(states))
        ctx.layout, ctx.dtypes = layout, [each.dtype for each in (q, k, v, g, beta)]
        return layout.gather(made)[0].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        unit, scale, sums, rate, scores, solved, x, new, states = ctx.saved_tensors
        layout, size, width = ctx.layout, x.shape[2], x.shape[-1]
        decayed = _decayed(layout.spread(unit), rate, sums)
        d_made = layout.spread(grad.float()[None]).mul_(layout.chunks.filled[:, None, :, None])
        d_new = torch.matmul(scores[:, :, 0].mT, d_made)
        d_seen, d_states = torch.cat([d_made, d_made], 2), torch.zeros_like(states)
        reading = torch.cat([decayed.kept[:, :, :size], solved[..., width:]], 2)
        state = states[:0]
        for at in reversed(layout.steps()):
            d_states[at][: len(state)] = state
            d_new[at] += torch.matmul(decayed.late[at], d_states[at])
            torch.neg(d_new[at], out=d_seen[at, :, size:])
            state = torch.matmul(reading[at].mT, d_seen[at]).addcmul_(d_states[at], decayed.grown[at, :, -1:])
        d_kept, d_late = torch.matmul(d_seen, states.mT), torch.matmul(new, d_states.mT)
        found = torch.cat([d_new, d_kept[:, :, size:]], -1)
        mixing = scores[:, :, 1].contiguous()
        # From the right, by the matrix as it lies: twice as fast as from the left by its transpose.
        found = torch.linalg.solve_triangular(mixing, found.mT, upper=False, left=False, unitriangular=True).mT
        d_mixing = torch.matmul(found, solved.mT).neg_().tril_(-1)
        d_scores = torch.stack([torch.matmul(d_made, new.mT).tril_(), d_mixing], 2)
        d_x, d_kept[:, :, size:] = found[..., :width], found[..., width:]
        # A sum of g lets what comes after it grow, and what comes before it fall.
        d_pairs = (d_scores * scores).sum(2)
        until = torch.linalg.vecdot(d_late, decayed.late)
        through = torch.linalg.vecdot(d_states.flatten(2), states.flatten(2)) * decayed.grown[:, :, -1, 0]
        d_sums = d_pairs.sum(-1) - d_pairs.sum(-2) - until + _halves(torch.linalg.vecdot(d_kept, decayed.kept)).sum(2)
        d_sums[:, :, -1] += until.sum(-1) + through
        d_scores = d_scores.mul_(decayed.pairs.unsqueeze(2)).flatten(2, 3)
        d_both = torch.matmul(d_scores, decayed.keys).addcmul_(d_kept, torch.cat([decayed.grown] * 2, 2))
        d_rate = torch.linalg.vecdot(d_both[:, :, size:], decayed.keys) + torch.linalg.vecdot(d_x, x)
        d_both[:, :, :size] *= unit.shape[-1] ** -0.5
        d_both[:, :, size:] *= rate
        d_both[:, :, size:] += torch.matmul(d_scores.mT, decayed.left).addcmul_(d_late, decayed.rest)
        d_q, d_k = _unit_backward(layout.gather(d_both), unit, scale)
        d_g = layout.gather_numbers(d_sums.flip(2).cumsum(2).flip(2))
        results = (d_q, d_k, layout.gather(d_x * rate)[0], d_g, layout.gather_numbers(d_rate))
        return *(each.to(dtype) for each, dtype in zip(results, ctx.dtypes, strict=True)), None
