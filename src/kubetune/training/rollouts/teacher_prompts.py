"""The ids that a teacher reads before answers, where it is shown another prompt (data/findings/teacher_texts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubetune import errors
from kubetune.config.schema import DistillConfig
from kubetune.data.findings.teacher_texts import teacher_text
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.training.rollouts.rewarded_prompts import RewardedPrompt


def teacher_prompts(
    prompts: Mapping[int, RewardedPrompt], settings: DistillConfig, tokenizer: Tokenizer
) -> dict[int, list[int]]:
    """Return the ids that the teacher reads before the answers to each row; none where it reads the row's own prompt.

    The check of the data has found that each record has what the template names. Raise DataError for a column that is
    no text where there is no template.
    """
    shown = {}
    for row, prompt in prompts.items():
        try:
            text = teacher_text(
                prompt.record, prompt.prompt, prompt.answer, settings.teacher_prompt
            )
        except ValueError as error:
            raise errors.DataError(
                f"row {row:,} of data.train cannot be shown to the teacher: {error}"
            ) from None
        if text is None:
            continue
        asked: Any = text
        if not isinstance(prompt.prompt, str):
            asked = _with_last_question(prompt.prompt, text)
        shown[row] = tokenizer.encode_prompt(asked)
    return shown


def _with_last_question(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a conversation whose last message of the user is another text."""
    changed = [dict(message) for message in messages]
    for message in reversed(changed):
        if message["role"] == "user":
            message["content"] = text
            return changed
    return [*changed, {"role": "user", "content": text}]
