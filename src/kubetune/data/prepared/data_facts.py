"""Facts about the data of a run that its result needs when the data are gone: kept in data.json, under `facts`.

They are read once from the first record of the first training source, and lie beside the prepared rows (FACTS).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kubetune import errors
from kubetune.base import files, logs
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.reading.examples import Chat, Labelled, parts_of
from kubetune.data.reading.formats import convert
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.rundir.metrics import DATA

# The name of the file in a folder of prepared data.
FACTS: Final = "facts.json"


@dataclass(frozen=True)
class DataFacts:
    """Form of the records that a run was trained on. A fact that is not known is None."""

    # Conversations, so that a question has to be asked as one.
    is_chat: bool | None = None
    # Of a classifier: two texts to a label.
    takes_pairs: bool | None = None


def learn(source: SourceConfig, kind: RecordKind) -> DataFacts:
    """Return the facts of a source, by its first record. They are unknown if that is missing or bad."""
    try:
        record = next(read_source(source, Problems()))
        example = convert(
            record.value,
            source.format,
            source.columns,
            kind=kind,
        )
    except (errors.KubetuneError, ValueError, StopIteration, OSError):
        return DataFacts()

    if isinstance(example, Labelled):
        return DataFacts(is_chat=False, takes_pairs=example.second is not None)
    # In a pair or a judged answer, the answer has the form.
    return DataFacts(is_chat=isinstance(parts_of(example)[0], Chat))


def write(folder: Path, facts: DataFacts) -> None:
    """Keep the facts beside the prepared rows."""
    files.write_atomic(folder / FACTS, json.dumps(asdict(facts)))


def of_prepared(folder: Path) -> DataFacts:
    """Return the facts beside prepared rows."""
    return _parse(files.read_object(folder / FACTS)) or DataFacts()


def read(run_dir: Path) -> DataFacts | None:
    """Return the facts in data.json of a run; None if the file is missing or damaged, which is logged."""
    try:
        return _parse(files.read_object(run_dir / DATA).get("facts"))
    except FileNotFoundError:
        return None
    except errors.EnvironmentFault as error:
        logs.DATA.warning("%s", error)
        return None


def known(
    run_dir: Path,
    source: SourceConfig,
    kind: RecordKind,
) -> DataFacts:
    """Return the facts that a run keeps. If it lost them, take those of its first source, if that is at hand."""
    facts = read(run_dir)
    if facts is None:
        facts = learn(source, kind)
        logs.DATA.warning(
            "%s keeps no facts about its data: they are looked up in the data themselves", run_dir
        )

    return facts


def _parse(facts: Any) -> DataFacts | None:
    """Return facts from JSON, None if it is of another form. A value of another type is taken for unknown."""
    if not isinstance(facts, dict):
        return None
    is_chat = facts.get("is_chat")
    takes_pairs = facts.get("takes_pairs")
    return DataFacts(
        is_chat=is_chat if isinstance(is_chat, bool) else None,
        takes_pairs=takes_pairs if isinstance(takes_pairs, bool) else None,
    )
