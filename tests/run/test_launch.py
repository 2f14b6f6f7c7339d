"""`kubetune train` for real, on a tiny model: what it prints and leaves, how it stops, goes on, and refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetune import cli, errors
from kubetune.base import processes
from kubetune.config.resolved import load_resolved
from kubetune.rundir import exit_status, metrics
from kubetune.supervisor.run_folder import check_run_dir
from tests import toy
from tests.bombs import plant_modules
from tests.ranks import wait_until
from tests.tiny import train_tokenizer

STEPS = 24


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Llama, `model`, and `train.jsonl`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("inputs")
    model = train_tokenizer(folder / "model")
    shape = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(model)
    rows = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}"} for n in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    flags = [
        "--model",
        str(inputs / "model"),
        "--data",
        str(inputs / "train.jsonl"),
        "--eval",
        "0.1",
    ]
    return [
        sys.executable, "-m", "kubetune", "train", *flags, "--lora", "--seq-len", "64", "--batch", "4",
        "--max-steps", str(STEPS), "--output", str(run_dir),
        "training.save_steps=8", "training.eval_steps=8", *more,
    ]  # fmt: skip


def environ() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "150"}


def train(inputs: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(inputs, run_dir, *more),
        cwd=inputs,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def start_refused(inputs: Path, run_dir: Path, *more: str) -> tuple[int, str]:
    """Return the exit code and stderr of a start that is refused before it has a process of its own, and so needs none."""
    with contextlib.chdir(inputs), contextlib.redirect_stderr(io.StringIO()) as stderr:
        return cli.main(command(inputs, run_dir, *more)[3:]), stderr.getvalue()


def run_among_bombs(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `kubetune` with these words in a folder with modules of its own, none of which may be imported."""
    folder.mkdir()
    canary = plant_modules(folder)
    done = subprocess.run(
        [Path(sys.executable).with_name("kubetune"), *words[words.index("train") :]],
        cwd=folder, env=environ(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not canary.exists(), canary.read_text()
    return done


def without_signs(text: str) -> str:
    """Return what was printed besides the signs of life of a slow machine."""
    lines = [line for line in text.splitlines() if not line.startswith("… judging the run")]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def finished(inputs: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return a run that went to its end, and what it printed."""
    run_dir = inputs / "finished"
    return run_dir, run_among_bombs(inputs / "folder", command(inputs, run_dir))


def test_a_run_says_what_it_does(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert without_signs(done.stderr) == ""
    assert "effective batch" in done.stdout
    assert str(run_dir) in done.stdout
    for family in ("STEP", "DDP", "DATA", "MODEL", "TRAIN", "EPOCH", "EVAL", "RESULT", "DONE"):
        assert f"[{family}]" in done.stdout
    assert f"step {STEPS}/{STEPS}" in done.stdout
    assert "\x1b" not in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Next: ")
    assert f"kubetune chat {run_dir} · " in last
    log = toy.log_of(run_dir)
    assert all(line in done.stdout for line in log.splitlines())


def test_a_run_leaves_its_numbers(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, _ = finished
    assert [line["step"] for line in metrics.read_metrics(run_dir) if "loss" in line] == list(
        range(1, STEPS + 1)
    )
    report = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == STEPS
    assert report["tokens"] > report["trained_tokens"] > 0
    assert exit_status.read_exit_status(run_dir) == exit_status.ExitStatus(0, "done", STEPS)
    assert metrics.read_events(run_dir)[0]["event"] == "launch"


def test_every_file_that_a_run_leaves_is_on_the_page_on_files(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text("utf-8")
    table = page.partition("## Run directory")[2].partition("## In a pod")[0]
    named = [
        name
        for row in re.findall(r"^\| (`.+?`) \|", table, re.M)
        for name in re.findall(r"`(.+?)`", row)
    ]
    assert {
        "config.yaml",
        "resolved.json",
        "plan.json",
        "identity.json",
        "exit.json",
        "data.json",
    } <= set(named)
    known = re.compile(
        "|".join(
            re.escape(name).replace("\\-N", r"-\d+").replace("000120", r"\d+") for name in named
        )
    )
    left = [str(path.relative_to(finished[0])) for path in finished[0].rglob("*") if path.is_file()]
    assert [name for name in left if not known.match(name)] == []


def test_what_the_environment_decides_is_said_and_a_report_without_a_place_is_refused(
    inputs: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*command(inputs, tmp_path / "run"), "logging.report_json=train.jsonl/report.json"],
        cwd=inputs, env=environ() | {"LR": "1e-3"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == errors.USER
    assert "LR is set in the environment: it decides training.learning_rate" in done.stderr
    assert "train.jsonl is no folder; give another place" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_report_in_the_place_of_the_data_is_refused_before_anything_is_written(
    inputs: Path, tmp_path: Path
) -> None:
    rows = (inputs / "train.jsonl").read_bytes()
    done = subprocess.run(
        [*command(inputs, tmp_path / "run"), "logging.report_json=train.jsonl"],
        cwd=inputs, env=environ(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == errors.USER
    assert "train.jsonl holds something other than a report" in done.stderr
    assert (inputs / "train.jsonl").read_bytes() == rows
    assert not (tmp_path / "run").exists()


def read_screen(terminal: int, until: bytes, seconds: float = 60) -> bytes:
    """Return what appears on a terminal, up to `until` or the end."""
    screen = b""
    while until not in screen:
        assert select.select([terminal], [], [], seconds)[0], screen
        try:
            screen += os.read(terminal, 4096)
        except OSError:  # the last process that had it open has ended
            break
    return screen


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_saves_below_the_progress_bar_and_the_run_goes_on_bit_for_bit(
    inputs: Path, tmp_path: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    """It stands still after a few steps, while a second start is refused."""
    run_dir = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(inputs)
        os.execve(
            sys.executable,
            command(inputs, run_dir),
            environ() | {"KUBETUNE_FAULT": "signal 19:step:4"},
        )
    wait_until(lambda: any(map(toy.is_stopped, processes.children(pid))))
    code, stderr = start_refused(inputs, run_dir)
    assert code == 3
    assert f"process {pid}" in stderr
    os.write(terminal, b"\x03")
    screen = read_screen(terminal, b"Ctrl-C once more")
    for rank in processes.children(pid):
        os.kill(rank, signal.SIGCONT)
    screen += read_screen(terminal, b"no such text")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 143, screen.decode()
    assert b"tokens/s" in screen
    assert b"[TRAIN] step" not in screen
    assert "[TRAIN] step 1/" in toy.log_of(run_dir)
    stopped = exit_status.read_exit_status(run_dir)
    assert stopped is not None
    assert stopped.step is not None
    assert 4 <= stopped.step < STEPS
    assert (run_dir / "checkpoints" / f"step-{stopped.step:06d}" / "manifest.json").exists()
    assert toy.train(run_dir) == [0]
    assert (run_dir / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_leave_a_log_each_and_run_nothing_of_the_current_folder(
    inputs: Path, tmp_path: Path
) -> None:
    words = command(inputs, tmp_path / "run", "compute.processes=2", "training.max_steps=2")
    done = run_among_bombs(tmp_path / "folder", words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WORLD_SIZE=2" in done.stdout
    for rank in range(2):
        assert "[STEP]" in (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
    assert without_signs(done.stderr) == ""


def require_nothing_trained(run_dir: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Require that a start with `bad.jsonl` ended before its first step, and named what exists all the same."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "bad.jsonl:1:" in done.stdout
    assert "This start trained nothing; the run directory holds its config and logs." in done.stdout
    assert "Nothing was written" not in done.stdout + done.stderr  # because that much was
    assert {path.name for path in run_dir.iterdir()} == {
        "config.yaml", "resolved.json", "plan.json", "logs", "events.jsonl", "exit.json",
    }  # fmt: skip


def test_a_run_that_is_done_has_nothing_to_do(
    tmp_path: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    run_dir = shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    kept = {
        name: (run_dir / name).read_bytes()
        for name in ("report.json", "metrics.jsonl", "timings.jsonl")
    }
    log = run_dir / "logs" / "rank-0.log"
    assert toy.train(run_dir) == [0], log.read_text()
    assert (
        f"all {STEPS} steps were done before; {run_dir / 'report.json'} tells of them"
        in log.read_text()
    )
    assert {name: (run_dir / name).read_bytes() for name in kept} == kept


@pytest.mark.slow
def test_a_run_as_json(
    tmp_path: Path, inputs: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    run_dir = shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    done = train(inputs, run_dir, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["run_dir"], report["exit_code"], report["step"]) == (str(run_dir), 0, STEPS)
    assert report["report"] == json.loads((run_dir / "report.json").read_text())
    assert "effective batch" in done.stderr


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_config_is_refused_with_the_keys_that_differ(
    inputs: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    run_dir, _ = finished
    before = snapshot(run_dir)
    changes = "training.seed=7", "lora.r=4", "training.logging_steps=2", "logging.level=ERROR"
    code, stderr = start_refused(inputs, run_dir, *changes)
    assert code == 2
    assert "training.seed was 42, now is 7" in stderr
    assert "lora.r was 16, now is 4" in stderr
    assert "logging.level" not in stderr
    assert snapshot(run_dir) == before


def test_another_number_of_processes_must_keep_the_global_batch(
    inputs: Path, finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    code, stderr = start_refused(inputs, finished[0], "compute.processes=2")
    assert code == 2
    assert "training.global_batch_size was 4, now is 8" in stderr


@pytest.mark.parametrize(
    ("resume", "reason"), [("never", "has checkpoints"), ("must", "no checkpoint")]
)
def test_resume_never_and_must(
    inputs: Path,
    tmp_path: Path,
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    resume: str,
    reason: str,
) -> None:
    run_dir = finished[0] if resume == "never" else tmp_path / "new"
    code, stderr = start_refused(inputs, run_dir, f"training.resume={resume}")
    assert code == 2
    assert reason in stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_of_other_things_is_left_alone(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    code, stderr = start_refused(inputs, tmp_path)
    assert code == 2
    assert "thesis.txt" in stderr
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("again", ["ranks", "agent"])
def test_a_pod_makes_the_run_directory_from_its_config(
    inputs: Path, tmp_path: Path, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time with data that were refused the first time, and are mended."""
    data = tmp_path / "bad.jsonl"
    text = f"model: {inputs / 'model'}\ndata: {{train: {data}, max_length: 64}}\n"
    (tmp_path / "run.yaml").write_text(text)
    data.write_text('{"prompt": 3}\n' * 20)
    done = pod(tmp_path)
    require_nothing_trained(tmp_path / "run", done)
    data.write_text((inputs / "train.jsonl").read_text())
    if again == "agent":
        done = pod(tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        monkeypatch.chdir(tmp_path)
        assert toy.train(tmp_path / "run") == [0]
    assert (tmp_path / "run" / "config.yaml").read_text() == text
    resolved = json.loads((tmp_path / "run" / "resolved.json").read_text())
    assert resolved["output"] == "run"
    assert resolved["training"]["max_steps"] == 1
    assert (tmp_path / "run" / "checkpoints" / "last").exists()


def pod(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the agent as pods do."""
    return subprocess.run(
        [sys.executable, "-m", "kubetune.agent", "run", "--config", "run.yaml", "training.max_steps=1"],
        cwd=folder, env=environ(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_without_output_each_run_gets_a_directory_of_its_own_and_bad_data_end_it_before_any_training(
    inputs: Path, tmp_path: Path
) -> None:
    # Of several processes none imports torch before the data are prepared.
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n' * 20)
    bad = ["--data", str(tmp_path / "bad.jsonl"), "data.max_length=8", "compute.processes=2"]
    for number in (1, 2):
        earlier = set(inputs.glob("outputs/model/*"))
        done = subprocess.run(
            [sys.executable, "-m", "kubetune", "train", "--model", "model", *bad],
            cwd=inputs, env=environ(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert len(earlier) == number - 1
        (made,) = set(inputs.glob("outputs/model/*")) - earlier
        assert made.name.startswith("lora-r16-a32-len8-")
        require_nothing_trained(made, done)


def test_gpus_that_are_not_there_are_a_problem_of_the_run(inputs: Path, tmp_path: Path) -> None:
    code, stderr = start_refused(inputs, tmp_path / "run", "compute.gpus_per_node=64")
    assert code == 2
    assert "wants 64 GPUs on this machine" in stderr
    assert not (tmp_path / "run").exists()


class BesideAnother(type(Path())):  # type: ignore[misc]
    """A run directory in which another node writes the first files just when this one looks what is there."""

    def glob(self, pattern: str) -> Iterator[Path]:
        for name in ("resolved.json", "config.yaml") if self.name == "run" else ():
            (self / name).write_text("{}")
        return super().glob(pattern)  # type: ignore[no-any-return]


def test_nodes_that_make_one_run_directory_at_the_same_moment_know_it_for_theirs(
    tmp_path: Path,
) -> None:
    config = load_resolved({"model": "m/m", "data": {"train": "d/d"}})
    folder = tmp_path / "run"
    folder.mkdir()
    check_run_dir(config, BesideAnother(folder))
    (folder / "resolved.json").unlink()
    with pytest.raises(errors.ConfigError, match=r"holds config\.yaml but no run of kubetune"):
        check_run_dir(config, folder)
