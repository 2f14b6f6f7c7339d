"""Tables of the command line: whole where they are read by programs, folded where a terminal is narrow."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

from kubetune.cli.tables import table
from kubetune.rundir import metrics
from tests.run.test_report_long import write_run

HEAD = ("RUN", "STATE", "WHY")
ROWS = [
    ("a", "running", None),
    ("outputs/b", "failed", "the disk was full when the checkpoint of step 20 was written"),
]
PRINTED = """
from kubetune.cli.tables import *
print_table(("A", "B"), [("x" * 30, "y " * 20)])
print_fact("w", "z " * 30, 9)
"""


def test_nothing_is_cut_off_and_no_line_is_wider_than_the_terminal() -> None:
    whole = list(table(HEAD, ROWS))
    folded = list(table(HEAD, ROWS, 50))
    assert len(whole) == 3
    assert max(map(len, folded)) <= 50
    assert folded[:2] == ["RUN        STATE    WHY", "a          running"]
    assert [line[:9].strip() for line in folded[2:]] == ["outputs/b", "", ""], (
        "the longest column gives way"
    )
    words = " ".join(line[20:].strip() for line in folded[2:])
    assert words == ROWS[1][2]
    assert list(table(HEAD, ROWS, 200)) == whole
    assert max(map(len, table(HEAD, ROWS, 10))) == 27, "no column is narrower than can be read"


def test_a_sentence_at_the_end_of_a_short_row_stays_whole() -> None:
    assert list(table(HEAD, [("a", "b" * 90)], 40))[1] == f"a    {'b' * 90}"


def test_a_path_breaks_behind_a_slash() -> None:
    path = "/data/customers/2026-11/support-answers.csv"
    folded = [line.rstrip() for line in table(("PATH", "N"), [(path, 1)], 28)][1:]
    assert folded == ["/data/customers/2026-11/   1", "support-answers.csv"]


def test_only_a_terminal_has_a_width() -> None:
    """COLUMNS is set in many shells, and means nothing for what is read by a program."""
    environ = {**os.environ, "COLUMNS": "40", "NO_COLOR": "1"}
    piped = subprocess.run(
        [sys.executable, "-c", PRINTED], env=environ, capture_output=True, text=True, check=True
    )
    assert [len(line.rstrip()) for line in piped.stdout.splitlines()] == [33, 71, 69]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as terminal:
        subprocess.run([sys.executable, "-c", PRINTED], env=environ, stdout=theirs, check=True)
        os.close(theirs)
        lines = terminal.read(4096).decode().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[-2:] == [f"w         {'z ' * 15}".rstrip(), f"          {'z ' * 15}".rstrip()]


def on_terminal(columns: int, *words: str) -> list[str]:
    """Return the lines that a command prints on a terminal of this width, and four lines high."""
    environ = {**os.environ, "COLUMNS": str(columns), "LINES": "4", "NO_COLOR": "1"}
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as terminal:
        command = [sys.executable, "-m", "kubetune", *words]
        subprocess.run(command, env=environ, stdout=theirs, stderr=theirs, check=False)
        os.close(theirs)
        return terminal.read(1 << 16).decode().splitlines()


def test_runs_keep_evaluation_task_and_a_cut_reason_at_100_columns(tmp_path: Path) -> None:
    for name in ("a-run-with-a-name", "other"):
        run_dir = write_run(tmp_path / name, 60)
        with (run_dir / metrics.METRICS).open("a") as lines:
            lines.write('{"step": 60, "epoch": 0.06, "eval_loss": 0.0726}\n')
    reason = "rank 0 ran out of memory (CUDA) in the backward pass of a step of eight rows"
    ended = {"code": 3, "reason": reason, "step": 60, "error": "EnvironmentFault"}
    (tmp_path / "other" / "exit.json").write_text(json.dumps(ended))
    head, *rows = on_terminal(100, "runs", str(tmp_path))
    assert {"EVALUATION", "TASK", "WHY"} <= set(head.split())
    assert max(map(len, (head, *rows))) <= 100
    assert any("rank 0 ran out" in row and row.endswith("…") for row in rows)
    assert rows[-1] == "reasons are cut; --failed and --state have them whole"
    whole = on_terminal(100, "runs", str(tmp_path), "--failed")
    assert "…" not in "".join(whole)
    # A terminal breaks no word of an error either.
    lines = on_terminal(60, "runs", "nowhere-to-be-found", "--sort", "started")
    assert len(lines) > 1
    assert " ".join(lines).startswith(
        "kubetune: nowhere-to-be-found: no such folder; give the one that"
    )
    assert max(map(len, lines)) <= 60
