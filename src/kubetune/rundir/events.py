"""Events of a run, as a contract: the kinds of lines in events.jsonl and their fields, as a JSON Schema.

docs/events.schema.json is written from KINDS. A later version may add kinds and fields, which readers step over; a
field that goes, or means something else, makes another VERSION. Writing them is metrics.record_event's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.rundir import metrics

VERSION = metrics.EVENTS_VERSION
_SECONDS_BETWEEN_LOOKS = 0.5

# What each kind says, and its fields; `?`: not in every line of the kind, or null.
KINDS: dict[str, tuple[str, str]] = {
    "launch": (
        "The agent of a node starts.",
        "node:integer nodes:integer processes:integer last_seen?:time",
    ),
    "start": (
        "The first step is about to begin.",
        "step:integer steps:integer machine:object device?:string device_bytes?:integer dtype?:string "
        "flops_per_token?:number peak_tflops?:number peak_source?:string forecast?:object",
    ),
    "resume": (
        "As `start`, from the checkpoint of a step.",
        "step:integer steps:integer machine:object device?:string device_bytes?:integer dtype?:string "
        "flops_per_token?:number peak_tflops?:number peak_source?:string forecast?:object",
    ),
    "preflight": (
        "The rehearsal before the first step.",
        "rows:integer tokens:integer measured_bytes:integer device_bytes:integer checkpoint_bytes:integer "
        "forecast_bytes?:integer reserved_bytes?:integer seconds:object",
    ),
    "reference": (
        "Log-probabilities under the model before training.",
        "rows:integer reused:boolean seconds:number",
    ),
    "teacher": (
        "Which teacher `task: distill` learns from. `probe`: log-probabilities of one on servers.",
        "name:string digest:string probe:array",
    ),
    "teacher_numbers": (
        "What a teacher says of the rows, kept for all runs.",
        "rows:integer reused:boolean seconds:number",
    ),
    "compile": (
        "Kernels were compiled, once, before the next step.",
        "step:integer seconds:number",
    ),
    "evaluation": (
        "An evaluation of the weights after a step.",
        "step:integer best:boolean seconds:number metrics:object",
    ),
    "save": (
        "A checkpoint is whole; seconds are those the loop waited.",
        "step:integer seconds:number",
    ),
    "mirror": (
        "The copy in an object store fails, or works again.",
        "address:string ok:boolean reason?:string",
    ),
    "killed": (
        "The kernel ended a rank for lack of memory.",
        "node:integer rank:integer step?:integer",
    ),
    "benchmarks": ("Benchmarks at the end.", "ok:boolean reason?:string tasks?:array"),
    "exit": (
        "The node's ranks have ended; codes are those of the agent.",
        "node:integer code:integer reason:string step?:integer error?:string",
    ),
    "push": (
        "The result was uploaded, or not.",
        "repo:string ok:boolean reason?:string url?:string commit?:string",
    ),
    "served": (
        "A server that `serve --check --watch` asks has become another model, or the model again; for hooks alone.",
        "model:string ok:boolean reason:string",
    ),
    "hooks": (
        "Commands for events failed, or were left out.",
        "ran:integer failed:integer left_out:integer reason:string",
    ),
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a line."""
    kinds = [_schema_of(kind, text, fields) for kind, (text, fields) in KINDS.items()]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of events.jsonl",
        "description": "An event of a run of kubetune. Kinds and fields that are not known are to be stepped over.",
        "type": "object",
        "required": ["schema_version", "time", "event"],
        "properties": {
            "schema_version": {"const": VERSION},
            "time": {"type": "string", "format": "date-time"},
            "event": {"type": "string", "examples": list(KINDS)},
        },
        "allOf": kinds,
    }


def _schema_of(kind: str, text: str, fields: str) -> dict[str, Any]:
    """Return the part of the schema for events of a kind: "if the event is this one, then it has these fields"."""
    required = []
    properties = {}
    for field in fields.split():
        # Such as "last_seen?:time".
        name, _, type_name = field.partition(":")
        form: dict[str, Any] = {"type": type_name}
        if type_name == "time":
            form = {"type": "string", "format": "date-time"}
        if name.endswith("?"):
            form["type"] = [form["type"], "null"]
        else:
            required.append(name)
        properties[name.removesuffix("?")] = form
    then = {"description": text, "required": required, "properties": properties}
    return {"if": {"properties": {"event": {"const": kind}}}, "then": then}


def size(run_dir: Path) -> int:
    """Return the bytes of events.jsonl: where the next event will begin."""
    path = run_dir / metrics.EVENTS
    if not path.exists():
        return 0
    return path.stat().st_size


def follow(run_dir: Path, offset: int, ended: threading.Event) -> Iterator[dict[str, Any] | None]:
    """Yield the events after `offset` as they come, and None after each look at the file.

    After `ended` is set, there is one last look.
    """
    lines = metrics.follower(run_dir / metrics.EVENTS, offset)
    while True:
        is_last = ended.is_set()
        yield from lines.read()
        yield None
        if is_last:
            return
        ended.wait(_SECONDS_BETWEEN_LOOKS)
