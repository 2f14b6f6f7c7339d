"""Proof on the model at hand, at the start, that what draws answers and what learns from them are the same model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kubetune.base import logs
from kubetune.base.humanize import size
from kubetune.batching.batch import collate
from kubetune.batching.drawn_answers import answer_sequence
from kubetune.errors import ModelError, first_line
from kubetune.models import fsdp
from kubetune.models.padding_free import FOREIGN_ERRORS, own_attention
from kubetune.models.sharded_base import base_shards
from kubetune.scoring.counted_draws import uniforms
from kubetune.scoring.generation import acting_settings
from kubetune.tasks.grpo.task import log_probabilities, settings_of
from kubetune.training.rollouts.rewarded_prompts import prompt_ids
from kubetune.training.rollouts.sampler import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kubetune.data.prepared.rows import Rows
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner

# Tokens that are drawn for each answer.
TOKENS: Final = 4

# Largest difference of two log-probabilities of a token; the second one of arithmetic in 16 bits.
TOLERANCE: Final = 1e-3
NARROW_TOLERANCE: Final = 0.5


def require_sampling(learner: Learner, prompts: Sequence[list[int]], pad_id: int) -> None:
    """Raise ModelError for a model that cannot draw with a cache, or whose training says otherwise of what it drew.

    `prompts`: of different lengths, so that one is padded.
    """
    kind = type(learner.lm).__name__
    # All ranks draw the same here, so a base in parts is borrowed as in training.
    is_base_cut = base_shards.of(learner.lm) is not None
    try:
        with learner.asked(), nullcontext() if is_base_cut else fsdp.whole(learner.lm):
            difference = _difference(learner, prompts, pad_id)
            # Slices of a sharded model have another dtype than what is computed with.
            is_narrow = next(learner.lm.parameters()).dtype != torch.float32
    except FOREIGN_ERRORS as error:
        reason = first_line(error)
        raise ModelError(
            f"{kind} cannot draw answers with the cache of its code, which learning from its own answers needs "
            f"({reason}); take a model of another family"
        ) from error
    tolerance = TOLERANCE
    if is_narrow:
        tolerance = NARROW_TOLERANCE
    # Not ">": a difference that is not a number is too large as well.
    if not difference <= tolerance:
        raise ModelError(
            f"{kind} gives its own answers other log-probabilities in training than in sampling: they differ by "
            f"{difference:.2g}, so it would learn from other answers than it drew; take a model of another family, or set "
            "model.dtype to float32"
        )


def _difference(learner: Learner, prompts: Sequence[list[int]], pad_id: int) -> float:
    """Return by how much the log-probabilities of drawn tokens differ at most, NaN if one is NaN."""
    settings = settings_of(learner)
    short = settings.model_copy(update={"num_generations": 2, "max_completion_length": TOKENS})
    numbers = []
    for place in range(len(prompts)):
        for answer in range(2):
            numbers.append(uniforms(TOKENS, "self-check", place, answer))

    with own_attention(learner.lm):
        # No token ends an answer, so that rows of all prompts are compared.
        drawn = draw(learner.lm, prompts, np.stack(numbers), short, (), pad_id)

    # The same tokens as one packed batch, as training would see them.
    sequences = []
    sampled: list[float] = []
    for number, answer_tokens in enumerate(drawn):
        # Answers 0 and 1 are of the first prompt, 2 and 3 of the second.
        sequences.append(answer_sequence(prompts[number // 2], answer_tokens.ids))
        sampled += answer_tokens.logps
    batch = collate(sequences).to(next(learner.lm.parameters()).device)
    of_training = log_probabilities(learner, batch).cpu()
    return float((of_training - torch.tensor(sampled)).abs().max())


def two_prompts(rows: Rows, padding_free: bool) -> list[list[int]]:
    """Return the shortest and the longest prompt; only one for a model whose state would run over padding."""
    chosen = [int(rows.lengths.argmin())]
    if padding_free:
        chosen.append(int(rows.lengths.argmax()))
    return [prompt_ids(rows, row) for row in chosen]


def name_unused_settings(lm: Any, world: World) -> None:
    """Log what of the model's generation_config acts on answers of evaluations, and not on those that are learnt from."""
    settings = [f"{key} {value}" for key, value in acting_settings(lm).items()]
    if settings and world.is_main:
        logs.DATA.info(
            "answers are drawn by the model's own probabilities, without %s of its generation_config; evaluations use it",
            ", ".join(settings),
        )


def say_of_parts(learner: Learner, world: World) -> None:
    """Log that answers are drawn with a base in parts, which is slow."""
    shards = base_shards.of(learner.lm)
    if shards is not None and not shards.has_room(world) and world.is_main:
        logs.MODEL.info(
            "answers are drawn layer by layer, since the whole base has no room: each of their tokens moves %s to each "
            "rank; servers (grpo.servers), a quantised base or larger GPUs are faster",
            size(shards.nbytes - shards.nbytes // world.size),
        )
