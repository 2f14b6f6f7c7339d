"""An organisation's defaults: a file that every run file on a machine inherits from, such as image, queue and tracking.

It is named by KUBETUNE_DEFAULTS (set and empty: none), or is `kubetune/defaults.yaml` in ~/.config ($XDG_CONFIG_HOME).
Everything a run file, an environment variable or the command line says wins over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from kubetune.base.provenance import Entry, KeyPath, Problem, dotted
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

VARIABLE: Final = "KUBETUNE_DEFAULTS"

_OF_ONE_RUN: Final[tuple[KeyPath, ...]] = (
    ("name",), ("task",), ("model", "path"), ("data", "train"), ("data", "eval"), ("output",), ("mirror",), ("push",),
)  # fmt: skip
"""Keys that only a run itself can say."""


def defaults_file(environ: Mapping[str, str]) -> Path | None:
    """The file, if there is one. Raises ConfigError where the one that is named is missing."""
    named = environ.get(VARIABLE)
    if named is not None:
        path = Path(named).expanduser()
        if named and not path.is_file():
            raise ConfigError(
                f"{VARIABLE}: there is no file {named}; unset it, or set it to nothing for no defaults"
            )
        return path if named else None
    path = (
        Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
        / "kubetune"
        / "defaults.yaml"
    )
    return path if path.is_file() else None


def fitting(
    entries: Sequence[Entry], sections: Collection[str], problems: list[Problem]
) -> list[Entry]:
    """The defaults that a run takes over: of optional sections, such as `lora`, only those of `sections` that it has.

    So a default rank turns LoRA on for nobody. What is of one run only is a problem.
    """
    taken = []
    for entry in entries:
        if any(entry.path[: len(path)] == path for path in _OF_ONE_RUN):
            text = f"{dotted(entry.path)}: found in a file of defaults; expected what several runs share"
            problems.append(Problem(entry.origin, text))
        elif entry.path[0] in sections or not _is_optional(str(entry.path[0])):
            taken.append(entry)
    return taken


def _is_optional(section: str) -> bool:
    known = Config.model_fields.get(section)
    return known is not None and known.default is None
