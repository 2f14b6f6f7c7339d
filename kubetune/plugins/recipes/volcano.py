"""Volcano (hub: kaist-ai/volcano-train): feedback, revisions and instructions in LLaVA's form, some text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.data.reading.formats import IMAGE_TAG
from kubetune.plugins.recipes import recipe
from kubetune.plugins.recipes.recipe import ImageOf, Options, Recipe
from kubetune.plugins.recipes.tally import Skipped, Tally

_ROLES: Final = {"human": "user", "gpt": "assistant", "system": "system"}

Turn = tuple[str, str]


def rows_of(
    record: Mapping[str, Any], name: str, options: Options, image_of: ImageOf, tally: Tally
) -> list[str]:
    """The one row of a record. Raises Skipped."""
    path = recipe.image_path(record)
    found = recipe.require_source(path, options)
    system, turns = _turns(record, tally)
    if path is None and any(IMAGE_TAG in text for _, text in turns):
        raise Skipped("no_image", f"holds {IMAGE_TAG}, but names no image")
    images = ""
    if path is not None:
        turns = _with_tag(turns, tally)
        images = f', "images": [{recipe.quote(image_of(path))}]'
    else:
        tally.notes["text_only"] += 1
    tally.rounds += len(turns) // 2
    tally.sets[found if path is not None else "text"] += 1
    messages = recipe.messages_json(
        [(role, recipe.quote(text)) for role, text in [*system, *turns]]
    )
    return [f'{{"id": {recipe.quote(name)}, "messages": [{messages}]{images}}}']


def _turns(record: Mapping[str, Any], tally: Tally) -> tuple[list[Turn], list[Turn]]:
    """The system prompt, if any, and questions and answers by turns. Raises Skipped where they are not so."""
    given = record.get("conversations")
    if not isinstance(given, list) or not given:
        raise Skipped("no_conversations", "has no conversations")
    turns: list[Turn] = []
    for i, turn in enumerate(given):
        role = _ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None:
            raise Skipped(
                "bad_turn",
                f"conversations[{i}] is by nobody known; expected `from` human, gpt or system",
            )
        text = recipe.plain_text(turn.get("value"), f"conversations[{i}].value")
        if not text:
            raise Skipped("empty_turn", f"conversations[{i}].value is empty")
        turns.append((role, text))
    system = turns[:1] if turns[0][0] == "system" else []
    turns = turns[len(system) :]
    if turns and turns[0][0] == "assistant":
        tally.notes["leading_answers_left_out"] += (
            1  # ShareGPT's conversations may begin in their middle
        )
        turns = turns[1:]
    if turns and turns[-1][0] == "user":
        tally.notes["trailing_questions_left_out"] += 1
        turns = turns[:-1]
    if not turns:
        raise Skipped("no_answer", "has no question with an answer")
    for i, (role, _) in enumerate(turns):
        if role != ("assistant" if i % 2 else "user"):
            raise Skipped("bad_turn", "its questions and answers do not follow each other by turns")
    return system, turns


def _with_tag(turns: list[Turn], tally: Tally) -> list[Turn]:
    """One tag in all: the first that a question has, where it stands, or else one before the first question."""
    asks = (i for i, (role, text) in enumerate(turns) if role == "user" and IMAGE_TAG in text)
    place = next(asks, 0)
    tally.notes["images_in_later_questions"] += place > 0
    turns = [
        (role, recipe.with_one_tag(text, tally) if i == place else recipe.without_tags(text, tally))
        for i, (role, text) in enumerate(turns)
    ]
    if any(not text.replace(IMAGE_TAG, "").strip() for role, text in turns if role == "assistant"):
        raise Skipped("empty_turn", f"an answer is nothing but {IMAGE_TAG}")
    if any(not text for _, text in turns):
        raise Skipped("empty_turn", f"a question is nothing but {IMAGE_TAG}")
    return turns


_KEYS: Final = {
    "": frozenset({"id", "image", "conversations"}),
    "conversations": frozenset({"from", "value"}),
}
RECIPE: Final = Recipe(
    "volcano", "kaist-ai/volcano-train", ("train",), ("chat",), False, rows_of, _KEYS
)
