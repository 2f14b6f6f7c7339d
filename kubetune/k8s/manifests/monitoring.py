"""Objects by which a cluster's own Prometheus and Grafana see a run: PodMonitor, alert rules, board; each on wish.

PodMonitor and PrometheusRule are the Prometheus operator's kinds; boards are ConfigMaps that Grafana's sidecar loads by
their label. Names of metrics are observers/prometheus'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec

PORT = "metrics"
COMPONENT = "monitoring"


def container_ports(spec: RunSpec) -> list[Manifest]:
    """The trainer's port that Prometheus asks, where it is to."""
    wanted = spec.config.tracking.prometheus
    return (
        [] if wanted is None else [{"name": PORT, "protocol": "TCP", "containerPort": wanted.port}]
    )


def monitoring(spec: RunSpec) -> list[Manifest]:
    """The objects that the config wants."""
    return list(_objects(spec))


def _objects(spec: RunSpec) -> Iterator[Manifest]:
    wanted = spec.config.tracking.prometheus
    if wanted is None:
        return
    labels, group = dict(wanted.labels), "monitoring.coreos.com/v1"
    if wanted.pod_monitor:
        body = {
            "selector": {"matchLabels": spec.selector(TRAINER)},
            "podMetricsEndpoints": [{"port": PORT, "interval": "15s"}],
        }
        yield spec.manifest(
            group, "PodMonitor", spec.name, COMPONENT, more_labels=labels, spec=body
        )
    if wanted.alerts:
        rules = {"groups": [{"name": f"kubetune-{spec.name}", "rules": alert_rules(spec.name)}]}
        yield spec.manifest(
            group, "PrometheusRule", spec.name, COMPONENT, more_labels=labels, spec=rules
        )
    if wanted.dashboard:
        found = {"grafana_dashboard": "1", **labels}
        content = {f"kubetune-{spec.name}.json": json.dumps(board(spec.name), indent=1)}
        yield spec.manifest(
            "v1", "ConfigMap", f"{spec.name}-board", COMPONENT, more_labels=found, data=content
        )


def alert_rules(run: str) -> list[Manifest]:
    """Alerts of a run, as a Prometheus rule file has them too."""
    of_run = f'{{run="{run}"}}'
    found = {
        "KubetuneHung": (
            f"max by (run) (kubetune_heartbeat_age_seconds{of_run}) > 600", "1m", "critical",
            "No progress for {{ $value | humanizeDuration }}: look at hang.json and the logs.",
        ),
        "KubetuneNoCheckpoint": (
            # A run that goes on after a pause begins with an old one, and has lost nothing yet.
            f"kubetune_checkpoint_age_seconds{of_run} > 3600 and kubetune_checkpoint_age_seconds{of_run} offset 1h",
            "1m", "warning",
            "The newest checkpoint is {{ $value | humanizeDuration }} old: a stop now would cost as much.",
        ),
        "KubetuneDiverging": (
            f"kubetune_loss{of_run} > 2 * min_over_time(kubetune_loss{of_run}[1h]) + 0.5", "5m", "warning",
            "The loss is {{ $value | humanize }}, more than twice what it was within the hour.",
        ),
        "KubetuneSlowRank": (
            f"kubetune_slowest_rank_ratio{of_run} > 1.3", "10m", "warning",
            "One rank takes {{ $value | humanize }} times as long as the median: all wait for it.",
        ),
    }  # fmt: skip
    return [
        {
            "alert": name,
            "expr": expression,
            "for": during,
            "labels": {"severity": severity},
            "annotations": {
                "summary": f"{run}: {name.removeprefix('Kubetune')}",
                "description": text,
            },
        }
        for name, (expression, during, severity, text) in found.items()
    ]


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
    """Grafana's model of a board of this run."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + at),
                    "datasource": source,
                    "expr": f'{name}{{run="{run}"}}',
                    "legendFormat": f"{name.removeprefix('kubetune_')} {{{{node}}}}",
                }
                for at, name in enumerate(names)
            ],
        }
        for number, (title, unit, names) in enumerate(_PANELS)
    ]
    variable = {
        "name": "source",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }
    return {
        "title": f"kubetune: {run}",
        "uid": f"kubetune-{run}"[:40],
        "schemaVersion": 39,
        "tags": ["kubetune"],
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }
