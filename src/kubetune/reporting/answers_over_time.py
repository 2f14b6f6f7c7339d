"""The answers of a run by reward to some prompts over time, with their rewards, as few as a page can show.

row 17   step 0     mean 0.1   the best and the worst answers
         step 40    mean 0.6   …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kubetune.base.files import IrregularFileError
from kubetune.base.humanize import visible
from kubetune.config.schema.rewards import RewardConfig
from kubetune.reporting.series import spread
from kubetune.rundir import rollout_files

# Limits of one page. Files of a run may have gigabytes: of more than these bytes the first and the last ones are read.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Limits:
    """How much of the answers a page shows."""

    prompts: int
    steps: int  # of each prompt
    answers: int  # of each prompt and step: the best and the worst
    characters: int  # of a prompt and of an answer


SECTION = Limits(prompts=3, steps=6, answers=2, characters=600)
WHOLE_PROMPT = Limits(prompts=1, steps=40, answers=16, characters=4000)


@dataclass(frozen=True)
class ShownAnswer:
    """An answer with its rewards."""

    text: str
    reward: float | None  # weighted sum; None if no function could judge it
    rewards: Mapping[str, float | None]  # by function
    is_cut: bool  # no token ended it
    is_shortened: bool  # the page shows only its beginning
    times: int = 1  # so many answers are the same, with the same rewards


@dataclass(frozen=True)
class ShownStep:
    """The answers that the weights after some steps gave to a prompt."""

    step: int
    mean: float | None  # reward of all answers
    count: int  # all answers
    answers: Sequence[ShownAnswer]  # those that are shown, the best first
    errors: Mapping[str, str]  # by function: why it could not judge


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with its answers over time."""

    row: int  # of the training data
    text: str
    is_shortened: bool
    drawings: int  # steps before which it was answered, as far as was looked
    steps: Sequence[ShownStep]  # those that are shown


@dataclass(frozen=True)
class ShownRollouts:
    """The part of a run's answers that a page shows."""

    prompts: Sequence[ShownPrompt]
    files: int  # of the run
    files_read: int
    damaged: int  # files and lines that could not be read
    rows: Sequence[int]  # that can be asked for, at most 200


def shown_rollouts(
    run_dir: Path, rewards: Sequence[RewardConfig], limits: Limits, row: int | None = None
) -> ShownRollouts:
    """Return the prompts that were answered most often, or the one of `row`, with their answers over time."""
    all_steps = rollout_files.steps_of(run_dir)
    steps = _readable_steps(run_dir, all_steps)
    damaged = 0
    places: dict[int, dict[int, tuple[int, int]]] = {}  # by row, then by step
    for step in steps:
        try:
            of_step = rollout_files.places_of_rows(run_dir, step)
        except (OSError, IrregularFileError):
            damaged += 1
            continue
        for answered, place in of_step.items():
            places.setdefault(answered, {})[step] = place

    # Those that were answered most often say most about time; the first of these in the data.
    chosen = sorted(places, key=lambda answered: (-len(places[answered]), answered))
    rows = sorted(chosen[:200])
    if row is not None:
        chosen = [row] if row in places else []
    prompts = []
    for answered in chosen[: limits.prompts]:
        prompt, damaged_lines = _prompt(run_dir, answered, places[answered], rewards, limits)
        damaged += damaged_lines
        if prompt is not None:
            prompts.append(prompt)
    return ShownRollouts(prompts, len(all_steps), len(steps), damaged, rows)


def _readable_steps(run_dir: Path, steps: Sequence[int]) -> list[int]:
    """Return the steps for which files are read: all, or if they are too large the first and the last ones."""
    #     steps 0 1 2 3 4 5  →  taken in the order 0 5 1 4 2 3, until the bytes are used up
    taken: list[int] = []
    left = MOST_BYTES
    for number in range(len(steps)):
        place = number // 2
        step = steps[-1 - place] if number % 2 else steps[place]
        try:
            left -= rollout_files.file_of(run_dir, step).stat().st_size
        except OSError:
            continue
        if left < 0 and taken:
            break
        taken.append(step)
    return sorted(taken)


def _prompt(
    run_dir: Path,
    row: int,
    places: Mapping[int, tuple[int, int]],
    rewards: Sequence[RewardConfig],
    limits: Limits,
) -> tuple[ShownPrompt | None, int]:
    """Return a prompt with its answers before some steps, and how many lines were damaged."""
    shown = []
    text = ""
    damaged = 0
    for step in spread(sorted(places), limits.steps):
        try:
            line = rollout_files.read_line(run_dir, step, places[step])
        except (OSError, IrregularFileError):
            line = None
        if line is None:
            damaged += 1
            continue
        text = line["text"]
        shown.append(_step(step, line, rewards, limits))
    if not shown:
        return None, damaged
    is_shortened = len(text) > limits.characters
    # The end of a prompt is what is asked.
    prompt = ShownPrompt(row, visible(text[-limits.characters :]), is_shortened, len(places), shown)
    return prompt, damaged


def _step(
    step: int, line: Mapping[str, Any], rewards: Sequence[RewardConfig], limits: Limits
) -> ShownStep:
    weights = [(reward.title, reward.weight) for reward in rewards]
    drawn: list[ShownAnswer] = []
    alike: dict[tuple[str, str, bool], list[ShownAnswer]] = {}
    for answer in line["answers"]:
        text = answer["text"]
        shown = ShownAnswer(
            text=visible(text[: limits.characters]),
            reward=rollout_files.weighted_sum(answer["rewards"], weights),
            rewards=answer["rewards"],
            is_cut=bool(answer.get("is_cut")),
            is_shortened=len(text) > limits.characters,
        )
        drawn.append(shown)
        alike.setdefault((text, str(answer["rewards"]), shown.is_cut), []).append(shown)
    known = [answer.reward for answer in drawn if answer.reward is not None]
    mean = sum(known) / len(known) if known else None

    answers = [replace(group[0], times=len(group)) for group in alike.values()]
    answers.sort(key=_by_reward, reverse=True)
    kept = answers
    if len(answers) > limits.answers:
        best = limits.answers - limits.answers // 2
        kept = answers[:best] + answers[best - limits.answers :]
    errors = line.get("errors")
    if not isinstance(errors, dict):
        errors = {}
    return ShownStep(step, mean, len(drawn), kept, errors)


def _by_reward(answer: ShownAnswer) -> float:
    """Return the reward, for sorting. Answers without a judgement come last."""
    return float("-inf") if answer.reward is None else answer.reward
