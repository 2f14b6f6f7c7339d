"""Work that takes long shows that it goes on, on a terminal and in a pipe, and leaves nothing behind on a terminal."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from kubetune.base import reminders
from kubetune.base.terminal import VERBOSE
from kubetune.cli.busy import busy
from kubetune.rundir import metrics, waits
from kubetune.supervisor import start_signs
from kubetune.supervisor.place import Place

SECONDS = 60.0


class Listener(io.StringIO):
    """A stream that says when a text has been written to it."""

    def __init__(self, awaited: str, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._awaited = awaited
        self._is_terminal = is_terminal
        self.heard = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._awaited in self.getvalue():
            self.heard.set()
        return written


HERE = Place(nodes=1, processes=1)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run directory whose rank 0 has logged a step of an earlier start. No silence is too short."""
    monkeypatch.setattr(start_signs, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(start_signs, "_POLL_SECONDS", 0.001)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("10:00 [STEP] saved checkpoint\n")
    return tmp_path


def test_a_pipe_is_told_what_a_start_does(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run_dir / "logs" / "rank-0.log"
    out = Listener("kubetune: still preparing data, ")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(reminders, "SIGN_SECONDS", 0.0)
    with start_signs.shown(run_dir, HERE):
        with log.open("a") as file:
            file.write("10:01 [STEP] preparing data\n")
        assert out.heard.wait(SECONDS)
    assert "saved checkpoint" not in out.getvalue(), "that was an earlier start"


def test_a_pipe_hears_of_later_evaluations_too(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Listener("kubetune: still evaluating, ")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(reminders, "SIGN_SECONDS", 0.0)
    with start_signs.shown(run_dir, HERE):
        (run_dir / metrics.METRICS).write_text('{"step": 1}\n')
        note_phase(run_dir, "micro-batch")
        note_phase(run_dir, "evaluation")
        assert out.heard.wait(SECONDS)


def test_the_first_step_ends_the_signs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Listener("starting", is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    ended = threading.Event()
    watch = start_signs._watch

    def watched(*arguments: object) -> None:
        watch(*arguments)  # type: ignore[arg-type]
        ended.set()

    monkeypatch.setattr(start_signs, "_watch", watched)
    with start_signs.shown(run_dir, HERE):
        assert out.heard.wait(SECONDS)
        (run_dir / metrics.METRICS).write_text('{"step": 1}\n')
        assert ended.wait(SECONDS), "steps have a bar or lines of their own"


def note_phase(run_dir: Path, phase: str) -> None:
    """Write the beat of a rank 0 that has come to a phase."""
    beat = {"rank": 0, "phase": phase, "waiting": False, "step": 0, "alone": False}
    later = time.time() + SECONDS
    note = json.dumps({**beat, "since": later, "time": later})
    (run_dir / "logs" / "rank-0.beat.json").write_text(note)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("evaluation", "evaluating"),
        ("reference", "running the reference model"),
        ("teacher", "asking the teacher"),
        ("generation", "drawing answers"),
        ("micro-batch", "in a step"),
    ],
)
def test_a_pipe_hears_of_everything_until_the_first_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, phase: str, words: str
) -> None:
    out = Listener(f"kubetune: still {words}, ")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(reminders, "SIGN_SECONDS", 0.0)
    note_phase(run_dir, phase)
    with start_signs.shown(run_dir, HERE):
        assert out.heard.wait(SECONDS)


def test_a_terminal_sees_the_bar_alone_once_there_is_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Listener("evaluating", is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    ended = threading.Event()
    watch = start_signs._watch

    def watched(*arguments: object) -> None:
        watch(*arguments)  # type: ignore[arg-type]
        ended.set()

    monkeypatch.setattr(start_signs, "_watch", watched)
    note_phase(run_dir, "evaluation")
    with start_signs.shown(run_dir, HERE):
        assert out.heard.wait(SECONDS)
        note_phase(run_dir, "generation")
        assert ended.wait(SECONDS)
    assert "drawing" not in out.getvalue()


@pytest.mark.parametrize("verbose", ["", "1"])
def test_a_terminal_has_one_line_that_is_covered_in_the_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, verbose: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(VERBOSE, verbose)
    out = Listener("⠹", is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    with start_signs.shown(run_dir, HERE):
        assert out.heard.wait(SECONDS)
    drawn = [text for text in out.getvalue().split("\r") if text]
    assert "\n" not in out.getvalue()
    assert drawn[-1].isspace()
    assert len(drawn[-1]) == max(map(len, drawn))
    # The rank's own lines, where they are shown, begin with a time and a tag, which cover all of it.
    assert not verbose or len(drawn[-1]) < len("2026-11-28 20:40:30 [STEP] ")


def test_a_verb_in_a_pipe_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Listener("… checking records 1,200, ")
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(reminders, "SIGN_SECONDS", 0.001)
    with busy("loading the tokenizer") as work:
        work.count("checking records", None, 1_200)
        assert err.heard.wait(SECONDS)


def test_quick_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Listener("…")
    monkeypatch.setattr(sys, "stderr", err)
    with busy("loading the tokenizer"):
        pass
    assert err.getvalue() == ""


def test_each_node_says_what_it_does_itself(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 waits for node 1, which prepares its data."""
    second = Place(nodes=2, processes=2, node=1)
    log = run_dir / "logs" / "rank-2.log"
    log.write_text("10:01 [STEP] preparing data\n")
    note_phase(run_dir, "evaluation")
    out = Listener("kubetune: still starting, ")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(reminders, "SIGN_SECONDS", 0.0)
    with waits.noted(run_dir, 0) as note:
        note("node 1")
        with start_signs.shown(run_dir, second):
            assert out.heard.wait(SECONDS)
    assert "waiting for node 1" not in out.getvalue()
    assert "evaluating" not in out.getvalue()
