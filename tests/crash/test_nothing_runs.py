"""Whatever lies in models, checkpoints, data and run files is read, never run: each bomb here would touch a file."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kubetune import cli, errors
from kubetune.base import files
from kubetune.rundir import checkpoints
from kubetune.rundir.checkpoints import folder_of
from tests import toy
from tests.bombs import plant_modules
from tests.crash.poisons import Bomb

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "words",
    [
        "kubetune plan missing.yaml",
        pytest.param("kubetune.agent run --config missing.yaml", marks=pytest.mark.slow),
        pytest.param("kubetune.worker missing.yaml", marks=pytest.mark.slow),
    ],
)
def test_modules_of_the_current_folder(tmp_path: Path, words: str) -> None:
    """Started by hand with `python -m`, which by itself looks there first; so much Python has imported before."""
    process = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; print(*sys.modules)"], capture_output=True
    )
    canary = plant_modules(tmp_path, but={"kubetune", *process.stdout.decode().split()})
    done = subprocess.run(
        [sys.executable, "-m", *words.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert not canary.exists(), canary.read_text()
    assert done.returncode == errors.USER, done.stderr


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Return the file that must never be there; the bombs do work."""
    probe = tmp_path / "probe"
    pickle.loads(pickle.dumps(Bomb(probe)))
    assert probe.exists()
    return tmp_path / "canary"


def only_a_pickle(model: Path, canary: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))


def weights_that_are_a_pickle(model: Path, canary: Path) -> None:
    (path,) = model.glob("*.safetensors")
    path.write_bytes(pickle.dumps(Bomb(canary)))


def pickles_beside_the_weights(model: Path, canary: Path) -> None:
    for name in (
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "rng_state.pth",
        ".metadata",
    ):
        (model / name).write_bytes(pickle.dumps(Bomb(canary)))


def code_of_its_own(model: Path, canary: Path) -> None:
    """Write code as in a repository that says `trust_remote_code`, for an architecture that transformers does not know."""
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "architectures": ["Evil"]}
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")


def a_tokenizer_of_its_own(model: Path, canary: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (only_a_pickle, errors.USER),
        pytest.param(weights_that_are_a_pickle, errors.USER, marks=slow),
        pytest.param(pickles_beside_the_weights, errors.OK, marks=slow),
        pytest.param(code_of_its_own, errors.USER, marks=slow),
        pytest.param(a_tokenizer_of_its_own, errors.USER, marks=slow),
    ],
)
def test_models(
    toy_inputs: Path, tmp_path: Path, canary: Path, plant: Callable[[Path, Path], None], code: int
) -> None:
    model = shutil.copytree(toy_inputs / "model", tmp_path / "model")
    plant(model, canary)
    config = toy.make_config(
        toy_inputs,
        {"max_steps": 2},
        model=str(model),
        data={"cache": str(tmp_path / "cache"), "eval": None},
    )
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir) == [code], toy.log_of(run_dir)
    assert not canary.exists()


def seal_again(folder: Path) -> None:
    """Write the manifest that whoever planted something would write."""
    sums = {
        path.name: {"sha256": files.sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.name != checkpoints.MANIFEST
    }
    (folder / checkpoints.MANIFEST).write_text(
        json.dumps({"version": 1, "files": sums}, indent=1) + "\n"
    )
    assert checkpoints.verify(folder) is None


@slow
@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", ".metadata", "optimizer.pt", "adapter_model.bin"]
)
@pytest.mark.parametrize("is_sealed", [False, True], ids=["planted", "planted and sealed"])
def test_checkpoints(
    toy_inputs: Path, tmp_path: Path, canary: Path, name: str, is_sealed: bool
) -> None:
    config = toy.make_config(toy_inputs, {"max_steps": 4, "save_steps": 2}, data={"eval": None})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:step:4"}) == [-9]
    folder = folder_of(run_dir, 2)
    (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    if is_sealed:
        seal_again(folder)
    # The only checkpoint: damaged, it must not be used; sealed, it is used unless its optimizer cannot be read.
    expected = errors.OK if is_sealed and name != "optimizer.safetensors" else errors.USER
    assert toy.train(run_dir) == [expected], toy.log_of(run_dir)
    assert not canary.exists()


@slow
def test_data(toy_inputs: Path, tmp_path: Path, canary: Path) -> None:
    """A data set's loading script, as older libraries ran, and pickles under names of data files."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(canary)!r}, 'w')\n")
    for name in ("a.pkl", "b.parquet", "c.jsonl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    for source in (folder, *sorted(folder.iterdir())):
        config = toy.make_config(
            toy_inputs, data={"train": str(source), "cache": str(tmp_path / "cache")}
        )
        assert toy.train(toy.make_run(tmp_path / "runs" / source.name, config)) == [errors.USER]
    assert not canary.exists()


@pytest.mark.parametrize(
    "line",
    [
        "model: !!python/object/apply:os.system ['touch CANARY']",
        "name: $(touch CANARY)",
        "name: '; touch CANARY'",
        "task: os.system('touch CANARY')",
        "data: {train: x.jsonl, num_proc: !!python/name:os.system }",
        "lora: {target_modules: __import__('os').system('touch CANARY')}",
    ],
)
def test_run_files(tmp_path: Path, canary: Path, line: str) -> None:
    keys = {"model": "model: a/b", "data": "data: {train: x.jsonl}", line.split(":")[0]: line}
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{text}\n" for text in keys.values()).replace("CANARY", str(canary)))
    if line.startswith(
        "model:"
    ):  # the others are read alike, by a verb that begins no process to train in
        done = subprocess.run(
            [sys.executable, "-m", "kubetune", "train", str(file)],
            cwd=tmp_path,
            capture_output=True,
        )
        assert done.returncode == errors.USER, done.stderr
    assert cli.main(["plan", str(file)]) == errors.USER
    assert not canary.exists()
