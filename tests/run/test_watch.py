"""The live view on real runs: what a rank says of itself while it runs, and what a reader sees of it."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.screen import Screen

from kubetune import cli
from kubetune.base.humanize import sparkline
from kubetune.cli.local import watch
from kubetune.cli.local.watch_screen import RunView, draw
from kubetune.cli.program import program
from kubetune.rundir import exit_status, heartbeat
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until
from tests.run.test_report_long import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of one process, with the verdict that its agent would write."""
    inputs = toy.make_inputs(tmp_path_factory.mktemp("toy"))
    run_dir = toy.finished(inputs / "run", toy.make_config(inputs))
    exit_status.write_exit_status(run_dir, exit_status.ExitStatus(0, "done", 14))
    return run_dir


def shown(run_view: RunView, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(draw(run_view, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of_screen(run_view: RunView, width: int, height: int) -> list[str]:
    """Return the lines that the live screen puts on a terminal of this size."""
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=False)
    lines = console.render_lines(Screen(draw(run_view, console, watch.HINT)))
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_a_finished_run_is_shown_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "done  step 14/14 (100%)" in text
    assert "on this machine" in text
    assert f"Next: {program()} chat {run_dir} · {program()} report {run_dir}" in text.replace(
        "\n", ""
    )
    for words in (
        "numbers     step=14",
        "loss=",
        "timing      step=14",
        "tokens_per_second=",
        "peak_memory_bytes=",
        "evaluation  step=14",
        "checkpoint  step=14",
        "best        step=",
        "[DONE] 14 steps",
    ):
        assert words in text, words
    assert "[TRAIN]" not in text, "the table has the numbers of the last step"
    assert cli.main(["watch", str(run_dir), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["progress"]["step"], len(facts["curves"]["loss"])) == (
        "done",
        14,
        14,
    )
    assert facts["numbers"]["step"] == facts["timing"]["step"] == 14


def test_runs_are_listed_with_what_became_of_them(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("a/first", "a/second", "broken"):
        shutil.copytree(run_dir, tmp_path / name, symlinks=True)
    exit_status.write_exit_status(
        tmp_path / "a/second", exit_status.ExitStatus(3, "the disk is full", 14)
    )
    (tmp_path / "broken" / "resolved.json").write_text("{")
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert cli.main(["runs", str(tmp_path), "--json", "--sort", "eval_loss"]) == 0
    runs = json.loads(capsys.readouterr().out)
    states = {Path(run["path"]).name: (run["state"], run["step"]) for run in runs}
    assert states == {"first": ("done", 14), "second": ("failed", 14), "broken": ("damaged", None)}
    assert runs[0]["evaluation"]["eval_loss"] == last["eval_loss"]
    assert runs[-1]["state"] == "damaged"
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "the disk is full" in capsys.readouterr().out
    assert cli.main(["runs", str(tmp_path), "--sort", "speed"]) == 2
    assert "eval_loss" in capsys.readouterr().err
    assert cli.main(["runs", str(tmp_path), "--sort", "evaluation"]) == 2, (
        "all of its metrics at once are no order"
    )
    capsys.readouterr()
    assert cli.main(["runs", str(tmp_path), "--sort", "price"]) == 0, (
        "a column of the table, though nobody gave a price"
    )
    assert "the disk is full" in capsys.readouterr().out
    for words, names in (
        (["--state", "failed"], ["second"]),
        (["--filter", "DISK full"], ["second"]),
    ):
        assert cli.main(["runs", str(tmp_path), "--json", *words]) == 0
        assert [Path(run["path"]).name for run in json.loads(capsys.readouterr().out)] == names
    (tmp_path / "none").mkdir()
    assert cli.main(["runs", str(tmp_path / "none")]) == 0
    assert "no runs below" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs"]) == 2


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_keeps_the_evaluation_and_why_a_run_failed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    good = write_run(Path("outputs/support-bot-2026-11"), 60)
    with (good / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 60, "epoch": 1.0, "eval_loss": 7e-9, "eval_exact_match": 0.94}\n')
    exit_status.write_exit_status(good, exit_status.ExitStatus(0, exit_status.DONE, 60))
    failed = write_run(Path("outputs/support-bot-failed"), 60)
    reason = "lora.target_modules: the model has no module qproj; did you mean q_proj?"
    exit_status.write_exit_status(failed, exit_status.ExitStatus(2, reason, 0))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["runs"]) == 0
    lines_shown = capsys.readouterr().out.splitlines()
    head, *rest = lines_shown
    at = next(i for i, line in enumerate(rest) if line.startswith("left out"))
    rows, left_out = rest[:at], rest[at]
    assert "EVALUATION" in head
    assert "WHY" in head
    assert "exact_match 0.94" in "\n".join(rows)
    assert ("causal lm" in "\n".join(rows)) == (width > 80)
    assert ("CURVE" in head) == (width > 100)
    # The reason continues below itself.
    of_why = " ".join(row[head.index("WHY") :].strip() for row in rows)
    assert " ".join(of_why.split()) == reason
    assert max(map(len, (head, *rows))) <= width
    assert left_out.startswith("left out at this width: METHOD")
    # Without a reason there is no such column.
    shutil.rmtree(failed)
    assert cli.main(["runs"]) == 0
    assert "WHY" not in capsys.readouterr().out


def test_it_shows_first_what_the_task_is_about(run_dir: Path) -> None:
    run_view = watch.look_here(run_dir)
    assert shown(run_view).splitlines()[1].startswith("loss ")
    progress = {
        "evaluation": {"step": 40, "eval_loss": 1.5, "eval_reward_std": 0.2, "eval_reward": 0.35},
        "measures": {"reward": 0.25, "solved": 0.5},
    }
    by_reward = RunView("a", "running", "", "here", {"progress": progress})
    assert shown(by_reward).splitlines()[1] == "reward 0.35 at step 40  in training: reward 0.25"
    # Before the first evaluation there are the steps, and before the first step nothing.
    progress["evaluation"] = {}
    assert shown(by_reward).splitlines()[1] == "in training: reward 0.25"
    nothing = RunView("a", "starting", "", "here", {"progress": {}})
    assert shown(nothing).split() == ["a", "starting", "here"]


def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert cli.main(["watch", str(tmp_path / "none")]) == 2
    assert "no such run directory" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert cli.main(["watch", "none"]) == 3
    assert "there is no folder none here, so a cluster is asked" in capsys.readouterr().err


@contextmanager
def on_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield `kubetune watch` on a terminal of its own, and the other end of that."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    command = [sys.executable, "-m", "kubetune", "watch", *words]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, words: str | None = None) -> str:
    """Return what is written to a terminal, until certain words come, or to its end."""
    text = b""
    while words is None or words.encode() not in text:
        assert select.select([terminal], [], [], 60)[0], (
            f"{words!r} did not come; last: {text[-2000:]!r}"
        )
        try:
            text += os.read(terminal, 4096)
        except OSError:  # nobody writes there any more
            assert words is None, text
            break
    return text.decode(errors="ignore")  # what was read may end within a character


def test_a_run_that_is_not_there_yet_is_waited_for(run_dir: Path, tmp_path: Path) -> None:
    with on_a_terminal(str(tmp_path / "later")) as (process, terminal):
        read_until(terminal, "no such run directory yet; waiting for it")
        shutil.copytree(run_dir, tmp_path / "half", symlinks=True)
        (tmp_path / "half").rename(tmp_path / "later")
        assert "[DONE] 14 steps" in read_until(terminal)
        assert process.wait() == 0
    with on_a_terminal(str(tmp_path / "never")) as (process, terminal):
        read_until(terminal, "waiting for it")
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in read_until(terminal)
        assert process.wait() == 130


def test_leaving_says_that_the_run_goes_on(run_dir: Path, tmp_path: Path) -> None:
    going = shutil.copytree(run_dir, tmp_path / "going", symlinks=True)
    (going / exit_status.EXIT).unlink()
    with on_a_terminal(str(going)) as (process, terminal):
        read_until(terminal, "Ctrl-C leaves")
        process.send_signal(signal.SIGINT)
        assert "The run goes on. The same command shows it again." in read_until(terminal)
        assert process.wait() == 0


def test_the_last_view_stays_on_the_terminal(run_dir: Path, tmp_path: Path) -> None:
    going = shutil.copytree(run_dir, tmp_path / "going", symlinks=True)
    (going / exit_status.EXIT).unlink()
    with on_a_terminal(str(going)) as (process, terminal):
        text = read_until(terminal, "Ctrl-C leaves; the run goes on")
        assert "\x1b[?1049h" in text, "a screen of its own"
        process.send_signal(signal.SIGINT)
        after = read_until(terminal).partition("\x1b[?1049l")[2]
        assert "step 14/14" in after
        assert "The run goes on. The same command shows it again." in after
        assert process.wait() == 0


def test_a_signal_gives_the_terminal_back(run_dir: Path, tmp_path: Path) -> None:
    going = shutil.copytree(run_dir, tmp_path / "going", symlinks=True)
    (going / exit_status.EXIT).unlink()
    with on_a_terminal(str(going)) as (process, terminal):
        read_until(terminal, "Ctrl-C leaves")
        process.terminate()
        assert "\x1b[?1049l" in read_until(terminal)
        assert process.wait() == 128 + signal.SIGTERM


def test_the_file_of_a_local_run_will_do(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: x/y\ndata: {{train: x/y}}\noutput: {run_dir}\n")
    assert cli.main(["watch", str(file)]) == 0
    assert "done  step 14/14" in capsys.readouterr().out


def test_ranks_say_where_they_are_while_they_run(run_dir: Path, tmp_path: Path) -> None:
    inputs = run_dir.parent
    going = toy.make_run(tmp_path / "run", toy.make_config(inputs), 2)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGSTOP.value}:micro-batch:6:1"}
    with started(worker.main, 2, [str(going)], environ=environ) as processes:
        toy.wait_until_stopped(processes[1])
        # Rank 0 has nothing else to do from here on, so what it said last stays so.
        wait_until(
            lambda: (
                [b["waiting"] and b["step"] == 5 for b in heartbeat.read_beats(going)][:1] == [True]
            )
        )
        run_view = watch.look_here(going)
        assert run_view.state == "running"
        first, second = run_view.status["ranks"]
        assert (first["rank"], first["waiting"], second["rank"]) == (0, True, 1)
        toy.go_on(processes[1])
        assert wait_all(processes) == [0, 0]
    assert heartbeat.read_beats(going) == []


def test_what_cannot_be_reached_is_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = run_dir.with_name("away")
    looks = iter(range(4))

    def look() -> RunView:
        number = next(looks)
        if number == 1:
            run_dir.rename(away)
        elif number == 2:
            away.rename(run_dir)
        run_view = watch.look_here(run_dir)
        if number == 3:
            return run_view
        return RunView(run_view.name, "running", "", "", run_view.status)

    console = Console(width=300, file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(watch, "SECONDS", 0.0)
    last_view = watch.follow(look(), look, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "trying again:" in text
    assert "expected a run directory" in text
    assert last_view.state == "done"


def test_a_damaged_run_is_shown(run_dir: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(run_dir, tmp_path / "damaged", symlinks=True)
    for name in ("metrics.jsonl", "timings.jsonl", "events.jsonl"):
        path = damaged / name
        path.write_bytes(path.read_bytes()[:-20] + b"\x00\xff{")
    (damaged / "plan.json").write_text("{")
    (damaged / "verdict.json").write_text("[]")
    shutil.rmtree(damaged / "checkpoints")
    shutil.rmtree(damaged / "logs")
    text = shown(watch.look_here(damaged))
    assert "done  step 14/14" in text
    assert "checkpoint" not in text
    for name in ("metrics.jsonl", "timings.jsonl", "events.jsonl"):
        (damaged / name).unlink()
    assert "done" in shown(watch.look_here(damaged))


def rank_facts(rank: int, *, waiting: bool = False, phase_seconds: float, silent_seconds: float):
    return {
        "rank": rank,
        "phase": "step",
        "waiting": waiting,
        "step": 7,
        "phase_seconds": phase_seconds,
        "silent_seconds": silent_seconds,
    }


def test_ranks_are_shown_one_by_one_only_where_some_wait_long_for_others() -> None:
    ranks = [
        rank_facts(n, waiting=n != 3, phase_seconds=1.0, silent_seconds=1.0) for n in range(40)
    ]
    text = shown(RunView("many", "running", "", "", {"ranks": ranks}))
    assert "number=40 phase=step" in text
    assert "rank 3 " not in text

    ranks = [
        rank_facts(n, waiting=n not in (3, 39), phase_seconds=60.0, silent_seconds=60.0 * (n == 39))
        for n in range(40)
    ]
    text = shown(RunView("many", "running", "", "", {"ranks": ranks}))
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert [row.split()[1] for row in rows[:3]] == ["39", "3", "0"]
    assert "waiting=True" in rows[2]
    assert len(rows) == 6


LOG = [
    f"2026-11-20 10:15:{n:02} [TRAIN] step {n}/12000 epoch 3.12 loss 2.1835 lr 1.23e-05 grad_norm 0.474 tokens/s 5001"
    for n in range(60)
]


def full_view(ranks: int) -> RunView:
    """Return a run of which everything is known."""
    beats = [rank_facts(n, phase_seconds=1.0, silent_seconds=1.0) for n in range(ranks)]
    warning = "2026-11-20 10:15:00 [DATA] WARNING: 3 rows were dropped"
    error = "2026-11-20 10:15:01 [ERROR] rank 3 lost its peers"
    status = {
        "progress": {
            "step": 59,
            "steps": 12_000,
            "loss": 2.2,
            "saved_step": 50,
            "best": {"step": 40, "value": 2.1},
            "seconds_left": 7200.0,
            "restarts": 1,
            "last_exit": {"code": 137, "reason": "killed by the kernel"},
            "tokens_per_second": 5001.0,
            "evaluation": {"step": 40, "eval_loss": 2.1, "eval_accuracy": 0.5},
        },
        "timing": {"tokens_per_second": 5001.0, "peak_memory_bytes": 2**34},
        "ranks": beats,
        "log": [warning, *LOG, error, "2026-11-20 10:16:00 [STEP] saving"],
    }
    return RunView("full", "running", "", "on this machine", status)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
@pytest.mark.parametrize("ranks", [1, 40])
def test_the_screen_fills_a_terminal(width: int, height: int, ranks: int) -> None:
    lines = lines_of_screen(full_view(ranks), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[1] == "Ctrl-C leaves; the run goes on"
    text = "\n".join(lines)
    for words in (
        "full  running  step 59/12,000 (0%)  ETA 2h00m  on this machine",
        "numbers     loss=2.2",
        "timing      tokens_per_second=5,001 peak_memory_bytes=16 GiB",
        "evaluation  step=40 eval_loss=2.1 eval_accuracy=0.5",
        "checkpoint  step=50",
        "best        step=40 value=2.1",
        "restarts    times=1 code=137 reason=killed by the kernel",
        f"ranks       number={ranks} phase=step",
        "10:15:00 [DATA] WARNING: 3 rows were dropped",
        "10:15:01 [ERROR] rank 3 lost its peers",
    ):
        assert words in text, words
    assert [line for line in lines if line][-1] == "2026-11-20 10:16:00 [STEP] saving"


@pytest.mark.parametrize(("width", "height"), [(20, 3), (40, 10), (5, 1)])
def test_a_small_terminal_is_never_exceeded(width: int, height: int) -> None:
    lines = lines_of_screen(full_view(40), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_curves_are_between_their_first_value_and_their_last() -> None:
    status = {"curves": {"reward": [0.125, 0.5, 1.0], "loss": [2.0, 1.0]}}
    text = shown(RunView("r", "running", "", "", status), 80)
    assert [line.split() for line in text.splitlines()[1:3]] == [
        ["reward", "0.125", "▁▄█", "1"],
        ["loss", "2", "█▁", "1"],
    ]


def test_gpus_are_shown() -> None:
    gpu = {"index": 0, "name": "NVIDIA H200", "utilization_percent": 73, "memory_used_mib": 1000,
           "memory_total_mib": 143771, "temperature_celsius": 41, "power_watts": None}  # fmt: skip
    text = shown(RunView("gpu", "running", "", "", {"gpus": [gpu]}), 160)
    for words in ("name=NVIDIA H200", "utilization_percent=73", "memory_total_mib=143,771"):
        assert words in text


def test_answers_of_a_run_by_reward_are_counted() -> None:
    numbers = {
        "loss": 0.1, "reward": 0.5, "reward/exact_match": 0.25, "completion_length": 96.5, "solved": 0.75,
        "zero_variance": 0.25, "truncated": 0.125, "entropy": 1.5, "kl": 0.01, "clip_low": 0.01, "clip_high": 0.02,
        "sampling_difference": 1e-7,
    }  # fmt: skip
    timing = {"seconds": 9.0, "generate_seconds": 5.0, "reward_seconds": 0.5, "train_seconds": 3.5}
    status = {"numbers": numbers, "timing": timing}
    run_view = RunView("r", "running", "", "", status)
    text = " ".join(shown(run_view, 80).split())
    for words in (
        "numbers loss=0.1 reward=0.5 reward/exact_match=0.25 completion_length=96.5 solved=0.75",
        "kl=0.01 clip_low=0.01 clip_high=0.02 sampling_difference=1e-07",
        "timing seconds=9 s generate_seconds=5 s reward_seconds=0.5 s train_seconds=3.5 s",
    ):
        assert words in text, words


def test_a_run_that_does_not_exist_yet_may_be_named_by_a_path_of_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", "./out"]) == 2
    assert "no such run directory" in capsys.readouterr().err


def test_sparklines() -> None:
    assert sparkline([0, 7], 10) == "▁█"
    assert sparkline([8, 4, 2, 1], 60) == "█▄▂▁"
    assert len(sparkline(range(1000), 60)) == 60
    assert sparkline([1, 1, 1], 2) == "▁▁"
    assert sparkline([0, None, 1], 3) == "▁ █"
    assert sparkline([None], 3) == " "
    assert sparkline([], 3) == ""
    assert len(sparkline(range(1000), 40)) == 40


def test_a_namespace_means_the_cluster_though_a_folder_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fit").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert cli.main(["watch", "fit", "-n", "team", "--once"]) == 3
    assert str(tmp_path / "none") in capsys.readouterr().err
