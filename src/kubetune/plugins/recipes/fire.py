"""FIRE (hub: PengxiangLi/FIRE, CC BY 4.0): a student's attempts at a question about an image, and a teacher's feedback.

Two styles. `bc` (behaviour cloning): one row for each attempt, whose prompt is the state the student was in (image,
question, the last attempts with their feedback) and whose completion is that attempt as the student gave it; only the
completion is trained. `sharegpt`: one row for each record, the answers without their thoughts, the feedback in words.
Source: "FIRE: A Dataset for Feedback Integration and Refinement Evaluation of Multimodal Models", Li et al. 2024.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubetune.data.reading.formats import IMAGE_TAG
from kubetune.plugins.recipes.recipe import Converted, Options, Recipe, Skipped
from kubetune.plugins.recipes.turns import (
    Turn,
    clean_text,
    messages,
    read_turns,
    trimmed,
    with_one_tag,
)

# The student's attempts are what a model learns; the teacher's feedback is what it answers to.
_ROLES: Final[Mapping[tuple[str, ...], str]] = {
    ("student", "response"): "assistant",
    ("teacher", "feedback"): "user",
}
# "Thought: …\nAnswer: a cat" and "Score: 4/10.\nFeedback: …", each mark at the beginning of a line.
_ANSWER: Final = re.compile(r"^[ \t]*Answer:[ \t]*", re.MULTILINE)
_SCORE: Final = re.compile(r"\s*Score:[ \t]*([0-9]+(?:\.[0-9]+)?)(?:[ \t]*/[ \t]*10)?\.?")
_FEEDBACK: Final = re.compile(r"^[ \t]*Feedback:[ \t]*", re.MULTILINE)


@dataclass(slots=True)
class Round:
    """An attempt and what the teacher said of it, empty where nothing was said."""

    attempt: str
    feedback: str = ""


def convert(record: Mapping[str, Any], has_image: bool, options: Options) -> Converted:
    """Return the rows of a trajectory. Raise Skipped where there are none."""
    if not has_image:
        raise Skipped("no_image", "names no image")
    # The question is a field of its own, and the first turn of the conversation.
    turns = [Turn("user", _question(record)), *read_turns(record, ("role", "type"), _ROLES)]
    converted = Converted()
    question, *turns = with_one_tag(turns, 0, converted.notes)
    rounds = _rounds(turns, converted.notes)
    converted.rounds = len(rounds)
    if options.style == "sharegpt":
        conversation = _conversation(question, rounds, converted.notes)
        converted.rows = [{"messages": messages(conversation)}]
    else:
        converted.rows = _attempts(question, rounds, options.max_history_rounds, converted.notes)
    return converted


def _question(record: Mapping[str, Any]) -> str:
    """Return the question, which is a text or an object that holds one."""
    question = record.get("question")
    if isinstance(question, dict):
        question = question.get("value")
    if question is None:
        raise Skipped("no_question", "has no question")
    text = clean_text(question, "question")
    if not text.replace(IMAGE_TAG, "").strip():
        raise Skipped("no_question", "its question is empty")
    return text


def _rounds(turns: Sequence[Turn], notes: Counter[str]) -> list[Round]:
    """Return the attempts, each with all that the teacher said of it before the next one."""
    rounds: list[Round] = []
    for role, text in turns:
        if role == "assistant":
            rounds.append(Round(text))
        elif not rounds:
            notes["feedback_before_any_attempt"] += 1
        else:
            # Several pieces of feedback on one attempt are one.
            rounds[-1].feedback = f"{rounds[-1].feedback}\n{text}".lstrip("\n")
    if not rounds:
        raise Skipped("no_student_turn", "has no attempt of the student")
    notes["attempts_without_feedback"] += sum(not attempt.feedback for attempt in rounds[:-1])
    return rounds


def _attempts(
    question: Turn, rounds: Sequence[Round], most: int, notes: Counter[str]
) -> list[dict[str, Any]]:
    """Return a row for each attempt. An attempt that nothing was said of is no part of later states.

    With at most one round of history, rows of the rounds 1, 2 and 3 are

        prompt: question                             completion: attempt 1
        prompt: question, attempt 1, feedback 1      completion: attempt 2
        prompt: question, attempt 2, feedback 2      completion: attempt 3
    """
    rows = []
    history: list[Turn] = []
    for number, attempt in enumerate(rounds, 1):
        # A round is two turns: the attempt and its feedback.
        state = history[max(0, len(history) - 2 * most) :]
        notes["states_cut"] += len(state) < len(history)
        action = Turn("assistant", attempt.attempt)
        rows.append(
            {
                "round": number,
                "prompt": messages([question, *state]),
                "completion": messages([action]),
            }
        )
        if attempt.feedback:
            history += [action, Turn("user", attempt.feedback)]
    return rows


def _conversation(question: Turn, rounds: Sequence[Round], notes: Counter[str]) -> list[Turn]:
    """Return the record as one conversation. Of attempts with nothing said between them the last one counts."""
    turns = [question]
    for attempt in rounds[:-1]:
        if attempt.feedback:
            turns.append(Turn("assistant", _answer(attempt.attempt)))
            turns.append(Turn("user", _in_words(attempt.feedback, notes)))
    turns.append(Turn("assistant", _answer(rounds[-1].attempt)))
    return turns


def _answer(attempt: str) -> str:
    """Return what follows `Answer:`, or the whole attempt where there is no such mark or nothing after it."""
    mark = _ANSWER.search(attempt)
    if mark is None:
        return attempt
    return trimmed(attempt[mark.end() :]) or attempt


def _in_words(feedback: str, notes: Counter[str]) -> str:
    """Return feedback as a sentence: `Score: 4.\\nFeedback: No.` is `A score of 4 is given to the answer. No.`"""
    score = _SCORE.match(feedback)
    mark = _FEEDBACK.search(feedback)
    # The words begin after the mark, or else after the score.
    words = feedback
    if mark is not None:
        words = feedback[mark.end() :]
    elif score is not None:
        words = feedback[score.end() :]
    words = words.strip()
    if score is None:
        notes["feedback_without_score"] += 1
        return words or feedback
    return f"A score of {score[1]} is given to the answer. {words}".strip()


RECIPE: Final = Recipe(
    name="fire",
    hub="PengxiangLi/FIRE",
    splits=("train", "test"),
    styles=("bc", "sharegpt"),
    has_history=True,
    keys={
        "id": (),
        "image": (),
        "question": ("value",),
        "conversations": ("role", "type", "value"),
    },
    convert=convert,
)
