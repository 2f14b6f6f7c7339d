"""Releases of transformers that nobody has checked train by their own code, and learn the same."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import modeling_layers

from kubetune.models import padding_free, patches
from kubetune.rundir import metrics
from tests import toy

ROOT = Path(__file__).parents[2]
OFFLINE = (ROOT / "tests" / "offline" / "sitecustomize.py").read_text()
# Run at the start of every process: transformers says that it is of a release which is in no patch's range.
NEWER = """
import importlib.metadata

_version = importlib.metadata.version
importlib.metadata.version = lambda name: "5.99.0" if name == "transformers" else _version(name)
"""
# And takes no masks of others any more.
WITHOUT_MASKS = """
import sys
from importlib.machinery import PathFinder


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "transformers.masking_utils":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.AttentionMaskInterface.register = classmethod(lambda kind, key, value: None)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
"""
LORA: dict[str, Any] = {"lora": {"r": 4}}
FULL: dict[str, Any] = {"lora": None}
FSDP = {"parallelism": "fsdp"}
SAME = 1e-5
SHORT = {"max_steps": 4, "eval_steps": 4, "save_steps": 4}


def losses_and_log(
    tmp_path: Path,
    inputs: Path,
    name: str,
    start: str = "",
    *,
    python: str = sys.executable,
    processes: int = 1,
    training: dict[str, Any] | None = None,
    **sections: Any,
) -> tuple[list[float], str]:
    """Return the losses of a run in which every process begins with `start`, and the log of its first rank."""
    begun = tmp_path / f"{name}-begun"
    begun.mkdir()
    (begun / "sitecustomize.py").write_text(OFFLINE + start)
    settings = {**SHORT, **(training or {})}
    config = toy.make_config(inputs, settings, compute={"processes": processes}, **sections)
    run_dir = tmp_path / name
    run_file = tmp_path / f"{name}.yaml"
    run_file.write_text(config.model_dump_json(exclude_unset=True))
    done = subprocess.run(
        [python, "-m", "kubetune", "train", str(run_file), f"output={run_dir}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{begun}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics.read_metrics(run_dir)
    learnt = [line["loss"] for line in lines if "loss" in line]
    measured = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert (len(learnt), len(measured)) == (4, 1)
    return [*learnt, *measured], toy.log_of(run_dir)


def known_losses(inputs: Path, folder: Path, sections: dict[str, Any]) -> list[float]:
    """Return the losses of the same run with the release that is here, and its patches."""
    run_dir = toy.finished(folder / "known", toy.make_config(inputs, SHORT, **sections))
    assert "this kubetune was not checked with" not in toy.log_of(run_dir)
    assert "padding-free packed batches" in toy.log_of(run_dir)
    measured = [line["eval_loss"] for line in metrics.read_metrics(run_dir) if "eval_loss" in line]
    return [*toy.losses(run_dir), *measured]


@pytest.mark.slow
@pytest.mark.parametrize("sections", [LORA, FULL], ids=["lora", "full"])
def test_an_unknown_release_learns_the_same_without_patches(
    tmp_path: Path, inputs: Path, sections: dict[str, Any]
) -> None:
    unknown, log = losses_and_log(tmp_path, inputs, "unknown", NEWER, **sections)
    assert "this kubetune was not checked with transformers 5.99.0" in log
    assert "padding-free packed batches" in log
    assert unknown == pytest.approx(known_losses(inputs, tmp_path, sections), rel=SAME)


@pytest.mark.parametrize(
    "sections", [LORA, pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"]
)
def test_an_unknown_release_that_takes_no_masks_learns_the_same(
    tmp_path: Path, inputs: Path, sections: dict[str, Any]
) -> None:
    alone, log = losses_and_log(tmp_path, inputs, "alone", NEWER + WITHOUT_MASKS, **sections)
    assert "this kubetune was not checked with transformers 5.99.0" in log
    assert "one sequence at a time" in log
    assert alone == pytest.approx(known_losses(inputs, tmp_path, sections), rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("sections", [LORA, FULL], ids=["lora", "full"])
def test_an_unknown_release_shards_a_model_that_was_read_whole(
    tmp_path: Path, inputs: Path, sections: dict[str, Any]
) -> None:
    known, log = losses_and_log(tmp_path, inputs, "known", processes=2, training=FSDP, **sections)
    assert "each rank holds all of it once" not in log
    unknown, log = losses_and_log(
        tmp_path, inputs, "unknown", NEWER, processes=2, training=FSDP, **sections
    )
    assert "each rank holds all of it once" in log
    assert unknown == pytest.approx(known, rel=SAME)


def test_layers_that_recompute_are_found_where_their_class_is_called_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    assert padding_free.recomputable_layers(model) == []
    monkeypatch.delattr(modeling_layers, "GradientCheckpointingLayer")
    assert padding_free.recomputable_layers(model) == list(model["layers"])


def test_a_name_that_is_gone_is_unknown() -> None:
    assert patches.PACKING.is_known()
    assert not patches.Patch(
        "transformers.masking_utils", "nowhere", patches.PACKING.checked
    ).is_known()
    assert not patches.Patch("transformers.nowhere", "x", patches.PACKING.checked).is_known()
    assert not patches.Patch(
        patches.PACKING.place, patches.PACKING.name, "transformers<5"
    ).is_known()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["5.18.*", "5.22.*", "newest"])
def test_older_releases_and_the_newest_train(tmp_path: Path, inputs: Path, release: str) -> None:
    """Each in an environment of its own, which has all else from this one."""
    wanted = "transformers" if release == "newest" else f"transformers=={release}"
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    # pip alone may leave this machine: without the file that refuses it to all other processes of tests.
    online = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-m", "pip", "install", "-q", wanted]
    fetched = subprocess.run(command, env=online, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"{wanted} cannot be fetched: {fetched.stderr[-200:]}")
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    process = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True)
    beside = f"{sysconfig.get_path('purelib')}\n{ROOT}\n"
    (Path(process.stdout.strip()) / "beside.pth").write_text(beside)
    known, _ = losses_and_log(tmp_path, inputs, "known", **LORA)
    for name, sections in (("lora", LORA), ("full", FULL)):
        losses, log = losses_and_log(tmp_path, inputs, name, python=str(python), **sections)
        assert "padding-free packed batches" in log
        if sections is LORA:
            assert losses == pytest.approx(known, rel=1e-4)
