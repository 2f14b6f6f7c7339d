"""Classifying sentences beside the Trainer of transformers, as recipes set it up and as well as it can be set up.

    python -m benchmarks.sequence_classification --tokenizer FOLDER --data FOLDER [--cases base small] [--repeats N]

`FOLDER` of the tokenizer holds BERT's tokenizer.json, that of the data train.tsv and dev.tsv as SST-2 of GLUE has them.
The models are BERT shapes with random weights: `base` is for speed, `small` also learns in the time given. Every
trainer gets the same weights, rows, batches of 64 and threads, and one epoch, which alone is timed; accuracy is
measured after it.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.encoders import make_encoder
from benchmarks.harness import WORK, end_on_sigterm, execute
from benchmarks.peers.job import Order
from benchmarks.results import Results, open_results

SUITE = "sequence_classification"
BATCH, MAX_LENGTH = 64, 128


@dataclass(frozen=True)
class Case:
    """A shape of `encoders.SHAPES`, how many rows of training it gets, and how fast it learns."""

    shape: str
    rows: int
    learning_rate: float
    adapt: str = "full"


CASES = {
    "base": Case("base", 512, 5e-5),
    "base-lora": Case("base", 512, 2e-4, adapt="lora"),
    "small": Case("small", 16_384, 5e-4),
    "tiny": Case("tiny", 256, 1e-3),
}

TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kubetune": ("kubetune, bf16", {"model.dtype": "bfloat16"}),
    "trainer-padded": ("Trainer, every row padded to 128, fp32", {"padded": True}),
    "trainer-tuned": (
        "Trainer, bf16 autocast, dynamic padding, length groups",
        {"grouped": True, "arguments": {"bf16": True}},
    ),
}
"""How each is called in the tables, and its settings."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{SUITE}", description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a BERT tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tsv and dev.tsv")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["base", "small"])
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="results of their own, which the documentation leaves out")
    parser.add_argument("--fresh", action="store_true", help="replace today's results instead of going on with them")
    args = parser.parse_args(argv)
    results = open_results(quick=args.quick, fresh=args.fresh)
    end_on_sigterm()
    for name in args.cases:
        case = CASES[name]
        model = make_encoder(case.shape, args.tokenizer, WORK / "models" / f"bert-{case.shape}")
        data = take_rows(args.data, case.rows)
        for repeat in range(args.repeats):
            for trainer in args.trainers:
                key = {"case": name, "trainer": trainer, "threads": args.threads, "repeat": repeat}
                measure_once(key, case, model, data, results)


def take_rows(data: Path, rows: int) -> Path:
    """A folder with the first `rows` rows of training and all of the evaluation's."""
    folder = WORK / "classification" / str(rows)
    folder.mkdir(parents=True, exist_ok=True)
    with (data / "train.tsv").open(encoding="utf-8") as whole:
        lines = [line for _, line in zip(range(rows + 1), whole, strict=False)]
    (folder / "train.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "dev.tsv").write_bytes((data / "dev.tsv").read_bytes())
    return folder


def measure_once(key: dict[str, Any], case: Case, model: Path, data: Path, results: Results) -> None:
    """Run one trainer in a process of its own and keep what it reports, unless the results have it."""
    if results.find(SUITE, key) is not None:
        return
    found = run(key["trainer"], case, model, data, key["threads"])
    found.pop("losses", None)
    results.add(SUITE, key, found | {"rows": case.rows})
    print(f"{key['case']:<10} {key['trainer']:<16} {summary(case, found)}", flush=True)


def run(trainer: str, case: Case, model: Path, data: Path, threads: int) -> dict[str, Any]:
    """What one trainer reports of one case."""
    settings = TRAINERS[trainer][1]
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
    found = execute("ours", "ours", Order(**{**vars(order), "run_dir": str(run_dir)}), threads=threads)
    if "failed" not in found:
        from kubetune.metrics import read_metrics

        found["accuracy"] = read_metrics(run_dir)[-1]["eval_accuracy"]
    return found


def trainer_arguments(case: Case) -> dict[str, Any]:
    """What the Trainer is told besides what all peers are told."""
    return {"learning_rate": case.learning_rate, "lr_scheduler_type": "linear", "logging_steps": 10}


def prepare_run(case: Case, model: Path, data: Path, settings: dict[str, Any]) -> Path:
    """Prepare the rows and make the run directory, as the launcher would."""
    from kubetune.config.load import load_config
    from kubetune.data.prepare import prepare
    from kubetune.launch.local import create_run_dir
    from kubetune.plan import make_plan

    run_dir = WORK / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    lora = {"lora.r": 8, "lora.alpha": 16, "lora.dropout": 0.05, "lora.target_modules": ["query", "value"]}
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
        "training.warmup_ratio": 0.0,
        "training.save_steps": 1_000_000,
        "output": str(run_dir),
        **(lora if case.adapt == "lora" else {}),
        **settings,
    }
    config = load_config(None, flags=flags)
    rows = len(prepare(config).train)
    create_run_dir(config, run_dir, make_plan(config, rows, 0, world_size=1))
    return run_dir


def rows_per_cpu_second(measurement: dict[str, Any]) -> float:
    """Rows of training per CPU-second of the process."""
    return float(measurement["rows"] / measurement["epoch_cpu_seconds"][0])


def summary(case: Case, found: dict[str, Any]) -> str:
    """One measurement in a few words."""
    if "epoch_seconds" not in found:
        return f"left out: {found.get('missing') or found.get('failed')}"
    speed = rows_per_cpu_second(found | {"rows": case.rows})
    wall = case.rows / found["epoch_seconds"][0]
    peak = found["peak_bytes"] / 2**20
    return f"{speed:,.1f} rows/CPU-s, {wall:,.1f} rows/s, peak {peak:,.0f} MB, accuracy {found['accuracy']:.3f}"


if __name__ == "__main__":
    main()
