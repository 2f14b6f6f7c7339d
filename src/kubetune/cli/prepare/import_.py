"""`kubetune import`: another tool's config as a run file, and what became of each of its keys."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kubetune.base.files import write_atomic
from kubetune.base.humanize import shell_word, visible
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.program import program
from kubetune.errors import ConfigError

if TYPE_CHECKING:
    from kubetune.plugins.importers import Imported

_TITLES = {
    "carried": "carried over",
    "assumed": "their defaults, written down because ours differ",
    "approximated": "approximated: look at these",
    "dropped": "dropped: not done, or for you to do",
    "unneeded": "not needed here",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kubetune.plugins.importers import words_of_tools

    parser.add_argument(
        "file", type=Path, metavar="FILE", help="config (.yaml, .yml, .json), or a script (.sh)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it there instead of printing it"
    )
    parser.add_argument(
        "--from",
        dest="peer",
        choices=words_of_tools(),
        help="whose config it is (default: recognised)",
    )
    add_json(parser, "run file and notes as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print or write the run file, and the notes. Raise ConfigError rather than overwrite anything."""
    from kubetune.plugins.importers import import_config, words_of_tools

    if args.output is not None and args.output.exists():
        raise ConfigError(
            f"{args.output} exists already; choose another name, or remove it. Nothing was written."
        )

    # Everything is read and checked before the file is written.
    imported = import_config(args.file, words_of_tools().get(args.peer))
    if args.output is not None:
        write_atomic(args.output, imported.text)

    def show() -> None:
        if args.output is None:
            # The run file alone is on standard output, so that it can be redirected.
            print(imported.text, end="")
            _show_notes(imported, sys.stderr)
            return
        _show_notes(imported, sys.stdout)
        next_command = f"{program()} plan {shell_word(args.output)}"
        print(visible(f"\nwrote {args.output}; next: {next_command}"))

    notes = []
    for note in imported.notes:
        notes.append(
            {
                "kind": note.kind,
                "key": note.key,
                "value": note.value,
                "text": note.text,
            }
        )
    facts = {"from": imported.peer, "run_file": imported.text, "notes": notes}
    return Answer(facts, show)


def _show_notes(imported: Imported, stream: TextIO) -> None:
    """Print what became of each key of the file; those that a person should look at come last."""
    counts = ", ".join(f"{len(imported.of(kind))} {kind}" for kind in _TITLES)
    print(f"{imported.peer}: {counts}", file=stream)
    for kind in ("carried", "assumed", "unneeded", "approximated", "dropped"):
        notes = imported.of(kind)
        if not notes:
            continue
        print(f"\n{_TITLES[kind]}", file=stream)
        # A single long key must not push all texts to the right.
        width = min(34, max(len(note.key) for note in notes))
        for note in notes:
            value = ""
            if kind == "assumed":
                value = f"{json.dumps(note.value)}; "
            print(f"  {note.key:<{width}}  {value}{note.text}", file=stream)
