"""Objects by which Prometheus and Grafana see a run: only on wish, and fitting the pods that they look for."""

from __future__ import annotations

import json
import re

import pytest

from kubetune.lint.objects import check_objects
from kubetune.manifests import KINDS
from kubetune.manifests.monitoring import alert_rules, board
from kubetune.observers.prometheus import METRICS
from tests.golden.made import made, the

WANTED = 'tracking.prometheus={"pod_monitor": true, "alerts": true, "dashboard": true, "labels": {"release": "p"}}'
NAMES = {f"kubetune_{name}{'_total' * (kind == 'counter')}" for name, (kind, _) in METRICS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_prometheus_finds_the_trainers_port_and_may_reach_it(kind: str) -> None:
    objects = made(kind, WANTED)
    assert not [*check_objects(objects)]
    monitor = the(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "p"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    text = json.dumps(objects)
    named = {"name": endpoint["port"], "protocol": "TCP", "containerPort": 9464}
    assert json.dumps(named) in text
    assert '"privileged": true' not in text
    assert the(objects, "NetworkPolicy")["spec"]["ingress"][1:] == [{"ports": [{"protocol": "TCP", "port": 9464}]}]
    (group,) = the(objects, "PrometheusRule")["spec"]["groups"]
    assert group["rules"] == alert_rules("support-bot")
    plain = {obj["kind"] for obj in made(kind, "tracking.prometheus=true")}
    assert plain.isdisjoint({"PodMonitor", "PrometheusRule"})


def test_alerts_and_board_ask_for_metrics_that_are_there() -> None:
    asked = json.dumps([alert_rules("bot"), board("bot")])
    assert set(re.findall(r"kubetune_\w+(?=\{)", asked)) <= NAMES
    assert len({panel["id"] for panel in board("bot")["panels"]}) == len(board("bot")["panels"])
