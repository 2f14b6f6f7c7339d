"""The word `last` in place of a run directory: the run below outputs that was started last."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kubetune.errors import ConfigError

LAST = "last"
FOLDER = Path("outputs")

# Arguments that are run directories, and verbs whose run may be one of this machine.
_RUN_DIRS = ("run_dir", "beside", "compare")
_HERE_TOO = ("watch", "stop", "delete")
# Arguments that may be a run directory, by verb.
_AMONG_OTHERS = {"serve": ["targets"], "sync": ["source"]}


def put_last_run(args: argparse.Namespace) -> None:
    """Replace `last` on a command line by the newest run, and print which one that is. Raise ConfigError without any.

    A folder or a cluster's run of that name is meant where there is one, or where a namespace is named.
    """
    names = [*_RUN_DIRS, *_AMONG_OTHERS.get(args.verb, [])]
    if args.verb in _HERE_TOO and args.namespace is None:
        names.append("run_name")
    for name in names:
        value = getattr(args, name, None)
        if isinstance(value, list):
            setattr(args, name, [_replaced(word) for word in value])
        elif value is not None:
            setattr(args, name, _replaced(value))


def _replaced(word: Any) -> Any:
    """Return the newest run for `last`, of the type of the word; any other word as it is.

    `bot=last` of `serve` is `bot=outputs/…`.
    """
    if not isinstance(word, str | Path):
        return word
    name, equals, path = str(word).rpartition("=")
    if path != LAST or Path(LAST).exists():
        return word
    from kubetune.library.listing import newest_run

    run_dir = newest_run(FOLDER)
    if run_dir is None:
        raise ConfigError(f"last: there is no run below {FOLDER}; name a run directory")
    print(f"last: {run_dir}", file=sys.stderr)
    if isinstance(word, str):
        return f"{name}{equals}{run_dir}"
    return run_dir
