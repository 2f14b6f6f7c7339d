"""An organisation's defaults: a file that every run file on a machine inherits from, such as image, queue and tracking.

KUBETUNE_DEFAULTS names it (set and empty: no file); else it is `kubetune/defaults.yaml` in ~/.config ($XDG_CONFIG_HOME).
Run file, environment variables and command line take precedence over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from kubetune.base.provenance import Entry, KeyPath, Problem, dotted
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

VARIABLE: Final = "KUBETUNE_DEFAULTS"

# Keys that belong to one run, so that no file of defaults may have them.
_OF_ONE_RUN: Final[tuple[KeyPath, ...]] = (
    ("name",), ("task",), ("model", "path"), ("data", "train"), ("data", "eval"), ("output",), ("mirror",), ("push",),
)  # fmt: skip


def defaults_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file of defaults. None if there is none. Raise ConfigError if KUBETUNE_DEFAULTS names a missing one."""
    named = environ.get(VARIABLE)
    if named == "":
        return None
    if named is not None:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"{VARIABLE}: there is no file {named}; unset it, or set it to nothing for no defaults"
            )
        return path
    # The usual place. There the file may be missing.
    folder = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    path = folder / "kubetune" / "defaults.yaml"
    return path if path.is_file() else None


def fitting(
    entries: Sequence[Entry], sections: Collection[str], problems: list[Problem]
) -> list[Entry]:
    """Return the defaults that a run takes over. A key that belongs to one run is a problem.

    Defaults of an optional section, such as `lora`, apply only to runs that have that section (`sections`): a default
    for `lora.r` does not switch LoRA on.
    """
    taken = []
    for entry in entries:
        if any(entry.path[: len(path)] == path for path in _OF_ONE_RUN):
            text = f"{dotted(entry.path)}: found in a file of defaults; expected what several runs share"
            problems.append(Problem(entry.origin, text))
        # Sections that every config has, such as `training`, and optional ones that this run has.
        elif entry.path[0] in sections or not _is_optional(str(entry.path[0])):
            taken.append(entry)
    return taken


def _is_optional(section: str) -> bool:
    known = Config.model_fields.get(section)
    return known is not None and known.default is None
