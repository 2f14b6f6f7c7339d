"""Measure how soon training starts, from text, and how soon verbs answer that train nothing, by the wall.

    python -m benchmarks.startup [--quick] [--repeats N]

Training has started at the end of the first optimizer step. kubetune is started by its command line, with compiled
bytecode like an installed one and an empty cache of prepared data; its first step is done when its line is in
timings.jsonl. TRL gets the same rows as a data set and marks its first step itself. Both take steps of 16 rows:
kubetune in micro-batches of 1,024 tokens, its default, TRL of 4 rows.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.corpus import Corpus, write_text
from benchmarks.flops import LORA_RANK
from benchmarks.harness import WORK, end_on_sigterm, environment, execute, python_of
from benchmarks.peers.job import ATTENTION, Order
from benchmarks.recorder import cpu_seconds
from benchmarks.results import ROOT, Results, open_results

SUITE = "startup"
ROWS = (64, 10_000, 52_000)
MODEL = "q32k"
VERBS = ("--help", "plan --help", "plan")
TIMEOUT_SECONDS = 600.0
CORES = len(os.sched_getaffinity(0))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="64 rows only, one repeat")
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument("--repeats", type=int, help="left out: 3, or 1 when quick")
    args = parser.parse_args(argv)
    results = open_results(quick=args.quick, fresh=args.fresh)
    end_on_sigterm()
    # As pip does. Python itself may be told to write none.
    compileall.compile_dir(ROOT / "kubetune", quiet=1)
    model = text_model()
    starts = {"kubetune": start_kubetune, "trl-default": start_trl}
    for repeat in range(args.repeats or (1 if args.quick else 3)):
        for rows in ROWS[:1] if args.quick else ROWS:
            data = text_data(rows)
            for trainer, start in starts.items():
                key = {"trainer": trainer, "rows": rows, "repeat": repeat}
                measure_once(key, partial(start, model, data), results)
        data = text_data(ROWS[0])
        for verb in VERBS:
            key = {"verb": verb, "repeat": repeat}
            measure_once(key, partial(start_verb, verb, model, data), results)


def measure_once(
    key: dict[str, Any], start: Callable[[], dict[str, Any]], results: Results
) -> None:
    """Start a trainer or verb and keep how long it took, unless the results have it."""
    if results.find(SUITE, key) is not None:
        return
    numbers = start()
    results.add(SUITE, key, numbers)
    print(f"startup: {key}: {numbers}", flush=True)


def text_model() -> Path:
    """Return the folder of the model with a tokenizer for text. Make it if it is not there."""
    folder = WORK / "models" / f"{MODEL}-text"
    subprocess.run(
        [python_of("ours"), "-m", "benchmarks.models", MODEL, folder, "--text"],
        cwd=ROOT,
        check=True,
    )
    return folder


def text_data(rows: int) -> Path:
    """Return a JSONL file of so many rows, some 200 tokens each."""
    data = WORK / "data" / f"text-{rows}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    write_text(data, Corpus(rows=rows, mean=150.0, longest=750))
    return data


def start_kubetune(model: Path, data: Path) -> dict[str, Any]:
    """Run `kubetune train` until its first step is done; it is stopped then."""
    # Rows are prepared anew: that is a part of a start.
    shutil.rmtree(WORK / "startup-cache", ignore_errors=True)
    return start_command(model, data, {"training.global_batch_size": 16})


def start_command(
    model: Path, data: Path, special: dict[str, Any], *, threads: int = CORES
) -> dict[str, Any]:
    """Run `kubetune train` with these settings, and what the cache holds, until its first step is done."""
    run_dir = WORK / "startup-run"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {
        "model.path": model,
        "model.dtype": "bfloat16",
        "data.train": data,
        "data.cache": WORK / "startup-cache",
        "data.max_length": 1024,
        "lora.target_modules": f"[{', '.join(ATTENTION)}]",
        "output": run_dir,
        **special,
    }
    command = [python_of("ours"), "-m", "kubetune", "train"]
    command += [f"{key}={value}" for key, value in settings.items()]
    log = WORK / "logs" / "startup.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(threads), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return wait_for_line(run_dir / "timings.jsonl", process, start)
        finally:
            process.terminate()
            process.wait()


def wait_for_line(file: Path, process: subprocess.Popen[bytes], start: float) -> dict[str, Any]:
    """Return the seconds from `start` until `file` has a line. It is looked at every 5 ms."""
    while time.monotonic() - start < TIMEOUT_SECONDS:
        if file.exists() and b"\n" in file.read_bytes():
            return {
                "first_step_seconds": time.monotonic() - start,
                "first_step_cpu_seconds": cpu_seconds(process.pid),
            }
        if process.poll() is not None:
            return {
                "failed": f"kubetune ended with exit code {process.returncode} before its first step"
            }
        time.sleep(0.005)
    return {"failed": f"no step within {TIMEOUT_SECONDS:.0f} s"}


def start_verb(verb: str, model: Path, data: Path) -> dict[str, Any]:
    """Run a verb that trains nothing, to its end."""
    command = [python_of("ours"), "-m", "kubetune", *verb.split()]
    if verb == "plan":
        command += [f"model.path={model}", f"data.train={data}"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment(CORES), capture_output=True, text=True)
    seconds = time.monotonic() - start
    if done.returncode:
        return {"failed": done.stderr.strip().rpartition("\n")[2]}
    return {"seconds": seconds}


def start_trl(model: Path, data: Path) -> dict[str, Any]:
    """Run TRL's SFTTrainer for one step, with its defaults except for the batch."""
    order = Order(
        model=str(model),
        data=str(data),
        adapt="attention",
        lora_rank=LORA_RANK,
        batch=4,
        accumulation=4,
        epochs=1,
        max_length=1024,
        pack_length=1024,
        settings={},
        started=0.0,
        text=True,
        max_steps=1,
    )
    return first_step(execute("trl", "peers", order, threads=CORES, timeout=TIMEOUT_SECONDS))


def first_step(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return what a driver reports of its first step alone."""
    names = ("first_step_seconds", "first_step_cpu_seconds", "versions", "missing", "failed")
    return {name: numbers[name] for name in names if name in numbers}


if __name__ == "__main__":
    main()
