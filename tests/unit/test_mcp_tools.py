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
    assert {words[0] for words in asked} == {
        "plan",
        "data",
        "runs",
        "status",
        "logs",
        "report",
        "submit",
        "stop",
    }


def test_a_folder_that_is_no_run_is_said(tmp_path: Path) -> None:
    for look in (mcp.Tools().status, mcp.Tools().logs):
        answer = look(str(tmp_path))
        assert answer["exit_code"] == errors.USER
        assert "is no run directory" in answer["messages"]


def test_arguments_that_can_name_nothing_are_answered(tmp_path: Path) -> None:
    tools = mcp.Tools()
    for tool in (tools.plan, tools.status, tools.logs, tools.report, tools.submit):
        for name in ("a\0b", "x" * 5000):
            answer = mcp._answering(tool)(name)
            assert answer["exit_code"] in (errors.USER, errors.ENVIRONMENT)
            assert answer["messages"].startswith("kubetune: ")


def test_a_code_is_for_the_run_file_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mcp, "_call", lambda *words: {"exit_code": 0, "result": words[0], "messages": ""}
    )
    tools = mcp.Tools()
    file = tmp_path / "run.yaml"
    file.write_text("model: small\n")
    code = tools.submit(str(file))["confirmation"]
    file.write_text("model: large\n")
    again = tools.submit(str(file), confirmation=code)
    assert "needs_confirmation" in again
    assert tools.submit(str(file), confirmation=again["confirmation"])["result"] == "submit"
