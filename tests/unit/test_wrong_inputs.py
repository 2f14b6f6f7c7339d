"""Every verb that needs no cluster, given what is not what it takes: it says so, and is never broken by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.cli import main
from kubetune.cli.overview import VERBS


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


def make_binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def make_unreadable(path: Path) -> None:
    path.write_text("model: x/y\n")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("whoever may read everything, such as root, can be denied no file")


def leave_out(path: Path) -> None:
    pass


INPUTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "missing": ("none", leave_out),
    "folder": ("folder", Path.mkdir),
    "empty": ("empty", make_empty),
    "binary": ("binary", make_binary),
    "unreadable": ("unreadable", make_unreadable),
    "long": ("x" * 5000, leave_out),
    "bytes": ("latin-1 \udce9", leave_out),  # as Python is given a name that is not UTF-8
}

# How the input stands in each command; what comes before it is written to the folder that the command runs in.
COMMANDS = (
    "import {}.yaml",
    "import {}.yaml --from axolotl",
    "data check {}.yaml",
    "data check {}.jsonl",
    "data convert {}.csv -o out.jsonl",
    "data prepare {}.yaml",
    "plan {}.yaml",
    "plan --model {} --data {}.jsonl",
    "train {}.yaml",
    "train --model {} --data {}.jsonl --output run",
    "verify-resume {}.yaml",
    "sweep {}.yaml training.learning_rate=1e-3,1e-2 --trials 2",
    "sweep best {}",
    "render {}.yaml -o out",
    "report {}",
    "report --compare {} {} -o out.html",
    "evaluate {}",
    "rollouts {}",
    "generate {} hello",
    "chat {}",
    "export {}",
    "push {} org/name",
    "sync {} s3://bucket/place",
    "sync {}.yaml s3://bucket/place",
    "watch {} --once",
    "watch {}.yaml --once",
    "init -o {}/run.yaml",
    "demo -o {}/run",
)
# A place to write to is made where there is none.
HARMLESS = [
    (command, kind)
    for command in ("init -o {}/run.yaml", "demo -o {}/run")
    for kind in ("missing", "folder")
]
CASES = [
    (command, kind) for command in COMMANDS for kind in INPUTS if (command, kind) not in HARMLESS
]


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_a_wrong_input_is_explained(
    command: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-cluster"))
    name, make = INPUTS[kind]
    folder = tmp_path / "given"
    folder.mkdir()
    for word in command.split():
        if word.startswith("{}"):
            path = folder / word.format(name).split("/")[0]
            if not (kind != "long" and path.exists()):
                make(path)
    words = [word.format(folder / name) for word in command.split()]
    try:
        code = main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    printed = capfd.readouterr()
    assert code in (errors.USER, errors.ENVIRONMENT), printed.out + printed.err
    assert printed.err.strip()
    assert "Traceback" not in printed.out + printed.err
    assert "bug" not in printed.err


def test_every_verb_that_needs_no_cluster_is_tried() -> None:
    # `serve` takes a path on the volume of a cluster too, which cannot be looked at from here
    without_input = {"smoke", "bench", "runs", "doctor", "completion", "serve", "mcp", "ui"}
    on_cluster = {"submit", "status", "logs", "events", "top", "gpus", "exec", "cp", "port-forward", "stop", "resume",
                  "delete", "secret", "dev", "cluster"}  # fmt: skip
    assert {command.split()[0] for command in COMMANDS} == set(VERBS) - without_input - on_cluster
