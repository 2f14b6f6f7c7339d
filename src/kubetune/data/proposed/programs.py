"""Programs to paste: a file of other records, made from the records of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base.humanize import counted
from kubetune.data.record_programs import each_record, piped

Value = Mapping[str, Any]


def literal(value: Any) -> str:
    """Return a name, a number or a list of them in Python, with texts in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def program(path: str, new_columns: Mapping[str, str]) -> str:
    """Return what makes records with other columns. `new_columns`: their values in Python of a record r, by name."""
    pairs = ", ".join(f"{literal(name)}: {code}" for name, code in new_columns.items())
    if not path.endswith(".jsonl"):
        # All of them at once: a column may be read for one and emptied by another.
        return f"Write `r.update({{{pairs}}})` for each record r in Python"
    command = each_record(path, pairs, "texts")
    return f"Make them so, then give {command.made}: `{command.words}`"


def records_within(values: Sequence[Value], path: str) -> str:
    """Return how to get at the records of a file that is one object around them; empty if it is not.

    Such a file is `{"version": 1, "data": [{"question": …}, …]}`.
    """
    if len(values) != 1:
        return ""
    for name, inner in values[0].items():
        if isinstance(inner, list) and inner and all(isinstance(item, dict) for item in inner):
            code = f"import json, sys; [print(json.dumps(r)) for r in json.load(sys.stdin)[{literal(name)}]]"
            command = piped(code, path, f"{path.rpartition('.')[0]}-{name}.jsonl")
            return (
                f"{path} is one object, and its `{name}` is a list of {counted(len(inner), 'object')}. Write these on a "
                f"line each, then give {command.made}: `{command.words}`"
            )
    return ""
