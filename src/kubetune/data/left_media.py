"""Images, sounds, films and documents beside a question: a record whose reading would leave one out is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kubetune.config.schema import RecordKind
from kubetune.data.column_names import ANSWERS, PROMPTS, TALKS, names_origin
from kubetune.data.column_words import in_list, in_words, in_yaml
from kubetune.data.media import Medium, is_on_web, medium_of
from kubetune.data.record_values import RecordValue, is_empty, key_of

# What one is called, and several.
NAMES: Final[Mapping[Medium, tuple[str, str]]] = {
    "image": ("an image", "images"),
    "audio": ("a sound", "sounds"),
    "video": ("a video", "videos"),
    "document": ("a document", "documents"),
}
# Columns that readers take images from.
IMAGES: Final = ("images", "image")


def left_media(value: RecordValue, unused: Iterable[str]) -> dict[str, Medium]:
    """Return the unused columns that hold no text but an image or the like, with what they hold.

    None of those that are on the web or say where the record is from: these are named, and the record is read.
    """
    left = {}
    for name in unused:
        item = value.get(name)
        medium = None if is_empty(item) or names_origin(name) else medium_of(item)
        if medium is not None and not is_on_web(item):
            left[name] = medium
    return left


def require_media(
    value: RecordValue, unused: Iterable[str], columns: Mapping[str, str], kind: RecordKind
) -> None:
    """Raise ValueError for an image, or the like, that stands beside a question and would be left out."""
    question = key_of((*TALKS, *PROMPTS), value, {})
    # Whoever names a question, an answer or the text to learn has seen the other columns.
    is_decided = not columns.keys().isdisjoint(
        (*PROMPTS, *ANSWERS, *TALKS, "chosen", "rejected", "text")
    )
    if not question or is_decided:
        return
    left = left_media(value, unused)
    if not left:
        return
    images = [name for name, medium in left.items() if medium == "image"]
    others = [name for name in left if name not in images]
    decided = f"`{in_yaml({question: columns.get(question, question), **columns})}`"
    if others:
        what = NAMES[left[others[0]]][len(others) > 1]
        raise ValueError(
            f"has {what} in {in_list(others)}, which kubetune cannot show to a model; expected texts and images. Write what "
            f"it says into `{question}` as a text, or give {decided} to leave it out"
        )
    raise ValueError(_images(value, images, columns, kind, decided))


def _images(
    value: RecordValue,
    images: Sequence[str],
    columns: Mapping[str, str],
    kind: RecordKind,
    decided: str,
) -> str:
    """Return what is said of images that would be left out. `decided`: columns with which they are."""
    them = "it" if len(images) == 1 else "them"
    what = NAMES["image"][len(images) > 1]
    has = f"has {what} in {in_list(images)}, and the model would not see {them}"
    if kind == "prompt":
        return f"{has}: `task: grpo` has no images; give {decided} to leave {them} out"
    task = "task: vision_language" if kind == "text" else "preference.images: true"
    read = key_of(IMAGES, value, {})
    if len(images) == 1 and not read:
        use = {**columns, "image": images[0]}
        return f"{has}; give `{in_yaml(use)}` (`{in_words(use)}` beside `--data`) and `{task}`, or {decided} to leave it out"
    every = [columns.get(read, read)] if read else []
    return (
        f"{has}, since images are read of one column; write those of {in_list([*every, *images])} as a list into `images` "
        f"and set `{task}`, or give {decided} to leave {them} out"
    )
