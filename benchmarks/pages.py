"""How soon the pages of `kubetune ui` come, and the memory of its server: 100 runs, one of a million steps, and a
million rows that are filtered in every way.

    python -m benchmarks.pages FOLDER

FOLDER is filled once (1 GB) and used again. Prints a line for each page: the slowest of five looks, after a first one
that is told beside it.
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
from kubetune.config.load import load_config, resolved
from kubetune.data.prepared.prepare import MANIFEST, manifest_text, prepare
from kubetune.rundir import metrics
from tests.run.test_report_long import write_run

EMBEDDED = Path(kubetune.__file__).parent / "cli" / "local" / "embedded"
MILLION = 1_000_000
FILTERS = (
    "", "at=999980", "source=0&low=20&high=60", *(f"order={name}" for name in ("longest", "shortest", "least")),
    *(f"problem={name}" for name in ("limit", "little", "repeated")), "text=kubectl", "text=nothing&order=longest",
    "text=nothing&order=least&low=30", "text=nothing&problem=repeated",
)  # fmt: skip
"""Queries of the page of data: each filter and order, and words that all rows hold, and none."""


def write_many(folder: Path) -> None:
    """100 runs, one of them of a million steps, and one of a million rows."""
    folder.mkdir(parents=True)
    for number in range(98):
        write_run(folder / f"run-{number:03d}", 100)
    write_run(folder / "long", MILLION)
    write_rows(folder)


def write_rows(folder: Path) -> Path:
    """The run `million`, whose prepared rows are a million: the demo's, over and over."""
    data = {"train": f"{EMBEDDED}/data/train.jsonl", "cache": str(folder / ".cache")}
    config = load_config({"name": "million", "model": str(EMBEDDED / "model"), "data": data})
    prepared = prepare(config)
    rows, fingerprint = prepared.train, "e" * 64
    place = prepared.path.parent / fingerprint[:32]
    train = place / "train"
    train.mkdir(parents=True)
    for path in (prepared.path / "train").iterdir():
        (train / path.name).write_bytes(path.read_bytes())
    times, lengths = -(-MILLION // len(rows)), np.resize(rows.lengths, MILLION)
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
        found = re.search(r"(http://\S+)/(\?token=\S+)", server.stdout.readline())
        assert found is not None
        opener = build_opener(HTTPCookieProcessor())
        opener.open(f"{found[1]}/{found[2]}").close()
        compared = "/compare?" + "&".join(f"dir=run-{number:03d}" for number in range(12))
        pages = ["/", "/run?dir=run-005", "/run?dir=long", compared, "/new", "/chat"]
        pages += [f"/data?dir=million&{query}" for query in FILTERS]
        try:
            for page in pages:
                first, *others = (seconds_of(opener, f"{found[1]}{page}") for _ in range(6))
                held = " to ".join(f"{size:3.0f}" for size in mebibytes(server.pid))
                print(
                    f"{max(others) * 1e3:5.0f} ms  first {first * 1e3:5.0f} ms  {held} MiB  {page[:60]}",
                    flush=True,
                )
        finally:
            server.terminate()


def mebibytes(pid: int) -> list[float]:
    """Memory that a process holds now, and the most that it held so far."""
    known = Path(f"/proc/{pid}/status").read_text()
    return [
        int(number) / 1024
        for name in ("RSS", "HWM")
        for number in re.findall(rf"Vm{name}:\s+(\d+) kB", known)
    ]


def seconds_of(opener: OpenerDirector, address: str) -> float:
    """Seconds until a page is there as a whole."""
    begun = time.perf_counter()
    with opener.open(address) as answer:
        answer.read()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
