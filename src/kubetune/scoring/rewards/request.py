"""The request to reward functions and their reply: the two messages between a rank and its reward process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """All answers to one prompt, which each reward function judges together."""

    prompt: Any  # a text, or the messages of a conversation
    record: dict[str, Any]  # the record of the training data, with all of its columns
    references: list[str | None]  # the right answer for each reward, by its `column`
    texts: list[str]  # of the answers
    ids: list[list[int]]  # tokens of the answers
    prompt_ids: list[int] = field(default_factory=list)  # of the model that learns
    step: int = 0
    max_steps: int = 0

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a conversation; answers are then messages too, as TRL has it."""
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class Judgement:
    """The judgement of one reward function on the answers of a request."""

    rewards: list[float | None]  # None: it could not judge the answer
    error: str = ""  # why it could not, if it raised or hung
    # What it logged (TRL's `log_metric`), as means.
    metrics: dict[str, float] = field(default_factory=dict)
