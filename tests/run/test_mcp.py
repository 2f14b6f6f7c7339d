"""`kubetune mcp`, asked by the official client over standard input and output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.rundir import metrics

pytestmark = pytest.mark.slow


def ask(*calls: tuple[str, dict[str, Any]], folder: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the server's tools, and its answers to calls; `$CODE` is the code of the answer before."""

    async def talk() -> tuple[list[Any], list[dict[str, Any]]]:
        command = StdioServerParameters(
            command=sys.executable,
            args=["-m", "kubetune", "mcp"],
            env=dict(os.environ),
            cwd=str(folder),
        )
        answers: list[dict[str, Any]] = []
        # The terminal: what pytest puts in its place is no file that a process can write to.
        async with Client(stdio_client(command, errlog=sys.__stderr__)) as client:
            tools = (await client.list_tools()).tools
            for name, arguments in calls:
                code = answers[-1].get("confirmation", "") if answers else ""
                filled = {
                    key: code if value == "$CODE" else value for key, value in arguments.items()
                }
                result = await client.call_tool(name, filled)
                answers.append(json.loads(result.content[0].text))
        return tools, answers

    return anyio.run(talk)


def test_an_agent_plans_checks_and_looks_and_needs_a_code_for_what_costs(tmp_path: Path) -> None:
    run_dir = tmp_path / "done"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "rank-0.log").write_text("one\ntwo\nthree\n")
    with metrics.MetricsLog(run_dir) as log:
        log.write(1, {"loss": 2.0})
    config = Config.model_validate({"model": "m", "data": {"train": "d"}})
    (run_dir / "resolved.json").write_text(json.dumps(resolved(config)))
    (tmp_path / "run.yaml").write_text(
        "model: m\ndata: {train: d.jsonl}\nkubernetes: {image: registry.example/k:1}\n"
    )
    tools, answers = ask(
        ("plan", {"run_file": "missing.yaml"}),
        ("plan", {"run_file": "--help"}),
        ("status", {"run": "done"}),
        ("logs", {"run": "done", "lines": 2}),
        ("stop", {"run": "bot"}),
        ("stop", {"run": "other", "confirmation": "$CODE"}),
        ("stop", {"run": "bot", "confirmation": "1234"}),
        folder=tmp_path,
    )
    assert {tool.name for tool in tools} == {
        "plan", "data_check", "runs", "status", "logs", "report", "submit", "stop",
    }  # fmt: skip
    assert {tool.name for tool in tools if not tool.annotations.read_only_hint} == {
        "report",
        "submit",
        "stop",
    }
    missing, option, status, logs, first, other, wrong = answers
    assert missing["exit_code"] == 2
    assert "missing.yaml" in missing["messages"]
    assert option["messages"].startswith("--help is an option")
    assert status["result"]["progress"]["step"] == 1
    assert logs["result"] == "two\nthree"
    assert first["needs_confirmation"] == "kubetune stop bot"
    assert other["needs_confirmation"] == "kubetune stop other", "a code is for one command"
    assert wrong["confirmation"] != "1234"


def test_a_confirmed_call_is_done(tmp_path: Path) -> None:
    _, answers = ask(
        ("stop", {"run": "bot"}), ("stop", {"run": "bot", "confirmation": "$CODE"}), folder=tmp_path
    )
    assert "needs_confirmation" not in answers[1]
    assert answers[1]["exit_code"] == 3, "there is no cluster here"
