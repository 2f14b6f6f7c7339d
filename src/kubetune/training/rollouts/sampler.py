"""Draw answers token by token with a key-value cache: the prompts of a few groups, each with all of its answers.

Nothing is random but what `counted_draws.uniforms` says: a number for each token, which follows from the seed, the step,
the prompt's place in the step, the answer and the token's place. So a rank that draws a group anew, at whatever time and
however many ranks there are, draws the same answers. Which prompts go together follows from the step's prompts alone,
since the last bits of a matrix product depend on its number of rows.

Two prompts with two answers each, `.` is padding, `$` ends an answer:

    prefill        . A B C      one row for each prompt; its keys and values are then repeated for each answer
                   D E F G
    decode         h  i  $      answer 0 of the first prompt
                   h  j  k  $   answer 1
                   $            answer 0 of the second prompt: its row leaves the batch once half of the rows are done
                   l  m  n  o   answer 1, cut off after 4 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kubetune.models.forward_cache import cache_of
from kubetune.rundir import heartbeat
from kubetune.scoring.counted_draws import choose

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import GrpoConfig


@dataclass
class DrawnTokens:
    """An answer as the sampler drew it."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)  # of each token, under all tokens
    entropies: list[float] = field(default_factory=list)  # of what each token was drawn from
    is_cut: bool = True  # no token ended it


