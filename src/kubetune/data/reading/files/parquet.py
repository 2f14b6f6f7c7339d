"""Reading Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kubetune.data.reading.files.columnar import as_json, damage_refused, named_twice
from kubetune.data.reading.files.reader import Reader
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.strict_json import JsonObject


def read_parquet(file: Path, problems: Problems) -> Iterator[Record]:
    """Read the rows of a Parquet file."""
    number = 0
    table = _parquet(file)
    twice = named_twice(table.schema_arrow)
    if twice:
        mistake = f"has the column `{twice}` more than once; all but one would be lost"
        problems.add(f"{file}:1", mistake)
        return

    for values in _batches(file, table):
        for value in values:
            number += 1
            yield Record(str(file), number, as_json(value))


def _batches(file: Path, table: Any) -> Iterator[list[JsonObject]]:
    """Yield the rows of a Parquet file, some at once. Raise DataError where the file is damaged."""
    batches = table.iter_batches(batch_size=1000)
    number = 1
    while True:
        with damage_refused(file, f" from row {number:,} on"):
            batch = next(batches, None)
            # Damage shows when a batch is read, and some only when it is made into Python's values.
            values = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        number += len(values)
        yield values


def parquet_rows(file: Path) -> int:
    """Return the number of rows that a Parquet file says it has."""
    return int(_parquet(file).metadata.num_rows)


def parquet_features(file: Path) -> JsonObject:
    """Return the account that `datasets` gives of the columns of a Parquet file that it wrote; empty for others."""
    metadata = _parquet(file).schema_arrow.metadata or {}
    # `datasets` writes its account as JSON; other tools may use the same key for anything.
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (ValueError, LookupError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _parquet(file: Path) -> Any:
    from kubetune.extras import require

    require(f"{file}, a Parquet file,", "pyarrow")
    import pyarrow.parquet

    with damage_refused(file):
        # Where the pages of a file have checksums, they are compared.
        return pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)


PARQUET: Final = Reader(read_parquet, count=parquet_rows, features=parquet_features)
