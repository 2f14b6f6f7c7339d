"""Spellings of hub data sets that recipes still use, in today's names. Nothing here asks the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOVED = {"glue": "nyu-mll/glue"}
"""Data sets that were known without their owner, by the name that the hub has them under now."""

_SHORT = re.compile(rf"(?P<name>{'|'.join(MOVED)})(?:/(?P<subset>\w+))?(?P<sample>#\d+)?")


def todays_names(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source with `hub:` taken from its path; `glue/sst2` is the subset sst2 of `nyu-mll/glue`, and so is `glue`.

    A path that names one subset beside another `subset` stays as it is, for the hub to refuse.
    """
    path = source.get("path")
    if not isinstance(path, str):
        return dict(source)
    path = path.strip().removeprefix("hub:")
    found, given = _SHORT.fullmatch(path), source.get("subset")
    if found is None or (given is not None and found["subset"] not in (None, given)):
        return {**source, "path": path}
    subset = {"subset": found["subset"]} if found["subset"] else {}
    return {**source, **subset, "path": MOVED[found["name"]] + (found["sample"] or "")}
