"""The id of a run, by which its agents know each other: a file that the first start makes."""

from __future__ import annotations

import uuid
from pathlib import Path

from kubetune import errors
from kubetune.base import files
from kubetune.base.humanize import visible

_IDENTITY = Path("logs", "gang.id")
_LONGEST_NAME = 253  # characters of a host


def read_identity(run_dir: Path) -> str:
    """Return the id of the run, "" while node 0 has not written it."""
    try:
        with files.open_inside(run_dir / _IDENTITY) as file:
            return file.read(_LONGEST_NAME).decode(errors="replace")
    except (OSError, errors.KubetuneError):
        return ""


def make_identity(run_dir: Path) -> str:
    """Return the id of the run, which its first start makes."""
    identity = read_identity(run_dir)
    if not identity:
        identity = uuid.uuid4().hex
        files.write_atomic(run_dir / _IDENTITY, identity)
    return identity


def shown_name(value: object) -> str:
    """Return what another process says it is called, for messages."""
    return visible(str(value)[:_LONGEST_NAME], keep="")
