"""Ask a model the questions of a judge while it is trained.

All ranks share the rows that are asked, each row once. Which rows go together does not depend on the number of ranks,
so neither do the answers. Drawn answers follow from row, answer and token (counted_draws), and are the same at each
evaluation while the weights are. Nothing of the training changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kubetune.base import logs
from kubetune.distributed import process_group
from kubetune.models import fsdp
from kubetune.models.padding_free import own_attention
from kubetune.rundir import heartbeat
from kubetune.scoring.counted_draws import Draws, uniforms
from kubetune.scoring.generation import acting_settings, generate, greedy
from kubetune.scoring.judge import Judge, Reply
from kubetune.scoring.questions import Question

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner


def remarks_on_answers(lm: Any) -> list[str]:
    """Return a line on what the model's generation_config changes in greedy answers, if it does."""
    settings = [f"{key} {value}" for key, value in acting_settings(lm).items()]
    if not settings:
        return []
    shown = ", ".join(settings)
    return [f"answers are greedy, and the model's generation_config acts on them: {shown}"]


def rehearse(judge: Judge, learner: Learner, world: World) -> None:
    """Let every rank answer the longest questions at full length, to see what memory it takes and that it works."""
    # Groups come longest first. `min_new_tokens` keeps the model from ending early.
    longest = _groups(judge, learner)[:1]
    settings = {"min_new_tokens": judge.wanted.max_new_tokens}
    # Drawn answers take as much memory as the greedy one.
    wanted = judge.wanted.model_copy(update={"samples": None})
    judge = replace(judge, wanted=wanted)
    _ask(judge, learner, world, longest, settings, lambda: False, None)


def answer(
    judge: Judge,
    learner: Learner,
    world: World,
    is_stopping: Callable[[], bool],
    count: Callable[[int], None] | None = None,
) -> dict[int, list[Reply]] | None:
    """Return answers by row, the greedy one first, of all ranks on all ranks; None if a stop was asked for meanwhile.

    A model that attends to everything before it gets prompts of several lengths at a time, padded on the left; others
    get equal ones together. If the time runs out, rows are left unasked, which is logged. `count` is called with
    the number of rows that this rank has answered.
    """
    mine = _ask(
        judge,
        learner,
        world,
        _groups(judge, learner),
        {},
        is_stopping,
        count,
    )
    if mine is None:
        return None

    answers: dict[int, list[Reply]] = {}
    for of_rank in process_group.gather(mine, world):
        answers |= of_rank
    if len(answers) < len(judge.asked) and world.is_main:
        logs.EVAL.warning(
            "evaluation.generate.max_seconds: %g s are over; %d of %d rows were asked, and the metrics are theirs",
            judge.wanted.max_seconds, len(answers), len(judge.asked),
        )  # fmt: skip

    return answers


def _ask(
    judge: Judge,
    learner: Learner,
    world: World,
    groups: Sequence[Sequence[Question]],
    settings: Mapping[str, Any],
    is_stopping: Callable[[], bool],
    count: Callable[[int], None] | None,
) -> dict[int, list[Reply]] | None:
    """Return this rank's answers by row; None if a stop was asked for meanwhile."""
    # `max_seconds` counts from here, on each rank by its own clock; all decide together below.
    began = time.monotonic()
    lm = learner.lm
    most_seconds = judge.wanted.max_seconds
    settings = {
        **greedy(judge.wanted.max_new_tokens),
        "use_cache": True,
        "synced_gpus": fsdp.is_sharded(lm),
        **settings,
    }
    mine: dict[int, list[Reply]] = {}
    with learner.asked(), own_attention(lm), torch.no_grad():
        # Each time round, every rank answers one group: rank 0 group `first`, rank 1 the next, and so on.
        for first in range(0, len(groups), world.size):
            heartbeat.beat("evaluation")

            # All ranks stop together, or the others would wait for ever.
            is_late = bool(first and most_seconds and time.monotonic() - began > most_seconds)
            flags = [float(is_stopping()), float(is_late)]
            stopping, late = process_group.sum_numbers(flags, world)
            if stopping:
                return None
            if late:
                break

            # Ranks of a sharded model run every step together: one that has nothing left asks again what is asked.
            number = first + world.rank
            group = groups[min(number, len(groups) - 1)]
            replies = _replies(judge, lm, group, settings)

            # The answers to a group that was asked again are dropped: another rank has them.
            if number < len(groups):
                for question, of_question in zip(group, replies, strict=True):
                    mine[question.row] = of_question
            if count is not None:
                count(len(mine))
    return mine


def _replies(
    judge: Judge, lm: Any, group: Sequence[Question], settings: Mapping[str, Any]
) -> list[list[Reply]]:
    """Return the greedy answer to each question of a group, and after it those that are drawn."""
    prompts = [question.ids for question in group]
    images = [question.images for question in group]
    replies: list[list[Reply]] = [[] for _ in group]
    # As many rows at a time as for the greedy answer, so that drawn ones take no more memory.
    for sample in range(1 + (judge.wanted.samples or 0)):
        heartbeat.beat("evaluation")
        changed = settings
        if sample:
            draws = Draws(_numbers(judge, group, sample), judge.wanted.temperature)
            # Beams would follow several tokens, of which only one is possible.
            changed = {**settings, "logits_processor": [draws], "num_beams": 1}
        new = generate(lm, judge.tokenizer, prompts, changed, judge.reader, images)
        for of_question, ids in zip(replies, new, strict=True):
            of_question.append(Reply(judge.tokenizer.decode(ids), tuple(ids)))
    return replies


def _numbers(judge: Judge, group: Sequence[Question], sample: int) -> list[NDArray[np.float64]]:
    """Return the numbers that draw one answer to each question of a group."""
    length = judge.wanted.max_new_tokens
    return [uniforms(length, "evaluation", question.row, sample) for question in group]


def _groups(judge: Judge, learner: Learner) -> list[list[Question]]:
    """Return the questions that go together, longest first; if images are no grids, a question with some is a group
    of its own.
    """
    reader = judge.reader
    images_go_alone = reader is not None and not reader.processor.is_grid

    def fits(group: list[Question], question: Question) -> bool:
        if len(group) >= judge.wanted.batch_size:
            return False
        if images_go_alone and (question.images or group[0].images):
            return False
        return learner.route.padding_free or len(group[0].ids) == len(question.ids)

    # Longest first: what takes the most memory is tried first, and prompts of about one length are together.
    asked = sorted(judge.asked, key=lambda question: (-len(question.ids), question.row))
    groups: list[list[Question]] = []
    for question in asked:
        if groups and fits(groups[-1], question):
            groups[-1].append(question)
        else:
            groups.append([question])

    return groups
