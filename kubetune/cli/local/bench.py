"""`kubetune bench`: the speed of this machine, and what settings that are `auto` should mean on it.

Writes one JSON file with the machine and every case, which `python -m benchmarks.table` shows, and the choices into the
user's cache, where `train` and `plan` find them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files
from kubetune.base.gpus import gpu_use, visible_gpus
from kubetune.base.humanize import size, visible

UNSAID = ("why", "compile_from")
MINUTES = {"cpu": 2.5, "cuda": 10.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="results; left out: bench-DATE-MACHINE.json"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no case after so many; left out: 10 on a GPU, 2.5 on a CPU",
    )
    parser.add_argument(
        "--shape", help="measure only models of this size: tiny, 42M, 0.6B, 4B or 8B"
    )
    parser.add_argument("--work", metavar="FOLDER", help="disk for the models, which are removed")
    parser.add_argument("--keep-choices", action=argparse.BooleanOptionalAction, default=True,
                        help="write down what settings that are auto mean on this machine")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print a line for each case, and write. Exit code 3 where no case ran, or results differ."""
    from kubetune.plan import measured
    from kubetune.plugins.diagnostics.bench import cases, measure, verdict

    device = "cuda" if visible_gpus(os.environ) else "cpu"
    if args.shape not in (None, *cases.SHAPES):
        raise errors.ConfigError(
            f"--shape is {args.shape!r}; expected one of {', '.join(cases.SHAPES)}"
        )
    wanted = cases.on_gpu() if device == "cuda" else cases.on_cpu(args.shape or "42M")
    wanted = [case for case in wanted if args.shape in (None, case.shape)]
    if not wanted:
        raise errors.ConfigError(
            f"--shape {args.shape} is not measured on a GPU; expected 0.6B, 4B or 8B"
        )
    minutes, machine, rows = (
        args.minutes or MINUTES[device],
        _machine(device),
        dict[str, dict[str, Any]](),
    )
    started = datetime.now(UTC).isoformat(timespec="seconds")
    output = Path(args.output or f"bench-{started[:10]}-{_slug(machine)}.json")

    def write(**more: Any) -> None:
        measurements = [{"suite": "bench", "case": name, **row} for name, row in rows.items()]
        facts = {
            "started": started,
            "machine": machine,
            "source": "kubetune bench",
            "measurements": measurements,
        }
        files.write_atomic(output, json.dumps(facts | more, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="kubetune-bench-", dir=args.work) as folder:
        for case, row in measure.measure(wanted, Path(folder), device, 60 * minutes):
            rows[case.name] = row
            print(f"{case.name:<52} {_line(row)}", flush=True)
            write()
        if device == "cuda":
            rows["tests/gpu"] = measure.checks(Path(errors.__file__).parents[1], print, 600.0)
            print(
                f"{'tests/gpu':<52} {rows['tests/gpu'].get('said') or rows['tests/gpu'].get('failed')}"
            )
    found = verdict.choices(rows, list(dict.fromkeys(case.shape for case in wanted)), device)
    wrong = verdict.disagreements(rows)
    write(choices=found, disagreements=wrong)
    for line in wrong:
        print(f"differs: {line}")
    told = ", ".join(
        f"{key} {str(value).lower()}" for key, value in found.items() if key not in UNSAID
    )
    print(f"here `auto` should mean: {told or 'nothing is known'}")
    # What a tiny model is fastest with says nothing of others.
    if args.keep_choices and told and not wrong and args.shape != "tiny":
        measured.keep(machine["gpu"] if device == "cuda" else None, **found)
        print(f"kept in {measured.place()}, where `train` and `plan` take it from")
    print(visible(f"written: {output}"))
    return (
        errors.ENVIRONMENT
        if wrong or not any("tokens_per_second" in row for row in rows.values())
        else errors.OK
    )


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return str(row["failed"])
    tflops = f", {row['tflops']:,.3g} TFLOP/s" if "tflops" in row else ""
    return f"{row['tokens_per_second']:,.0f} tokens/s{tflops}, peak {size(row['peak_bytes'])}"


def _machine(device: str) -> dict[str, Any]:
    """Facts that results are told apart by: no host names, users or folders."""
    from kubetune.rundir import machine

    info = (
        Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    )
    facts = machine.describe()
    return {
        "cpu": facts["cpu"],
        "cores": facts["cores"],
        "memory_gib": round(facts["memory_bytes"] / 2**30),
        "instructions": sorted(set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", info))),
        "gpu": next((str(gpu["name"]) for gpu in gpu_use()), None) if device == "cuda" else None,
        "driver": facts["driver"],
        "versions": facts["versions"],
    }


def _slug(machine: dict[str, Any]) -> str:
    text = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
