"""Send a run to OpenTelemetry: its starts, phases, evaluations and checkpoints as spans, its events as log records.

The standard environment variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, say where they are sent and with what headers.
All starts of a run are in one trace, whose id follows from the run directory. A span is sent when it ends.

    run          ├──────────────────────────────────────────────┤   sent after the last start
    start        ├──────────────────┤       ├───────────────────┤
    phases       preparation│training       preparation│training
    and in them  evaluation, save, reference, preflight
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kubetune.base.logs import scrub
from kubetune.errors import FINAL, OK
from kubetune.extras import require
from kubetune.rundir import events, metrics
from kubetune.supervisor.observers.otlp import ids, providers

if TYPE_CHECKING:
    from kubetune.supervisor.observers.observer_process import Observed

_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
)
_NANO = 1_000_000_000
# Time that is kept at the end to print what was missed.
_SECONDS_TO_REPORT = 0.5


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """True if the environment names a collector."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return node == 0 and not is_off and any(environ.get(name) for name in _ENDPOINTS)


def observe(run: Observed) -> None:
    """Send the events of a run. Raise MissingExtra if the exporter is not installed."""
    require("OTEL_EXPORTER_OTLP_ENDPOINT", "opentelemetry.sdk", "opentelemetry.exporter")

    # The exporter only logs what it cannot send.
    failures = _Failures()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(failures)
    logger.propagate = False  # it logs each retry of each batch

    trace = Trace(run)
    for event in events.follow(run.run_dir, run.offset, run.ended):
        if event is not None:
            trace.take(event)
    is_sent = trace.end(run.deadline - time.monotonic() - _SECONDS_TO_REPORT)

    missed = []
    if failures.batches:
        missed.append(f"{failures.batches} batches")
    if not is_sent:
        missed.append("what was left at the end")
    if missed:
        print(
            f"kubetune: the OpenTelemetry collector missed {' and '.join(missed)}", file=sys.stderr
        )


class _Failures(logging.Handler):
    """Counts the batches that the collector did not take, and prints the first, with the warning before it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.batches = 0
        self._retry = ""  # what was logged about the last retry

    def emit(self, record: logging.LogRecord) -> None:
        """Count an error of the exporter, and print the first."""
        message = record.getMessage().partition("\n")[0]
        if record.levelno < logging.ERROR:
            self._retry = f"; before: {message}"
            return
        self.batches += 1
        if self.batches == 1:
            reason = scrub(message + self._retry)
            print(
                f"kubetune: OpenTelemetry does not work; the run goes on: {reason}", file=sys.stderr
            )


class Trace:
    """Sends the spans and the log records of this start of a run."""

    def __init__(self, run: Observed) -> None:
        from opentelemetry import trace

        # What every span and record says about where it comes from.
        attributes = {
            "service.name": "kubetune",  # unless OTEL_SERVICE_NAME is set
            "kubetune.run": run.name,
            "kubetune.task": run.task,
            "kubetune.model": scrub(run.model),
        }

        # Ids of the trace and of the span of the whole run, the same for all starts.
        number = hashlib.sha256(str(run.run_dir.absolute()).encode()).digest()
        trace_id = int.from_bytes(number[:16])
        run_id = int.from_bytes(number[16:24])
        generator = ids(trace_id, run_id)

        self._spans, self._records = providers(attributes, generator)
        self._tracer = self._spans.get_tracer("kubetune")
        self._logger = self._records.get_logger("kubetune")

        # The run's span is sent by the start that ends it. Until then the others name it as their parent.
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        root = trace.SpanContext(trace_id, run_id, is_remote=True, trace_flags=flags)
        self._ids = generator
        self._run_dir = run.run_dir
        self._run = trace.set_span_in_context(trace.NonRecordingSpan(root))
        self._trace: Any = trace

        # The spans that are open, and what new ones are within.
        self._start: Any = None
        self._phase: Any = None
        self._context: Any = self._run

    def take(self, event: Mapping[str, Any]) -> None:
        """Begin or end the spans that an event is about, and make a log record of it."""
        kind = event["event"]
        at = _nanoseconds(event["time"])
        # What the machine is made of is long, and the same in each event of a start.
        facts = {}
        for key, value in event.items():
            if key not in ("event", "time", "machine"):
                facts[key] = _attribute(value)

        if kind == "launch" and not event.get("node", 0):
            self._start = self._tracer.start_span(
                "start", self._run, start_time=at, attributes=facts
            )
            self._context = self._trace.set_span_in_context(self._start)
            self._enter("preparation", at)
        elif kind in ("start", "resume"):
            self._enter("training", at)
        elif kind in ("evaluation", "save", "reference", "teacher_numbers", "preflight"):
            # The event comes when it is done, and says how long it took.
            seconds = event.get("seconds") or 0.0
            if isinstance(seconds, dict):  # part -> seconds
                seconds = sum(seconds.values())
            began = at - int(seconds * _NANO)
            span = self._tracer.start_span(kind, self._context, start_time=began, attributes=facts)
            span.end(at)

        # The record of the exit belongs into the span that it ends, so it comes before the end.
        self._record(kind, at, facts)
        if kind == "exit" and not event.get("node", 0):
            self._leave(event, at)

    def _enter(self, phase: str, at: int) -> None:
        """End the phase that is open, and begin another."""
        if self._phase is not None:
            self._phase.end(at)
        self._phase = self._tracer.start_span(phase, self._context, start_time=at)

    def _leave(self, event: Mapping[str, Any], at: int) -> None:
        """End the spans of this start and, if no other start will follow, of the run."""
        # The inner span first.
        for span in (self._phase, self._start):
            if span is not None:
                if event["code"]:
                    reason = scrub(str(event.get("reason")))
                    span.set_status(self._trace.StatusCode.ERROR, reason)
                span.end(at)
        self._phase = None
        self._start = None

        # Now the run's own span can be sent, from its first event of all starts.
        if event["code"] in (OK, *FINAL):
            from opentelemetry.context import Context

            first = metrics.read_events(self._run_dir)[0]["time"]
            self._ids.is_of_run = True
            self._tracer.start_span("run", Context(), start_time=_nanoseconds(first)).end(at)

    def _record(self, kind: str, at: int, facts: Mapping[str, Any]) -> None:
        from opentelemetry._logs import LogRecord, SeverityNumber

        severity = SeverityNumber.INFO
        if facts.get("code") in FINAL or facts.get("ok") is False or kind in ("killed", "hooks"):
            severity = SeverityNumber.ERROR
        elif facts.get("code", OK) != OK:  # another start may fix it
            severity = SeverityNumber.WARN

        text = kind
        if facts.get("reason"):
            text = f"{kind}: {facts['reason']}"
        record = LogRecord(
            timestamp=at,
            context=self._context,
            severity_number=severity,
            severity_text=severity.name,
            body=text,
            attributes={**facts, "event.name": f"kubetune.{kind}"},
        )
        self._logger.emit(record)

    def end(self, seconds: float) -> bool:
        """Send everything that is left. Return False if the collector has not taken it after so many seconds."""
        deadline = time.monotonic() + seconds
        threads = []
        # Both at once, each of which may take as long as the collector lets it.
        for provider in (self._spans, self._records):
            thread = threading.Thread(target=provider.force_flush, daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _nanoseconds(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp() * _NANO)


def _attribute(value: Any) -> Any:
    """Return a value as OpenTelemetry allows it for an attribute: other kinds as JSON."""
    if isinstance(value, str | bool | int | float):
        return value
    return json.dumps(value)
