"""Carry out jobs one after the other, each in processes of its own, and keep what they report.

    Job (cases.py) → Order (peers/job.py) → python -m benchmarks.peers.DRIVER ORDER → "RESULT {…}" → results file

Each job gets the same model files and rows. A job that fails, takes too long or lacks a library is written down as
such, and the next one follows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from benchmarks import models
from benchmarks.cases import TRAINERS, Case, Home, Job
from benchmarks.corpus import Pair, token_pairs, token_rows, write_pairs, write_tokens
from benchmarks.flops import LORA_RANK
from benchmarks.peers.job import ATTENTION, LEARNING_RATE, Order
from benchmarks.recorder import RESULT
from benchmarks.results import ROOT, Results
from benchmarks.summary import Measurement, tokens_per_cpu_second, tokens_per_second

WORK = Path(os.environ.get("KUBETUNE_BENCHMARK_WORK", ROOT / "benchmarks" / ".work"))
TIMEOUT_SECONDS = 3600.0


def run_jobs(suite: str, jobs: Iterable[Job], results: Results) -> None:
    """Measure what the results do not hold yet, in the order given, with a line for each."""
    end_on_sigterm()
    for job in jobs:
        # What an interrupted benchmark has measured is not measured again.
        if results.find(suite, job.key) is not None:
            continue
        name = f"{job.case.name} {job.trainer} {job.processes}×{job.threads} #{job.repeat + 1}"
        if job.batch is not None:
            name += f" batch {job.batch}"
        print(f"{name:<60}", end=" ", flush=True)
        numbers = run_job(job)
        results.add(suite, job.key, numbers)
        print(summary(numbers), flush=True)


def end_on_sigterm() -> None:
    """Let SIGTERM end us as Ctrl-C does, so that the process being measured is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def summary(measurement: Measurement) -> str:
    """Return one measurement in a few words."""
    if "missing" in measurement:
        return f"left out: {measurement['missing']} is not installed"
    if "failed" in measurement:
        return f"failed: {measurement['failed']}"
    speed = tokens_per_cpu_second(measurement)
    wall = tokens_per_second(measurement)
    peak = measurement["peak_bytes"] / 2**20
    return f"{speed:,.0f} tokens/CPU-s, {wall:,.0f} tokens/s, peak {peak:,.0f} MB"


def run_job(job: Job) -> dict[str, Any]:
    """Carry out one job and return what it reported, or why it could not."""
    trainer = TRAINERS[job.trainer]
    order = order_of(job)
    # A driver's own failure is in its report. Here only what comes before it can fail.
    try:
        if trainer.home == "ours":
            prepare_run(job, order)
        return execute(
            trainer.driver, trainer.home, order, threads=job.threads, processes=job.processes
        )
    except subprocess.CalledProcessError as error:
        return {"failed": redact(f"preparing the run: {_last_line(error.stderr)}")}


def order_of(job: Job) -> Order:
    """Return what the driver of a job is told. Make the model and the rows if they are not there."""
    model, data = provide(job.case)
    return Order(
        model=str(model),
        data=str(data),
        adapt=job.case.adapt,
        lora_rank=LORA_RANK,
        batch=job.micro_batch,
        accumulation=job.accumulation,
        epochs=job.case.epochs,
        max_length=job.case.corpus.max_length,
        pack_length=job.case.pack_length,
        settings=job.settings(),
        started=0.0,
        run_dir=str(WORK / "run") if TRAINERS[job.trainer].home == "ours" else "",
    )


def provide(case: Case) -> tuple[Path, Path]:
    """Return the model folder and the rows of a case. Make them if they are not there."""
    model = WORK / "models" / case.model
    subprocess.run(
        [python_of("ours"), "-m", "benchmarks.models", case.model, model], cwd=ROOT, check=True
    )
    data = WORK / "data" / f"{case.name}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = models.SHAPES[case.model].vocab_size
    if case.pairs:
        write_pairs(data, token_pairs(case.corpus, vocabulary))
    else:
        write_tokens(data, token_rows(case.corpus, vocabulary))
    return model, data


def prepare_run(job: Job, order: Order) -> None:
    """Make kubetune's run directory and its prepared rows, as a launcher would, and compare these with the peers' ids.

    The peers get ids, so tokenising is no part of this measurement (benchmarks.startup has it).
    """
    import numpy as np

    from kubetune.config.load import load_config
    from kubetune.data.prepared.prepare import prepare
    from kubetune.plan.plan import make_plan
    from kubetune.supervisor.run_folder import create_run_dir

    run_dir = Path(order.run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)
    config = load_config(None, flags=run_settings(job, order))
    prepared = prepare(config)
    rows = [json.loads(line) for line in Path(order.data).read_text().splitlines()]
    for index, row in enumerate(rows):
        ours = []
        for ids, trained in prepared.train.sequences(index):
            labels = np.where(trained, ids.astype(np.int64), -100)
            ours.append((ids.tolist(), labels.tolist()))
        if ours != _ids_and_labels(row):
            raise RuntimeError(
                f"row {index}: kubetune's ids or labels differ from those the peers are given"
            )
    plan = make_plan(config, len(rows), 0, world_size=job.processes)
    create_run_dir(config, run_dir, plan)


