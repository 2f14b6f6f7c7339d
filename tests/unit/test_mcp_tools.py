"""What agents are answered: command lines that kubetune understands, and a folder that is no run said to be none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.cli import make_parser
from kubetune.cli.installation import mcp


def test_every_tool_is_a_command_line_that_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def call(*words: str) -> dict[str, Any]:
        asked.append(words)
        return {"exit_code": 0, "result": "one\ntwo\nthree", "messages": ""}

    monkeypatch.setattr(mcp, "_call", call)
    tools = mcp.Tools()
    for tool in (tools.plan, tools.data_check, tools.submit):
        tool("run.yaml", ["training.seed=1"])
    tools.submit("run.yaml", confirmation=tools.submit("run.yaml")["confirmation"])
    tools.stop("bot", tools.stop("bot")["confirmation"])
    for look in (tools.runs, tools.status, tools.report):
        look("bot")
    assert tools.logs("bot", 2)["result"] == "two\nthree"
    for words in asked:
        assert make_parser(words[0]).parse_args(words).verb == words[0]
    assert {words[0] for words in asked} == {"plan", "data", "runs", "status", "logs", "report", "submit", "stop"}


def test_a_folder_that_is_no_run_is_said(tmp_path: Path) -> None:
    for look in (mcp.Tools().status, mcp.Tools().logs):
        answer = look(str(tmp_path))
        assert answer["exit_code"] == errors.USER
        assert "is no run directory" in answer["messages"]
