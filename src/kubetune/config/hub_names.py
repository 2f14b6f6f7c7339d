"""Old names of hub data sets that recipes still use, and their names of today. Nothing here asks the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Old name without an owner → name on the hub today.
MOVED = {"glue": "nyu-mll/glue"}

_SHORT = re.compile(rf"(?P<name>{'|'.join(MOVED)})(?:/(?P<subset>\w+))?(?P<sample>#\d+)?")


def todays_names(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source with today's name of its data set, and without `hub:` before it.

        {path: hub:glue/sst2#500}  →  {path: nyu-mll/glue#500, subset: sst2}

    If the path and `subset` name two different subsets, the path stays, and the hub refuses it.
    """
    path = source.get("path")
    if not isinstance(path, str):
        return dict(source)
    path = path.strip().removeprefix("hub:")
    renamed = {**source, "path": path}

    old_name = _SHORT.fullmatch(path)
    if old_name is None:
        return renamed
    subset_of_path = old_name["subset"]
    subset_of_key = source.get("subset")
    if subset_of_path and subset_of_key is not None and subset_of_path != subset_of_key:
        return renamed

    if subset_of_path:
        renamed["subset"] = subset_of_path
    renamed["path"] = MOVED[old_name["name"]] + (old_name["sample"] or "")
    return renamed
