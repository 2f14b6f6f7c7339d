"""The normal form of records: conversations, texts, labelled texts, and answers that are compared or judged.

Later parts know a record only in this form, whatever keys it had in its file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, of which the assistant's answers are trained."""

    # with `role` and `content` and, where the answer calls tools, `tool_calls`
    messages: tuple[dict[str, Any], ...]
    # schemas of functions
    tools: tuple[Any, ...] = ()
    # number of messages at the beginning that are never trained, whoever speaks them
    context: int = 0
    # paths, or addresses of data (images.py); the contents hold one `<image>` for each, in their order
    images: tuple[str, ...] = ()
    # indices of other messages that are not trained, since the data say so
    not_trained: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt, and the completion that is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text, trained from its start to its end."""

    text: str


Label = str | int | float | tuple[str | int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two, and its label."""

    text: str
    second: str | None
    # the name or number of a class, several of them, a 0.0 or 1.0 for every class, or a number to predict
    label: Label


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, each as an example that begins with the prompt."""

    chosen: Chat | Pair
    rejected: Chat | Pair
    # by how much the chosen answer is better; None where nobody says
    margin: float | None = None
    # numbers of the record say that the rejected answer is the better one
    is_scored_otherwise: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt with one answer to it, good or bad."""

    answer: Chat | Pair
    is_good: bool


Example = Chat | Pair | Text | Labelled | Preference | Judged
_E = TypeVar("_E", bound=Example)


def parts_of(example: Example) -> tuple[Chat | Pair | Text | Labelled, ...]:
    """Return the answers of a pair with their prompt, the chosen one first, or the one that is judged; else the example."""
    match example:
        case Preference():
            return example.chosen, example.rejected
        case Judged():
            return (example.answer,)
    return (example,)


def images_of(example: Example) -> tuple[str, ...]:
    """Return the images of a record; those of a pair once, since both answers have the same."""
    first = parts_of(example)[0]
    return first.images if isinstance(first, Chat) else ()


def with_images(example: _E, place: Callable[[str], str]) -> _E:
    """Return the record with another place of each image."""
    match example:
        case Preference():
            return replace(
                example,
                chosen=with_images(example.chosen, place),
                rejected=with_images(example.rejected, place),
            )
        case Judged():
            return replace(example, answer=with_images(example.answer, place))
        case Chat() if example.images:
            return replace(example, images=tuple(map(place, example.images)))
    return example
