"""`--json`: the answer is all that stands on standard output, whatever else there is to say."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.base.registry import registry_client as registry_client
from kubetune.cli.overview import VERBS
from kubetune.rundir import exit_status
from kubetune.rundir.mirror import copier
from tests import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run file, data, another tool's config, and a finished run."""
    folder = toy.make_inputs(tmp_path_factory.mktemp("json"))
    config = toy.make_config(folder, {"num_train_epochs": 1})
    (folder / "run.yaml").write_text(config.model_dump_json(exclude_unset=True))
    (folder / "peer.yaml").write_text(
        "base_model: model\ndatasets: [{path: train.jsonl}]\nsequence_len: 512\n"
    )
    exit_status.write_exit_status(
        toy.finished(folder / "run", config), exit_status.ExitStatus(0, "done", 7)
    )
    return folder


ANSWERED = (
    "data check run.yaml",
    "data check train.jsonl",
    "data check train.jsonl --model model",
    "data prepare run.yaml",
    "evaluate run",
    "export run --merge -o exported",
    "generate run quick brown --max-new-tokens 2",
    "import peer.yaml",
    "plan run.yaml",
    "plan run.yaml --origins",
    "report run -o page.html",
    "runs .",
    "watch run",
)
# What starts processes of its own or needs a server: where its answer is read from standard output.
ELSEWHERE = {
    "data convert": "run/test_convert.py",
    "doctor": "unit/test_cli.py",
    "push": "run/test_push.py",
    "rollouts": "run/test_grpo.py",
    "serve": "run/test_serve_check.py",
    "smoke": "run/test_smoke.py",
    "sweep": "unit/test_sweep_command.py",
    "sync": "run/test_mirror.py",
    "train": "run/test_launch.py",
    "verify-resume": "run/test_verify_resume.py",
    "cluster status": "nebius/test_cluster.py",
    **dict.fromkeys(("events", "gpus", "status", "top"), "cluster/test_operate.py"),
}


@pytest.mark.parametrize("command", ANSWERED)
def test_the_answer_stands_alone(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main([*command.split(), "--json"]) == errors.OK
    out = capfd.readouterr().out
    answers: list[Any] = (
        [json.loads(line) for line in out.splitlines()]
        if "generate" in command
        else [json.loads(out)]
    )
    assert all(answers)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("push run oci://127.0.0.1:1/team/run:1", "… uploading"),
        ("sync run s3://bucket/run", "again in 1 s"),
    ],
    ids=["push", "sync"],
)
def test_what_is_said_before_a_failure_stands_elsewhere(
    folder: Path,
    command: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing can be pushed or copied to a port where nobody listens."""
    monkeypatch.chdir(folder)
    # Pauses double until they exceed what is left, whether an attempt takes a moment or seconds.
    monkeypatch.setattr(copier, "SECONDS_IF_NEVER_REACHED", 20.0)
    monkeypatch.setattr(copier.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(registry_client, "WAITS_SECONDS", (0.0,))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name, value in (
            ("ACCESS_KEY_ID", "test"),
            ("SECRET_ACCESS_KEY", "test"),
            ("MAX_ATTEMPTS", "1"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        assert cli.main([*command.split(), "--json"]) in (errors.USER, errors.ENVIRONMENT)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert message in printed.err


def verbs_below(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> dict[str, argparse.ArgumentParser]:
    """Return the verbs of a parser, `data check` and the like among them."""
    verbs = {" ".join(words): parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                verbs |= verbs_below(below, (*words, name))
    return verbs


def test_every_verb_with_json_is_tried() -> None:
    """Here, or in a file which reads JSON from what the verb prints."""
    verbs = verbs_below(cli.make_parser(*VERBS))
    with_json = {
        name for name, parser in verbs.items() if "--json" in parser._option_string_actions
    }
    here = {
        name for name in with_json for command in ANSWERED if f"{command} ".startswith(f"{name} ")
    }
    assert here | set(ELSEWHERE) == with_json
    tests = Path(__file__).parents[1]
    for verb, file in ELSEWHERE.items():
        text = (tests / file).read_text()
        assert "json.loads(" in text, file
        assert verb.split()[-1] in text, file
