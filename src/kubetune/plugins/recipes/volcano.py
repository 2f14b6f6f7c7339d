"""Volcano (hub: kaist-ai/volcano-train): feedback, revisions and instructions in LLaVA's form, some text only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kubetune.data.reading.formats import IMAGE_TAG
from kubetune.plugins.recipes.recipe import Converted, Options, Recipe, Skipped
from kubetune.plugins.recipes.turns import Turn, messages, read_turns, with_one_tag

# Speakers as LLaVA's form names them.
_ROLES: Final[Mapping[tuple[str, ...], str]] = {
    ("human",): "user",
    ("gpt",): "assistant",
    ("system",): "system",
}


def convert(record: Mapping[str, Any], has_image: bool, options: Options) -> Converted:
    """Return the one row of a record. Raise Skipped where it cannot be used."""
    converted = Converted()
    turns = read_turns(record, ("from",), _ROLES)

    # A system prompt stands before the questions and answers, and is put back at the end.
    system = []
    if turns[0].role == "system":
        system = [turns.pop(0)]
    turns = _by_turns(turns, converted.notes)

    # A row with an image has one tag; a row without has none.
    if has_image:
        place = _place_of_tag(turns, converted.notes)
        turns = with_one_tag(turns, place, converted.notes)
    elif any(IMAGE_TAG in turn.content for turn in turns):
        raise Skipped("no_image", f"holds {IMAGE_TAG}, but names no image")
    else:
        converted.notes["text_only"] += 1

    converted.rounds = len(turns) // 2
    converted.rows = [{"messages": messages([*system, *turns])}]
    return converted


def _by_turns(turns: list[Turn], notes: Counter[str]) -> list[Turn]:
    """Return questions and their answers by turns. Conversations of ShareGPT may begin and end in their middle."""
    if turns and turns[0].role == "assistant":
        notes["leading_answers_left_out"] += 1
        turns = turns[1:]

    if turns and turns[-1].role == "user":
        notes["trailing_questions_left_out"] += 1
        turns = turns[:-1]
    if not turns:
        raise Skipped("no_answer", "has no question with an answer")

    # What is left begins with a question and ends with an answer.
    for number, turn in enumerate(turns):
        expected = "assistant" if number % 2 else "user"
        if turn.role != expected:
            raise Skipped("bad_turn", "its questions and answers do not follow each other by turns")
    return turns


def _place_of_tag(turns: list[Turn], notes: Counter[str]) -> int:
    """Return the index of the first question that has a tag, or of the first question."""
    for number, turn in enumerate(turns):
        if turn.role == "user" and IMAGE_TAG in turn.content:
            notes["images_in_later_questions"] += number > 0
            return number
    return 0


RECIPE: Final = Recipe(
    name="volcano",
    hub="kaist-ai/volcano-train",
    splits=("train",),
    styles=("chat",),
    has_history=False,
    keys={"id": (), "image": (), "conversations": ("from", "value")},
    convert=convert,
)
