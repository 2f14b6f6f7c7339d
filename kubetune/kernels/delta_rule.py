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
    `places` `[tokens]` of the batch's tokens among them, and how many sequences have a first, second … chunk."""

    tokens: Tensor
    filled: Tensor
    places: Tensor
    alive: tuple[int, ...]


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
    return Chunks(flat_tokens.view(-1, size), flat_filled.view(-1, size), where, tuple(alive))


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
    """Queries and keys of chunks, side by side, after the decays since the chunk's beginning, `kept`, and keys until
    its end, `late`; those decays, `grown` and `rest`, and from each token to a later one, `pairs`."""

    kept: Tensor
    late: Tensor
    grown: Tensor
    rest: Tensor
    pairs: Tensor


def _decayed(both: Tensor, sums: Tensor) -> _Decayed:
    size = sums.shape[2]
    grown, rest = sums.exp(), (sums[:, :, -1:] - sums).exp_()
    pairs = (sums - sums.mT).tril_().exp_().tril_()  # above the diagonal they would overflow
    return _Decayed(_halves(both).mul(grown.unsqueeze(2)).flatten(2, 3), both[:, :, size:] * rest, grown, rest, pairs)


def _halves(both: Tensor) -> Tensor:
    """Of queries and of keys, `[chunks, heads, 2, size, …]`."""
    return cast(Tensor, both.unflatten(2, (2, -1)))


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of length 1, and what they were multiplied by."""
    scale = torch.linalg.vecdot(x, x).add_(EPSILON).rsqrt_().unsqueeze(-1)
    return x * scale, scale


def _unit_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of vectors; that of a head which was several is their sum."""
    grad = grad.unflatten(2, (unit.shape[2], -1)).sum(3)
    return grad.addcmul_(unit, torch.linalg.vecdot(grad, unit).unsqueeze(-1), value=-1).mul_(scale)


class _DeltaRule(Function):
    """Of each chunk, with q and k of length 1, c the sums of g within it and S the state before it:

    A = (q kᵀ) e^(cᵢ - cⱼ), j ≤ i        M = (k kᵀ) e^(cᵢ - cⱼ), j < i        R = (1 + β M)⁻¹
    x = v - e^c (k S)        u = R (β x)        o = e^c (q S) + A u        S' = e^(c_end) S + (e^(c_end - c) k)ᵀ u
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
        layout, size = _Layout(chunks, v.shape[1]), chunks.tokens.shape[1]
        unit, scale = _unit(torch.stack([q, k]).float())
        both = layout.spread(unit)
        rate, sums = layout.spread_numbers(beta), layout.spread_numbers(g).cumsum(2)
        decayed = _decayed(both, sums)
        scores = _halves(torch.matmul(both, both[:, :, size:].mT)).mul_(decayed.pairs.unsqueeze(2))
        attention, mixing = scores[:, :, 0], scores[:, :, 1].tril_(-1)
        eye = torch.eye(size, device=q.device).expand_as(mixing)
        inverse = torch.linalg.solve_triangular(mixing * rate, eye, upper=False, unitriangular=True)
        x = layout.spread(v.float()[None])
        made, new, states = torch.empty_like(x), torch.empty_like(x), list[Tensor]()
        state = x.new_zeros(chunks.alive[0], layout.heads, q.shape[-1], v.shape[-1])
        for at in layout.steps():
            states.append(state[: at.stop - at.start])
            seen = torch.matmul(decayed.kept[at], states[-1])
            made[at] = seen[:, :, :size]
            new[at] = torch.matmul(inverse[at], x[at].sub_(seen[:, :, size:]) * rate[at])
            state = torch.matmul(decayed.late[at].mT, new[at]).addcmul_(states[-1], decayed.grown[at, :, -1:])
        made += torch.matmul(attention, new)
        ctx.save_for_backward(unit, scale, sums, rate, scores, inverse, x, new, torch.cat(states))
        ctx.layout, ctx.dtypes = layout, [each.dtype for each in (q, k, v, g, beta)]
        return layout.gather(made)[0].mul_(q.shape[-1] ** -0.5).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        unit, scale, sums, rate, scores, inverse, x, new, states = ctx.saved_tensors
        layout, size = ctx.layout, x.shape[2]
        both = layout.spread(unit)
        decayed = _decayed(both, sums)
        d_made = layout.spread(grad.float()[None])
        d_made.mul_(layout.chunks.filled[:, None, :, None]).mul_(unit.shape[-1] ** -0.5)
        d_new = torch.matmul(scores[:, :, 0].mT, d_made)
        d_seen, d_states, solved = torch.cat([d_made, d_made], 2), torch.zeros_like(states), torch.empty_like(x)
        state = states[:0]
        for at in reversed(layout.steps()):
            d_states[at][: len(state)] = state
            d_new[at] += torch.matmul(decayed.late[at], d_states[at])
            solved[at] = torch.matmul(inverse[at].mT, d_new[at])
            torch.mul(solved[at], -rate[at], out=d_seen[at, :, size:])
            state = torch.matmul(decayed.kept[at].mT, d_seen[at])
            state.addcmul_(d_states[at], decayed.grown[at, :, -1:])
        d_mixing = torch.matmul(solved, new.mT).neg_().tril_(-1)
        d_rate = torch.linalg.vecdot(solved, x) + torch.linalg.vecdot(d_mixing, scores[:, :, 1])
        d_scores = torch.stack([torch.matmul(d_made, new.mT).tril_(), d_mixing.mul_(rate)], 2)
        # A sum of g lets what comes after it grow, and what comes before it fall.
        d_pairs = (d_scores * scores).sum(2)
        d_kept, d_late = torch.matmul(d_seen, states.mT), torch.matmul(new, d_states.mT)
        until = torch.linalg.vecdot(d_late, decayed.late)
        through = torch.linalg.vecdot(d_states.flatten(2), states.flatten(2)) * decayed.grown[:, :, -1, 0]
        d_sums = d_pairs.sum(-1) - d_pairs.sum(-2) - until + _halves(torch.linalg.vecdot(d_kept, decayed.kept)).sum(2)
        d_sums[:, :, -1] += until.sum(-1) + through
        d_scores = d_scores.mul_(decayed.pairs.unsqueeze(2)).flatten(2, 3)
        d_both = torch.matmul(d_scores, both[:, :, size:]).addcmul_(d_kept, torch.cat([decayed.grown] * 2, 2))
        d_both[:, :, size:] += torch.matmul(d_scores.mT, both).addcmul_(d_late, decayed.rest)
        d_q, d_k = _unit_backward(layout.gather(d_both), unit, scale)
        d_v = layout.gather(d_seen[:, :, size:])[0].neg_()
        d_g = layout.gather_numbers(d_sums.flip(2).cumsum(2).flip(2))
        found = (d_q, d_k, d_v, d_g, layout.gather_numbers(d_rate))
        return *(each.to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)), None
