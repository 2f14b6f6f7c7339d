"""Whole runs of a toy model in real ranks: 50 short rows, 7 steps an epoch, the last with 2 samples."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from kubetune.base import processes
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.rundir import metrics
from kubetune.supervisor.run_folder import create_run_dir
from kubetune.training import worker
from tests.architectures import save_model
from tests.ranks import SECONDS, started, wait_all, wait_until

ROWS, BATCH, STEPS_PER_EPOCH = 50, 8, 7
WORDS = "the quick brown fox jumps over a lazy dog what is the capital of one two three".split()


def make_inputs(folder: Path, **model: Any) -> Path:
    """Write `model`, `train.jsonl` and `eval.jsonl` into a folder and return it; rows differ much in length.

    `model`: settings of its config.json.
    """
    save_model(folder / "model", **model)
    draw = random.Random(0)
    for name, rows in (("train", ROWS), ("eval", 13)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(rows):
                prompt, answer = (
                    " ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(2)
                )
                file.write(
                    json.dumps({"prompt": f"{number} {prompt}", "completion": f" {answer}"}) + "\n"
                )
    return folder


def make_config(inputs: Path, training: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """Return the config of LoRA on everything, two epochs, evaluated and saved every 3 steps; the arguments change it."""
    data = {
        "train": str(inputs / "train.jsonl"),
        "eval": str(inputs / "eval.jsonl"),
        "max_length": 64,
    }
    settings: dict[str, Any] = {
        "model": str(inputs / "model"),
        "lora": {"r": 4},
        **sections,
        "data": {**data, "cache": str(inputs / "cache"), "num_proc": 1, **sections.get("data", {})},
        "training": {
            "global_batch_size": BATCH,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "eval_steps": 3,
            "save_steps": 3,
            **(training or {}),
        },
    }
    return Config.model_validate(settings)


def tracked_run(folder: Path, **trackers: Any) -> Config:
    """Return the config of a run that trains nothing, with these trackers."""
    return Config.model_validate(
        {
            "name": "bot",
            "model": "m",
            "data": {"train": "d"},
            "tracking": trackers,
            "output": str(folder / "run"),
        }
    )


def run_file(folder: Path, inputs: Path, address: str, **training: Any) -> Path:
    """Write a config as a user writes it, with a store as output."""
    config = json.loads(make_config(inputs, training).model_dump_json(exclude_unset=True))
    path = folder / "run.yaml"
    path.write_text(json.dumps({**config, "output": address, "compute": {"gpus_per_node": 0}}))
    return path


def make_run(run_dir: Path, config: Config, world_size: int = 1) -> Path:
    """Make the run directory that a launcher would make."""
    create_run_dir(
        config.model_copy(update={"output": str(run_dir)}),
        run_dir,
        make_plan(config, world_size=world_size),
    )
    return run_dir


def train(
    run_dir: Path,
    world_size: int = 1,
    environ: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> list[int]:
    """Train to the end in ranks of their own; returns their exit codes."""
    with started(worker.main, world_size, [str(run_dir)], environ=environ) as processes:
        return wait_all(processes, seconds)


def finished(run_dir: Path, config: Config, world_size: int = 1, seconds: float = SECONDS) -> Path:
    """Train a run to its good end and return its directory."""
    codes = train(make_run(run_dir, config, world_size), world_size, seconds=seconds)
    assert codes == [0] * world_size, log_of(run_dir)
    return run_dir


def log_of(run_dir: Path, rank: int = 0) -> str:
    """Return what a rank wrote into its log."""
    return (run_dir / "logs" / f"rank-{rank}.log").read_text()


def losses(run_dir: Path) -> list[float]:
    """Return the training loss of every step."""
    return [line["loss"] for line in metrics.read_metrics(run_dir) if "loss" in line]


def require_like(
    ours: Path, theirs: Path, weights: Callable[[Path], Mapping[str, torch.Tensor]] | None = None
) -> None:
    """Assert that two runs wrote the same numbers, and that the models which came out have the same `weights`."""
    for mine, other in zip(metrics.read_metrics(ours), metrics.read_metrics(theirs), strict=True):
        assert mine == pytest.approx(other, abs=1e-5, rel=1e-5)
    if weights is not None:
        came = weights(ours)
        wanted = weights(theirs)
        assert came.keys() == wanted.keys()
        for name, tensor in came.items():
            torch.testing.assert_close(tensor, wanted[name], atol=2e-5, rtol=1e-4)


def digests(run_dir: Path, which: str = "last") -> dict[str, str]:
    """Return the SHA-256 of all that a repeat of the run must reproduce bit for bit: weights, optimizer and metrics."""
    paths = [
        *sorted((run_dir / "checkpoints" / which).glob("*.safetensors")),
        run_dir / "metrics.jsonl",
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def is_stopped(pid: int | None) -> bool:
    """True if a process has been stopped by SIGSTOP; one that has just gone has not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below one."""
    children = processes.children(pid)
    return children + [grandchild for child in children for grandchild in descendants(child)]


def stopped_below(pid: int) -> list[int]:
    """Return the ids of the processes below one that SIGSTOP holds."""
    return [child for child in descendants(pid) if is_stopped(child)]


def wait_until_stopped(process: ForkServerProcess) -> None:
    """Wait for a rank that stops itself with SIGSTOP."""
    wait_until(lambda: is_stopped(process.pid))


def go_on(process: ForkServerProcess) -> None:
    """Let a stopped rank run again."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
