"""The demo, run for real: what a stranger types first, its promise asserted, and what a stop does to it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.cli import main
from kubetune.cli.local import demo
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import load_state

KUBETUNE = [sys.executable, "-m", "kubetune"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of one whole demo, and what it printed; it trains in a process of its own."""
    folder = tmp_path_factory.mktemp("work")
    return folder, say(folder, "demo")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the demo's data with an eighth of its requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.DATA, "causal_lm", "train.jsonl#150")
        folder = tmp_path_factory.mktemp("short")
        return folder, say(folder, "demo")


def say(folder: Path, *argv: str) -> str:
    """Return what a verb prints in a folder; in this process, which has imported the libraries that answers take."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(list(argv)) == 0
    return printed.getvalue()


def test_the_best_checkpoint_is_the_one_that_is_shown(short: tuple[Path, str]) -> None:
    require_best(*short)


@pytest.mark.slow
def test_the_model_learns_what_it_could_not_do(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    before, after = require_best(folder, printed)
    assert before < 10
    # Five seeds ended at 89 to 96; another processor may round otherwise.
    assert after >= 88
    run_dir, prompt = next_command(printed)
    assert (
        say(folder, "generate", run_dir, prompt).strip()
        == "kubectl rollout restart deployment wallet -n staging"
    )


def shares(printed: str) -> tuple[int, int]:
    """Return the percentages before and after that are shown."""
    before, after = (
        int(re.search(rf"^  {when} +(\d+)%$", printed, re.M)[1]) for when in ("before", "after")
    )
    return before, after


def require_best(folder: Path, printed: str) -> tuple[int, int]:
    """Return the percentages that are shown; the latter is the best of three evaluations."""
    before, after = shares(printed)
    run_dir = folder / "outputs/demo/run"
    matches = {
        n["step"]: n["eval_exact_match"]
        for n in metrics.read_metrics(run_dir)
        if "eval_exact_match" in n
    }
    assert len(matches) == 3
    best = load_state(run_dir / "checkpoints" / "best").step
    assert matches[best] == max(matches.values()) == pytest.approx(after / 100)
    return before, after


def next_command(printed: str) -> tuple[str, str]:
    """Run directory and prompt of the command that is to be tried next."""
    return re.search(r'^try next .* generate (\S+) "(.+)"$', printed, re.M).groups()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q8_0", "adapter"])
def test_its_model_is_exported_for_llama_cpp(finished: tuple[Path, str], kind: str) -> None:
    pytest.importorskip("gguf")
    folder, _ = finished
    printed = say(folder, "export", "outputs/demo/run", "--gguf", kind)
    if find_spec("llama_cpp") is None:
        assert "not proved" in printed
    else:
        assert "same first choice 100.0%" in printed
        assert "greedy answers of up to 64 tokens equal: 4 of 4" in printed
    file = "adapter.gguf" if kind == "adapter" else "model-q8_0.gguf"
    (path,) = (folder / "outputs/demo/run/exports").glob(f"step-*-gguf-{kind}/{file}")
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.slow
def test_pairs_flip_its_style(tmp_path: Path) -> None:
    printed = say(tmp_path, "demo", "--task", "preference")
    before, after = shares(printed)
    assert before < 60
    assert after > 95
    lines = map(
        json.loads,
        (tmp_path / "outputs/demo-preference/run/metrics.jsonl").read_text().splitlines(),
    )
    assert max(line.get("eval_accuracy", 0) for line in lines) >= 0.95


@pytest.mark.slow
def test_it_learns_by_reward_what_few_examples_half_taught(tmp_path: Path) -> None:
    printed = say(tmp_path, "demo", "--task", "grpo")
    before, after = shares(printed)
    assert 20 <= before <= 40
    # 80 or more with each seed that docs/grpo.md tells of; another processor may round otherwise.
    assert after >= 70
    pass_at_1 = re.search(r"^pass@1 +(\d+)% → (\d+)%$", printed, re.M)
    pass_at_8 = re.search(r"^pass@8 +(\d+)% → (\d+)%$", printed, re.M)
    assert 1.5 * int(pass_at_1[1]) < int(pass_at_1[2])
    assert int(pass_at_8[1]) < int(pass_at_8[2])
    entropy = re.search(r"^entropy +(\S+) → (\S+) nats a token$", printed, re.M)
    assert float(entropy[1]) > float(entropy[2])
    assert re.search(r"^length +\S+ → \S+ tokens an answer$", printed, re.M)
    assert len(re.findall("^request", printed, re.M)) == demo.SHOWN
    assert say(tmp_path, "generate", *next_command(printed)).strip()


@pytest.mark.slow
def test_a_quarter_of_the_model_learns_from_it(tmp_path: Path) -> None:
    printed = say(tmp_path, "demo", "--task", "distill")
    before, after = shares(printed)
    assert before < 10
    # 96 on other held-out requests; another processor may round otherwise.
    assert after >= 80
    teacher = int(re.search(r"^  teacher +(\d+)%", printed, re.M)[1])
    assert teacher >= 80
    alone = int(re.search(r"^  alone +(\d+)%", printed, re.M)[1])
    gained, lost = map(int, re.search(r"(\d+) gained, (\d+) lost by", printed).groups())
    assert after - alone == gained - lost
    assert say(tmp_path, "generate", *next_command(printed)).strip()
    # The same test by the command that it names.
    command = re.search(r"kubetune (evaluate \S+ --compare \S+)$", printed, re.M)[1]
    assert "McNemar" in say(tmp_path, *command.split())


def test_the_summary_names_what_is_there(short: tuple[Path, str]) -> None:
    folder, printed = short
    adapter = folder / re.search(r"^adapter +(.+)$", printed, re.M)[1]
    base = AutoModelForCausalLM.from_pretrained(demo.EMBEDDED / "model")
    assert PeftModel.from_pretrained(base, adapter).peft_config["default"].r == 16
    assert len(re.findall("^request", printed, re.M)) == demo.SHOWN


def test_the_next_command_works(short: tuple[Path, str]) -> None:
    folder, printed = short
    assert say(folder, "generate", *next_command(printed)).strip()


@pytest.mark.slow
def test_a_second_demo_shows_the_same_result_without_training_again(
    finished: tuple[Path, str],
) -> None:
    folder, printed = finished
    steps = (folder / "outputs/demo/run/metrics.jsonl").read_text()
    done = subprocess.run([*KUBETUNE, "demo"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "outputs/demo/run/metrics.jsonl").read_text() == steps
    assert re.findall(r"^  after .*", done.stdout, re.M) == re.findall(
        r"^  after .*", printed, re.M
    )


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    started = subprocess.Popen(
        [*KUBETUNE, "demo"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert started.stdout is not None
    with started, started.stdout:
        for line in started.stdout:
            if "[TRAIN]" in line:
                started.send_signal(signal.SIGINT)
                break
        rest = started.stdout.read()
    assert started.returncode == errors.PREEMPTED, rest
    assert "goes on from there" in rest
    [step] = {
        int(path.name.removeprefix("step-"))
        for path in tmp_path.glob("outputs/demo/run/checkpoints/step-*")
    }

    assert (
        subprocess.run([*KUBETUNE, "demo"], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
    )
    numbers = [
        json.loads(line)
        for line in (tmp_path / "outputs/demo/run/metrics.jsonl").read_text().splitlines()
    ]
    steps = [number["step"] for number in numbers if "loss" in number]
    assert 0 < step < steps[-1]
    assert steps == list(range(1, steps[-1] + 1))


def test_a_foreign_run_file_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("name: mine\n")
    assert main(["demo", "--output", str(tmp_path)]) == errors.USER
    assert "Nothing was written" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "name: mine\n"
