"""Tests side by side in copies of one process, so that all is imported and collected once: `-p tests.forks --forks 4`.

Files are handed out whole, in the order of collection, each to the copy that is free first: what a module's tests
share is made once. Reports come back through pipes, and are told as if there were one process.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections import deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many copies of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Hand out the files until there are none left, and tell what became of their tests."""
    count = session.config.getoption("forks")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop does what is to be done
    if "tests.ranks" in sys.modules:
        importlib.import_module("tests.warm")
    gc.collect()
    gc.freeze()
    files = deque(list(items) for _, items in groupby(session.items, key=lambda item: item.path))
    copies: dict[Connection, Copy] = {}
    for _ in range(count):
        copy = Copy(session, copies)
        copies[copy.pipe] = copy
    try:
        while copies:
            for pipe in wait(list(copies)):
                assert isinstance(pipe, Connection)
                if not copies[pipe].hear(files):
                    del copies[pipe]
    finally:
        for copy in copies.values():
            os.kill(copy.pid, signal.SIGTERM)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if left := sum(map(len, files)):
        raise session.Failed(f"{left} tests were not run, because no process was left")
    return True


class Copy:
    """One of the processes, as the first one sees it."""

    def __init__(self, session: pytest.Session, others: dict[Connection, Copy]) -> None:
        self._session = session
        self._numbers = {id(item): number for number, item in enumerate(session.items)}
        self._given: list[pytest.Item] = []
        self._running: tuple[str, Any] | None = None
        self.pipe, theirs = Pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for pipe in (*others, self.pipe):
                pipe.close()
            _serve(session, theirs)
        theirs.close()

    def hear(self, files: deque[list[pytest.Item]]) -> bool:
        """Take up a message, and answer it if it asks for tests; false once there will be no more."""
        hook = self._session.config.hook
        try:
            kind, *content = self.pipe.recv()
        except (EOFError, ConnectionError):
            _, status = os.waitpid(self.pid, 0)
            if self._running is not None or status:
                self._tell_death(os.waitstatus_to_exitcode(status))
            if self._given:  # others run what this one was still to run
                files.append(self._given)
            return False
        if kind == "more":
            items = files.popleft() if files and not self._session.shouldfail else []
            self._given += items
            self.pipe.send([self._numbers[id(item)] for item in items])
        elif kind == "start":
            self._running = (content[0], content[1])
            del self._given[0]
            hook.pytest_runtest_logstart(nodeid=content[0], location=content[1])
        elif kind == "finish":
            self._running = None
            hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
        else:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content[0])
            hook.pytest_runtest_logreport(report=report)
        return True

    def _tell_death(self, code: int) -> None:
        """Report the test that was running as failed, since nobody else can."""
        nodeid, location = self._running or ("a process of tests", ("", None, ""))
        said = f"the process that ran it ended with {code}"
        report = pytest.TestReport(nodeid, location, {}, "failed", said, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)


class Told:
    """Plugin of a copy that passes on what happens, instead of showing it."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._pipe.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._pipe.send(("report", hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._pipe.send(("finish", nodeid, location))


def _serve(session: pytest.Session, pipe: Connection) -> None:
    """Run the tests that are given out, in this copy, and end it."""
    plugins = session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    code = 1
    try:
        plugins.unregister(name="terminalreporter")
        plugins.register(Told(session.config, pipe))
        capture.stop_global_capturing()  # it goes through files, which copies must not share
        capture.start_global_capturing()
        _run(session, pipe)
        code = 0
    except BaseException:
        capture.stop_global_capturing()
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(session: pytest.Session, pipe: Connection) -> None:
    def ask() -> list[int]:
        pipe.send(("more",))
        numbers: list[int] = pipe.recv()
        return numbers

    numbers = ask()
    while numbers:
        number = numbers.pop(0)
        # Asked for before the last of a file is run: what it leaves set up depends on what comes next.
        numbers = numbers or ask()
        following = session.items[numbers[0]] if numbers else None
        item = session.items[number]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
