"""What data, models and pods say reaches no terminal as a command: colours, titles, cursor moves and the like."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from kubetune.base import logs
from kubetune.cli.local.watch_screen import RunView, draw
from kubetune.cli.program import next_steps, program
from kubetune.cli.remote.logs import _Counter, printer

EVIL = "\x1b]0;mine\x07\x1b[2Jx\x9b31m[red]"


def test_a_log_line_of_a_rank_spells_them_out(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO")
    logs.DATA.info("label %s", EVIL)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b]0;mine\x07" in out


def test_watch_shows_them_without_obeying() -> None:
    rank = {
        "rank": 0,
        "step": 1,
        "phase": EVIL,
        "waiting": False,
        "phase_seconds": 1,
        "silent_seconds": 1,
    }
    gpu = {"index": 0, "name": EVIL, "utilization_percent": 1, "memory_used_mib": 1, "memory_total_mib": 2,
           "temperature_celsius": 1, "power_watts": 1}  # fmt: skip
    status: dict[str, Any] = {"log": [EVIL], "ranks": [rank], "gpus": [gpu]}
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    run_view = RunView(EVIL, "failed", EVIL, EVIL, status)
    console.print(draw(run_view, console))
    console.print(draw(run_view, console, EVIL))
    shown = cast(io.StringIO, console.file).getvalue()
    for char in ("\x1b", "\x07", "\x9b"):
        assert char not in shown
    on_screen = 6  # name, why, where, log line, phase, GPU
    assert shown.count("[red]") == 2 * on_screen + 1, (
        "and why there is no answer, below the live one"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_logs_of_pods(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """On a terminal they are spelt out; a file or a pipe gets them byte by byte."""
    reading, writing = pty.openpty() if is_terminal else os.pipe()
    with os.fdopen(writing, "w", newline="") as out, os.fdopen(reading, "rb", 0) as read:
        monkeypatch.setattr(sys, "stdout", out)
        spec = SimpleNamespace(nodes=1)
        printer(cast(Any, spec))(
            cast(Any, SimpleNamespace(node=0, is_main=True, component="trainer", container="")),
            EVIL,
        )
        counter = _Counter()
        counter.write(EVIL.encode())
        counter.write(b"\n")
        shown = read.read(4096)
    assert (b"\x1b" in shown) == (not is_terminal)
    assert counter.bytes == len(EVIL.encode()) + 1


@pytest.mark.parametrize(
    "prepared", ["", "logging.getLogger().addHandler(logging.StreamHandler())"]
)
def test_notes_of_a_config_are_shown_wherever_it_is_read(prepared: str) -> None:
    """Notebooks come with a handler of their own, which hides what nobody asked for."""
    code = f"""
import logging
{prepared}
from kubetune.base import logs
from kubetune.cli.prepare.plan import show_notes
show_notes()
logs.DATA.info("a note")
logging.getLogger("httpx").info("a library's note")
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (shown.stdout, shown.stderr) == ("", "a note\n")


def kubetune(words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Return the program as a shell starts it."""
    command = ["sh", "-c", f"exec {sys.executable} -m kubetune {words}"]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_terminal_of_few_letters_is_shown_those_that_it_has() -> None:
    done = kubetune("--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(r"usage: kubetune VERB \u2026")


def test_streams_that_are_closed_are_no_fault() -> None:
    done = kubetune("completion bash >&- <&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_who_cannot_be_told_of_a_mistake_is_left_the_exit_code() -> None:
    words = "runs nowhere >/dev/full 2>/dev/full"
    assert kubetune(words).returncode == 2
    # An empty value: what is printed waits for the end of the program.
    assert kubetune(words, PYTHONUNBUFFERED="").returncode == 2


def test_a_full_disk_behind_standard_output_is_explained() -> None:
    done = kubetune("runs . >/dev/full", PYTHONUNBUFFERED="")
    assert done.returncode == 3
    assert "No space left" in done.stderr
    assert "Exception ignored" not in done.stderr


NAMES = [
    "outputs/plain-1.2_x",
    "a'b\"c $(touch PWN) `touch PWN` ; touch PWN",
    "red\x1b[31m'quoted' \\x1b \u202eback",
    "new\nline\ttab",
    "\x9b31m\udcff",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_to_paste_is_read_back_by_a_shell_and_holds_nothing_a_terminal_obeys(
    name: str, tmp_path: Path
) -> None:
    shown = next_steps(Path(name), "causal_lm")
    for char in "\x1b\x9b\n\t\u202e\udcff":
        assert char not in shown
    word = shown.removeprefix(f"Next: {program()} chat ").split(f" · {program()} report ")[0]
    done = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout == os.fsencode(name)
    assert not list(tmp_path.iterdir())
