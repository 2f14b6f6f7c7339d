"""Learning by reward beside TRL's GRPOTrainer: CPU seconds of a step and peak memory, on one core.

    python -m benchmarks.grpo [--steps N] [--micro-batches N …]

Both train the demo's model by LoRA on the same prompts with the same reward, as many answers of the same longest
length, the same loss (dapo) and learning rate. Each runs twice, with few and with more steps; what the longer run took
more is divided by the steps that it made more, so that imports, loading and the end are not counted. CPU seconds are
those of all processes of a run, also of the process that rewards. Results are printed as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, python_of
from benchmarks.results import ROOT

EMBEDDED = ROOT / "src" / "kubetune" / "cli" / "local" / "embedded"
PROMPTS = 16
ANSWERS = 8
LONGEST = 40
LEARNING_RATE = 1e-3
FEW_STEPS = 3
# What a run prints of its own processes: the CPU seconds and the peak of the largest one.
MEASURED = """
import json, resource, subprocess, sys
code = subprocess.run(json.loads(sys.argv[1]), stdout=2).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


@dataclass(frozen=True)
class Cost:
    """What the steps of a trainer cost."""

    cpu_seconds: float  # of a step
    peak_bytes: int  # of the largest process


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both, TRL with micro-batches of different sizes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grpo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=20, help="of the longer runs, default 20")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[128, 32, 8], metavar="N", help="TRL's"
    )
    args = parser.parse_args(argv)
    # One core for all processes of a run.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory(prefix="benchmark-grpo-") as name:
        folder = Path(name)
        prompts = write_prompts(folder)
        print("| | CPU seconds a step | steps a CPU minute | peak MiB |")
        print("|---|--:|--:|--:|")
        show("kubetune", cost_of_ours(folder, prompts, args.steps))
        for size in args.micro_batches:
            show(f"TRL, micro-batches of {size}", cost_of_trl(folder, prompts, args.steps, size))


def write_prompts(folder: Path) -> Path:
    """Write the demo's requests with their commands in a column that rewards read."""
    path = folder / "prompts.jsonl"
    lines = (EMBEDDED / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            request, command = json.loads(line)["messages"]
            record = {"prompt": [request], "command": command["content"]}
            file.write(json.dumps(record) + "\n")
    return path


def cost_of_ours(folder: Path, prompts: Path, steps: int) -> Cost:
    """Return what a step of kubetune costs."""

    def command(number: int) -> list[str]:
        run_dir = folder / f"run-{number}"
        run_file = folder / f"run-{number}.yaml"
        config = {
            "task": "grpo",
            "model": str(EMBEDDED / "model"),
            "data": {"train": str(prompts), "max_length": 128},
            "lora": {"r": 16},
            "grpo": {
                "num_generations": ANSWERS,
                "max_completion_length": LONGEST,
                "generation_batch_size": PROMPTS * ANSWERS,
            },
            "rewards": [
                {"file": str(ROOT / "benchmarks/peers/grpo_reward.py"), "function": "alike"}
            ],
            "training": {
                "max_steps": number,
                "global_batch_size": PROMPTS,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
            },
            "output": str(run_dir),
            "compute": {"processes": 1},
        }
        run_file.write_text(json.dumps(config))
        return [sys.executable, "-m", "kubetune", "train", str(run_file)]

    return cost(command(FEW_STEPS), command(steps), steps)


def cost_of_trl(folder: Path, prompts: Path, steps: int, micro_batch: int) -> Cost:
    """Return what a step of TRL's trainer costs."""

    def command(number: int) -> list[str]:
        order: dict[str, Any] = {
            "model": str(EMBEDDED / "model"),
            "prompts": str(prompts),
            "output": str(folder / f"trl-{micro_batch}-{number}"),
            "steps": number,
            "micro_batch": micro_batch,
            "answers_of_step": PROMPTS * ANSWERS,
            "answers": ANSWERS,
            "longest": LONGEST,
            "learning_rate": LEARNING_RATE,
        }
        return [python_of("peers"), "-m", "benchmarks.peers.trl_grpo", json.dumps(order)]

    return cost(command(FEW_STEPS), command(steps), steps)


def cost(few: list[str], many: list[str], steps: int) -> Cost:
    """Run both commands, and return what a step costs."""
    # Once before, so that no run compiles modules or prepares the data alone.
    run(few)
    seconds_of_few, _ = run(few)
    seconds_of_many, peak = run(many)
    return Cost((seconds_of_many - seconds_of_few) / (steps - FEW_STEPS), peak)


def run(command: list[str]) -> tuple[float, int]:
    """Run a command; return its CPU seconds, with all processes below it, and the peak memory of the largest."""
    # A run that is finished would only be shown again.
    if command[-1].endswith(".yaml"):
        shutil.rmtree(command[-1].removesuffix(".yaml"), ignore_errors=True)
    variables: Mapping[str, str] = {
        **environment(threads=1),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps(command)],
        cwd=ROOT, env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, seconds, peak = json.loads(done.stdout)
    if code:
        raise RuntimeError(f"{command[:3]} ended with exit code {code}:\n{done.stderr[-2000:]}")
    return seconds, peak


def show(name: str, measured: Cost) -> None:
    """Print a line of the table."""
    per_minute = 60 / measured.cpu_seconds
    peak = measured.peak_bytes / 2**20
    print(f"| {name} | {measured.cpu_seconds:.2f} | {per_minute:.0f} | {peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