def _ids_and_labels(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of each sequence of a row as the peers get them."""
    if "ids" in row:
        return [(sequence.ids, sequence.labels) for sequence in Pair(**row["ids"]).sequences]
    return [(row["input_ids"], row["labels"])]


def run_settings(job: Job, order: Order) -> dict[str, Any]:
    """Return kubetune's settings by dotted key, equal to what the peers get."""
    lora = {
        "lora.r": order.lora_rank,
        "lora.target_modules": ATTENTION if order.adapt == "attention" else "all-linear",
    }
    settings: dict[str, Any] = {
        "model.path": order.model,
        "data.train": order.data,
        "data.max_length": order.max_length,
        "data.cache": str(WORK / "cache"),
        "training.num_train_epochs": float(order.epochs),
        "training.global_batch_size": job.case.sequences_per_step,
        "training.per_device_train_batch_size": order.batch,
        "training.learning_rate": LEARNING_RATE,
        "training.lr_scheduler_type": "constant",
        "training.warmup_ratio": 0.0,
        "training.save_steps": 1_000_000,
        "output": order.run_dir,
    }
    if job.case.pairs:
        settings["task"] = "preference"
    if order.adapt != "full":
        settings |= lora
    return settings | order.settings


def execute(
    driver: str,
    home: Home,
    order: Order,
    *,
    threads: int = 1,
    processes: int = 1,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Run a driver with one process per rank. Return what rank 0 reported, or `failed` and why."""
    with ExitStack() as stack:
        ranks, outputs = launch(stack, driver, home, order, threads=threads, processes=processes)
        try:
            for process in ranks:
                process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {timeout:.0f} s"}
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        outputs[0].seek(0)
        worst = max((process.returncode for process in ranks), key=abs)
        return read_report(outputs[0].read(), worst)


def launch(
    stack: ExitStack, driver: str, home: Home, order: Order, *, threads: int = 1, processes: int = 1
) -> tuple[list[subprocess.Popen[bytes]], list[TextIO]]:
    """Start a driver with one process per rank. Return these and what they print, which is closed with `stack`."""
    log = WORK / "logs" / f"{driver}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # The time to the first step counts from here, Python's own start included.
    order = replace(order, started=time.monotonic())
    command = [python_of(home), "-m", f"benchmarks.peers.{driver}", json.dumps(asdict(order))]
    port = free_port()
    ranks = []
    outputs: list[TextIO] = []
    for rank in range(processes):
        variables = environment(threads)
        if processes > 1:
            variables |= rank_variables(rank, processes, port)
        output = stack.enter_context(log.with_suffix(f".{processes}.{rank}.log").open("w+"))
        outputs.append(output)
        ranks.append(
            subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
            )
        )
    return ranks, outputs


def read_report(output: str, code: int) -> dict[str, Any]:
    """Return the report in a driver's output; without one, its last line as the reason."""
    # The last one: a library may print what begins like it.
    reports = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    if reports and (code == 0 or "missing" in json.loads(reports[-1])):
        return json.loads(reports[-1])  # type: ignore[no-any-return]
    if code == -9:
        return {"failed": "killed, as the kernel does when memory runs out"}
    return {"failed": redact(_last_line(output) or f"exit code {code}")}


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def redact(text: str) -> str:
    """Return a text without folders of this machine, and short."""
    for folder in (WORK, ROOT, Path.home(), Path(sys.prefix)):
        text = text.replace(str(folder), "…")
    return text[:300]


def python_of(home: Home) -> str:
    """Return the interpreter for a driver: of the peers' own environment if it was made, else this one."""
    folder = ROOT / "benchmarks" / f".venv-{home}"
    if home != "ours" and (folder / "installed").exists():
        return str(folder / "bin" / "python")
    return sys.executable


def environment(threads: int) -> dict[str, str]:
    """Return variables for every trainer alike: threads, no network, no progress bars, caches in the work folder."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(WORK / "datasets"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DISABLE_VERSION_CHECK": "1",
        "TMPDIR": str(_temporary()),
    }


def _temporary() -> Path:
    folder = WORK / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rank_variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
