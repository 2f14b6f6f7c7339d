"""Pods that draw answers beside a trainer's: they start, stop and end with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster.submit import submit
from kubetune.k8s.manifests import local_files
from standin.state.objects import find_condition, name_of
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk, _templates
from tests.cluster.test_operate_training import furnish, model

__all__ = ["model"]

ROOT = Path(__file__).parents[2]

TRAINERS = "app.kubernetes.io/component=trainer"
SAMPLERS = "app.kubernetes.io/component=sampler"

# Asks each server by its address until it answers, then waits.
TRAINS = """
import os, signal, sys, time, urllib.request
from pathlib import Path
from kubetune.rundir.exit_status import ExitStatus, clear_exit_statuses, write_exit_status

def save(*_):
    print("saved step 7", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
run_dir = Path("/outputs/fit")
run_dir.mkdir(exist_ok=True)
clear_exit_statuses(run_dir)
for url in os.environ["KUBETUNE_SAMPLERS"].split():
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.02)
print("asked", os.environ["KUBETUNE_SAMPLERS"], flush=True)
while not Path("/outputs/go").exists():
    time.sleep(0.02)
write_exit_status(run_dir, ExitStatus(0, "done"))
"""
# As vLLM: it ends with 0 when it is told to.
SERVES = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("", 8000), Handler)
print("serves", flush=True)
server.serve_forever()
"""

SETTINGS: dict[str, Any] = {
    "task": "grpo",
    "rewards": ["exact_match"],
    "grpo": {"servers": {}},
    "kubernetes.samplers": {
        "replicas": 2, "gpus": 0, "cpu": 1, "memory": "1Gi", "image": "registry.example/kubetune:1.0",
    },
}  # fmt: skip


