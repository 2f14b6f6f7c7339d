"""FIRE (hub: PengxiangLi/FIRE, CC BY 4.0): a student's attempts at a question about an image, and a teacher's feedback.

Two styles. `bc` (behaviour cloning): one row for each attempt, whose prompt is the state the student was in (image,
question, the last attempts with their feedback) and whose completion is that attempt as the student gave it; only the
completion is trained. `sharegpt`: one row for each record, the answers without their thoughts, the feedback in words.
Source: "FIRE: A Dataset for Feedback Integration and Refinement Evaluation of Multimodal Models", Li et al. 2024.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kubetune.plugins.recipes import recipe
from kubetune.plugins.recipes.recipe import ImageOf, Options, Recipe
from kubetune.plugins.recipes.tally import Skipped, Tally

_ANSWER: Final = re.compile(r"^[ \t]*Answer:[ \t]*", re.MULTILINE)
_SCORE: Final = re.compile(r"\s*Score:[ \t]*([0-9]+(?:\.[0-9]+)?)(?:[ \t]*/[ \t]*10)?\.?")
_FEEDBACK: Final = re.compile(r"^[ \t]*Feedback:[ \t]*", re.MULTILINE)
_SPEAKERS: Final = (
    ("student", "response"),
    ("teacher", "feedback"),
    ("student", None),
    ("teacher", None),
)


@dataclass(slots=True)
class Round:
    """An attempt and what the teacher said of it; None where nothing was said."""

    attempt: str
    feedback: str | None = None


def rows_of(
    record: Mapping[str, Any], name: str, options: Options, image_of: ImageOf, tally: Tally
) -> list[str]:
    """The rows of a trajectory. Raises Skipped."""
    path = recipe.image_path(record)
    found = recipe.require_source(path, options)
    if path is None:
        raise Skipped("no_image", "names no image")
    question = _question(record, tally)
    rounds = _rounds(record, tally)
    image = recipe.quote(image_of(path))
    tally.rounds += len(rounds)
    tally.sets[found] += 1
    if options.style == "sharegpt":
        return [_conversation(name, question, rounds, image, tally)]
    return _behaviour(name, question, rounds, image, options.max_history_rounds, tally)


def _question(record: Mapping[str, Any], tally: Tally) -> str:
    question = record.get("question")
    question = question.get("value") if isinstance(question, dict) else question
    if question is None:
        raise Skipped("no_question", "has no question")
    text = recipe.plain_text(question, "question")
    if not text.replace("<image>", "").strip():
        raise Skipped("no_question", "its question is empty")
    return recipe.with_one_tag(text, tally)


def _rounds(record: Mapping[str, Any], tally: Tally) -> list[Round]:
    """The attempts that can be read, each with its own feedback. Raises Skipped where there are none.

    A turn that is empty or odd is left out and counted, and with one of the student what the teacher said of it.
    """
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise Skipped("no_conversations", "has no conversations")
    rounds: list[Round] = []
    odd: Skipped | None = None
    is_lost = False  # whether the attempt that feedback would now be on is one that was left out
    for i, turn in enumerate(turns):
        speaker = _speaker(turn)
        try:
            text = _said(turn, f"conversations[{i}]", tally)
        except Skipped as error:
            odd = odd or error
            tally.notes[f"turns_left_out_{error.reason}"] += 1
            text = ""
        if not text:
            # A turn by nobody known stands in an attempt's place where the attempt before it has its feedback.
            is_lost |= speaker == "student" or (
                speaker is None and bool(rounds) and rounds[-1].feedback is not None
            )
        elif speaker == "student":
            rounds.append(Round(text))
            is_lost = False
        elif is_lost:
            tally.notes["feedback_on_attempts_left_out"] += 1
        elif not rounds:
            tally.notes["feedback_before_any_attempt"] += 1
        else:
            before = rounds[-1].feedback
            rounds[-1].feedback = text if before is None else f"{before}\n{text}"
    if not rounds:
        raise odd or Skipped("no_student_turn", "has no attempt of the student")
    tally.notes["attempts_without_feedback"] += sum(r.feedback is None for r in rounds[:-1])
    return rounds


def _said(turn: Any, where: str, tally: Tally) -> str:
    """The text of a turn; empty where nothing is said. Raises Skipped for a turn that is odd."""
    speaker = _speaker(turn)
    if speaker is None or (speaker, turn.get("type")) not in _SPEAKERS:
        found = (
            (turn.get("role"), turn.get("type")) if isinstance(turn, dict) else type(turn).__name__
        )
        raise Skipped("bad_turn", f"{where} is by {found}; expected a student or a teacher")
    text = recipe.without_tags(recipe.plain_text(turn.get("value"), f"{where}.value"), tally)
    tally.notes["empty_turns"] += not text
    return text


def _speaker(turn: Any) -> str | None:
    role = turn.get("role") if isinstance(turn, dict) else None
    return role if role in ("student", "teacher") else None


def _behaviour(
    name: str, question: str, rounds: list[Round], image: str, most: int, tally: Tally
) -> list[str]:
    """One row for each attempt. An attempt that nothing was said of is no part of later states."""
    start, rows = ("user", recipe.quote(question)), []
    history: list[tuple[str, str]] = []
    before: list[tuple[str, str]] | None = None
    for number, round_ in enumerate(rounds, 1):
        attempt = recipe.quote(round_.attempt)
        state = history[max(0, len(history) - 2 * most) :]
        tally.notes["states_cut"] += len(state) < len(history)
        tally.notes["prompts_that_repeat_the_one_before"] += state == before
        before = state
        rows.append(
            f'{{"id": {recipe.quote(name)}, "round": {number}, "prompt": [{recipe.messages_json([start, *state])}], '
            f'"completion": [{recipe.messages_json([("assistant", attempt)])}], "images": [{image}]}}'
        )
        if round_.feedback is not None:
            history += [("assistant", attempt), ("user", recipe.quote(round_.feedback))]
    return rows


def _conversation(name: str, question: str, rounds: list[Round], image: str, tally: Tally) -> str:
    """One row for the record. Of attempts with nothing said between them the last one counts."""
    turns = [("user", recipe.quote(question))]
    for i, round_ in enumerate(rounds):
        last = i == len(rounds) - 1
        if round_.feedback is None and not last:
            continue
        turns.append(("assistant", recipe.quote(answer_of(round_.attempt))))
        if not last and round_.feedback is not None:
            turns.append(("user", recipe.quote(_feedback(round_.feedback, tally))))
    return f'{{"id": {recipe.quote(name)}, "messages": [{recipe.messages_json(turns)}], "images": [{image}]}}'


def answer_of(attempt: str) -> str:
    """Text after `Answer:` in an attempt; the whole of it where there is no such mark, or nothing after it."""
    mark = _ANSWER.search(attempt)
    return (recipe.trimmed(attempt[mark.end() :]) if mark else "") or attempt


def _feedback(text: str, tally: Tally) -> str:
    score = _SCORE.match(text)
    mark = _FEEDBACK.search(text)
    words = text[mark.end() :] if mark else text[score.end() :] if score else text
    if score is None:
        tally.notes["feedback_without_score"] += 1
        return words.strip() or text
    return f"A score of {score[1]} is given to the answer. {words.strip()}".strip()


_KEYS: Final = {
    "": frozenset({"id", "image", "question", "conversations"}),
    "question": frozenset({"value"}),
    "conversations": frozenset({"role", "type", "value"}),
}
RECIPE: Final = Recipe(
    "fire", "PengxiangLi/FIRE", ("train", "test"), ("bc", "sharegpt"), True, rows_of, _KEYS
)
