"""Measurements of `kubetune bench`: one case after the other, each in a process of its own.

A case that runs out of memory or takes too long is a row with its reason, and the next one goes on.
Without torch.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kubetune.base import processes
from kubetune.config.load import load_config
from kubetune.plan.plan import make_plan
from kubetune.plugins.diagnostics.bench import inputs
from kubetune.plugins.diagnostics.bench.cases import SHAPES, Case
from kubetune.rundir import exit_status, metrics
from kubetune.supervisor.run_folder import create_run_dir

STEPS = 8  # of a case
WARM = 3  # the first steps, which do not count: they set up caches, and compile
# By type of device.
TOKENS = {"cpu": 2048, "cuda": 16_384}  # of a step, about
ROWS = {"cpu": 192, "cuda": 1024}  # of the data
MOST_SECONDS = {"cpu": 60.0, "cuda": 150.0}  # for a case
_WEIGHTS_SECONDS = 600.0  # to write the weights of a model
Row = dict[str, Any]


def measure(
    cases: Iterable[Case],
    folder: Path,
    device: str,
    seconds: float,
) -> Iterator[tuple[Case, Row]]:
    """Yield each case with its row: `tokens_per_second` and more, or `failed` and why. Use `seconds` at most."""
    deadline = time.monotonic() + seconds
    for case in cases:
        left = deadline - time.monotonic()
        if left > 0:
            yield case, _measured(case, folder, device, min(left, MOST_SECONDS[device]))
        else:
            yield case, {"failed": f"left out: the {seconds / 60:g} minutes were over"}


def _measured(case: Case, folder: Path, device: str, seconds: float) -> Row:
    """Write the inputs that a case still lacks, train, and return its row."""
    # Cases of one size share the model and the rows.
    model = folder / case.shape
    problem = _write_model(case.shape, model)
    if problem:
        return {"failed": problem}
    data = folder / f"rows-{case.shape}.jsonl"
    if not data.exists():
        inputs.write_rows(data, ROWS[device], SHAPES[case.shape]["vocab_size"])

    # The data stay prepared in the cache, but a run begins anew.
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    flags = {
        "model.path": str(model),
        "data.train": str(data),
        "data.cache": str(folder / "cache"),
        "data.max_length": inputs.LONGEST,
        "training.max_steps": STEPS,
        # Two micro-batches a step, so that accumulation is measured too.
        "training.global_batch_tokens": TOKENS[device],
        "training.per_device_train_batch_size": TOKENS[device] // inputs.LONGEST // 2,
        "training.lr_scheduler_type": "constant",
        "training.warmup_ratio": 0.0,
        "training.save_steps": 1_000_000,
        "output": str(run_dir),
        **case.settings,
    }
    config = load_config(None, flags=flags)
    create_run_dir(config, run_dir, make_plan(config, world_size=case.ranks))

    command = processes.module("kubetune.worker", run_dir)
    if case.ranks > 1:
        here = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
        worker = ("-m", "kubetune.worker", run_dir)
        command = processes.module(
            "torch.distributed.run", *here, f"--nproc-per-node={case.ranks}", *worker
        )
    code, last_line = _run(command, seconds, case.environ)
    # A run that was killed after enough steps counts too.
    steps = metrics.read_lines(run_dir / metrics.TIMINGS)
    if len(steps) > WARM:
        return _results(case, run_dir, steps[WARM:])
    status = exit_status.read_rank_exit_statuses(run_dir).get(0)
    if status is not None and status.reason:
        return {"failed": status.reason}
    return {"failed": last_line or f"exit code {code}"}


def _write_model(shape: str, model: Path) -> str:
    """Write the model unless it is there; return the problem, empty if there is none."""
    if (model / inputs.TOKENIZER).exists():
        return ""
    # A process of its own, since this one never imports torch.
    command = processes.module("kubetune.plugins.diagnostics.bench.inputs", shape, model)
    code, last_line = _run(command, _WEIGHTS_SECONDS)
    if code:
        return f"its weights could not be made: {last_line}"
    return ""


def _results(case: Case, run_dir: Path, steps: Sequence[dict[str, Any]]) -> Row:
    """Return the row of the steps that count."""
    losses = [line["loss"] for line in metrics.read_metrics(run_dir) if "loss" in line]
    # The median, since a single step may wait for the machine.
    speed = statistics.median(step["tokens_per_second"] for step in steps)
    row = {
        "tokens_per_second": speed,
        "peak_bytes": max(step["peak_memory_bytes"] or 0 for step in steps),
        "losses": losses,
    }

    events = {event["event"]: event for event in metrics.read_events(run_dir)}
    if "compile" in events:
        row["compile_seconds"] = events["compile"]["seconds"]
        row["parameters"] = inputs.parameters_of(case.shape)
    start = events.get("start", {})
    if start.get("flops_per_token"):
        row["tflops"] = speed * start["flops_per_token"] / 1e12
        row["peak_tflops"] = start["peak_tflops"]
    return row


def _run(
    command: list[str], seconds: float, more: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Run a process and return its exit code and its last line. One that takes too long is killed.

    `more`: variables of it.
    """
    environ = {
        **os.environ,
        **more,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            preexec_fn=processes.die_with_parent,
        )
    except subprocess.TimeoutExpired:
        return -9, f"took longer than {seconds:.0f} s"
    if done.returncode == -9:
        return -9, "killed, as the kernel does when memory runs out"
    last_line = done.stdout.strip().rpartition("\n")[2]
    return done.returncode, last_line