def as_both(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects of a run whose trainers and servers are small programs."""
    for template in _templates(objects):
        (container,) = template["spec"]["containers"]
        if container["name"] == "sampler":
            container["args"] = ["python", "-c", SERVES]
        else:
            container["command"] = ["python", "-c", TRAINS]
    return objects


def start(desk: Desk, kind: str, *, nodes: int = 2, restarts: int = 3) -> None:
    """Submit the run."""
    changes = {
        "kubernetes.kind": kind,
        "compute.nodes": nodes,
        "kubernetes.max_restarts": restarts,
    }
    path = desk.write({**SETTINGS, **changes})
    with desk.at():
        config = load_config(path, environ={})
        files = local_files(config)
        submit(Client(), config, files, confirm=lambda question: True, change=as_both)


def wait_asked(desk: Desk, nodes: int = 2) -> str:
    """Return what the trainers wrote of the addresses, once they have asked all servers."""
    for labels, count in ((TRAINERS, nodes), (SAMPLERS, 2)):
        for pod in desk.cluster.wait_pods(labels, count):
            desk.cluster.wait_phase(name_of(pod), "Running")
    for pod in desk.cluster.find("Pod", TRAINERS):
        desk.cluster.wait_log(name_of(pod), "asked ")
    return desk.quick("logs", "fit").stdout


def test_both_groups_of_a_jobset_start_stop_and_end_together(desk: Desk) -> None:
    start(desk, "jobset")
    assert "asked http://fit-sampler-0-0.fit:8000 http://fit-sampler-0-1.fit" in wait_asked(desk)
    head = desk.quick("status", "fit").stdout.splitlines()[0]
    assert "running, 2 of 2 pods running, 2 of 2 samplers answer" in head

    assert "node 0: saved step 7" in desk.quick("stop", "fit").stdout
    assert desk.cluster.find("Pod", TRAINERS) + desk.cluster.find("Pod", SAMPLERS) == []
    assert ", stopped" in desk.quick("status", "fit").stdout

    desk.quick("resume", "fit")
    wait_asked(desk)
    (desk.cluster.claim_folder("fit-outputs") / "go").touch()
    desk.cluster.wait_condition("JobSet", "fit", "Completed")
    # Nobody pays for servers that nobody asks any more.
    desk.cluster.wait_pods(SAMPLERS, 0)
    assert "done" in desk.quick("status", "fit").stdout.splitlines()[0]


def test_servers_beside_a_job_start_stop_and_end_with_it(desk: Desk) -> None:
    start(desk, "job")
    asked = wait_asked(desk)
    assert (
        "asked http://fit-sampler-0.fit-sampler:8000 http://fit-sampler-1.fit-sampler:8000" in asked
    )
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert [pod["index"] for pod in status["samplers"] if pod["ready"]] == [0, 1]
    assert status["why"] == ""
    logs = desk.quick("logs", "fit", "--sampler", "all").stdout.splitlines()
    assert sorted(logs) == ["[sampler 0] serves", "[sampler 1] serves"]
    assert desk.quick("logs", "fit", "--sampler", "1").stdout == "[sampler 1] serves\n"
    message = "--sampler: found 2; expected 0 to 1, or all"
    assert message in desk.quick("logs", "fit", "--sampler", "2", code=2).stderr

    assert "node 0: saved step 7" in desk.quick("stop", "fit").stdout
    assert desk.cluster.find("Pod", TRAINERS) + desk.cluster.find("Pod", SAMPLERS) == []
    # To submit a stopped run again starts none of both.
    start(desk, "job")
    for name in ("fit", "fit-sampler"):
        assert desk.cluster.get("Job", name)["spec"]["suspend"] is True

    # A Job of servers that somebody has deleted meanwhile comes back too.
    desk.cluster.kubectl("delete", "job", "fit-sampler")
    desk.quick("resume", "fit")
    desk.cluster.wait_pods(TRAINERS, 2)
    desk.cluster.wait_pods(SAMPLERS, 2)


def test_servers_beside_a_job_end_once_the_run_has_and_come_back_with_it(desk: Desk) -> None:
    start(desk, "job", nodes=1)
    wait_asked(desk, nodes=1)
    go = desk.cluster.claim_folder("fit-outputs") / "go"
    go.touch()
    for name in ("fit", "fit-sampler"):
        desk.cluster.wait_condition("Job", name, "Complete")
    assert "done" in desk.quick("status", "fit").stdout.splitlines()[0]

    # It goes on by another run file: pods of both groups are replaced.
    go.unlink()
    start(desk, "job", nodes=1, restarts=5)
    wait_asked(desk, nodes=1)

    desk.quick("delete", "fit", "--yes", "--volumes")
    for kind in ("Job", "Service", "Pod", "ConfigMap", "PersistentVolumeClaim"):
        names = {name_of(obj) for obj in desk.cluster.find(kind)}
        assert not {name for name in names if name.startswith("fit")}


def test_status_says_why_a_server_waits(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-sampler-1")
    start(desk, "job", nodes=1)
    (trainer,) = desk.cluster.wait_pods(TRAINERS, 1)
    desk.cluster.wait_phase(name_of(trainer), "Running")
    for pod in desk.cluster.wait_pods(SAMPLERS, 2):
        if name_of(pod).startswith("fit-sampler-1"):
            waiting = name_of(pod)
            desk.cluster.wait("Pod", waiting, lambda pod: find_condition(pod, "PodScheduled"))
        else:
            desk.cluster.wait_condition("Pod", name_of(pod), "Ready")
    head = desk.quick("status", "fit").stdout.splitlines()[0]
    assert "1 of 1 pods running, 1 of 2 samplers answer" in head
    assert f"{waiting}: no node fits" in head


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ends"), [("jobset", "Completed"), ("job", "Complete")])
def test_a_run_learns_from_what_its_pods_draw(
    cluster: Cluster, tmp_path: Path, model: Path, kind: str, ends: str
) -> None:
    """The trainer is the real one, and the servers speak vLLM's protocol."""
    samplers = {
        "replicas": 2, "gpus": 0, "cpu": 1, "memory": "1Gi", "image": "registry.example/kubetune:1.0",
    }  # fmt: skip
    changes = {
        "task": "grpo",
        "rewards": [{"name": "length", "settings": {"target": 4}}],
        "grpo": {
            "servers": {"lag": 1, "timeout_seconds": 120},
            "num_generations": 4,
            "max_completion_length": 8,
        },
        "data": {"train": "train.jsonl", "max_length": 64},
        "training": {"global_batch_size": 4, "max_steps": 4, "save_steps": 2, "compile": False},
        "kubernetes.kind": kind,
        "kubernetes.samplers": samplers,
        "kubernetes.env": {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    }
    desk = furnish(cluster, tmp_path, model, **changes)

    def with_servers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for template in _templates(objects):
            (container,) = template["spec"]["containers"]
            if container["name"] == "sampler":
                program = f"mkdir -p /tmp/served && exec python -m tests.vllm_server {model} /tmp/served 8000"
                container["args"] = ["sh", "-c", program]
                del container["readinessProbe"]
        return objects

    with desk.at():
        config = load_config(tmp_path / "run.yaml", environ={})
        files = local_files(config)
        submit(Client(), config, files, confirm=lambda question: True, change=with_servers)
    cluster.wait_condition({"jobset": "JobSet", "job": "Job"}[kind], "fit", ends, seconds=240)
    run_dir = desk.run_folder()
    assert len(list((run_dir / "rollouts").glob("step-*.jsonl"))) == 4
    assert "done" in desk.quick("status", "fit").stdout.splitlines()[0]
