"""Releases of transformers that nobody has checked train by their own code, and learn the same."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import modeling_layers

from kubetune.models import padding_free, patches
from kubetune.models.patch import Use
from kubetune.rundir import metrics
from tests import toy

ROOT = Path(__file__).parents[2]
OFFLINE = (ROOT / "tests" / "offline" / "sitecustomize.py").read_text()
# Run at the start of every process: transformers says that it is of a later release, in which nothing else is new.
NEWER = """
import importlib.metadata

_version = importlib.metadata.version
importlib.metadata.version = lambda name: "5.99.0" if name == "transformers" else _version(name)
"""
# And what kubetune replaces in it takes other arguments.
OTHERWISE = (
    NEWER
    + """
import sys
from importlib.machinery import PathFinder


def find_otherwise(module):
    original = module.find_packed_sequence_indices
    module.find_packed_sequence_indices = lambda places: original(places)


def slice_otherwise(module):
    kind = module.DtensorShardOperation
    original = kind.shard_tensor
    kind.shard_tensor = lambda self, part, number=None, **others: original(self, part, number, **others)


CHANGES = {
    "transformers.masking_utils": [find_otherwise],
    "transformers.distributed.sharding_utils": [slice_otherwise],
}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for change in CHANGES[name]:
                change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
"""
)
# And it takes no masks of others any more.
WITHOUT_MASKS = """

def without_masks(module):
    module.AttentionMaskInterface.register = classmethod(lambda kind, key, value: None)


CHANGES["transformers.masking_utils"].append(without_masks)
"""
LORA: dict[str, Any] = {"lora": {"r": 4}}
FULL: dict[str, Any] = {"lora": None}
FSDP = {"parallelism": "fsdp"}
SAME = 1e-5
UNKNOWN = "finds packed sequences in a way that this kubetune does not know"
# What touches transformers most: loading, attention, templates' ids, slices, drawing, exports.
HEART = (
    "tests/unit/test_process_patches.py",
    "tests/unit/test_transformers_ids.py",
    "tests/unit/test_chat_templates.py",
    "tests/run/test_padding_free.py",
    "tests/run/test_fsdp.py",
    "tests/run/test_grpo.py",
    "tests/run/test_models_page.py",
    "tests/run/test_recurrences.py",
    "tests/run/test_export.py",
    "tests/run/test_classifiers.py",
)
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
    assert UNKNOWN not in toy.log_of(run_dir)
    assert "padding-free packed batches" in toy.log_of(run_dir)
    measured = [line["eval_loss"] for line in metrics.read_metrics(run_dir) if "eval_loss" in line]
    return [*toy.losses(run_dir), *measured]


@pytest.mark.slow
@pytest.mark.parametrize("sections", [LORA, FULL], ids=["lora", "full"])
def test_an_unknown_release_learns_the_same_without_patches(
    tmp_path: Path, inputs: Path, sections: dict[str, Any]
) -> None:
    unknown, log = losses_and_log(tmp_path, inputs, "unknown", OTHERWISE, **sections)
    assert UNKNOWN in log
    assert "padding-free packed batches" in log
    assert unknown == pytest.approx(known_losses(inputs, tmp_path, sections), rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [LORA, pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"]
)
def test_an_unknown_release_that_takes_no_masks_learns_the_same(
    tmp_path: Path, inputs: Path, sections: dict[str, Any]
) -> None:
    alone, log = losses_and_log(tmp_path, inputs, "alone", OTHERWISE + WITHOUT_MASKS, **sections)
    assert UNKNOWN in log
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
        tmp_path, inputs, "unknown", OTHERWISE, processes=2, training=FSDP, **sections
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


@pytest.mark.parametrize(
    ("processes", "training"),
    [(1, {}), pytest.param(2, FSDP, marks=pytest.mark.slow)],
    ids=["one process", "slices"],
)
def test_a_later_release_with_nothing_new_is_served_like_this_one(
    tmp_path: Path, inputs: Path, processes: int, training: dict[str, Any]
) -> None:
    """Slices are slow: three interpreters import transformers for them, and tests/run/test_fsdp.py has them as well."""
    later, log = losses_and_log(
        tmp_path, inputs, "later", NEWER, processes=processes, training=training, **LORA
    )
    assert "5.99.0" not in log
    assert UNKNOWN not in log
    assert "each rank holds all of it once" not in log
    assert len(later) == 5


def test_a_patch_says_what_does_not_fit() -> None:
    fits = patches.PACKING
    assert fits.misfit() == ""
    for change, reason in (
        ({"name": "nowhere"}, "transformers.masking_utils has no nowhere, or has it elsewhere"),
        ({"place": "transformers.nowhere"}, "transformers.nowhere has no find_packed_sequence"),
        ({"parameters": ("places",)}, "takes (position_ids); expected (places)"),
        (
            {"uses": (Use(f"{fits.place}:create_causal_mask", "if cows_fly:"),)},
            "create_causal_mask has no `if cows_fly:`",
        ),
    ):
        assert reason in replace(fits, **change).misfit()


# The first release of the range, the last that gives queries by their places, and the last two before this one.
OLDER = ("5.0.*", "5.3.*", "5.18.*", "5.22.*", "5.23.*")


@pytest.mark.slow
@pytest.mark.parametrize("release", [*OLDER, "newest"])
def test_older_releases_and_the_newest_train(tmp_path: Path, inputs: Path, release: str) -> None:
    """Each in an environment of its own, which has all else from this one."""
    wanted = "transformers" if release == "newest" else f"transformers=={release}"
    python = environment_with(wanted, tmp_path / "environment")
    known, _ = losses_and_log(tmp_path, inputs, "known", **LORA)
    for name, sections in (("lora", LORA), ("full", FULL)):
        losses, log = losses_and_log(tmp_path, inputs, name, python=str(python), **sections)
        assert "padding-free packed batches" in log
        assert UNKNOWN not in log
        if sections is LORA:
            assert losses == pytest.approx(known, rel=1e-4)
    sharded, log = losses_and_log(
        tmp_path, inputs, "fsdp", python=str(python), processes=2, training=FSDP, **LORA
    )
    assert sharded == pytest.approx(known, rel=1e-4)
    # Releases before 5.19 or so read slices in another way.
    assert ("each rank holds all of it once" in log) is (release in OLDER[:3])


@pytest.mark.slow
def test_the_heart_of_the_suite_passes_with_the_newest_release(tmp_path: Path) -> None:
    """What kubetune takes from transformers, on the first day of a release; the one installed here may be older."""
    python = environment_with("transformers", tmp_path / "environment")
    # A pytest within this one would report to its processes.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    process = subprocess.run(
        [str(python), "-m", "pytest", "-m", "not slow and not gpu", "-n", "2", *HEART],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]


def environment_with(wanted: str, environment: Path) -> Path:
    """Return the Python of an environment that has a package of its own, and all else from this one."""
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
    beside = f"{sysconfig.get_path('purelib')}\n{ROOT}\n{ROOT / 'src'}\n"
    (Path(process.stdout.strip()) / "beside.pth").write_text(beside)
    return python
