"""What a stranger gets: a wheel that works outside the checkout, commands that exist, files that agree."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    # bitsandbytes is left out: it is not among the things that [dev] installs.
    optional = [text for name in extras if name != "quantization" for text in extras[name]]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *optional)]


def test_every_requirement_is_pinned_to_a_version_in_its_range() -> None:
    for wanted in requirements():
        if wanted.name != "kubetune":
            assert wanted.specifier.contains(
                PINS[wanted.name.lower().replace("_", "-").replace(".", "-")]
            ), wanted


def test_the_scripts_of_the_readme_and_the_extras_of_the_page_on_installing_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    scripts = set(re.findall(r"\./(scripts/\w+)", readme))
    assert {"scripts/demo", "scripts/test"} <= scripts
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    assert set(re.findall(r"`\[(\w+)\]`", page)) == PROJECT["optional-dependencies"].keys()


def test_ci_runs_the_second_command_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [
        'exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/test"'
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="counts on what /usr/bin holds")
@pytest.mark.parametrize(
    ("change", "version"),
    [
        ("sys.version_info = (3, 9, 2)", "3.9.2"),
        ("sys.version_info = (3, 15, 0)", "3.15.0"),
        ("platform.python_implementation = lambda: 'PyPy'", "PyPy 3."),
        ("sysconfig.get_config_var = lambda name: 1", "free-threaded 3."),
        ("struct.calcsize = lambda text: 4", "32-bit 3."),
    ],
)
def test_a_python_that_the_pins_do_not_serve_is_refused(
    tmp_path: Path, change: str, version: str
) -> None:
    python = tmp_path / "python"
    start = f"import platform, struct, sys, sysconfig; {change}; exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{start}" "$2"\n')
    python.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run([ROOT / "scripts" / "venv"], env=environ, capture_output=True, text=True)
    assert done.returncode == 3
    assert "found no Python 3.11 to 3.14" in done.stderr
    assert f"{python} is {version}" in done.stderr


def test_every_pin_was_asked_for_on_the_lowest_and_the_newest_python() -> None:
    """By scripts/check, which asks pip; here only what it wrote down is read."""
    pins = runpy.run_path(str(ROOT / "scripts" / "pins.py"), run_name="pins")
    asked = (ROOT / "scripts" / "pins.asked").read_text().splitlines()
    wanted = {
        f"{pin} {python}"
        for python in (pins["LOWEST"], pins["NEWEST"])
        for pin in pins["pins_for"]((ROOT / "constraints.txt").read_text(), python)
    }
    assert set(asked) == wanted, "run scripts/pins.py"


def test_pins_with_markers_are_asked_for_where_they_hold() -> None:
    pins = runpy.run_path(str(ROOT / "scripts" / "pins.py"), run_name="pins")
    text = "a==1 ; python_version < '3.12'\na==2 ; python_version >= '3.12'\n# b==1\ntorch==2\n"
    assert pins["pins_for"](text, "3.11.0") == ["a==1"]
    assert pins["pins_for"](text, "3.14.0") == ["a==2"]


def test_a_venv_that_is_a_link_is_not_emptied(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in ("scripts/venv", "pyproject.toml", "constraints.txt"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "pyvenv.cfg").write_text("of another clone")
    (clone / ".venv").symlink_to(shared)
    python = tmp_path / "python"
    # Without pip the script ends as soon as it has made the venv.
    python.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then shift 2; set -- -m venv --without-pip "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run([clone / "scripts/venv"], env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    assert "No module named pip" in done.stderr
    assert (shared / "pyvenv.cfg").read_text() == "of another clone"
    assert [path.name for path in shared.iterdir()] == ["pyvenv.cfg"]
    assert (clone / ".venv/bin/python").exists()


def test_the_wheel_and_the_image_hold_nothing_but_kubetune() -> None:
    rule = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"][
        "find"
    ]
    packages = {
        name.partition(".")[0]
        for name in find_namespace_packages(str(ROOT / "src"), include=rule["include"])
    }
    assert packages == {"kubetune"}
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == {
        name for names in copied for name in names.split()
    }


def test_a_script_beside_the_clone_imports_the_package_and_not_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kubetune").symlink_to(ROOT)
    command = [sys.executable, "-c", "import kubetune; print(kubetune.train.__name__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("train\n", "")


def test_the_stand_in_for_a_cluster_knows_nothing_of_kubetune_nor_of_its_tests() -> None:
    files = list((ROOT / "standin").rglob("*.py"))
    imported = {
        name.partition(".")[0]
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "standin" in imported
    assert not imported & {"kubetune", "tests"}
    mentioning = [
        path.name
        for path in (ROOT / "src" / "kubetune").rglob("*.py")
        if "import standin" in path.read_text()
    ]
    assert mentioning == []


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """Built without isolation and installed without dependencies, because tests have no network."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(build, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 6_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "kubetune/cli/local/embedded/model/model.safetensors",
        "kubetune/cli/local/embedded/data/heldout.jsonl",
    } <= set(names)
    assert not [name for name in names if name.startswith(("tests", "scripts", "standin"))]

    venv.create(tmp_path / "venv", with_pip=False)
    # The libraries of this environment, the package from the wheel only: a .pth would bring the checkout along.
    site = tmp_path / "venv/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True
    )
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), libraries))}
    python = tmp_path / "venv/bin/python"
    done = subprocess.run(
        [python, "-m", "kubetune", "demo"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"^  after +(\d+)%$", done.stdout, re.M)[1]) > 90
    where = [python, "-c", "import kubetune; print(kubetune.__file__)"]
    assert (
        str(tmp_path)
        in subprocess.run(where, cwd=tmp_path, env=environ, capture_output=True, text=True).stdout
    )
