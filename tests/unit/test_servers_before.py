"""Servers that a run is to ask, and that nobody reaches: warned of before the run, and no problem of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kubetune
from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.library.verdict import servers

MODEL = Path(kubetune.__file__).parent / "cli" / "local" / "embedded" / "model"


def run_of(**settings: Any) -> dict[str, Any]:
    return {"model": str(MODEL), "data": {"train": "train.jsonl"}, "output": "out", **settings}


def drawn_by(*urls: str) -> dict[str, Any]:
    return run_of(
        task="grpo",
        lora={"r": 8},
        rewards=[{"name": "length", "settings": {"max_tokens": 9}}],
        grpo={"servers": list(urls)},
    )


def unreachable(settings: dict[str, Any]) -> list[str]:
    config = load_config(settings)
    return servers.unreachable_servers(config.task, config.grpo.servers, config.distill)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_server_that_refuses_is_named_and_one_that_listens_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"http://127.0.0.1:{server.getsockname()[1]}"
        gone = f"http://127.0.0.1:{closed_port()}"
        [warning] = unreachable(drawn_by(here, gone))
    assert f"grpo.servers: nobody answers at {gone} (Connection refused)" in warning
    assert "up to 600 s" in warning


def test_a_teacher_on_servers_is_asked_too() -> None:
    gone = f"http://127.0.0.1:{closed_port()}"
    settings = run_of(task="distill", distill={"teacher": gone, "support": "teacher_k", "top_k": 8})
    [warning] = unreachable(settings)
    assert warning.startswith(f"distill.teacher: nobody answers at {gone}")


def test_silent_servers_take_one_second_together(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(servers, "_try", lambda url, reasons: end.wait(60))
    began = time.monotonic()
    urls = [f"http://127.0.0.1:{port}" for port in range(9000, 9008)]
    try:
        assert unreachable(drawn_by(*urls)) == []
    finally:
        end.set()
    # One after the other they would take eight; the machine may be busy.
    assert time.monotonic() - began < 6


def test_plan_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": f"{n}?", "completion": f"{n}"} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    gone = f"http://127.0.0.1:{closed_port()}"
    (tmp_path / "run.yaml").write_text(json.dumps(drawn_by(gone)))
    assert main(["plan", "run.yaml"]) == 0
    text = capsys.readouterr().out
    assert f"nobody answers at {gone}" in text
    assert "Next: " in text
    assert main(["plan", "run.yaml", "--json"]) == 0
    assert gone in capsys.readouterr().out
