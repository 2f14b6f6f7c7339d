"""A run as the Prometheus operator and an agent's client see it: objects beside the run, and tools that really act."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.k8s.manifests.monitoring import alert_rules, board
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk
from tests.cluster.test_operate_training import furnish, model  # noqa: F401 - a fixture
from tests.ranks import wait_until
from tests.run.test_mcp import ask

ALL = {"pod_monitor": True, "alerts": True, "dashboard": True, "labels": {"release": "stack"}}


def test_monitoring_comes_and_goes_with_the_run(cluster: Cluster, tmp_path: Path) -> None:
    """Taken by a server as strict as the operator's kinds, left alone the second time, and gone with the run."""
    desk = Desk(cluster, tmp_path)
    assert desk.submit_script("echo trained", tracking__prometheus=ALL).outcome == "submitted"
    (monitor,), (rule,) = cluster.find("PodMonitor"), cluster.find("PrometheusRule")
    (dashboard,) = cluster.find("ConfigMap", "grafana_dashboard=1")
    for obj in (monitor, rule, dashboard):
        assert obj["metadata"]["labels"]["release"] == "stack"
    assert rule["spec"]["groups"][0]["rules"] == alert_rules("fit")
    assert json.loads(dashboard["data"]["kubetune-fit.json"]) == board("fit")
    chosen = monitor["spec"]["selector"]["matchLabels"]
    (pod, _) = cluster.wait_pods(",".join(f"{key}={value}" for key, value in chosen.items()), 2)
    ports = {
        port["name"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    cluster.wait_condition("Job", "fit", "Complete")
    assert desk.submit_script("echo trained", tracking__prometheus=ALL).outcome == "unchanged"
    assert "PodMonitor fit" in desk.quick("delete", "fit", "--yes").stdout
    assert cluster.find("PodMonitor") == cluster.find("PrometheusRule") == []
    assert cluster.find("ConfigMap", "grafana_dashboard=1") == []


def test_a_cluster_without_the_prometheus_operator_says_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    desk = Desk(cluster, tmp_path)
    cluster.uninstall("PodMonitor")
    desk.write({"tracking.prometheus": ALL})
    refused = desk.quick("submit", "run.yaml", code=errors.ENVIRONMENT).stderr
    assert (
        "the cluster has no kind PodMonitor in monitoring.coreos.com/v1; install the Prometheus operator"
        in refused
    )
    assert cluster.find("Job") == []


@pytest.mark.slow
def test_an_agent_submits_looks_and_stops(
    cluster: Cluster,
    tmp_path: Path,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the official client: nothing happens without the code of the very call, and with it all of it does."""
    desk = furnish(cluster, tmp_path, model, **{"training.max_steps": 100_000, "compute.nodes": 1})
    for name, value in desk.environment().items():
        monkeypatch.setenv(name, value)
    _, (planned, other) = ask(
        ("submit", {"run_file": "run.yaml"}),
        (
            "submit",
            {
                "run_file": "run.yaml",
                "overrides": ["training.max_steps=9"],
                "confirmation": "$CODE",
            },
        ),
        folder=desk.folder,
    )
    assert planned["needs_confirmation"] == "kubetune submit run.yaml"
    assert planned["exit_code"] == 0
    assert "100,000" in planned["result"]
    assert other["needs_confirmation"].endswith("training.max_steps=9")
    assert cluster.find("Job") == [], "no code was of its call"
    _, (_, submitted) = ask(
        ("submit", {"run_file": "run.yaml"}), ("submit", {"run_file": "run.yaml", "confirmation": "$CODE"}),
        folder=desk.folder,
    )  # fmt: skip
    assert submitted["exit_code"] == 0, submitted
    assert len(cluster.find("Job")) == 1

    def trains() -> bool:
        _, (logs,) = ask(("logs", {"run": "run.yaml"}), folder=desk.folder)
        return "[TRAIN] step" in logs["result"]

    wait_until(trains, 300.0)
    _, (logs, status, _, stopped) = ask(
        ("logs", {"run": "run.yaml", "lines": 5}), ("status", {"run": "run.yaml"}), ("stop", {"run": "fit"}),
        ("stop", {"run": "fit", "confirmation": "$CODE"}),
        folder=desk.folder,
    )  # fmt: skip
    assert len(logs["result"].splitlines()) == 5
    assert "[TRAIN] step" in logs["result"]
    assert status["result"]["state"] == "running"
    assert stopped["exit_code"] == 0, stopped
    _, (status,) = ask(("status", {"run": "fit"}), folder=desk.folder)
    assert status["result"]["state"] == "stopped", status
