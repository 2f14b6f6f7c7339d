"""What people say of a run: a name to show, a note, tags, and that it is archived. Training never reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kubetune.base.files import read_object, write_atomic
from kubetune.base.jsonl import warn
from kubetune.errors import ConfigError, EnvironmentFault

LABELS = "labels.json"

# Characters of each, so that a list stays one.
MOST_TITLE = 100
MOST_NOTE = 2_000
MOST_TAG = 40
MOST_TAGS = 20


@dataclass(frozen=True)
class Labels:
    """Name, note and tags that a user gave a run."""

    title: str = ""  # instead of the name in its run file; empty: that name
    note: str = ""
    tags: tuple[str, ...] = ()  # besides those for the trackers
    archived: bool = False  # left out of lists


NO_LABELS = Labels()


def read_labels(run_dir: Path) -> Labels:
    """Return the labels of a run. A warning names a damaged file, which says nothing."""
    try:
        values = read_object(run_dir / LABELS)
        return checked(values)
    except FileNotFoundError:
        return NO_LABELS
    except (ConfigError, EnvironmentFault) as error:
        warn(f"{run_dir / LABELS} is damaged, so the run has no labels: {error}")
        return NO_LABELS


def checked(values: dict[str, object]) -> Labels:
    """Return labels of this content. Raise ConfigError for anything else."""
    title = values.get("title", "")
    note = values.get("note", "")
    tags = values.get("tags", [])
    archived = values.get("archived", False)
    if not isinstance(title, str) or len(title) > MOST_TITLE:
        raise ConfigError(f"title: expected at most {MOST_TITLE} characters")
    if not isinstance(note, str) or len(note) > MOST_NOTE:
        raise ConfigError(f"note: expected at most {MOST_NOTE:,} characters")
    if not isinstance(tags, list) or len(tags) > MOST_TAGS:
        raise ConfigError(f"tags: expected a list of at most {MOST_TAGS}")
    for tag in tags:
        if not isinstance(tag, str) or not tag.strip() or len(tag) > MOST_TAG:
            raise ConfigError(f"tags: expected texts of at most {MOST_TAG} characters")
    if not isinstance(archived, bool):
        raise ConfigError("archived: expected true or false")
    unknown = set(values) - {"title", "note", "tags", "archived"}
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no label of a run")
    unique = dict.fromkeys(tag.strip() for tag in tags)
    return Labels(title.strip(), note.strip(), tuple(unique), archived)


def write_labels(run_dir: Path, labels: Labels) -> None:
    """Write the labels of a run."""
    text = json.dumps(asdict(labels), indent=2, ensure_ascii=False)
    write_atomic(run_dir / LABELS, text + "\n", within=run_dir)
