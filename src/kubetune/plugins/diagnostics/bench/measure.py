"""Measurements of `kubetune bench`: one case after the other, each in a process of its own.

A case that runs out of memory, takes too long or lacks a library is a row with its reason, and the next one goes on.
Without torch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kubetune.base import files, processes
from kubetune.config.load import load_config
from kubetune.plan.plan import make_plan
from kubetune.plugins.diagnostics.bench import inputs
from kubetune.plugins.diagnostics.bench.cases import SHAPES, Case
from kubetune.rundir import exit_status, metrics
from kubetune.supervisor.local import create_run_dir

# Steps of a case, and how many of them do not count: the first ones set caches up, and compile.
STEPS = 8
WARM = 3
# Of a step, about.
TOKENS = {"cpu": 2048, "cuda": 16_384}
ROWS = {"cpu": 192, "cuda": 1024}
MOST_SECONDS = {"cpu": 60.0, "cuda": 150.0}
_WEIGHTS_SECONDS = 600.0
TOO_LONG = "took longer than"
Row = dict[str, Any]


@dataclass(frozen=True)
class Inputs:
    """The files that a case is trained from, and where."""

    case: Case
    model: Path
    data: Path
    folder: Path
    device: str

    @property
    def longest(self) -> int:
        """Return the most tokens of a row."""
        return inputs.LONGEST + self.case.shared


def measure(
    cases: Iterable[Case], folder: Path, device: str, seconds: float
) -> Iterator[tuple[Case, Row]]:
    """Yield each case with its row: `tokens_per_second` and more, or `failed` and why. Use `seconds` at most."""
    deadline = time.monotonic() + seconds
    for case in cases:
        left = deadline - time.monotonic()
        row = {"failed": f"left out: the {seconds / 60:g} minutes were over"}
        if left > 0:
            limit = MOST_SECONDS[device]
            measured = _measured(case, folder, device, min(left, limit))
            # A case that was stopped by the end of all time did not take too long itself.
            took_too_long = measured.get("failed", "").startswith(TOO_LONG)
            was_cut = took_too_long and left < limit
            if not was_cut:
                row = measured
        yield case, row


def _measured(case: Case, folder: Path, device: str, seconds: float) -> Row:
    """Write what a case needs and is not there yet, and train; return its row."""
    if case.trainer != "kubetune" and find_spec(case.trainer) is None:
        return {"failed": f"left out: {case.trainer} is not installed"}
    if case.settings.get("quantization") and find_spec("bitsandbytes") is None:
        return {"failed": "left out: bitsandbytes is not installed"}

    # Cases of one size share the model, and those of one shared beginning the rows.
    model = folder / case.shape
    problem = _write_model(case.shape, model)
    if problem:
        return {"failed": problem}
    data = folder / f"rows-{case.shape}-{case.shared}.jsonl"
    if not data.exists():
        inputs.write_rows(data, ROWS[device], SHAPES[case.shape]["vocab_size"], case.shared)

    case_inputs = Inputs(case, model, data, folder, device)
    if case.trainer != "kubetune":
        return _by_peer(case_inputs, seconds)
    return _by_run(case_inputs, seconds)


def _write_model(shape: str, model: Path) -> str:
    """Write the model unless it is there; return the problem, empty if there is none."""
    if (model / "config.json").exists():
        return ""
    needed = inputs.bytes_of(shape)
    free = files.free_bytes(model.parent)
    if free < 1.1 * needed:
        return f"left out: its weights need {needed:,} bytes of disk, and {free:,} are free"

    # A process of its own, since this one never imports torch.
    model.mkdir(exist_ok=True)
    command = processes.module("kubetune.plugins.diagnostics.bench.inputs", shape, model)
    code, last_line = _run(command, _WEIGHTS_SECONDS)
    if code:
        return f"its weights could not be made: {last_line}"
    return ""


def _by_run(case_inputs: Inputs, seconds: float) -> Row:
    """Train with kubetune's own worker, and return the row of the steps that count."""
    # The data stay prepared in the cache, but a run begins anew.
    run_dir = case_inputs.folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = load_config(None, flags=_flags(case_inputs, run_dir))
    create_run_dir(config, run_dir, make_plan(config, world_size=1))

    began = time.time()
    code, last_line = _run(processes.module("kubetune.worker", run_dir), seconds)
    # A run that was killed after enough steps is as good as one that ended.
    steps = metrics.read_lines(run_dir / metrics.TIMINGS)
    if len(steps) <= WARM:
        status = exit_status.read_rank_exit_statuses(run_dir).get(0)
        reason = ""
        if status is not None:
            reason = status.reason
        return {"failed": reason or last_line or f"exit code {code}"}

    # The median, since a single step may wait for the machine.
    losses = []
    for line in metrics.read_metrics(run_dir):
        if "loss" in line:
            losses.append(line["loss"])
    speed = statistics.median(step["tokens_per_second"] for step in steps[WARM:])
    row = {
        "tokens_per_second": speed,
        "peak_bytes": max(step["peak_memory_bytes"] or 0 for step in steps),
        "seconds": time.time() - began,
        "losses": losses,
    }

    events = {event["event"]: event for event in metrics.read_events(run_dir)}
    compiled = events.get("compile")
    if compiled:
        row["compile_seconds"] = compiled["seconds"]
        # Two bytes each.
        row["parameters"] = inputs.bytes_of(case_inputs.case.shape) // 2

    start = events.get("start", {})
    flops_per_token = start.get("flops_per_token")
    if flops_per_token:
        row["tflops"] = speed * flops_per_token / 1e12
        row["peak_tflops"] = start["peak_tflops"]
        row["peak_source"] = start["peak_source"]
    return row


