"""Signals at both ends of `kubetune`: while it imports, and when its exit code is known already."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.base.signals import Relay
from kubetune.cli import main
from kubetune.cli.local import train

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

BEGUN = """
import os, sys
if sys.argv[1] == "--ahead":
    sys.stdout.write(f"begun as {os.getpid()}; ")
    sys.stdout.flush()
    told = open(int(sys.argv[2])).read()
    print(f"{os.getpid()} was told {told!r}", flush=True)
else:
    print("started anew with", sys.argv[1])
"""


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [("train", 15, errors.PREEMPTED), ("train", 2, errors.PREEMPTED), ("plan", 15, errors.PREEMPTED), ("plan", 2, 130)],
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


def test_a_process_begun_before_its_last_argument_is_known_goes_on_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "begun.py"
    script.write_text(BEGUN)
    command, said, before = [sys.executable, str(script)], "", set(processes.children(os.getpid()))
    with Relay() as relay:
        relay.begin(command, os.environ)
        (pid,) = set(processes.children(os.getpid())) - before
        assert relay.run([*command, "a run"], os.environ) == 0
        assert capfd.readouterr().out == f"begun as {pid}; {pid} was told 'a run'\n"
        assert relay.run([*command, "another"], os.environ) == 0
        assert capfd.readouterr().out == "started anew with another\n"
        relay.begin(command, os.environ)
        while "begun" not in said:
            said += capfd.readouterr().out
        assert relay.run([sys.executable, "-c", "print('other')"], os.environ) == 0
        relay.begin(command, os.environ)
    assert set(processes.children(os.getpid())) <= before
    assert "was told" not in capfd.readouterr().out


def test_train_starts_its_rank_before_it_reads_which_run_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, found = set(processes.children(os.getpid())), []

    def read(args: object, environ: object) -> None:
        (pid,) = set(processes.children(os.getpid())) - before
        found.append((pid, Path(f"/proc/{pid}/cmdline").read_text()))
        raise errors.ConfigError("no such run")

    monkeypatch.setattr(train, "config_from_args", read)
    assert main(["train", str(tmp_path / "run.yaml")]) == errors.USER
    ((pid, command),) = found
    assert "kubetune.worker\0--ahead" in command
    assert not processes.is_alive(pid)
    assert "no such run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
