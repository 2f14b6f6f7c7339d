"""What is fetched and prepared before training: once, in order, without a GPU, and told when it fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from kubetune.rundir import starts
from standin.state.objects import name_of
from tests.cluster.harness import Cluster
from tests.cluster.manifests import headless_service, pod
from tests.cluster.operation import Desk, slow
from tests.cluster.test_operate_training import model  # noqa: F401 - a fixture

ORDERED = """
case $POD_NAME in
  *preprocess*|*initializer*) sleep 0.3; echo prepared; touch /outputs/prepared;;
  *) test -e /outputs/prepared && echo trained
    until test -e /outputs/heard; do sleep 0.02; done  # with a pod goes its log
    test -z "$KUBETUNE_STAY" || exec sleep 600;;
esac
"""
KINDS = ["job", *(slow(kind) for kind in ("statefulset", "jobset", "pytorchjob", "trainjob"))]


@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_after_what_prepares(desk: Desk, kind: str) -> None:
    desk.submit_script(ORDERED, kubernetes__kind=kind, kubernetes__preprocess={})
    trainers = desk.cluster.wait_pods("app.kubernetes.io/component=trainer", 2)
    for trainer in trainers:
        desk.cluster.wait_phase(name_of(trainer), "Running")
        desk.cluster.wait_log(name_of(trainer), "trained")
    shown = desk.quick("logs", "fit").stdout.splitlines()
    assert [line for line in shown if "trained" in line] == ["[node 0] trained", "[node 1] trained"]
    (desk.cluster.claim_folder("fit-outputs") / "heard").touch()
    if kind != "statefulset":  # which never ends
        desk.quick("logs", "-f", "fit")
        assert "done" in desk.quick("status", "fit").stdout
    before = desk.cluster.find("Pod", "app.kubernetes.io/component=preprocess")
    assert [pod["status"]["phase"] for pod in before] == ["Succeeded"]
    again = desk.submit_script(ORDERED, kubernetes__kind=kind, kubernetes__preprocess={})
    assert again.outcome == "unchanged"
    assert len(desk.cluster.find("Pod", "app.kubernetes.io/component=preprocess")) == 1


def test_while_it_prepares_status_says_so(desk: Desk) -> None:
    desk.write({"kubernetes.preprocess": {"command": ["sleep", "600"]}})
    with desk.started("submit", "run.yaml", stderr=subprocess.PIPE) as submitting:
        assert submitting.stderr is not None
        assert any(
            "Job fit-preprocess fetches and prepares first" in line for line in submitting.stderr
        )
        (preparing,) = desk.cluster.wait_pods("app.kubernetes.io/component=preprocess", 1)
        desk.cluster.wait_phase(name_of(preparing), "Running")
        shown = desk.quick("status", "fit").stdout
        submitting.kill()
    assert ", waiting, " in shown
    assert (
        f"{name_of(preparing)} fetches and prepares first; training begins when kubetune submit has seen"
        in shown
    )
    assert shown.splitlines()[-1].startswith(name_of(preparing))
    assert desk.cluster.find("Pod", "app.kubernetes.io/component=trainer") == []
    desk.quick("delete", "fit", "--yes", "--volumes")
    assert desk.cluster.find("Job") == []


def test_bad_data_starts_no_training_and_can_be_mended(desk: Desk) -> None:
    script = "echo 'kubetune: train.jsonl:3: not JSON' >&2; exit 2"
    desk.write({"kubernetes.preprocess": {"command": ["sh", "-c", script]}})
    refused = desk.quick("submit", "run.yaml", code=2).stderr
    assert (
        "Job fit-preprocess, which fetches and prepares before training, has failed: train.jsonl:3: not"
        in refused
    )
    assert "Training was not started." in refused
    assert "failed, train.jsonl:3: not JSON" in desk.quick("status", "fit").stdout
    desk.write({"kubernetes.preprocess": {"command": ["true"]}})
    assert "was submitted" in desk.quick("submit", "run.yaml").stdout
    desk.cluster.wait_pods("app.kubernetes.io/component=trainer", 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_model_of_the_hub_is_fetched_once_and_trained_offline(
    cluster: Cluster,
    tmp_path: Path,
    model: Path,  # noqa: F811
    kind: str,
) -> None:
    """The hub is a server in a pod that speaks as much of its protocol as a download needs."""
    desk = Desk(cluster, tmp_path)
    serving = ["python", "-m", "tests.cluster.hub", str(model)]
    folder = {"name": "model", "hostPath": {"path": str(model)}}
    container = {"image": "kubetune", "volumeMounts": [{"name": "model", "mountPath": str(model)}]}
    hub = pod(
        "hub", *serving, volumes=[folder], container=container, terminationGracePeriodSeconds=0
    )
    hub["spec"]["containers"][0]["workingDir"] = str(Path(__file__).parents[2])
    cluster.apply(headless_service("hub", app="hub"), hub)
    cluster.wait_phase("hub", "Running")
    cluster.wait_log("hub", "serving")
    path = desk.write(
        {
            "model": {"path": "org/tiny"},
            "training.max_steps": 4,
            "kubernetes.kind": kind,
            "kubernetes.image": "registry.example/online:1.0",
            "kubernetes.env": {"HF_ENDPOINT": "http://hub:8000"},
            "kubernetes.initialisers": ["model", "data"],
            "kubernetes.preprocess": {"cpu": 1, "memory": "1Gi"},
        }
    )
    assert yaml.safe_load(path.read_text())["model"] == {"path": "org/tiny"}
    done = desk.kubetune("submit", "run.yaml", "--follow")
    assert "step 4/4" in done.stdout
    fetched = [
        line.split()[1] for line in cluster.log("hub").splitlines() if line.startswith("GET ")
    ]
    weights = [line for line in fetched if line.endswith("model.safetensors")]
    assert len(weights) == 1, fetched
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "done"


def test_a_run_keeps_the_day_it_was_submitted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates that write the date write the same one in pods of another day; what is rendered has no day."""

    def day() -> str | None:
        (config_map,) = [
            obj for obj in desk.cluster.find("ConfigMap") if obj["metadata"]["name"] == "fit"
        ]
        date: str | None = yaml.safe_load(config_map["data"]["run.yaml"])["data"].get("date")
        return date

    monkeypatch.setattr(starts, "today", lambda: "2024-02-29")
    desk.submit_script("true")
    assert day() == "2024-02-29"
    monkeypatch.setattr(starts, "today", lambda: "2024-03-01")
    assert desk.submit_script("true").outcome == "unchanged"
    assert day() == "2024-02-29"
    assert "date:" not in desk.quick("render", "run.yaml").stdout
    assert "2024-03-02" in desk.quick("render", "run.yaml", "data.date=2024-03-02").stdout
