"""Facts about the data of a run that its result needs after the data have gone: kept in data.json, under `facts`.

They are read off the first record of the first training source, once, and lie beside the prepared rows (FACTS).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kubetune import errors
from kubetune.base import files, logs
from kubetune.config.schema import Config
from kubetune.data.reading.formats import Chat, Judged, Labelled, Preference, convert
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.rundir.metrics import DATA

FACTS: Final = "facts.json"
"""The name of the file in a folder of prepared data."""


@dataclass(frozen=True)
class DataFacts:
    """Form of the records that a run was trained on, None where it is not known.

    `is_chat`: conversations; `takes_pairs`: two texts to a label, of a classifier.
    """

    is_chat: bool | None = None
    takes_pairs: bool | None = None


def learn(config: Config) -> DataFacts:
    """The facts of a config whose data are at hand; unknown ones where they are not, or the first record is bad."""
    source = config.data.train[0]
    try:
        record = next(read_source(source, Problems()))
        example = convert(record.value, source.format, source.columns, kind=config.record_kind)
    except (errors.KubetuneError, ValueError, StopIteration, OSError):
        return DataFacts()
    if isinstance(example, Labelled):
        return DataFacts(False, example.second is not None)
    if isinstance(example, Preference | Judged):
        example = example.chosen if isinstance(example, Preference) else example.answer
    return DataFacts(isinstance(example, Chat))


def write(folder: Path, config: Config) -> None:
    """Keep the facts beside the prepared rows."""
    files.write_atomic(folder / FACTS, json.dumps(asdict(learn(config))))


def of_prepared(folder: Path, config: Config) -> DataFacts:
    """The facts beside prepared rows; read anew where these were prepared before there were any."""
    beside = folder / FACTS
    return (_parse(files.read_object(beside)) if beside.is_file() else None) or learn(config)


def read(run_dir: Path) -> DataFacts | None:
    """The facts in data.json of a run; None where a run from before has none, or its disk has damaged the file."""
    try:
        return _parse(files.read_object(run_dir / DATA).get("facts"))
    except FileNotFoundError:
        return None
    except errors.EnvironmentFault as error:
        logs.DATA.warning("%s", error)
        return None


def known(run_dir: Path, config: Config) -> DataFacts:
    """The facts that a run keeps; of one from before they were kept, those of its data, where these are at hand."""
    found = read(run_dir)
    if found is None:
        found = learn(config)
        logs.DATA.warning(
            "%s keeps no facts about its data: they are looked up in the data themselves", run_dir
        )
    return found


def _parse(facts: Any) -> DataFacts | None:
    if not isinstance(facts, dict):
        return None
    found = {name: facts.get(name) for name in DataFacts.__dataclass_fields__}
    return DataFacts(
        **{name: value if isinstance(value, bool) else None for name, value in found.items()}
    )