def _flags(case_inputs: Inputs, run_dir: Path) -> dict[str, Any]:
    """Return the config of a case, by dotted key: a few steps, without checkpoints, each of about TOKENS."""
    # Two micro-batches a step, so that accumulation is measured too.
    tokens = TOKENS[case_inputs.device]
    longest = case_inputs.longest
    return {
        "model.path": str(case_inputs.model),
        "data.train": str(case_inputs.data),
        "data.cache": str(case_inputs.folder / "cache"),
        "data.max_length": longest,
        "training.max_steps": STEPS,
        "training.global_batch_tokens": max(tokens, longest),
        "training.per_device_train_batch_size": max(1, tokens // longest // 2),
        "training.lr_scheduler_type": "constant",
        "training.warmup_ratio": 0.0,
        "training.save_steps": 1_000_000,
        "output": str(run_dir),
        **case_inputs.case.settings,
    }


def _by_peer(case_inputs: Inputs, seconds: float) -> Row:
    """Train with another library, and return the row that it prints."""
    order = {
        "model": str(case_inputs.model),
        "data": str(case_inputs.data),
        "folder": str(case_inputs.folder / "peer"),
        "steps": STEPS,
        "warm": WARM,
        "tokens": TOKENS[case_inputs.device],
        "longest": case_inputs.longest,
    }
    module = f"kubetune.plugins.diagnostics.bench.{case_inputs.case.trainer}_peer"
    code, last_line = _run(processes.module(module, json.dumps(order)), seconds)
    if code:
        return {"failed": last_line or f"exit code {code}"}
    # A library may print something behind its row, such as a warning at the end.
    try:
        return dict(json.loads(last_line))
    except ValueError:
        return {"failed": last_line}


def _run(command: list[str], seconds: float) -> tuple[int, str]:
    """Run a process and return its exit code and its last line. One that takes too long is killed."""
    environ = {
        **os.environ,
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
        return -9, f"{TOO_LONG} {seconds:.0f} s"
    if done.returncode == -9:
        return -9, "killed, as the kernel does when memory runs out"
    lines = done.stdout.strip().splitlines()
    if not lines:
        return done.returncode, ""
    return done.returncode, lines[-1].strip()[:300]
