"""`kubetune mcp`: the verbs that agents need, as tools of a server by the Model Context Protocol (stdio).

Each tool is a command line of kubetune in a process of its own, so that agents see what people see. What costs money or
ends something is done after a confirmation only: by a second call with a code that the answer to the first one names.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import processes
from kubetune.base.files import open_regular, read_object
from kubetune.config import consent
from kubetune.config.load import load_config, read_config
from kubetune.extras import require
from kubetune.rundir import metrics
from kubetune.rundir.status import log_lines, read_status

_SECONDS, _LINES = 600.0, 200
Tool = Callable[..., dict[str, Any]]
_INSTRUCTIONS = (
    "Fine-tuning of language models by YAML run files. Check the data and plan a run before it is submitted. A tool "
    "that costs money or ends something answers with `needs_confirmation` at first: show that to the user, and call it "
    "again with the code only when they agree."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing: agents start it as it is."""


def run(args: argparse.Namespace) -> int:
    """Serve until the client leaves. Raises MissingExtra where the SDK is not installed."""
    require("kubetune mcp", "mcp")
    server().run("stdio")
    return errors.OK


def server() -> Any:
    """The server with its tools."""
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    made = MCPServer("kubetune", instructions=_INSTRUCTIONS)
    tools = Tools()
    for tool in (tools.plan, tools.data_check, tools.runs, tools.status, tools.logs):
        made.add_tool(_answering(tool), annotations=ToolAnnotations(readOnlyHint=True))
    made.add_tool(
        _answering(tools.report),
        annotations=ToolAnnotations(readOnlyHint=False, destructiveHint=False),
    )
    for tool in (tools.submit, tools.stop):
        made.add_tool(
            _answering(tool), annotations=ToolAnnotations(readOnlyHint=False, destructiveHint=True)
        )
    return made


class Tools:
    """Tools for agents; all but `submit` and `stop` changes nothing but caches and pages."""

    def __init__(self) -> None:
        self._codes: dict[str, tuple[tuple[str, ...], bytes]] = {}

    def plan(self, run_file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Plan a run: batches, steps, memory, hours and price. `overrides`: settings as key=value."""
        return _call("plan", run_file, *overrides, "--json")

    def data_check(self, run_file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Check the training data of a run file: formats, lengths, duplicates, what would be left out."""
        return _call("data", "check", run_file, *overrides, "--json")

    def runs(self, folder: str = "outputs") -> dict[str, Any]:
        """List the runs below a folder of this machine."""
        return _call("runs", folder, "--json")

    def status(self, run: str) -> dict[str, Any]:
        """State of a run: a run directory of this machine, or a run file or name of a run on the cluster."""
        if not Path(run).is_dir():
            return _call("status", run, "--json")
        if no_run := _no_run(run):
            return no_run
        found = read_status(Path(run))
        return {
            "exit_code": 0,
            "result": {key: found[key] for key in ("progress", "ranks", "peak_memory_bytes")},
        }

    def logs(self, run: str, lines: int = 50) -> dict[str, Any]:
        """Last lines of a run's log: of rank 0 in a run directory, of all pods on the cluster."""
        count = max(1, min(lines, _LINES))
        if Path(run).is_dir():
            if no_run := _no_run(run):
                return no_run
            return {"exit_code": 0, "result": "\n".join(log_lines(Path(run), 0, count))}
        done = _call("logs", run)
        return {**done, "result": "\n".join(str(done["result"]).splitlines()[-count:])}

    def report(self, run_dir: str) -> dict[str, Any]:
        """Results of a run of this machine that has ended; also writes its page, report.html."""
        done = _call("report", run_dir)
        path = Path(run_dir) / metrics.REPORT
        if done["exit_code"] != errors.OK or not path.exists():
            return done
        return {**done, "result": read_object(path)}

    def submit(
        self, run_file: str, overrides: Sequence[str] = (), confirmation: str = ""
    ) -> dict[str, Any]:
        """Start a run on the cluster, which costs money. `confirmation`: the code that the first call answers with."""
        command = ("submit", run_file, *overrides)
        if refused := _unallowed_code(run_file, overrides):
            return refused
        content = _content(run_file)
        if question := self._question(command, confirmation, content):
            planned = _call("plan", run_file, *overrides)
            return {**planned, **question} if planned["exit_code"] == 0 else planned
        return _call(*command)

    def stop(self, run: str, confirmation: str = "") -> dict[str, Any]:
        """Stop a run on the cluster after a checkpoint. `confirmation`: the code that the first call answers with."""
        command = ("stop", run)
        return self._question(command, confirmation) or _call(*command)

    def _question(
        self, command: tuple[str, ...], confirmation: str, content: bytes = b""
    ) -> dict[str, Any] | None:
        """Question to be confirmed, with a new code; None where the code is that of this very command, and of this
        content of its run file, once."""
        if confirmation and self._codes.pop(confirmation, None) == (command, content):
            return None
        code = secrets.token_hex(4)
        self._codes[code] = (command, content)
        return {"needs_confirmation": f"kubetune {shlex.join(command)}", "confirmation": code}


def _answering(tool: Tool) -> Tool:
    """The tool, which answers also where its arguments can name nothing, such as a path that is too long."""

    @wraps(tool)
    def answering(*arguments: Any, **more: Any) -> dict[str, Any]:
        try:
            return tool(*arguments, **more)
        except (OSError, ValueError, errors.KubetuneError) as error:
            code = error.exit_code if isinstance(error, errors.KubetuneError) else errors.USER
            return _answer(code, "", f"kubetune: {errors.first_line(error)}")

    return answering


def _unallowed_code(run_file: str, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Answer for a run file with code that the user has not allowed here; None for others, and for a name of a run."""
    if not Path(run_file).exists():
        return None
    try:
        config = load_config(run_file, overrides=overrides, environ=os.environ)
    except errors.ConfigError:
        return None  # the command line says what is wrong with it, and submits nothing
    for code in consent.code_of(config):
        if not consent.is_allowed(code):
            said = f"{code.key} has code run that nobody allowed here: {code.what}; submit that in a terminal"
            return _answer(errors.USER, "", f"kubetune: {said}")
    return None


def _content(run_file: str) -> bytes:
    """The bytes of a run file; none where there is no such file, which the command line says."""
    if not Path(run_file).exists():
        return b""
    with open_regular(run_file) as file:
        return file.read()


def _no_run(folder: str) -> dict[str, Any] | None:
    """Answer for a folder that is no run directory; None where it is one."""
    try:
        read_config(Path(folder))
    except errors.KubetuneError as error:
        return _answer(error.exit_code, "", f"kubetune: {error}")
    return None


def _call(*words: str) -> dict[str, Any]:
    """A command line of kubetune: its exit code, its result, and what it said on standard error."""
    flags = [word for word in words[1:] if word.startswith("-") and word != "--json"]
    if flags:
        return _answer(
            errors.USER, "", f"{flags[0]} is an option; expected a file, a name or key=value"
        )
    command = processes.module("kubetune", *words)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return _answer(errors.ENVIRONMENT, "", f"not done after {_SECONDS:g} s")
    return _answer(done.returncode, done.stdout, done.stderr)


def _answer(code: int, result: str, messages: str) -> dict[str, Any]:
    try:
        found: Mapping[str, Any] | str = json.loads(result)
    except ValueError:
        found = result
    return {
        "exit_code": code,
        "result": found,
        "messages": "\n".join(messages.splitlines()[-_LINES:]),
    }
