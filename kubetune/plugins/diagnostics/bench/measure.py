"""Measurements of `kubetune bench`: one case after the other, each in a process of its own, whatever becomes of it.

A case that runs out of memory, takes too long or lacks a library is a row with its reason. Without torch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
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

STEPS, WARM = 8, 3
"""Steps of a case, and how many of them count for nothing: the first warm up, and what is compiled is compiled then."""
TOKENS = {"cpu": 2048, "cuda": 16_384}
"""Tokens of a step, about."""
ROWS = {"cpu": 192, "cuda": 1024}
MOST_SECONDS = {"cpu": 60.0, "cuda": 150.0}
TOO_LONG = "took longer than"
Row = dict[str, Any]


def measure(
    cases: Iterable[Case], folder: Path, device: str, seconds: float
) -> Iterator[tuple[Case, Row]]:
    """Each case with what came of it: `tokens_per_second` and more, or `failed` and why. Uses `seconds` at most."""
    deadline = time.monotonic() + seconds
    for case in cases:
        left = deadline - time.monotonic()
        row = _measured(case, folder, device, min(left, MOST_SECONDS[device])) if left > 0 else {}
        if left <= 0 or (
            left < MOST_SECONDS[device] and row.get("failed", "").startswith(TOO_LONG)
        ):
            row = {"failed": f"left out: the {seconds / 60:g} minutes were over"}
        yield case, row


def _measured(case: Case, folder: Path, device: str, seconds: float) -> Row:
    if case.trainer != "kubetune" and find_spec(case.trainer) is None:
        return {"failed": f"left out: {case.trainer} is not installed"}
    if case.settings.get("quantization") and find_spec("bitsandbytes") is None:
        return {"failed": "left out: bitsandbytes is not installed"}
    model = folder / case.shape
    if not (model / "config.json").exists():
        needed = inputs.bytes_of(case.shape)
        if (free := files.free_bytes(folder)) < 1.1 * needed:
            return {
                "failed": f"left out: its weights need {needed:,} bytes of disk, and {free:,} are free"
            }
        model.mkdir(exist_ok=True)
        code, said = _run(
            processes.module("kubetune.plugins.diagnostics.bench.inputs", case.shape, model), 600.0
        )
        if code:
            return {"failed": f"its weights could not be made: {said}"}
    data = folder / f"rows-{case.shape}-{case.shared}.jsonl"
    if not data.exists():
        inputs.write_rows(data, ROWS[device], SHAPES[case.shape]["vocab_size"], case.shared)
    if case.trainer != "kubetune":
        return _by_peer(case, model, data, folder, device, seconds)
    return _by_run(case, model, data, folder, device, seconds)


def _by_run(case: Case, model: Path, data: Path, folder: Path, device: str, seconds: float) -> Row:
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    longest = inputs.LONGEST + case.shared
    flags: dict[str, Any] = {
        "model.path": str(model),
        "data.train": str(data),
        "data.cache": str(folder / "cache"),
        "data.max_length": longest,
        "training.max_steps": STEPS,
        "training.global_batch_tokens": max(TOKENS[device], longest),
        "training.per_device_train_batch_size": max(1, TOKENS[device] // longest // 2),
        "training.lr_scheduler_type": "constant",
        "training.warmup_ratio": 0.0,
        "training.save_steps": 1_000_000,
        "output": str(run_dir),
        **case.settings,
    }
    config = load_config(None, flags=flags)
    create_run_dir(config, run_dir, make_plan(config, world_size=1))
    began = time.time()
    code, said = _run(processes.module("kubetune.worker", run_dir), seconds)
    steps = metrics.read_lines(run_dir / metrics.TIMINGS)
    if len(steps) <= WARM:
        ended = exit_status.read_rank_exit_statuses(run_dir).get(0)
        return {
            "failed": ended.reason
            if ended is not None and ended.reason
            else said or f"exit code {code}"
        }
    events = {event["event"]: event for event in metrics.read_events(run_dir)}
    start = events.get("start", {})
    speed = statistics.median(step["tokens_per_second"] for step in steps[WARM:])
    row = {
        "tokens_per_second": speed,
        "peak_bytes": max(step["peak_memory_bytes"] or 0 for step in steps),
        "seconds": time.time() - began,
        "losses": [line["loss"] for line in metrics.read_metrics(run_dir) if "loss" in line],
    }
    if compiled := events.get("compile"):
        row |= {
            "compile_seconds": compiled["seconds"],
            "parameters": inputs.bytes_of(case.shape) // 2,
        }
    if flops := start.get("flops_per_token"):
        row |= {
            "tflops": speed * flops / 1e12,
            "peak_tflops": start["peak_tflops"],
            "peak_source": start["peak_source"],
        }
    return row


def _by_peer(case: Case, model: Path, data: Path, folder: Path, device: str, seconds: float) -> Row:
    order = {"model": str(model), "data": str(data), "folder": str(folder / "peer"), "steps": STEPS, "warm": WARM,
             "tokens": TOKENS[device], "longest": inputs.LONGEST + case.shared}  # fmt: skip
    code, said = _run(
        processes.module(
            f"kubetune.plugins.diagnostics.bench.{case.trainer}_peer", json.dumps(order)
        ),
        seconds,
    )
    try:
        return dict(json.loads(said)) if code == 0 else {"failed": said or f"exit code {code}"}
    except ValueError:
        return {"failed": said}


def _run(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit code of a process, and its last line; one that takes too long is killed, and that is said."""
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    try:
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
            preexec_fn=processes.die_with_parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -9, f"{TOO_LONG} {seconds:.0f} s"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    killed = "killed, as the kernel does when memory runs out"
    return done.returncode, killed if done.returncode == -9 else (lines[-1][:300] if lines else "")


def checks(root: Path, tell: Callable[[str], None], seconds: float) -> Row:
    """Outcome of the tests that only a GPU has, where kubetune lies in a checkout with them, and pytest is there."""
    tests = root / "tests" / "gpu"
    if not tests.is_dir() or find_spec("pytest") is None:
        return {"failed": "left out: they are in a checkout of kubetune's source, beside pytest"}
    tell("tests/gpu …")
    code, said = _run(processes.module("pytest", "-q", "-p", "no:cacheprovider", tests), seconds)
    return {"exit_code": code, "said": said} if code in (0, 1) else {"failed": said}
