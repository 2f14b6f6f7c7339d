"""`kubetune bench`: the speed of this machine, and what settings that are `auto` should mean on it.

It writes one JSON file with the machine and every case, which `python -m benchmarks.table` shows, and the choices into
the user's cache, where `train` and `plan` read them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import files
from kubetune.base.cpu import processor
from kubetune.base.gpus import gpu_use, visible_gpus
from kubetune.base.humanize import counted, size, visible

if TYPE_CHECKING:
    from kubetune.plugins.diagnostics.bench.cases import Case

# Of the choices: reasons, which the line for people leaves out.
NOT_PRINTED = ("why", "compile_from")

# After which no case is begun, by device.
MINUTES = {"cpu": 2.5, "cuda": 10.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="results; left out: bench-DATE-MACHINE.json"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="start no case after so many minutes; left out: 10 on a GPU, 2.5 on a CPU",
    )
    parser.add_argument(
        "--shape", help="measure only models of this size: tiny, 42M, 0.6B, 4B or 8B"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print a line for each case, and write. The exit code is 3 where no case ran, or results differ."""
    from kubetune.plugins.diagnostics.bench import auto_verdict
    from kubetune.rundir.machine import slug

    device = "cuda" if visible_gpus(os.environ) else "cpu"
    shape = args.shape
    # Other work on a GPU is not known here; that on the processors is.
    if device == "cpu" and shape is None and _is_busy():
        shape = "tiny"
    cases = _cases(device, shape)
    machine = _machine(device)
    started = datetime.now(UTC).isoformat(timespec="seconds")

    # Measure.
    output = Path(args.output or f"bench-{started[:10]}-{slug(machine)}.json")
    facts = {"started": started, "machine": machine, "source": "kubetune bench"}
    results: dict[str, dict[str, Any]] = {}
    seconds = 60 * (args.minutes or MINUTES[device])
    with tempfile.TemporaryDirectory(prefix="kubetune-bench-") as folder:
        for name, result in _measure(cases, Path(folder), device, seconds):
            results[name] = result
            # After each case, so that an interrupted bench keeps what it measured.
            _write(output, facts, results)

    # Conclude: what is fastest, and whether all cases of a model had the same losses.
    shapes = list(dict.fromkeys(case.shape for case in cases))
    choices = auto_verdict.choices(results, shapes)
    disagreements = auto_verdict.disagreements(results)
    _write(output, facts, results, choices=choices, disagreements=disagreements)
    for line in disagreements:
        print(f"differs: {line}")
    gathered_ahead = auto_verdict.overlap(results, shapes, device)
    if gathered_ahead is not None:
        print(gathered_ahead)
    # What a tiny model is fastest with does not hold for others.
    keeps = not disagreements and shape != "tiny"
    _conclude(choices, machine["gpu"], keeps=keeps)
    print(visible(f"written: {output}"))
    has_run = any("tokens_per_second" in result for result in results.values())
    if disagreements or not has_run:
        return errors.ENVIRONMENT
    return errors.OK


def _is_busy() -> bool:
    """True if other processes keep the processors busy; says so, and what follows from it."""
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    if load < 1.5 * cores:
        return False
    print(
        f"this machine is busy: {load:.1f} processes on {counted(cores, 'core')} in the last minute. Speeds would mean "
        "nothing, so only a tiny model is tried, and nothing is kept; for real numbers call it again when the machine "
        "is idle, or choose a size with --shape 42M",
        flush=True,
    )
    return True


def _measure(
    cases: Sequence[Case], folder: Path, device: str, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each case, and print a line for it."""
    from kubetune.plugins.diagnostics.bench import measure

    # Each case is a process of its own, so that one that dies leaves the others alone.
    for case, result in measure.measure(cases, folder, device, seconds):
        print(f"{case.name:<52} {_line(result)}", flush=True)
        yield case.name, result


def _write(
    output: Path, facts: dict[str, Any], results: dict[str, dict[str, Any]], **conclusions: Any
) -> None:
    """Write the file of results, as far as they are known."""
    measurements = [{"suite": "bench", "case": name, **row} for name, row in results.items()]
    content = facts | {"measurements": measurements} | conclusions
    files.write_atomic(output, json.dumps(content, indent=1) + "\n")


def _cases(device: str, shape: str | None) -> list[Case]:
    """Return the cases to measure. Raise ConfigError for a shape without cases."""
    from kubetune.plugins.diagnostics.bench import cases

    if shape not in (None, *cases.SHAPES):
        raise errors.ConfigError(f"--shape is {shape!r}; expected one of {', '.join(cases.SHAPES)}")
    if device == "cpu":
        of_device = cases.on_cpu(shape or "42M")
    else:
        of_device = cases.on_gpu(visible_gpus(os.environ))
    wanted = [case for case in of_device if shape in (None, case.shape)]
    if not wanted:
        raise errors.ConfigError(
            f"--shape {shape} is not measured on a GPU; expected 0.6B, 4B or 8B"
        )
    return wanted


def _conclude(choices: dict[str, Any], gpu: str | None, *, keeps: bool) -> None:
    """Print what `auto` should mean on this machine, and keep that where `train` and `plan` look."""
    from kubetune.plan import measured

    settings = []
    for key, value in choices.items():
        if key not in NOT_PRINTED:
            settings.append(f"{key} {str(value).lower()}")
    print(f"here `auto` should mean: {', '.join(settings) or 'nothing is known'}")
    if keeps and settings:
        measured.keep(gpu, **choices)
        print(f"kept in {measured.place()}, which `train` and `plan` read")


def _line(result: dict[str, Any]) -> str:
    """Return the result of a case in a line."""
    if "failed" in result:
        return str(result["failed"])
    parts = [f"{result['tokens_per_second']:,.0f} tokens/s"]
    if "tflops" in result:
        parts.append(f"{result['tflops']:,.3g} TFLOP/s")
    parts.append(f"peak {size(result['peak_bytes'])}")
    return ", ".join(parts)


def _machine(device: str) -> dict[str, Any]:
    """Return the facts that decide speed; no host names, users or folders."""
    from kubetune.rundir import machine

    facts = machine.describe()
    gpu = None
    if device == "cuda":
        gpu = next((str(row["name"]) for row in gpu_use()), None)
    return {
        "cpu": facts["cpu"],
        "cores": facts["cores"],
        "memory_gib": round(facts["memory_bytes"] / 2**30),
        "instructions": processor.instructions(),
        "gpu": gpu,
        "driver": facts["driver"],
        "versions": facts["versions"],
    }
