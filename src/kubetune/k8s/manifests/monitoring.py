"""Objects by which a cluster's own Prometheus and Grafana see a run: PodMonitor, alert rules and board.

PodMonitor and PrometheusRule are the Prometheus operator's kinds; boards are ConfigMaps that Grafana's sidecar loads by
their label. The names of metrics come from observers/prometheus.
"""

from __future__ import annotations

import json

from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec

PORT = "metrics"
COMPONENT = "monitoring"
OPERATOR = "monitoring.coreos.com/v1"


def container_ports(spec: RunSpec) -> list[Manifest]:
    """Return the trainer's port from which Prometheus reads metrics, where the config wants it."""
    prometheus = spec.config.tracking.prometheus
    if prometheus is None:
        return []
    return [{"name": PORT, "protocol": "TCP", "containerPort": prometheus.port}]


def monitoring(spec: RunSpec) -> list[Manifest]:
    """Return the objects that the config wants."""
    prometheus = spec.config.tracking.prometheus
    if prometheus is None:
        return []

    # The labels by which the cluster's own Prometheus and Grafana choose what they read.
    labels = dict(prometheus.labels)
    objects = []

    if prometheus.pod_monitor:
        body = {
            "selector": {"matchLabels": spec.selector(TRAINER)},
            "podMetricsEndpoints": [{"port": PORT, "interval": "15s"}],
        }
        objects.append(
            spec.manifest(
                OPERATOR, "PodMonitor", spec.name, COMPONENT, more_labels=labels, spec=body
            )
        )

    if prometheus.alerts:
        group = {"name": f"kubetune-{spec.name}", "rules": alert_rules(spec.name)}
        body = {"groups": [group]}
        objects.append(
            spec.manifest(
                OPERATOR, "PrometheusRule", spec.name, COMPONENT, more_labels=labels, spec=body
            )
        )

    if prometheus.dashboard:
        labels = {"grafana_dashboard": "1", **labels}
        content = {f"kubetune-{spec.name}.json": json.dumps(board(spec.name), indent=1)}
        objects.append(
            spec.manifest(
                "v1",
                "ConfigMap",
                f"{spec.name}-board",
                COMPONENT,
                more_labels=labels,
                data=content,
            )
        )
    return objects


def alert_rules(run: str) -> list[Manifest]:
    """Return the alerts of a run, in the form of a Prometheus rule file."""
    # Node 0 serves the run's numbers. Each node serves its own heartbeat, of which the oldest counts.
    of_run = f'{{run="{run}"}}'
    loss = f"kubetune_loss{of_run}"
    checkpoint_age = f"kubetune_checkpoint_age_seconds{of_run}"
    return [
        _alert(
            run,
            "Hung",
            f"max by (run) (kubetune_heartbeat_age_seconds{of_run}) > 600",
            during="1m",
            severity="critical",
            text="No progress for {{ $value | humanizeDuration }}: look at hang.json and the logs.",
        ),
        _alert(
            run,
            "NoCheckpoint",
            # A run that goes on after a pause begins with an old one, and has lost nothing yet.
            f"{checkpoint_age} > 3600 and {checkpoint_age} offset 1h",
            during="1m",
            severity="warning",
            text="The newest checkpoint is {{ $value | humanizeDuration }} old: a stop now would cost as much.",
        ),
        _alert(
            run,
            "Diverging",
            f"{loss} > 2 * min_over_time({loss}[1h]) + 0.5",
            during="5m",
            severity="warning",
            text="The loss is {{ $value | humanize }}, more than twice what it was within the hour.",
        ),
        _alert(
            run,
            "SlowRank",
            f"kubetune_slowest_rank_ratio{of_run} > 1.3",
            during="10m",
            severity="warning",
            text="One rank takes {{ $value | humanize }} times as long as the median: all wait for it.",
        ),
    ]


def _alert(
    run: str, name: str, expression: str, *, during: str, severity: str, text: str
) -> Manifest:
    return {
        "alert": f"Kubetune{name}",
        "expr": expression,
        "for": during,
        "labels": {"severity": severity},
        "annotations": {"summary": f"{run}: {name}", "description": text},
    }


# Title, unit of the axis, and metrics of each panel.
_PANELS = (
    ("Loss", "short", ("kubetune_loss", "kubetune_eval_loss")),
    ("Tokens a second", "short", ("kubetune_tokens_per_second",)),
    ("MFU and goodput", "percentunit", ("kubetune_mfu_ratio", "kubetune_goodput_ratio")),
    ("Steps", "short", ("kubetune_step", "kubetune_steps", "kubetune_checkpoint_step")),
    (
        "Age of checkpoint and last progress",
        "s",
        ("kubetune_checkpoint_age_seconds", "kubetune_heartbeat_age_seconds"),
    ),
    ("Peak memory", "bytes", ("kubetune_peak_memory_bytes",)),
    (
        "Time lost, and starts after the first",
        "s",
        ("kubetune_lost_seconds_total", "kubetune_restarts_total"),
    ),
    ("Slowest rank by the median", "short", ("kubetune_slowest_rank_ratio",)),
)


def board(run: str) -> Manifest:
    """Return Grafana's model of a board of this run."""
    # A Grafana may know several Prometheus servers, so the page lets its reader choose.
    variable = {
        "name": "source",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }
    panels = []
    for number, (title, unit, metrics) in enumerate(_PANELS):
        panels.append(_panel(run, number, title, unit, metrics))
    return {
        "title": f"kubetune: {run}",
        # Grafana allows 40 characters.
        "uid": f"kubetune-{run}"[:40],
        "schemaVersion": 39,
        "tags": ["kubetune"],
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }


def _panel(run: str, number: int, title: str, unit: str, metrics: tuple[str, ...]) -> Manifest:
    """Return one panel of the board. Two are side by side, 12 of 24 columns wide and 8 rows high."""
    source = {"type": "prometheus", "uid": "${source}"}
    targets = []
    for index, metric in enumerate(metrics):
        targets.append(
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": f'{metric}{{run="{run}"}}',
                "legendFormat": f"{metric.removeprefix('kubetune_')} {{{{node}}}}",
            }
        )
    # Panel 0 is at the left of row 0, panel 1 at its right, panel 2 at the left of row 1.
    row, column = divmod(number, 2)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * column, "y": 8 * row},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }
