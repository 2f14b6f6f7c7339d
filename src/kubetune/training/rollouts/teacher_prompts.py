"""What a teacher is shown in place of the prompt that the model answers: the same question, and more beside it.

    record             {"prompt": "2 + 2?", "solution": "4"}
    teacher_prompt     "{prompt} The answer is {answer}."
    the model reads    2 + 2? <answer>
    the teacher        2 + 2? The answer is 4. <the same answer>

A column `teacher_prompt` of a record comes before the template of the run file. In a conversation the text stands in place
of the last message of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.config.schema import DistillConfig
from kubetune.config.schema.distill import ITSELF
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.errors import DataError
from kubetune.training.rollouts.rewarded_prompts import RewardedPrompt

# The column of a record that says what the teacher is shown.
COLUMN: Final = "teacher_prompt"


def teacher_prompts(
    prompts: Mapping[int, RewardedPrompt], settings: DistillConfig, tokenizer: Tokenizer
) -> dict[int, list[int]]:
    """Return the ids that the teacher reads before the answers to each row; none where it reads the row's own prompt.

    Raise DataError for a record that lacks what the template names, and where a model would be its own teacher and be
    shown nothing more.
    """
    shown = {}
    for row, prompt in prompts.items():
        text = _text(row, prompt, settings.teacher_prompt)
        if text is None:
            continue
        asked: Any = text
        if not isinstance(prompt.prompt, str):
            asked = _with_last_question(prompt.prompt, text)
        shown[row] = tokenizer.encode_prompt(asked)
    if settings.teacher == ITSELF and len(shown) < len(prompts):
        raise DataError(
            f"{len(prompts) - len(shown):,} of {len(prompts):,} records of data.train have no column `{COLUMN}`, and a "
            "model learns nothing from itself unless it is shown more; expected that column, or distill.teacher_prompt"
        )
    return shown


def _text(row: int, prompt: RewardedPrompt, template: str | None) -> str | None:
    """Return what the teacher is asked, None if it is asked what the model is."""
    of_record = prompt.record.get(COLUMN)
    if isinstance(of_record, str) and of_record.strip():
        return of_record
    if template is None:
        return None
    question = prompt.prompt
    if not isinstance(question, str):
        question = next(
            (turn["content"] for turn in reversed(question) if turn["role"] == "user"), ""
        )
    fields = {**prompt.record, "prompt": question}
    if prompt.answer is not None:
        fields["answer"] = prompt.answer
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DataError(
            f"distill.teacher_prompt: row {row:,} of data.train lacks {error}; expected {{prompt}}, {{answer}} or names of "
            "columns that each record has"
        ) from None


def _with_last_question(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a conversation whose last message of the user is another text."""
    changed = [dict(message) for message in messages]
    for message in reversed(changed):
        if message["role"] == "user":
            message["content"] = text
            return changed
    return [*changed, {"role": "user", "content": text}]
