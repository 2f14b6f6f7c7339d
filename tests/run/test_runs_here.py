"""Runs of this machine by the command line: the newest by the word `last`, the failed ones, and how one is deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kubetune import cli, errors
from kubetune.rundir import exit_status
from kubetune.supervisor.place import hold
from tests.run.test_report_long import write_run


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder `outputs` with a run that is done, and a newer one that failed."""
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    for name, code, time in [("good", 0, "2026-11-02"), ("bad", 2, "2026-11-03")]:
        run_dir = write_run(Path("outputs") / name, 50)
        event = {"schema_version": 1, "time": f"{time}T10:00:00.000Z", "event": "launch"}
        (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
        status = exit_status.ExitStatus(code, exit_status.DONE if code == 0 else "no rows", 50)
        exit_status.write_exit_status(run_dir, status)
    return Path("outputs")


def test_last_is_the_newest_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "last", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["state"] == "failed"
    assert shown.err == "last: outputs/bad\n"
    # A folder of that name is meant where there is one.
    write_run(Path("last"), 50)
    assert cli.main(["watch", "last", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("outputs")
def test_last_is_a_run_that_is_served_or_copied(capsys: pytest.CaptureFixture[str]) -> None:
    # Neither does anything with a run of these; each says of which one it speaks.
    for words in (
        ["serve", "bot=last", "--render"],
        ["sync", "last"],
        ["serve", "last", "--render"],
    ):
        assert cli.main(words) == errors.USER
        shown = capsys.readouterr().err
        assert shown.startswith("last: outputs/bad\n"), words
        assert "outputs/bad" in shown.partition("\n")[2], words


def test_last_without_runs_names_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["chat", "last"]) == errors.USER
    assert "there is no run below outputs; name a run directory" in capsys.readouterr().err


@pytest.mark.usefixtures("outputs")
def test_failed_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--failed", "--json"]) == 0
    assert [run["path"] for run in json.loads(capsys.readouterr().out)] == ["outputs/bad"]


def test_a_run_here_is_deleted_as_a_whole(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nobody can be asked.
    assert cli.main(["delete", "outputs/bad"]) == errors.USER
    assert (outputs / "bad").is_dir()
    assert cli.main(["delete", "outputs/bad", "--yes"]) == 0
    assert "outputs/bad was deleted" in capsys.readouterr().out
    assert [path.name for path in outputs.iterdir()] == ["good"]


def test_only_a_run_at_rest_is_deleted(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "notes").mkdir()
    (outputs / "link").symlink_to("good")
    for name, reason in [("notes", "is no run directory"), ("link", "is a link")]:
        assert cli.main(["delete", f"outputs/{name}", "--yes"]) == errors.USER
        assert reason in capsys.readouterr().err
    with hold(outputs / "good", 0):
        assert cli.main(["delete", "outputs/good", "--yes"]) == errors.ENVIRONMENT
    assert cli.main(["delete", "outputs/good", "--yes", "--volumes"]) == errors.USER
    assert (outputs / "good" / "resolved.json").is_file()
