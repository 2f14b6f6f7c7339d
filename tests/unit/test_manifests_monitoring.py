"""Objects by which Prometheus and Grafana see a run: only on wish, and fitting the pods that they look for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import KINDS
from kubetune.k8s.manifests.monitoring import alert_rules, board
from kubetune.supervisor.observers.prometheus import METRICS
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
    assert the(objects, "NetworkPolicy")["spec"]["ingress"][1:] == [
        {"ports": [{"protocol": "TCP", "port": 9464}]}
    ]
    (group,) = the(objects, "PrometheusRule")["spec"]["groups"]
    assert group["rules"] == alert_rules("support-bot")
    plain = {obj["kind"] for obj in made(kind, "tracking.prometheus=true")}
    assert plain.isdisjoint({"PodMonitor", "PrometheusRule"})


def test_rights_of_operators_cover_what_is_rendered_for_prometheus() -> None:
    rules = the(made("job", WANTED), "Role", "support-bot-operator")["rules"]
    assert ["podmonitors", "prometheusrules"] in [rule["resources"] for rule in rules]
    plain = the(made("job", "tracking.prometheus={alerts: true}"), "Role", "support-bot-operator")[
        "rules"
    ]
    assert ["prometheusrules"] in [rule["resources"] for rule in plain]
    assert "monitoring.coreos.com" not in json.dumps(made("job", "tracking.prometheus=true"))


def test_alerts_and_board_ask_for_metrics_that_are_there() -> None:
    asked = json.dumps([alert_rules("bot"), board("bot")])
    assert set(re.findall(r"kubetune_\w+(?=\{)", asked)) <= NAMES
    assert len({panel["id"] for panel in board("bot")["panels"]}) == len(board("bot")["panels"])


@pytest.mark.parametrize(
    ("ages", "fires"), [("0+60x80", True), ("10800+60x80", True), ("_x60 10800+60x20", False)]
)
def test_an_old_checkpoint_alerts_after_an_hour_of_running_only(
    tmp_path: Path, ages: str, fires: bool
) -> None:
    tool = shutil.which("promtool", path=f"{os.environ['PATH']}:/usr/sbin")
    if tool is None:
        pytest.skip("promtool is missing")
    (tmp_path / "rules.yml").write_text(
        json.dumps({"groups": [{"name": "kubetune", "rules": alert_rules("bot")}]})
    )
    series = {"series": 'kubetune_checkpoint_age_seconds{run="bot", node="0"}', "values": ages}
    alert = "KubetuneNoCheckpoint"
    expression = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    asked = {"expr": expression, "eval_time": "75m", "exp_samples": samples}
    case = {"interval": "1m", "input_series": [series], "promql_expr_test": [asked]}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [case]}))
    done = subprocess.run(
        [tool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
