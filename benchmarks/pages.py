"""Measure how soon the pages of `kubetune ui` come, and the memory of its server.

    python -m benchmarks.pages FOLDER

FOLDER is filled once (1 GB) and used again: 100 runs, one of a million steps, and a million rows that are filtered in
every way. Prints a line for each page: the slowest of five requests, and beside it the one before these.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import numpy as np

import kubetune
from kubetune.base import processes, whole_folder
from kubetune.config.load import load_config
from kubetune.config.resolved import resolved
from kubetune.data.prepared.prepare import MANIFEST, manifest_text, prepare
from kubetune.rundir import metrics
from tests.run.test_report_long import write_run

EMBEDDED = Path(kubetune.__file__).parent / "cli" / "local" / "embedded"
MILLION = 1_000_000
# Queries of the page of data: each filter and order, and words that all rows hold, and none.
FILTERS = (
    "",
    "at=999980",
    "source=0&low=20&high=60",
    "order=longest",
    "order=shortest",
    "order=least",
    "problem=limit",
    "problem=little",
    "problem=repeated",
    "text=kubectl",
    "text=nothing&order=longest",
    "text=nothing&order=least&low=30",
    "text=nothing&problem=repeated",
)


def write_many(folder: Path) -> None:
    """Write 100 runs, one of them of a million steps, and one of a million rows."""
    folder.mkdir(parents=True)
    for number in range(98):
        write_run(folder / f"run-{number:03d}", 100)
    write_run(folder / "long", MILLION)
    write_rows(folder)


def write_rows(folder: Path) -> Path:
    """Write the run `million`, whose prepared rows are a million: the demo's, over and over."""
    data = {"train": f"{EMBEDDED}/data/train.jsonl", "cache": str(folder / ".cache")}
    config = load_config({"name": "million", "model": str(EMBEDDED / "model"), "data": data})
    prepared = prepare(config)
    rows = prepared.train
    fingerprint = "e" * 64
    place = prepared.path.parent / fingerprint[:32]
    train = place / "train"
    train.mkdir(parents=True)
    for path in (prepared.path / "train").iterdir():
        (train / path.name).write_bytes(path.read_bytes())

    # Each file of the prepared rows, repeated or cut off at a million.
    times = -(-MILLION // len(rows))
    lengths = np.resize(rows.lengths, MILLION)
    np.concatenate([[0], np.cumsum(lengths)]).astype("i8").tofile(train / "offsets.i64")
    for name in ("tokens.u32", "trained.u8"):
        (train / name).write_bytes((prepared.path / "train" / name).read_bytes() * times)
    np.resize(rows.trained_counts, MILLION).astype("u4").tofile(train / "labels.u32")
    np.zeros(MILLION, "u2").tofile(train / "source.u16")
    np.arange(MILLION, dtype="u4").tofile(train / "row.u32")

    text = manifest_text(fingerprint, whole_folder.checksums(place))
    (place / MANIFEST).write_text(text)
    run_dir = folder / "million"
    run_dir.mkdir()
    (run_dir / "resolved.json").write_text(json.dumps(resolved(config)))
    (run_dir / metrics.DATA).write_text(json.dumps({"fingerprint": fingerprint}))
    return run_dir


def main(argv: Sequence[str] | None = None) -> None:
    """Fill the folder, serve it, and look at each page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    if not folder.exists():
        write_many(folder)
    command = processes.module("kubetune", "ui", str(folder), "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"(http://\S+)/(\?token=\S+)", server.stdout.readline())
        assert address is not None, "the server prints its address first"
        opener = build_opener(HTTPCookieProcessor())
        opener.open(f"{address[1]}/{address[2]}").close()  # logs in
        compared = "/compare?" + "&".join(f"dir=run-{number:03d}" for number in range(12))
        pages = ["/", "/run?dir=run-005", "/run?dir=long", compared, "/new", "/chat"]
        pages += [f"/data?dir=million&{query}" for query in FILTERS]
        try:
            for page in pages:
                first = seconds_of(opener, f"{address[1]}{page}")
                slowest = max(seconds_of(opener, f"{address[1]}{page}") for _ in range(5))
                now, most = mebibytes(server.pid)
                times = f"{slowest * 1e3:5.0f} ms  first {first * 1e3:5.0f} ms"
                print(f"{times}  {now:3.0f} to {most:3.0f} MiB  {page[:60]}", flush=True)
        finally:
            server.terminate()


def mebibytes(pid: int) -> list[float]:
    """Return the memory that a process has now, and the most that it had so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    result = []
    for name in ("VmRSS", "VmHWM"):
        line = re.search(rf"{name}:\s+(\d+) kB", status)
        assert line is not None, "Linux has both"
        result.append(int(line[1]) / 1024)
    return result


def seconds_of(opener: OpenerDirector, address: str) -> float:
    """Return the seconds until a page has come as a whole."""
    start = time.perf_counter()
    with opener.open(address) as answer:
        answer.read()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
