"""What sends spans and log records to an OpenTelemetry collector, by the protocol OTLP over HTTP."""

from __future__ import annotations

from typing import Any


def providers(attributes: dict[str, str], generator: Any) -> tuple[Any, Any]:
    """Return the providers of spans and of log records. `attributes`: where they come from. `generator`: of ids."""
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(attributes)
    spans = TracerProvider(resource=resource, id_generator=generator)
    records = LoggerProvider(resource=resource)
    # Spans and records are sent in batches by a thread of each, so an event costs no request.
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    records.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
    return spans, records


def ids(trace_id: int, span_id: int) -> Any:
    """Return a generator of span ids: random ones, but `span_id` for the run's own span. All are in one trace."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        is_of_run = False

        def generate_trace_id(self) -> int:
            return trace_id

        def generate_span_id(self) -> int:
            if self.is_of_run:
                return span_id
            return int(super().generate_span_id())

    return Ids()
