"""Tests in copies of one process: every one is told of once, whatever ends it, and nothing is made twice for a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]

SHARED = """
import os, pytest
@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with open("made", "a") as file:
        print(__name__, os.getpid(), file=file)
    yield os.getpid()
    with open("unmade", "a") as file:
        print(__name__, os.getpid(), file=file)
@pytest.mark.parametrize("number", range(5))
def test_shares(made, number, capfd):
    os.write(1, b"said")
    assert (made, capfd.readouterr().out) == (os.getpid(), "said")
"""
FAILS = """
def test_fails():
    print("words of a test that fails")
    assert 1 == 2
def test_goes_on():
    pass
"""
DIES = """
import os
def test_before():
    pass
def test_dies():
    os.kill(os.getpid(), 9)
"""


def test_each_test_is_told_of_once_whatever_ends_it(tmp_path: Path) -> None:
    files = {"a": DIES, "b": FAILS, "c": SHARED, "d": SHARED}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.forks", "--forks=3", "-p", "no:randomly", "--junitxml=x"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 12 passed" in done.stdout
    assert "words of a test that fails" in done.stdout
    assert "ended with -9" in done.stdout
    told = [
        f"{case.get('classname')}.{case.get('name')}" for case in ElementTree.parse(tmp_path / "x").iter("testcase")
    ]
    shares = [f"test_{name}.test_shares[{number}]" for name in "cd" for number in range(5)]
    assert sorted(told) == sorted(
        ["test_a.test_before", "test_a.test_dies", "test_b.test_fails", "test_b.test_goes_on", *shares]
    )
    made = (tmp_path / "made").read_text().splitlines()
    assert sorted(line.split()[0] for line in made) == ["test_c", "test_d"]
    assert sorted(made) == sorted((tmp_path / "unmade").read_text().splitlines())
