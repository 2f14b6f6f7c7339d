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
from typing import Any, Final, NamedTuple

from kubetune.data.reading.fields import Fields, show, text_of
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.plugins.recipes.recipe import Converted, DataRecipe, Options, Skipped

# The student's attempts are what a model learns; the teacher's feedback is what it answers to.
_ROLES: Final = {("student", "response"): "assistant", ("teacher", "feedback"): "user"}
# "Thought: …\nAnswer: a cat" and "Score: 4/10.\nFeedback: …".
_ANSWER: Final = re.compile(r"^[ \t]*Answer:[ \t]*", re.MULTILINE)
_SCORE: Final = re.compile(
    r"\s*Score:[ \t]*([0-9]+(?:\.[0-9]+)?)(?:[ \t]*/[ \t]*10)?\.?\s*(?:Feedback:)?"
)


class FireTurn(NamedTuple):
    """What one speaker says; its fields are those of a message."""

    role: str
    content: str


@dataclass(slots=True)
class Round:
    """An attempt and the teacher's feedback on it; empty if there was none."""

    attempt: str
    feedback: str = ""


def convert(record: Mapping[str, Any], has_image: bool, options: Options) -> Converted:
    """Return the rows of a trajectory. Raise Skipped where there are none."""
    if not has_image:
        raise Skipped("no_image", "names no image")
    converted = Converted()
    fields = Fields(record)
    question = FireTurn("user", _question(fields, converted.notes))
    rounds = _rounds(_turns(fields, converted.notes), converted.notes)
    converted.unused_keys = set(fields.unused) - {"id", "image"}
    converted.rounds = len(rounds)
    if options.style == "sharegpt":
        conversation = _conversation(question, rounds, converted.notes)
        converted.rows = [{"messages": _messages(conversation)}]
    else:
        converted.rows = _attempts(question, rounds, options.max_history_rounds, converted.notes)
    return converted


def _question(record: Fields, notes: Counter[str]) -> str:
    """Return the image's tag and the question, which is a text or an object that holds one."""
    question = record.get("question")
    if isinstance(question, dict):
        fields = Fields(question)
        question = fields.get("value")
        for key in fields.unused:
            record.note_unused(f"question.{key}")
    text = _clean(question, "question")
    notes["image_tags_removed"] += max(0, text.count(IMAGE_TAG) - 1)
    text = text.replace(IMAGE_TAG, "").strip()
    if not text:
        raise Skipped("no_question", "its question is empty")
    return f"{IMAGE_TAG}\n{text}"


def _turns(record: Fields, notes: Counter[str]) -> list[FireTurn]:
    """Return what student and teacher say. Raise Skipped where a turn cannot be read."""
    conversation = record.get("conversations")
    if not isinstance(conversation, list) or not conversation:
        raise Skipped("no_conversations", "has no conversations")

    turns = []
    for number, turn in enumerate(conversation):
        where = f"conversations[{number}]"
        if not isinstance(turn, dict):
            raise Skipped("bad_turn", f"{where} is {show(turn)}; expected an object")
        fields = Fields(turn)
        speaker = (str(fields.get("role")), str(fields.get("type")))
        if speaker not in _ROLES:
            message = f"{where} has role/type {'/'.join(speaker)}; expected student/response or teacher/feedback"
            raise Skipped("bad_turn", message)

        # The model sees the image once, at the question.
        text = _clean(fields.get("value"), f"{where}.value")
        notes["image_tags_removed"] += text.count(IMAGE_TAG)
        text = text.replace(IMAGE_TAG, "").strip()
        if not text:
            raise Skipped("empty_turn", f"{where}.value is empty")
        turns.append(FireTurn(_ROLES[speaker], text))
        for key in fields.unused:
            record.note_unused(f"conversations[].{key}")
    return turns


def _clean(value: Any, where: str) -> str:
    """Return a text that can be trained on, without white space around it. Raise Skipped for what is none."""
    try:
        return text_of(value, where, may_be_empty=True).strip()
    except ValueError as error:
        raise Skipped("bad_text", str(error)) from None


def _rounds(turns: Sequence[FireTurn], notes: Counter[str]) -> list[Round]:
    """Return the attempts, each with all feedback before the next attempt."""
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
    question: FireTurn, rounds: Sequence[Round], most: int, notes: Counter[str]
) -> list[dict[str, Any]]:
    """Return a row for each attempt. An attempt without feedback is no part of later states.

    With at most one round of history, rows of the rounds 1, 2 and 3 are

        prompt: question                             completion: attempt 1
        prompt: question, attempt 1, feedback 1      completion: attempt 2
        prompt: question, attempt 2, feedback 2      completion: attempt 3
    """
    rows = []
    history: list[FireTurn] = []
    for number, attempt in enumerate(rounds, 1):
        # A round is two turns: the attempt and its feedback.
        state = history[max(0, len(history) - 2 * most) :]
        action = FireTurn("assistant", attempt.attempt)
        rows.append(
            {
                "round": number,
                "prompt": _messages([question, *state]),
                "completion": _messages([action]),
            }
        )
        if attempt.feedback:
            history += [action, FireTurn("user", attempt.feedback)]
    return rows


def _conversation(
    question: FireTurn, rounds: Sequence[Round], notes: Counter[str]
) -> list[FireTurn]:
    """Return the record as one conversation. Of attempts without feedback between them the last one counts."""
    turns = [question]
    for attempt in rounds[:-1]:
        if attempt.feedback:
            turns.append(FireTurn("assistant", _answer(attempt.attempt)))
            turns.append(FireTurn("user", _in_words(attempt.feedback, notes)))
    turns.append(FireTurn("assistant", _answer(rounds[-1].attempt)))
    return turns


def _messages(turns: Sequence[FireTurn]) -> list[dict[str, str]]:
    """Return turns as the messages of a row."""
    return [turn._asdict() for turn in turns]


def _answer(attempt: str) -> str:
    """Return what follows `Answer:`, or the whole attempt where there is no such mark or nothing after it."""
    mark = _ANSWER.search(attempt)
    if mark is None:
        return attempt
    return attempt[mark.end() :].strip() or attempt


def _in_words(feedback: str, notes: Counter[str]) -> str:
    """Return feedback as a sentence: `Score: 4.\\nFeedback: No.` is `A score of 4 is given to the answer. No.`"""
    score = _SCORE.match(feedback)
    if score is None:
        notes["feedback_without_score"] += 1
        return feedback
    words = feedback[score.end() :].strip()
    return f"A score of {score[1]} is given to the answer. {words}".strip()


RECIPE: Final = DataRecipe(
    name="fire",
    hub="PengxiangLi/FIRE",
    splits=("train", "test"),
    styles=("bc", "sharegpt"),
    convert=convert,
)
