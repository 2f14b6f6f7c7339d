"""The command line as a whole: its overview, its examples, what it says of mistakes, completion, and its own state."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kubetune import __version__, cli, errors
from kubetune.base.locks import lock
from kubetune.cli import main, make_parser, verb_module
from kubetune.cli.installation.doctor import CheckFinding
from kubetune.cli.local.demo import EMBEDDED
from kubetune.cli.overview import EXAMPLES, VERBS
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.plan.plan import Plan
from kubetune.supervisor.command_line import parse
from kubetune.supervisor.run_folder import create_run_dir


def ended(*words: str) -> int:
    """Return the exit code of a command that may leave by SystemExit."""
    try:
        return main(words)
    except SystemExit as left:
        return int(left.code or 0)


def test_no_verb_shows_all_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended() == 0
    shown = capsys.readouterr().out
    assert ended("--help") == 0
    assert capsys.readouterr().out == shown
    assert all(f"  {verb} " in shown for verb in VERBS)
    assert max(map(len, shown.splitlines())) <= 80


def test_help_of_a_verb_is_asked_for_in_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("help", "plan") == ended("plan", "--help") == 0
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first == second
    assert ended("help") == 0
    assert "usage: kubetune VERB" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out.startswith(f"kubetune {__version__} (Python 3.")


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["trian"], "unknown verb 'trian'; did you mean `train`?"),
        (["compare", "a", "b"], "did you mean `report --compare`?"),
        (["frobnicate"], "`kubetune --help` lists the verbs"),
        (["plan", "--jsn"], "unrecognized arguments: --jsn; did you mean --json?"),
        # Words after it are named too by some Pythons, and taken for a prompt by others.
        (["generate", "run", "--sed"], "unrecognized arguments: --sed; did you mean --seed?"),
    ],
)
def test_mistyped_words_are_met_with_what_was_meant(
    words: list[str], messages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*words) == 2
    assert messages in capsys.readouterr().err


def test_prompts_stand_before_and_after_options() -> None:
    words = ["generate", "run", "a", "--seed", "1", "b c", "--", "-d", "key=value"]
    args = parse(make_parser("generate"), words)
    assert (args.prompts, args.seed) == (["a", "b c", "-d", "key=value"], 1)


@pytest.mark.parametrize("verb", ["logs", "status"])
def test_a_folder_is_no_run_on_a_cluster(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(verb, str(tmp_path)) == 2
    assert (
        f"{tmp_path} is a folder of this machine; expected the name of a run"
        in capsys.readouterr().err
    )


def test_a_run_file_that_is_a_pipe_is_kept_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = '{"prompt": "a", "completion": "b"}\n' * 4
    (tmp_path / "t.jsonl").write_text(rows)
    text = f"model: {EMBEDDED / 'model'}\ndata: {{train: t.jsonl}} # mine\noutput: run\n"

    def make_folder(config: Config, plan: Plan, run_dir: Path, **facts: Any) -> int:
        create_run_dir(config, run_dir, plan, facts["source"])
        return errors.ENVIRONMENT

    monkeypatch.setattr("kubetune.supervisor.launch.launch_run", make_folder)
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write(text)
    try:
        assert main(["train", f"/dev/fd/{reading}"]) == errors.ENVIRONMENT
    finally:
        os.close(reading)
    assert (tmp_path / "run" / "config.yaml").read_text() == text


def test_a_run_of_this_machine_is_resumed_by_the_command_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    assert ended("resume", str(tmp_path)) == 2
    assert f"{tmp_path} is no run directory" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(
        f"{{model: {EMBEDDED / 'model'}, data: {{train: {tmp_path / 't.jsonl'}}}}}"
    )
    config = load_config(tmp_path / "run.yaml", overrides=["training.seed=7"])
    create_run_dir(config, tmp_path / "a run", source=(tmp_path / "run.yaml").read_text())
    assert ended("resume", "a run") == 2
    stderr = capsys.readouterr().err
    words = shlex.split(stderr.partition("by: ")[2].strip())
    assert words == ["kubetune", "train", "a run/config.yaml", "output=a run", "training.seed=7"]
    assert "kubeconfig" not in stderr
    assert make_parser("train").parse_args(words[1:]).inputs == words[2:]
    with lock(tmp_path / "a run" / "logs" / "node-0.lock", wait=False):
        assert ended("resume", "a run") == 2
    assert "is running; see kubetune watch" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_that_it_understands(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(verb, "--help") == 0
    shown = capsys.readouterr().out
    for example in EXAMPLES[verb]:
        assert f"  kubetune {example}\n" in shown
        words = shlex.split(example.partition(" > ")[0].partition(" -- ")[0])
        assert words[0] == verb
        assert parse(make_parser(verb), words).verb == verb


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_knows_verbs_and_options(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("completion", shell) == 0
    script = capsys.readouterr().out
    assert "verify-resume" in script
    assert "max-shard-size" in script
    (tmp_path / "script").write_text(script)
    if program := shutil.which(shell):
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("completion", "bash") == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    words = "COMP_WORDS=(kubetune verify-resume --st); COMP_CWORD=2"
    ask = f"source ./script; {words}; $(complete -p kubetune | grep -o '_[^ ]*') kubetune; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {"--steps", "--stop-at"} <= set(done.stdout.split())


@pytest.mark.slow
def test_the_doctor_finds_what_is_here_and_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secret@127.0.0.1:1")  # nobody listens there
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert ended("doctor", "--json") == 0
    findings = {
        finding["what"]: CheckFinding(**finding) for finding in json.loads(capsys.readouterr().out)
    }
    libraries = dict(library.split() for library in findings["libraries"].result.split(", "))
    assert "transformers" in libraries
    assert findings["PyTorch"].result.startswith(libraries["torch"].partition("+")[0])
    assert (findings["hub"].level, findings["cluster"].level) == ("note", "note")
    assert findings["hub"].result.startswith(
        "http://127.0.0.1:1 cannot be reached"
    )  # and no password


class _SecondInterrupt(io.StringIO):
    """Standard output at whose flush Ctrl-C is pressed once more."""

    def flush(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class _Left(Exception):
    """The process has ended; holds its exit code."""


def test_ctrl_c_twice_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    def leave(code: int) -> None:
        raise _Left(code)

    monkeypatch.setattr(sys, "stdout", _SecondInterrupt())
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("kubetune.cli.remote.status.run", interrupt)
    over = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    reader = threading.Thread(target=over.wait)  # such as one that holds a connection
    reader.start()
    try:
        with pytest.raises(_Left, match="130"):
            cli.main(["status"])
    finally:
        over.set()
        reader.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("verb", "code"), [("train", errors.ENVIRONMENT), ("plan", errors.OK)])
def test_work_that_ends_with_its_reader_is_not_done(
    verb: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as after `kubetune train | head -1`
    monkeypatch.setattr(verb_module(verb), "run", lambda args: print("the first line", flush=True))
    with open(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main([verb, "run.yaml"]) == code
    assert ("so the work was stopped" in capsys.readouterr().err) == (code != errors.OK)


def test_the_plan_of_a_model_that_only_pods_see_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run.yaml").write_text(
        "{name: fit, model: /models/tiny, data: {train: train.jsonl}, lora: {r: 4},\n"
        " kubernetes: {image: 'i:1', mounts: [{path: /models, claim: models}]}}\n"
    )
    assert main(["plan", "run.yaml"]) == 2
    stderr = capsys.readouterr().err
    assert "model /models/tiny: the pods mount this folder" in stderr
    assert "kubetune plan RUN_FILE model.path=FOLDER" in stderr


def test_a_plan_says_where_the_files_are_of_a_run_that_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run.yaml").write_text(
        f"{{name: fit, model: {EMBEDDED / 'model'}, data: {{train: train.jsonl}}, kubernetes: {{image: 'i:1'}}}}\n"
    )
    assert main(["plan", "run.yaml"]) == 2, "the folder is not in the pods"
    stdout = capsys.readouterr().out
    assert re.search(r"^output +outputs/model/full-len2048-", stdout, re.M)
    assert re.search(
        r"^on the cluster +submitted, its output is /outputs/fit in the pods;", stdout, re.M
    )
    assert "`kubetune cp fit` copies it to outputs/fit here\n" in stdout
