"""The Python interface: everything it promises can be imported, and importing it costs nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kubetune
from kubetune import errors


@pytest.mark.parametrize("name", kubetune.__all__)
def test_every_promised_name_exists(name):
    assert getattr(kubetune, name)


def test_no_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the function's place."""
    modules = {module.name for module in pkgutil.iter_modules(kubetune.__path__)}
    assert modules.isdisjoint(kubetune.__all__)


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
