"""Files of a run directory that an earlier version of kubetune wrote, in the words of this one.

What is written says its version from 2 on; what says none is of version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubetune.errors import EnvironmentFault

REPORT_VERSION = 2
"""`schema_version` of report.json; 2 renamed keys of what is forecast and what came."""

BEFORE_AFTER, SAMPLES = "before_after.jsonl", "samples.jsonl"
"""The file of answers before and after training, and what it was called once."""

_EVENTS = {"probe": "preflight"}
_PREFLIGHT = {"foreseen_bytes": "forecast_bytes"}
_REPORT = {"probe": "preflight", "hindsight": "actuals"}
_ACTUALS = {
    "memory": {"foreseen_bytes": "forecast_bytes", "off": "relative_error"},
    "hours": {"foreseen": "forecast", "in_steps": "step_hours", "whole": "total_hours", "off": "relative_error"},
    "price": {
        "foreseen": "forecast", "in_steps": "steps", "whole": "total", "off": "relative_error",
        "of_a_device_and_hour": "per_device_hour",
    },
}  # fmt: skip


def before_after(run_dir: Path) -> Path:
    """Path of the answers before and after training, by the file's name or by its earlier one."""
    new, old = run_dir / BEFORE_AFTER, run_dir / SAMPLES
    return old if old.exists() and not new.exists() else new


def event(line: dict[str, Any]) -> dict[str, Any]:
    """A line of events.jsonl, of any version, as one of this version."""
    kind = line["event"]
    if not isinstance(kind, str) or kind not in _EVENTS:
        return line
    return {**_renamed(line, _PREFLIGHT), "event": _EVENTS[kind]}


def report(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """A report.json of any version as one of this version. Raises EnvironmentFault for a later version's."""
    version = values.get("schema_version", 1)
    if version == REPORT_VERSION:
        return values
    if version != 1:
        raise EnvironmentFault(
            f"{path}: schema_version is {version!r}, this version of kubetune reads 1 to {REPORT_VERSION}; read it "
            "with the version that wrote it"
        )
    new = {**_renamed(values, _REPORT), "schema_version": REPORT_VERSION}
    if isinstance(found := new.get("preflight"), dict):
        new["preflight"] = event({"event": "probe", **found})
    if isinstance(found := new.get("actuals"), dict):
        new["actuals"] = {
            part: _renamed(numbers, _ACTUALS[part]) if part in _ACTUALS and isinstance(numbers, dict) else numbers
            for part, numbers in found.items()
        }
    return new


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}
