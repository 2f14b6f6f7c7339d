"""The prompts of a run as reward functions see them: the records of the training data, read again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kubetune.config.schema.rewards import RewardConfig
from kubetune.data.findings.references import asked_of, lacks_answers
from kubetune.data.reading.prompts import right_answer
from kubetune.errors import DataError
from kubetune.scoring.questions import records_of
from kubetune.scoring.rewards.request import Request

if TYPE_CHECKING:
    from kubetune.batching.feed import Feed
    from kubetune.config.schema import GrpoConfig, SourceConfig
    from kubetune.data.prepared.rows import Rows


@dataclass(frozen=True)
class RewardedPrompt:
    """A record of the training data, as it is given to reward functions."""

    prompt: Any  # a text, or the messages of a conversation
    record: dict[str, Any]
    references: list[str | None]  # the right answer for each reward
    answer: str | None = None  # the right answer of the record

    def request(
        self,
        prompt_ids: list[int],
        texts: list[str],
        ids: list[list[int]],
        step: int,
        max_steps: int,
    ) -> Request:
        """Return what the rewards are asked of the answers to this prompt. `ids`: tokens of each answer."""
        return Request(
            self.prompt,
            self.record,
            self.references,
            texts,
            ids,
            prompt_ids,
            step,
            max_steps,
        )


def rewarded_prompts(
    sources: Sequence[SourceConfig],
    rows: Rows,
    wanted: Iterable[int],
    rewards: Sequence[RewardConfig],
) -> dict[int, RewardedPrompt]:
    """Return the prompts of these rows. Raise DataError where no record has what a reward compares answers with."""
    prompts = {}
    for row, record in records_of(sources, rows, list(wanted)).items():
        source = sources[int(rows.source[row])]
        prompts[row] = _prompt_of(record, source, rewards)

    for number, reward in enumerate(rewards):
        references = [prompt.references[number] for prompt in prompts.values()]
        # A record without an answer is only left unjudged; a column of a wrong name leaves all of them so.
        if reward.compares and references and not any(references):
            raise DataError(lacks_answers(sources[0].path, reward))
    return prompts


def _prompt_of(
    record: dict[str, Any],
    source: SourceConfig,
    rewards: Sequence[RewardConfig],
) -> RewardedPrompt:
    asked = asked_of(record, source)
    # The right answer is the record's, or for a reward with a column of its own what is there.
    references: list[str | None] = []
    for reward in rewards:
        if reward.column is None:
            references.append(asked.answer)
        else:
            references.append(right_answer(asked.record, reward.column))
    return RewardedPrompt(asked.prompt, asked.record, references, asked.answer)


def rows_of_run(prompts: Feed, num_steps: int, settings: GrpoConfig, number: int) -> list[int]:
    """Return the rows that any step of a run asks, in order. `number`: of all rows."""
    # 10 steps whose prompts serve twice each take 5 steps of the data, and the last window is drawn whole.
    data_steps = math.ceil(num_steps / settings.num_iterations)
    data_steps += settings.steps_per_generation
    rows: set[int] = set()
    for data_step in range(data_steps):
        rows.update(prompts.samples(data_step).tolist())
        if len(rows) == number:
            break
    return sorted(rows)


def prompt_ids(rows: Rows, row: int) -> list[int]:
    """Return the ids of a row of the data up to its first trained token."""
    ids, is_trained = rows.row(row)
    length = int(is_trained.argmax())
    prompt: list[int] = ids[:length].tolist()
    return prompt
