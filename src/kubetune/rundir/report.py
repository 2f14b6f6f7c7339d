"""report.json: the whole run summed up, earlier starts included. Not for the page made from it (reporting/)."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubetune.base.files import open_regular, write_atomic
from kubetune.base.logs import scrub
from kubetune.config.naming import RESOLVED
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.rundir import shapes
from kubetune.rundir.machine import versions
from kubetune.rundir.metrics import REPORT, now, read_events
from kubetune.rundir.throughput import throughput
from kubetune.rundir.totals import Totals, measured_ends, runaway

REPORT_VERSION = 1
_REPORT_START = b'{\n  "schema_version"'


def write_report_json(
    run_dir: Path,
    totals: Totals,
    *,
    world_size: int,
    data_fingerprint: str,
    peak_memory_bytes: int,
    copy_to: Path | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Write report.json, and the same to `copy_to`, and return it.

    `peak_memory_bytes` is the highest of all ranks; `facts` are added as they are.
    """
    # Only numbers that hold for the whole run, all its starts together.
    seconds = totals.seconds
    tokens = totals.tokens
    trained = totals.trained_tokens
    report = {
        "schema_version": REPORT_VERSION,
        "world_size": world_size,
        "steps": totals.last.get("step", 0),
        "epochs": totals.last.get("epoch", 0),
        "samples": totals.samples,
        "tokens": tokens,
        "trained_tokens": trained,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "throughput": throughput(read_events(run_dir), tokens, trained, seconds, world_size),
        "loss_first": totals.first.get("loss"),
        "loss_last": totals.last.get("loss"),
        "loss_runaway": runaway(totals),
        "measures": measured_ends(totals),
        "eval_last": totals.evaluation,
        "peak_memory_bytes": peak_memory_bytes,
        "data_fingerprint": data_fingerprint,
        "config_sha256": _config_sha256(run_dir),
        "versions": versions(),
        "finished": now(),
        **facts,
    }
    content = scrub(json.dumps(report, indent=2) + "\n")
    write_atomic(run_dir / REPORT, content, within=run_dir)
    if copy_to is not None:
        require_place_of_report(copy_to)
        write_atomic(copy_to, content)
    return report


def require_place_of_report(path: Path) -> None:
    """Raise ConfigError where a copy of a report would overwrite anything but another one, or an empty file."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        # Our reports begin with these bytes.
        start = file.read(len(_REPORT_START))
        if start not in (b"", _REPORT_START):
            raise ConfigError(
                f"logging.report_json: {path} holds something other than a report, and would be overwritten; name "
                "another file, or remove it"
            )


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the contents of report.json.

    Raise FileNotFoundError, or EnvironmentFault for a damaged report and for one of another version.
    """
    path = run_dir / REPORT
    report = shapes.read(path)
    version = report.get("schema_version")
    if version != REPORT_VERSION:
        raise EnvironmentFault(
            f"{path}: schema_version is {version!r}, this version of kubetune reads "
            f"{REPORT_VERSION}; read it with the version that wrote it"
        )
    return report


def is_reported(run_dir: Path, step: int) -> bool:
    """True if report.json is of this many steps and of the config as it is."""
    try:
        report = read_report(run_dir)
    except (FileNotFoundError, EnvironmentFault):
        return False
    if report.get("steps") != step:
        return False
    return bool(report.get("config_sha256") == _config_sha256(run_dir))


def _config_sha256(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / RESOLVED).read_bytes()).hexdigest()
