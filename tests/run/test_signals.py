"""Signals at both ends of `kubetune`: while it imports, and when its exit code is known already."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kubetune import errors

# Stands before the real module, which the command line imports early, and sends the signal at that moment.
ARGPARSE = """
import importlib, os, sys
os.kill(os.getpid(), int(os.environ["EARLY"]))
sys.path.remove(os.path.dirname(__file__))
del sys.modules["argparse"]
importlib.import_module("argparse")
"""

LATE = """
import atexit, os, sys
atexit.register(os.kill, os.getpid(), int(os.environ["LATE"]))
from kubetune.__main__ import main
sys.exit(main())
"""

RELAY = """
import os, signal
from kubetune.base.signals import Relay
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with Relay() as relay:
    os.kill(os.getpid(), signal.SIGHUP)
    assert relay.stopping is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert relay.stopping == "asked to stop by SIGTERM"
"""


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        ("train", 15, errors.PREEMPTED),
        ("train", 2, errors.PREEMPTED),
        ("plan", 15, errors.PREEMPTED),
        ("plan", 2, 130),
    ],
)
def test_a_signal_while_it_imports(tmp_path: Path, verb: str, number: int, code: int) -> None:
    (tmp_path / "argparse.py").write_text(ARGPARSE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "kubetune", verb, "missing.yaml"],
        env={**os.environ, "PYTHONPATH": path, "EARLY": str(number)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("number", [15, 2, 1])
def test_a_signal_after_the_end_changes_no_exit_code(tmp_path: Path, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, "plan", "missing.yaml"],
        env={**os.environ, "LATE": str(number)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == errors.USER, done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_enters_where_it_listens_first() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"kubetune": "kubetune.__main__:main"}


def test_nohup_holds() -> None:
    subprocess.run([sys.executable, "-c", RELAY], check=True)
