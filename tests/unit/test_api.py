"""The Python interface: everything it promises can be imported, and importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kubetune
from kubetune import errors


@pytest.mark.parametrize("name", kubetune.__all__)
def test_every_promised_name_exists(name):
    assert getattr(kubetune, name)


def test_names_stay_what_they_are_whatever_is_imported() -> None:
    code = (
        "import kubetune, types, importlib, pkgutil\n"
        "first = {name: getattr(kubetune, name) for name in kubetune.__all__}\n"
        "[importlib.import_module(f'kubetune.{m.name}') for m in pkgutil.iter_modules(kubetune.__path__)"
        " if not m.name.startswith('__') and not m.name.endswith('worker')]\n"
        "again = {name: getattr(kubetune, name) for name in kubetune.__all__}\n"
        "assert again == first and not any(isinstance(found, types.ModuleType) for found in again.values()), again\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_paths_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "run.yaml").write_text("model: some/model\ndata: {train: train.jsonl}\n")
    config = kubetune.load_config(str(tmp_path / "run.yaml"))
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")
    for call in (kubetune.load_run, kubetune.export_run):
        with pytest.raises(errors.ConfigError, match="no such folder"):
            call(str(tmp_path / "none"))
    with pytest.raises(errors.ConfigError, match=r"holds run.yaml|holds train.jsonl"):
        kubetune.launch_run(config, kubetune.make_plan(config, 1), str(tmp_path))


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kubetune.__file__).parent / "py.typed").is_file()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kubetune.nonsense


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, kubetune; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
