"""Rows of tables that pyarrow reads: as JSON would have them, and with damage in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from kubetune.config.data_files import format_of
from kubetune.data.reading.strict_json import JsonObject
from kubetune.errors import DataError


def as_json(row: JsonObject) -> JsonObject:
    """Return a row of a table as JSON would have it.

    Columns of Arrow give all objects the same keys. So a call of f(a) beside one of g(b) is read as
    `{"a": 1, "b": null}` and becomes `{"a": 1}`. The row itself keeps its nulls: its keys are the columns.
    Decimal("2.50") becomes 2.5, and a date `2024-01-31`.
    """
    return {key: _as_json(value) for key, value in row.items()}


def _as_json(value: Any) -> Any:
    match value:
        case dict():
            return {key: _as_json(item) for key, item in value.items() if item is not None}
        case list():
            return [_as_json(item) for item in value]
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case _:
            return value


def named_twice(fields: Iterable[Any], place: str = "") -> str:
    """Return the first name that two fields of Arrow beside each other have; empty where none has."""
    # {"a": …, "a": …} is legal in a Parquet file, and loses a value when a row becomes a dict.
    names: set[str] = set()
    for field in fields:
        name = f"{place}{field.name}"
        if name in names:
            return name
        names.add(name)
        kind = field.type
        while hasattr(kind, "value_type"):  # a list
            kind = kind.value_type
        if hasattr(kind, "get_field_index"):  # an object
            inner = named_twice(kind, f"{name}.")
            if inner:
                return inner

    return ""


@contextmanager
def damage_refused(file: Path, place: str = "") -> Iterator[None]:
    """Raise DataError, which names the file, for what pyarrow cannot read of it. Errors of the disk pass."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # pyarrow calls damage an OSError too, but one without a number of the system.
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if is_of_system or isinstance(error, MemoryError):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        kind = format_of(file).title
        raise DataError(
            f"{file} cannot be read as {kind}{place}: {reason}. It is damaged, cut off, or another kind of "
            "file. Download or write it again; a file of another kind needs its usual ending. Nothing was written."
        ) from error
