"""`kubetune mcp`: the verbs that agents need, as tools of a server by the Model Context Protocol (stdio).

Each tool runs a command line of kubetune in its own process, so that agents see what people see. What costs money or
ends something needs a confirmation: a second call with a code that the answer to the first call names.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import processes
from kubetune.base.files import open_regular, read_object
from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.extras import require
from kubetune.k8s.manifests import local_files, sent_from_outside
from kubetune.rundir import metrics
from kubetune.rundir.status import log_lines, read_status

# Of one command.
_SECONDS = 600.0
# Of a log, and of what a command writes to standard error.
_LINES = 200
Tool = Callable[..., dict[str, Any]]
# What the server tells an agent about itself.
_INSTRUCTIONS = (
    "Fine-tuning of language models by YAML run files. Check the data and plan a run before it is submitted. A tool "
    "that costs money or ends something answers with `needs_confirmation` at first: show that to the user, and call it "
    "again with the code only when they agree."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing: agents start it as it is."""


def run(args: argparse.Namespace) -> int:
    """Serve until the client leaves. Raise MissingExtra where the SDK is not installed."""
    require("kubetune mcp", "mcp")
    server().run("stdio")
    return errors.OK


def server() -> Any:
    """Return the server with its tools."""
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    mcp_server = MCPServer("kubetune", instructions=_INSTRUCTIONS)
    tools = Tools()
    # Agents ask the user before they call a tool that may destroy something.
    reads = ToolAnnotations(readOnlyHint=True)
    writes = ToolAnnotations(readOnlyHint=False, destructiveHint=False)
    destroys = ToolAnnotations(readOnlyHint=False, destructiveHint=True)

    for tool in (tools.plan, tools.data_check, tools.runs, tools.status, tools.logs):
        mcp_server.add_tool(_answering(tool), annotations=reads)
    mcp_server.add_tool(_answering(tools.report), annotations=writes)
    for tool in (tools.submit, tools.stop):
        mcp_server.add_tool(_answering(tool), annotations=destroys)
    return mcp_server


class Tools:
    """Tools for agents. Their docstrings are what agents read. All but `submit` and `stop` change only caches and pages."""

    def __init__(self) -> None:
        # What may be confirmed, by code: the command, and the content of its run file when the code was made.
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

        no_run = _no_run(run)
        if no_run is not None:
            return no_run

        # Without the curves and the log: an agent reads every word of an answer.
        status = read_status(Path(run))
        result = {
            "progress": status["progress"],
            "ranks": status["ranks"],
            "peak_memory_bytes": status["timing"].get("peak_memory_bytes"),
        }
        return {"exit_code": 0, "result": result}

    def logs(self, run: str, lines: int = 50) -> dict[str, Any]:
        """Last lines of a run's log: of rank 0 in a run directory, of all pods on the cluster."""
        count = max(1, min(lines, _LINES))
        if Path(run).is_dir():
            no_run = _no_run(run)
            if no_run is not None:
                return no_run
            log = log_lines(Path(run), 0, count)
            return {"exit_code": 0, "result": "\n".join(log)}

        answer = _call("logs", run)
        log = str(answer["result"]).splitlines()
        return {**answer, "result": "\n".join(log[-count:])}

    def report(self, run_dir: str) -> dict[str, Any]:
        """Results of a run of this machine that has ended; also writes its page, report.html."""
        answer = _call("report", run_dir)
        path = Path(run_dir) / metrics.REPORT
        if answer["exit_code"] != errors.OK or not path.exists():
            return answer
        return {**answer, "result": read_object(path)}

    def submit(
        self, run_file: str, overrides: Sequence[str] = (), confirmation: str = ""
    ) -> dict[str, Any]:
        """Start a run on the cluster, which costs money. `confirmation`: the code that the first call answers with."""
        command = ("submit", run_file, *overrides)
        _require_allowed(run_file, overrides)
        question = self._question(command, confirmation, _content(run_file))
        if question is None:
            return _call(*command)
        # The plan tells the user what they confirm. Without one, there is nothing to confirm.
        plan = _call("plan", run_file, *overrides)
        if plan["exit_code"] != errors.OK:
            return plan
        return {**plan, **question}

    def stop(self, run: str, confirmation: str = "") -> dict[str, Any]:
        """Stop a run on the cluster after a checkpoint. `confirmation`: the code that the first call answers with."""
        command = ("stop", run)
        return self._question(command, confirmation) or _call(*command)

    def _question(
        self, command: tuple[str, ...], confirmation: str, content: bytes = b""
    ) -> dict[str, Any] | None:
        """Return what is to be confirmed, with a new code; None where `confirmation` confirms it.

        A code holds once, for exactly this command and this content of its run file.
        """
        # A run file that was changed since then is another run, which nobody has agreed to.
        if confirmation and self._codes.pop(confirmation, None) == (command, content):
            return None
        code = secrets.token_hex(4)
        self._codes[code] = (command, content)
        return {"needs_confirmation": f"kubetune {shlex.join(command)}", "confirmation": code}


def _answering(tool: Tool) -> Tool:
    """Return the tool so that it answers where it would raise, as for a path that is too long for a name."""

    @wraps(tool)
    def answering(*arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            return tool(*arguments, **options)
        except errors.KubetuneError as error:
            return _answer(error.exit_code, "", f"kubetune: {error}")
        except (OSError, ValueError) as error:
            return _answer(errors.USER, "", f"kubetune: {errors.first_line(error)}")

    return answering


def _require_allowed(run_file: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a run file that runs code or sends what the user has not allowed here.

    Files of the folder in which the server was started may be sent.
    """
    if not Path(run_file).exists():
        return
    try:
        config = load_config(run_file, overrides=overrides, environ=os.environ)
    except errors.ConfigError:
        # `submit` explains what is wrong with it, and submits nothing.
        return
    sent = sent_from_outside(local_files(config), Path.cwd())
    effects = [*consent.effects_of(config), *sent]
    consent.require(effects, Path(run_file), instead="submit it in a terminal")


def _content(run_file: str) -> bytes:
    """Return the bytes of a run file; empty where there is no such file, which `submit` explains."""
    if not Path(run_file).exists():
        return b""
    with open_regular(run_file) as file:
        return file.read()


def _no_run(folder: str) -> dict[str, Any] | None:
    """Return the answer for a folder that is no run directory; None where it is one."""
    try:
        read_config(Path(folder))
    except errors.KubetuneError as error:
        return _answer(error.exit_code, "", f"kubetune: {error}")
    return None


def _call(*words: str) -> dict[str, Any]:
    """Run a command line of kubetune; return its exit code, its result, and the end of its standard error."""
    for word in words[1:]:
        # An agent must not add an option such as --yes by way of an argument.
        if word.startswith("-") and word != "--json":
            reason = f"{word} is an option; expected a file, a name or key=value"
            return _answer(errors.USER, "", reason)

    # Standard input belongs to the protocol, so a command must not read it.
    command = processes.module("kubetune", *words)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _answer(errors.ENVIRONMENT, "", f"not done after {_SECONDS:g} s")
    return _answer(done.returncode, done.stdout, done.stderr)


def _answer(code: int, output: str, messages: str) -> dict[str, Any]:
    """Return an answer to an agent; output that is JSON becomes part of it."""
    try:
        result: Any = json.loads(output)
    except ValueError:
        result = output
    last_lines = messages.splitlines()[-_LINES:]
    return {"exit_code": code, "result": result, "messages": "\n".join(last_lines)}
