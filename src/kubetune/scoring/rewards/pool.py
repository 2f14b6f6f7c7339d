"""All rewards of a rank: functions of its reward process, and models that the rank holds.

A function that raises, hangs, runs out of memory or ends its process gives no reward for the group at hand; the run
continues with another process, or ends, as `grpo.on_reward_error` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import processes
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.rewards import RewardConfig
from kubetune.rundir import heartbeat
from kubetune.scoring.rewards import isolation
from kubetune.scoring.rewards.request import Judgement, Request
from kubetune.scoring.rewards.reward_process import Gone, RewardProcess

if TYPE_CHECKING:
    from kubetune.scoring.rewards.models import ModelJudge


class RewardPool:
    """All rewards of a rank. Left by `close`."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        settings: GrpoConfig,
        models: Mapping[int, ModelJudge] | None = None,
    ) -> None:
        """Begin the process. Raise ConfigError if a file or function of the config cannot be loaded.

        `models`: by the number of the reward.
        """
        self._rewards = [with_absolute_file(reward) for reward in rewards]
        self._settings = settings
        self.models = models or {}
        self.process: RewardProcess | None = None
        self.is_separate = False  # the process has a list of processes of its own
        self.refused: list[str] = []  # bounds that the kernel refuses, of isolation.WITHOUT
        if len(self.models) < len(self._rewards):
            self._start()

    @property
    def has_code(self) -> bool:
        """True if functions of the user's are among the rewards."""
        return any(reward.is_code for reward in self._rewards)

    def judge(self, request: Request) -> list[Judgement]:
        """Return what each reward says of the answers, in the order of the config."""
        judgements = []
        for number, reward in enumerate(self._rewards):
            model = self.models.get(number)
            judgement = self._judge(number, request) if model is None else model.judge(request)
            if judgement.error and self._settings.on_reward_error == "stop":
                raise errors.ConfigError(
                    f"reward {reward.title}: {judgement.error}\ngrpo.on_reward_error is stop, so the run ends"
                )
            judgements.append(judgement)
        return judgements

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def _judge(self, number: int, request: Request) -> Judgement:
        heartbeat.beat("reward")
        title = self._rewards[number].title
        process = self.process or self._start()
        try:
            reply = process.ask(
                (number, request), self._settings.reward_timeout_seconds, f"reward {title}"
            )
            return _judgement_of(reply, len(request.texts))
        except Gone as gone:
            # The next request begins another process.
            self.close()
            nothing: list[float | None] = [None] * len(request.texts)
            return Judgement(nothing, str(gone))

    def _start(self) -> RewardProcess:
        """Begin the process, and return it."""
        if self.has_code:
            # Functions of the same user could read the environment of this process, with its tokens.
            processes.hide_memory()
        process = RewardProcess(int(self._settings.reward_memory_gib * 2**30))
        self.is_separate = process.is_separate
        self.refused = process.refused
        if self.refused and self.has_code and self._settings.require_reward_isolation:
            process.close()
            raise errors.EnvironmentFault(
                f"grpo.require_reward_isolation: the kernel of this machine refuses {isolation.consequences(self.refused)}"
                ". Run it where the kernel allows that, or leave the key out. Nothing was trained."
            )
        process.load(self._rewards)
        self.process = process
        return process


def _judgement_of(reply: Mapping[str, Any], number: int) -> Judgement:
    """Return the judgement of so many answers in a reply. Raise Gone if it is none.

    The process has run code of others, so all is checked.
    """
    rewards = reply.get("rewards")
    metrics = reply.get("metrics")
    if not isinstance(rewards, list) or len(rewards) != number or not isinstance(metrics, dict):
        raise Gone("the reward process wrote something that is no reply")
    means = {}
    for name, value in metrics.items():
        mean = _finite(value)
        if mean is not None:
            means[name] = mean
    return Judgement([_finite(reward) for reward in rewards], str(reply.get("error", "")), means)


def _finite(value: Any) -> float | None:
    """Return a number of JSON; None for what is none, or none that a float can hold."""
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def with_absolute_file(reward: RewardConfig) -> RewardConfig:
    """Return a reward with the place of its file. Raise ConfigError unless that is a file."""
    if reward.file is None:
        return reward
    path = Path(reward.file).expanduser().absolute()
    if not path.is_file():
        raise errors.ConfigError(f"rewards: {path} is no file. Nothing was written.")
    return reward.model_copy(update={"file": str(path)})
