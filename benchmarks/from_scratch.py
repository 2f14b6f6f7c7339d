"""A classifier that learns for real without a hub: a small BERT shape from random weights on GLUE's SST-2.

    python -m benchmarks.from_scratch --tokenizer FOLDER --data FOLDER [--processes 1 2] [--fresh]

`FOLDER` of the tokenizer holds BERT's tokenizer.json, that of the data train.tsv and dev.tsv as GLUE has them. The
whole training split is trained on by `kubetune train`, once with each number of processes, and the accuracy on the
evaluation split is kept: a number that other programs on the machine do not change, unlike the seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.encoders import make_encoder
from benchmarks.harness import WORK, end_on_sigterm, environment
from benchmarks.results import ROOT, Results, open_results

SUITE = "from_scratch"
SHAPE = "small"
SETTINGS = {
    "task": "sequence_classification",
    "data.max_length": 128,
    "training.num_train_epochs": 2,
    "training.global_batch_size": 64,
    "training.per_device_train_batch_size": 32,
    "training.learning_rate": 5e-4,
    "training.metric_for_best_model": "eval_accuracy",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is not in the results yet, and print the metrics."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{SUITE}", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a BERT tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tsv and dev.tsv")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    args = parser.parse_args(argv)
    results = open_results(quick=False, fresh=args.fresh, subject="classification")
    end_on_sigterm()
    model = make_encoder(SHAPE, args.tokenizer, WORK / "models" / f"bert-{SHAPE}")
    for processes in args.processes:
        train_once(model, args.data, processes, results)


def train_once(model: Path, data: Path, processes: int, results: Results) -> None:
    """Train with so many processes by the real command, unless the results have it."""
    key = {"shape": SHAPE, "processes": processes}
    if results.find(SUITE, key) is not None:
        return
    run_dir = WORK / "from-scratch" / str(processes)
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = SETTINGS | {
        "model": model,
        "data.train": data.resolve() / "train.tsv",
        "data.eval": data.resolve() / "dev.tsv",
        "data.cache": WORK / "cache",
        "compute.processes": processes,
        "output": run_dir,
    }
    command = [sys.executable, "-m", "kubetune", "train"]
    command += [f"{name}={value}" for name, value in settings.items()]
    log = WORK / "logs" / f"{SUITE}-{processes}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(1), stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        numbers = {"failed": f"exit code {done.returncode}"}
    else:
        numbers = read_run(run_dir)
    results.add(SUITE, key, numbers | {"seconds": time.monotonic() - start})
    print(f"processes {processes}: {json.dumps(numbers)}", flush=True)


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return the metrics of a run's last evaluation, and how much it trained."""
    from kubetune.rundir.metrics import read_metrics

    # The last evaluation, not the best one, which chance has a part in.
    lines = read_metrics(run_dir)
    last = [line for line in lines if "eval_loss" in line][-1]
    plan = json.loads((run_dir / "plan.json").read_text())
    return {
        "rows": plan["rows"],
        "steps": last["step"],
        "accuracy": last["eval_accuracy"],
        "f1": last["eval_f1"],
        "loss": last["eval_loss"],
        "settings": SETTINGS,
    }


if __name__ == "__main__":
    main()
