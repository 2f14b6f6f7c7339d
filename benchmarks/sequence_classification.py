"""Classifying sentences beside the Trainer of transformers, as recipes set it up and as well as it can be set up.

    python -m benchmarks.sequence_classification --tokenizer FOLDER --data FOLDER [--cases base small] [--repeats N]

`FOLDER` of the tokenizer holds BERT's tokenizer.json, that of the data train.tsv and dev.tsv as SST-2 of GLUE has them.
The models are BERT shapes with random weights: `base` is for speed, `small` also learns in the time given. Every
trainer gets the same weights, rows, batches of 64 and threads, and one epoch, which alone is timed; accuracy is
measured after it, of `small` alone. Where every row is padded to 128, all steps are alike, and of the large shape one
is measured: a minute's work.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from benchmarks.encoders import make_encoder
from benchmarks.harness import WORK, end_on_sigterm, execute
from benchmarks.peers.job import Order
from benchmarks.results import Results, open_results

SUITE = "sequence_classification"
BATCH = 64
MAX_LENGTH = 128


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    shape: str  # of `encoders.SHAPES`
    rows: int  # of training
    padded_rows: int  # of training, of a trainer that pads all of them: its steps are all alike
    learning_rate: float
    adapt: str = "full"
    tested_rows: int | None = 16  # of the evaluation split, None: all

    def rows_for(self, trainer: str) -> int:
        """Return the rows of training of one trainer."""
        _, settings = TRAINERS[trainer]
        return self.padded_rows if settings.get("padded") else self.rows


CASES = {
    "base": Case("base", 1024, 64, 5e-5),
    "base-lora": Case("base", 1024, 64, 2e-4, adapt="lora"),
    "small": Case("small", 8192, 8192, 5e-4, tested_rows=None),
    "small-lora": Case("small", 8192, 2048, 2e-3, adapt="lora", tested_rows=None),
    "tiny": Case("tiny", 256, 256, 1e-3, tested_rows=None),
}

# How each is called in the tables, and its settings.
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kubetune": ("kubetune, bf16", {"model.dtype": "bfloat16"}),
    "trainer-padded": ("Trainer, every row padded to 128, fp32", {"padded": True}),
    "trainer-tuned": (
        "Trainer, bf16 autocast, dynamic padding, length groups",
        {"grouped": True, "arguments": {"bf16": True}},
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{SUITE}", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a BERT tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tsv and dev.tsv")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["base", "base-lora", "small"])
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of threads, one after another",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="results of their own, which the documentation leaves out",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    args = parser.parse_args(argv)
    results = open_results(quick=args.quick, fresh=args.fresh, subject="classification")
    end_on_sigterm()
    # Trainers take turns, so that what else runs on the machine hits all of them alike.
    for name in args.cases:
        case = CASES[name]
        model = make_encoder(case.shape, args.tokenizer, WORK / "models" / f"bert-{case.shape}")
        for threads, repeat, trainer in product(args.threads, range(args.repeats), args.trainers):
            data = take_rows(args.data, case.rows_for(trainer), case.tested_rows)
            key = {"case": name, "trainer": trainer, "threads": threads, "repeat": repeat}
            measure_once(key, case, model, data, results)


def take_rows(data: Path, rows: int, tested_rows: int | None = None) -> Path:
    """Return a folder with the first rows of training, and the first `tested_rows` (None: all) of evaluation."""
    folder = WORK / "classification" / f"{rows}-{tested_rows or 'all'}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("train.tsv", rows), ("dev.tsv", tested_rows)):
        with (data / name).open(encoding="utf-8") as whole:
            # One line more, of the names of columns.
            lines = islice(whole, None if number is None else number + 1)
            (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder


def measure_once(
    key: dict[str, Any], case: Case, model: Path, data: Path, results: Results
) -> None:
    """Run one trainer in a process of its own and keep what it reports, unless the results have it."""
    if results.find(SUITE, key) is not None:
        return
    numbers = run(key["trainer"], case, model, data, key["threads"])
    numbers.pop("losses", None)
    if case.tested_rows is not None:
        numbers.pop("accuracy", None)  # of random weights, on a handful of rows
    numbers["rows"] = case.rows_for(key["trainer"])
    results.add(SUITE, key, numbers)
    print(f"{key['case']:<10} {key['threads']} {key['trainer']:<16} {summary(numbers)}", flush=True)


def run(trainer: str, case: Case, model: Path, data: Path, threads: int) -> dict[str, Any]:
    """Return what one trainer reports of one case."""
    _, settings = TRAINERS[trainer]
    order = Order(
        model=str(model),
        data=str(data),
        adapt=case.adapt,
        lora_rank=8,
        batch=BATCH,
        accumulation=1,
        epochs=1,
        max_length=MAX_LENGTH,
        pack_length=MAX_LENGTH,
        settings={**settings, "arguments": trainer_arguments(case) | settings.get("arguments", {})},
        started=0.0,
    )
    if trainer != "kubetune":
        return execute("classify", "peers", order, threads=threads)
    run_dir = prepare_run(case, model, data, settings)
    numbers = execute("ours", "ours", replace(order, run_dir=str(run_dir)), threads=threads)
    if "failed" not in numbers:
        from kubetune.rundir.metrics import read_metrics

        numbers["accuracy"] = read_metrics(run_dir)[-1]["eval_accuracy"]
    return numbers


def trainer_arguments(case: Case) -> dict[str, Any]:
    """Return what the Trainer gets besides the arguments that all peers get."""
    return {"learning_rate": case.learning_rate, "lr_scheduler_type": "linear", "logging_steps": 10}


def prepare_run(case: Case, model: Path, data: Path, settings: dict[str, Any]) -> Path:
    """Prepare the rows and make the run directory, as the launcher would."""
    from kubetune.config.load import load_config
    from kubetune.data.prepared.prepare import prepare
    from kubetune.plan.plan import make_plan
    from kubetune.supervisor.run_folder import create_run_dir

    run_dir = WORK / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    lora = {
        "lora.r": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.05,
        "lora.target_modules": ["query", "value"],
    }
    flags = {
        "task": "sequence_classification",
        "model.path": str(model),
        "data.train": str(data / "train.tsv"),
        "data.eval": str(data / "dev.tsv"),
        "data.max_length": MAX_LENGTH,
        "data.cache": str(WORK / "cache"),
        "training.num_train_epochs": 1.0,
        "training.global_batch_size": BATCH,
        "training.per_device_train_batch_size": BATCH,
        "training.learning_rate": case.learning_rate,
        "training.lr_scheduler_type": "linear",
        "training.logging_steps": 10,
        "training.warmup_ratio": 0.0,
        "training.save_steps": 1_000_000,
        "output": str(run_dir),
    }
    if case.adapt == "lora":
        flags |= lora
    config = load_config(None, flags=flags | settings)
    rows = len(prepare(config).train)
    create_run_dir(config, run_dir, make_plan(config, rows, 0, world_size=1))
    return run_dir


def rows_per_cpu_second(measurement: dict[str, Any]) -> float:
    """Return rows of training per CPU-second of the process."""
    return float(measurement["rows"] / measurement["epoch_cpu_seconds"][0])


def rows_per_second(measurement: dict[str, Any]) -> float:
    """Return rows of training per second by the wall."""
    return float(measurement["rows"] / measurement["epoch_seconds"][0])


def summary(measurement: dict[str, Any]) -> str:
    """Return one measurement in a few words."""
    if "epoch_seconds" not in measurement:
        return f"left out: {measurement.get('missing') or measurement.get('failed')}"
    text = f"{rows_per_cpu_second(measurement):,.1f} rows/CPU-s"
    text += f", {rows_per_second(measurement):,.1f} rows/s"
    text += f", peak {measurement['peak_bytes'] / 2**20:,.0f} MB"
    if "accuracy" in measurement:
        text += f", accuracy {measurement['accuracy']:.3f}"
    return text


if __name__ == "__main__":
    main()
