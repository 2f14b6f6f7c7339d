"""What is wrong with a field, as one plain sentence beside it. The field shows its name and what was typed."""

from __future__ import annotations

import re

# What is expected of these fields, where the words of the schema are for those who write YAML.
_EXPECTED = {
    "name": "at most 40 lower case letters, digits and inner dashes, such as support-bot",
    "data.eval": "a share of the rows below 1, such as 0.05, or a file",
}
_OF_YAML = ("a section", "a list", "a mapping", "text")


def field_sentence(problem: str, key: str) -> str:
    """Return a problem as it is said beside the field of this key.

    data.eval: found 1.7; expected a number of at least 0 …   →   Expected a share of the rows below 1, such as 0.05, …
    """
    text = re.sub(r"^(model \S+|[a-z_]+(\.[a-z_]+)*): ", "", problem)
    offline = re.match(
        r"(?:model |dataset )?(\S+) is not in the local cache and the hub cannot", text
    )
    if offline is not None:
        return f"{offline[1]} is neither a folder nor downloaded, and the hub cannot be reached; choose one at hand"
    meant = re.match(r"found .*?; did you mean (.*?)\?", text)
    if meant is not None:
        return f"Did you mean {meant[1]}?"
    expected = re.match(r"found .*?; expected (.*)", text)
    if expected is not None:
        kinds = [kind for kind in expected[1].split(" or ") if kind not in _OF_YAML]
        return f"Expected {_EXPECTED.get(key) or ' or '.join(kinds)}"
    # Which files are read is said by the help of the field.
    absent = re.match(r"(\S+ does not exist); expected", text)
    return absent[1] if absent is not None else text


def held_out(text: str, rows: int | None) -> str:
    """Return of what a number of the evaluation data is a share, "" of a file."""
    try:
        part = float(text)
    except ValueError:
        return ""
    if not 0 < part < 1:
        return ""
    return f"{100 * part:.3g} % of the {f'{rows:,} ' if rows else ''}rows"