def restricted(log_probabilities: Tensor, settings: GrpoConfig) -> Tensor:
    """Return probabilities `[rows, vocabulary]` of the tokens that may be drawn, not normalised; 0 of the others."""
    # Each of the three limits for the same four tokens:
    #
    #     all           0.5   0.2   0.2   0.1
    #     top_k 2       0.5   0.2   0.2   0        as likely as the second one
    #     min_p 0.3     0.5   0.2   0.2   0        at least 0.3 × 0.5
    #     top_p 0.6     0.5   0.2   0     0        before them come 0, 0.5, 0.7 and 0.9
    probabilities = log_probabilities.exp()

    if settings.top_k:
        number = min(settings.top_k, probabilities.shape[1])
        least = probabilities.topk(number).values[:, -1:]
        # Tokens as likely as the last one of them stay too.
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)

    if settings.min_p is not None:
        least = probabilities.amax(1, keepdim=True) * settings.min_p
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)

    if settings.top_p < 1.0:
        falling, order = probabilities.sort(dim=1, descending=True, stable=True)
        total = falling.sum(1, keepdim=True)
        # A token stays if those before it do not reach the share yet; the likeliest always does.
        before = falling.cumsum(1) - falling
        is_beyond = before >= settings.top_p * total
        is_beyond[:, 0] = False
        falling = falling.masked_fill(is_beyond, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(1, order, falling)
    return probabilities


class Decoder:
    """The rows of a batch that are still being drawn: their cache, and their last tokens' logits."""

    def __init__(
        self,
        lm: Any,
        prompts: Sequence[Sequence[int]],
        answers: int,
        pad_id: int,
    ) -> None:
        """Run the prompts, each once, and repeat what they left in the cache for each of their answers."""
        self._lm = lm
        device = next(lm.parameters()).device

        # Padding comes first, so that all rows end with a token that the next one follows:
        #
        #     prompts 7 8 and 4 5 6    ids  . 7 8    mask  0 1 1    positions  0 0 1
        #                                   4 5 6          1 1 1               0 1 2
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            begin = longest - len(prompt)
            ids[row, begin:] = torch.tensor(prompt)
            mask[row, begin:] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        # Without padding no mask is needed, and attention is faster.
        self._mask = None
        if not bool(mask.all()):
            self._mask = mask.to(device)

        # Only the last token's logits are needed: those of all tokens would be [prompts, longest, vocabulary].
        out = lm(
            input_ids=ids.to(device),
            attention_mask=self._mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        self._past = cache_of(out)
        (self._cache,) = self._past.values()

        # 0 0 0 1 1 1: as beam search repeats rows, which caches of all kinds of layers know.
        repeated = torch.arange(len(prompts), device=device).repeat_interleave(answers)
        self._cache.reorder_cache(repeated)
        self.logits = out.logits[:, -1].repeat_interleave(answers, 0)
        self._positions = positions[:, -1:].repeat_interleave(answers, 0)
        if self._mask is not None:
            self._mask = self._mask.repeat_interleave(answers, 0)

    def append(self, tokens: Tensor) -> None:
        """Go on with one more token of each row."""
        self._positions = self._positions + 1
        if self._mask is not None:
            seen = torch.ones_like(self._mask[:, :1])
            self._mask = torch.cat([self._mask, seen], 1)
        out = self._lm(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions,
            **self._past,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = out.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self._cache.reorder_cache(rows)
        self.logits = self.logits[rows]
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]


class _Answers:
    """The answers of a batch, and which of its rows still draw one."""

    def __init__(self, number: int, eos_ids: Sequence[int]) -> None:
        self.drawn = [DrawnTokens() for _ in range(number)]
        self.rows = np.arange(number)  # the answer that each row of the batch belongs to
        self.is_done = np.zeros(number, bool)  # of each row of the batch
        self._eos_ids = eos_ids

    def append(
        self,
        tokens: list[int],
        logps: list[float],
        entropies: list[float],
    ) -> None:
        """Add a token to each answer that has not ended."""
        for row, token in enumerate(tokens):
            if self.is_done[row]:
                continue
            answer = self.drawn[self.rows[row]]
            answer.ids.append(token)
            answer.logps.append(logps[row])
            answer.entropies.append(entropies[row])
            if token in self._eos_ids:
                answer.is_cut = False
                self.is_done[row] = True

    def left(self) -> NDArray[np.int64] | None:
        """Return the rows to go on with, once half of them or more are done; None before.

        Copying the cache costs as much as some steps, so rows leave by halves.
        """
        # Rows 0 1 2 3, of which 1 and 2 are done: 0 and 3 go on, as rows 0 and 1.
        if 2 * self.is_done.sum() < len(self.rows):
            return None
        left = np.flatnonzero(~self.is_done)
        self.rows = self.rows[left]
        self.is_done = self.is_done[left]
        return left


@torch.no_grad()
def draw(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    numbers: NDArray[np.float64],
    settings: GrpoConfig,
    eos_ids: Sequence[int],
    pad_id: int,
) -> list[DrawnTokens]:
    """Return `num_generations` answers to each prompt, those to the first prompt first.

    `numbers` `[answers of all prompts, max_completion_length]`: by which tokens are drawn. The model must be in
    evaluation mode and attend by its own code.
    """
    decoder = Decoder(lm, prompts, settings.num_generations, pad_id)
    device = decoder.logits.device
    answers = _Answers(len(numbers), eos_ids)

    for place in range(settings.max_completion_length):
        heartbeat.beat("generation")
        # A token for each row, from all that it may be.
        logits = decoder.logits.float() / settings.temperature
        logps = torch.log_softmax(logits, 1)
        here = torch.from_numpy(numbers[answers.rows, place]).to(device)
        allowed = restricted(logps, settings)
        tokens = choose(allowed, here)

        of_tokens = logps.gather(1, tokens[:, None])[:, 0]
        # A logit of -inf has probability 0, and 0 × -inf would be NaN.
        finite = logps.clamp(min=-1e4)
        entropies = -(logps.exp() * finite).sum(1)
        answers.append(tokens.tolist(), of_tokens.tolist(), entropies.tolist())
        if answers.is_done.all() or place == settings.max_completion_length - 1:
            break

        # The next forward, of the rows that have not ended.
        left = answers.left()
        if left is not None:
            kept = torch.from_numpy(left).to(device)
            decoder.keep(kept)
            tokens = tokens[kept]
        decoder.append(tokens)
    return answers.drawn
