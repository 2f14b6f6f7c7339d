"""Commands that the page has started: processes that continue when the server ends.

Each has a record and a log in a hidden folder next to the runs, so that a later server knows it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from kubetune.base import processes
from kubetune.base.files import read_object, require_plain, require_plain_entry, write_atomic
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.rundir.status import last_lines

FOLDER = ".kubetune-ui"

# The server's token. A command that it starts does not get it.
TOKEN = "KUBETUNE_UI_TOKEN"


def result_job(name: str) -> str:
    """Return the name of the command that evaluates, exports or pushes a run: one at a time."""
    return f"{name}.result"


class Jobs:
    """The commands that were started for runs of a folder, by the name of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()  # two clicks at the same time start one command

    def start(self, name: str, words: Sequence[str]) -> None:
        """Start a command of kubetune. Raise ConfigError if one of this name still runs."""
        with self._starting:
            self._start(name, words)

    def _start(self, name: str, words: Sequence[str]) -> None:
        if self.is_running(name):
            raise ConfigError(f"{name} is being run already")
        self._require_plain()
        for child in self._children.values():
            child.poll()  # so that no ended child stays a zombie

        self._log(name).parent.mkdir(parents=True, exist_ok=True)
        # The token opens this server, and no command needs it.
        environ = {key: value for key, value in os.environ.items() if key != TOKEN}
        with self._log(name).open("wb") as log, self.result(name).open("wb") as result:
            child = subprocess.Popen(
                processes.module("kubetune", *words),
                stdin=subprocess.DEVNULL,
                stdout=result if "--json" in words else log,
                stderr=log,
                env=environ,
                start_new_session=True,  # so that Ctrl-C ends only the server
            )

        self._children[name] = child

        # After the end of a process its number is used again, but not with the same time.
        record = {
            "pid": child.pid,
            "created": psutil.Process(child.pid).create_time(),
            "words": list(words),
        }
        try:
            write_atomic(self._record(name), json.dumps(record))
        except OSError:
            child.kill()  # or it would run although the page says that it did not start
            child.wait()
            raise

    def look(self, name: str) -> dict[str, Any]:
        """Return whether a command is `running`, its exit `code`, its last `lines`, and its `words`.

        The code is None if another server started the command.
        """
        self._require_plain()
        # Only the parent of a process gets its exit code.
        code = None
        child = self._children.get(name)
        if child is not None:
            code = child.poll()
        return {
            "running": self.is_running(name),
            "code": code,
            "lines": last_lines(self._log(name)),
            "words": self._read_record(name).get("words", []),
        }

    def _require_plain(self) -> None:
        """Raise IrregularFileError for records or logs that are links out of the folder, which may be received.

        A log is opened to be written, and what a link leads to would be emptied.
        """
        if os.path.lexists(self._folder):
            require_plain_entry(self._folder, self._folder.parent)
            require_plain(self._folder)

    def is_running(self, name: str) -> bool:
        """True if a command of this name has not ended."""
        # A process of this server would be a zombie until it is polled; others are looked up.
        child = self._children.get(name)
        if child is not None:
            return child.poll() is None
        return self._process(name) is not None

    def has_failed_with(self, name: str, file: Path) -> bool:
        """True if a command of this name read this file, failed, and the file is as it was then."""
        # The record is written right after the file was read.
        job = self.look(name)
        if job["words"][1:] != [str(file)] or not job["code"]:
            return False
        return file.stat().st_mtime <= self._record(name).stat().st_mtime

    def process(self, name: str) -> psutil.Process | None:
        """Return the process of a command that has not ended."""
        if not self.is_running(name):
            return None
        return self._process(name)

    def _process(self, name: str) -> psutil.Process | None:
        """Return the process of a record, unless another process has its number by now."""
        record = self._read_record(name)
        # The record may be damaged, and the process may end at any line.
        try:
            # The same number with another time of creation is another process.
            process = psutil.Process(record["pid"])
            is_same = process.create_time() == record["created"]
            has_ended = process.status() == psutil.STATUS_ZOMBIE
        except (KeyError, psutil.Error):
            return None

        if not is_same or has_ended:
            return None
        return process

    def _read_record(self, name: str) -> dict[str, Any]:
        """Return the record of a command, or {} without a readable one."""
        try:
            return read_object(self._record(name))
        except (FileNotFoundError, EnvironmentFault):
            return {}

    def result(self, name: str) -> Path:
        """Return the file to which a command with `--json` prints."""
        return self._folder / f"{name}.out"

    def _log(self, name: str) -> Path:
        """Return the file to which a command prints its messages."""
        return self._folder / f"{name}.log"

    def _record(self, name: str) -> Path:
        """Return the file that says which process a command is."""
        return self._folder / f"{name}.json"
