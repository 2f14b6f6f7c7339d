"""Columns of images, sounds and the like in records of which nothing is known: refused where no run would show them."""

from __future__ import annotations

from kubetune.base.humanize import counted
from kubetune.config.schema import RecordKind
from kubetune.data.column_names import PROMPTS, TALKS, names_origin
from kubetune.data.column_words import in_list, in_words
from kubetune.data.left_media import IMAGES, NAMES
from kubetune.data.proposed.programs import literal, program
from kubetune.data.proposed.seen_records import SeenRecords
from kubetune.data.proposed.trial_reading import is_text_alone
from kubetune.errors import DataError


def require_shown(seen: SeenRecords, kind: RecordKind, path: str) -> None:
    """Raise DataError for what answers may be about and no model would be shown: sounds, or images in several columns.

    A text that is learned or classified as a whole stands alone: what is beside it is named.
    """
    if kind == "labelled" or (kind == "text" and is_text_alone(seen.records[0])):
        return
    for name, facts in seen.facts.items():
        medium = facts.medium(name)
        is_aside = names_origin(name) or name in TALKS or facts.is_mostly_on_web
        if medium not in (None, "image") and not is_aside:
            what = NAMES[medium][1]
            raise DataError(
                f"{path} has {what} in `{name}`, in {counted(facts.records, 'record')}, and kubetune shows texts and images "
                f"to a model, no {what}. Write what they say into the texts, or leave them out by `{_decided(seen)}`. "
                "Nothing was written."
            )
    if len(seen.images) > 1:
        made = program(path, _joined(seen))
        raise DataError(
            f"{path} has images in {in_list(seen.images)}, and images are read of one column, `images`, which may hold "
            f"several. {made}, or leave them out by `{_decided(seen)}`"
        )


def _decided(seen: SeenRecords) -> str:
    """Return words of the command line that name what is read, and so leave out the rest."""
    talk = next((name for name in TALKS if name in seen.names.values()), None)
    if talk is not None:
        return in_words({talk: talk})
    names = list(seen.names.values())
    asked = next((name for name in (*PROMPTS, seen.by_name["prompt"]) if name in names), None)
    answer = seen.by_name["completion"]
    if seen.by_name["chosen"]:
        return in_words({"prompt": asked or "NAME"})
    return in_words({"prompt": asked or "NAME", "completion": answer or "NAME"})


def _joined(seen: SeenRecords) -> dict[str, str]:
    """Return the new columns of records with all images in one list, in Python of a record r."""
    parts = []
    for name in seen.images:
        value = f"r.get({literal(name)})"
        is_list = seen.facts[name].is_list
        parts.append(f"*({value} or [])" if is_list else value)
    emptied = {name: "None" for name in seen.images if name != IMAGES[0]}
    return {**emptied, IMAGES[0]: f"[i for i in ({', '.join(parts)}) if i]"}
