"""`kubetune serve --check` beside a real server of llama.cpp.

LLAMA_SERVER=… python -m pytest -m slow tests/run/test_serve_check_llama_cpp.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kubetune.library.results import check_server
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.publishing.exporting import export_run
from tests.ranks import free_port
from tests.run.test_export_elsewhere import SIZE, answering
from tests.run.test_serve_check import TEMPLATE, chat_run

SERVER = os.environ.get("LLAMA_SERVER", "")
pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no program"),
]

from kubetune.result.gguf_files.model_file import write_model  # noqa: E402

# What llama.cpp's own template engine writes of a whole call has other spaces.
NAMED = TEMPLATE.replace(
    "call.function | tojson", "call.function.name + call.function.arguments | tojson"
)


@contextmanager
def llama_server(file: Path, log: Path, *words: Any) -> Iterator[str]:
    """Run llama-server on a GGUF file, and yield its address."""
    port = free_port()
    command = [
        SERVER, "--model", file, "--alias", "bot", "--host", "127.0.0.1", "--port", str(port), "--ctx-size", "1024",
        "--parallel", "1", "--threads", "1", "--no-warmup", "--jinja", *words,
    ]  # fmt: skip
    environ = {**os.environ, "LD_LIBRARY_PATH": str(Path(SERVER).parent)}
    with answering(command, port, log, environ) as url:
        yield url


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_run(tmp_path_factory.mktemp("inputs"), template=NAMED, **SIZE)


def exported(run_dir: Path, kind: str) -> Path:
    folder = run_dir / "exports" / kind
    if not folder.exists():
        export_run(run_dir, wanted=WantedExport(out=folder, gguf=kind), tell=lambda _: None)
    return next(folder.glob("*.gguf"))


def states(url: str, run_dir: Path) -> dict[str, str]:
    check = check_server(run_dir, url, timeout=600)
    for name, point in check.points.items():
        print(name, point.state, point.text, *point.lines)
    return {name: point.state for name, point in check.points.items()}


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_the_trained_model_is_right(kind: str, run_dir: Path, tmp_path: Path) -> None:
    with llama_server(exported(run_dir, kind), tmp_path / "log") as url:
        found = states(url, run_dir)
    assert found.pop("sampling") in ("right", "differs")
    assert set(found.values()) == {"right"}


def test_its_base_is_wrong(run_dir: Path, tmp_path: Path) -> None:
    base = write_model(run_dir.parent / "model", tmp_path / "base.gguf", "f32", {}).path
    with llama_server(base, tmp_path / "log") as url:
        check = check_server(run_dir, url, timeout=600)
    assert "those of the base" in str(check.reason_against)


def test_another_template_is_wrong(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(NAMED.replace("|>system", "|> system"))
    file = exported(run_dir, "f32")
    with llama_server(file, tmp_path / "log", "--chat-template-file", other) as url:
        check = check_server(run_dir, url, timeout=600)
    print(check.reason_against)
    assert check.points["ids"].text.count("template: ")
    assert check.points["log-probabilities"].state == "right"
