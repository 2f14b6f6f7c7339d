"""Commands that the page has begun: processes of their own, which go on when the server ends, and their output.

Each leaves a record and a log in a hidden folder beside the runs, by which a later server knows it again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from kubetune.base import processes
from kubetune.base.files import read_object, write_atomic
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.rundir.status import last_lines

FOLDER = ".kubetune-ui"
TOKEN = "KUBETUNE_UI_TOKEN"


class Jobs:
    """The commands begun for runs of a folder, each by the name of its run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, words: Sequence[str]) -> None:
        """Begin a command of kubetune. Raises ConfigError where one of this name still goes on."""
        if self.is_running(name):
            raise ConfigError(f"{name} is being run already")
        for child in self._children.values():
            child.poll()  # those that have ended leave the table of processes
        self._log(name).parent.mkdir(parents=True, exist_ok=True)
        environ = {key: value for key, value in os.environ.items() if key != TOKEN}
        with self._log(name).open("wb") as log, self.result(name).open("wb") as result:
            child = subprocess.Popen(
                processes.module("kubetune", *words),
                stdin=subprocess.DEVNULL,
                stdout=result if "--json" in words else log,
                stderr=log,
                env=environ,
                start_new_session=True,  # Ctrl-C of the server is none of its business
            )
        self._children[name] = child
        begun = {
            "pid": child.pid,
            "created": psutil.Process(child.pid).create_time(),
            "words": list(words),
        }
        try:
            write_atomic(self._record(name), json.dumps(begun))
        except OSError:
            child.kill()  # or it would go on though its start was refused
            child.wait()
            raise

    def look(self, name: str) -> dict[str, Any]:
        """`running`, the exit `code` where this server knows it, the last `lines`, and the `words` of the command."""
        known = self._known(name)
        child = self._children.get(name)
        return {
            "running": self.is_running(name),
            "code": child.poll() if child is not None else None,
            "lines": last_lines(self._log(name)),
            "words": known.get("words", []),
        }

    def is_running(self, name: str) -> bool:
        """A command of this name that has not ended."""
        child = self._children.get(name)
        if child is not None:
            return child.poll() is None
        return self._process(name) is not None

    def has_failed_with(self, name: str, file: Path) -> bool:
        """A command of this name was begun with a file, which nobody has written to since, and ended in a failure."""
        seen = self.look(name)
        known = [str(file)] == seen["words"][1:] and bool(seen["code"])
        return known and file.stat().st_mtime <= self._record(name).stat().st_mtime

    def process(self, name: str) -> psutil.Process | None:
        """The process of a command that has not ended."""
        return self._process(name) if self.is_running(name) else None

    def _process(self, name: str) -> psutil.Process | None:
        """The process of a record, unless its number is another's by now."""
        known = self._known(name)
        try:
            process = psutil.Process(known["pid"])
            is_same = (
                process.create_time() == known["created"]
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (KeyError, psutil.Error):
            return None
        return process if is_same else None

    def _known(self, name: str) -> dict[str, Any]:
        try:
            return read_object(self._record(name))
        except (FileNotFoundError, EnvironmentFault):
            return {}

    def result(self, name: str) -> Path:
        """The file that a command prints to which answers in JSON."""
        return self._folder / f"{name}.out"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _record(self, name: str) -> Path:
        return self._folder / f"{name}.json"
