"""Have answers rewarded by all rewards of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kubetune import errors
from kubetune.base import logs
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.scoring.rewards.request import Judgement
from kubetune.training.rollouts.model_answers import EarlierLogps, Slot
from kubetune.training.rollouts.rewarded_prompts import RewardedPrompt
from kubetune.training.rollouts.rollout_records import Group, RewardedAnswer
from kubetune.training.rollouts.sampler import DrawnTokens


@dataclass(frozen=True)
class Rewarding:
    """The rewards of a run, and its prompts as they see them."""

    pool: RewardPool
    names: list[str]  # of the rewards
    prompts: Mapping[int, RewardedPrompt]  # by row
    tokenizer: Tokenizer
    max_steps: int
    _explained: set[str] = field(default_factory=set)  # rewards of which an error was logged

    def group(
        self, step: int, slot: Slot, drawn: Sequence[DrawnTokens], earlier: EarlierLogps
    ) -> Group:
        """Have the answers to a prompt rewarded, and return all that is known of them."""
        texts = [self.tokenizer.decode(answer.ids) for answer in drawn]
        ids = [answer.ids for answer in drawn]
        request = self.prompts[slot.row].request(slot.ids, texts, ids, step, self.max_steps)
        judgements = self.pool.judge(request)

        answers = []
        for number, answer in enumerate(drawn):
            rewards = {}
            for name, judgement in zip(self.names, judgements, strict=True):
                rewards[name] = judgement.rewards[number]
            answers.append(
                RewardedAnswer(
                    ids=answer.ids,
                    text=texts[number],
                    sampled=answer.logps,
                    entropy=float(np.mean(answer.entropies)),
                    is_cut=answer.is_cut,
                    rewards=rewards,
                    old=earlier.old[number] if earlier.old else None,
                    reference=earlier.reference[number] if earlier.reference else None,
                )
            )
        return Group(
            slot=slot.number,
            row=slot.row,
            prompt=slot.ids,
            text=self.tokenizer.decode(slot.ids),
            answers=answers,
            errors=self._errors(judgements),
            logged=_logged(judgements),
        )

    def _errors(self, judgements: Sequence[Judgement]) -> dict[str, str]:
        """Return why rewards could not judge, by their names."""
        errors_by_name = {}
        for name, judgement in zip(self.names, judgements, strict=True):
            if judgement.error:
                errors_by_name[name] = judgement.error
        return errors_by_name

    def explain_errors(
        self, step: int, groups: Sequence[Group], forget: Callable[[], None]
    ) -> None:
        """Log the first error of each reward.

        Raise ConfigError for one that could judge nothing from the start on, after `forget`: the next start must ask it
        again.
        """
        for name in self.names:
            reasons = [group.errors[name] for group in groups if name in group.errors]
            if not reasons:
                continue
            # What fails from the first answer on is a mistake in the function, and the run would learn nothing from it.
            if step == 0 and len(reasons) == len(groups):
                forget()
                raise errors.ConfigError(
                    f"reward {name} could judge no answer of the first step: {reasons[0].strip()}"
                )
            if name not in self._explained:
                self._explained.add(name)
                logs.DATA.warning(
                    "reward %s could not judge the answers to %d of %d prompts, which is counted as reward_errors: %s",
                    name, len(reasons), len(groups), reasons[0],
                )  # fmt: skip


def _logged(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the numbers that reward functions logged, by their names."""
    logged: dict[str, float] = {}
    for judgement in judgements:
        logged |= judgement.metrics
    return logged
