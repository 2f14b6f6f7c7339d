"""Volcano (hub: kaist-ai/volcano-train): feedback, revisions and instructions in LLaVA's form, some text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.data.reading.convert import SHAPERS
from kubetune.data.reading.formats import read
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.plugins.recipes.recipe import Converted, DataRecipe, Options, Skipped


def convert(record: Mapping[str, Any], has_image: bool, options: Options) -> Converted:
    """Return the one row of a record, as any data of this form is read. Raise Skipped where it cannot be used."""
    try:
        example, unused, *_ = read(record, "sharegpt", {})
    except ValueError as error:
        raise Skipped("bad_record", str(error)) from None
    row = SHAPERS["messages"](example)
    if row is None:
        raise Skipped("no_answer", "has no answer")

    converted = Converted(rows=[row], unused_keys=set(unused) - {"id"})
    for message in row["messages"]:
        converted.rounds += message["role"] == "assistant"
        # The answer to a picture that is not there teaches to invent.
        if not has_image and IMAGE_TAG in message["content"]:
            raise Skipped("no_image", f"holds {IMAGE_TAG}, but names no image")
    return converted


RECIPE: Final = DataRecipe(
    name="volcano",
    hub="kaist-ai/volcano-train",
    splits=("train",),
    styles=("chat",),
    convert=convert,
)
