"""Pods that run and cannot be asked: exec that is forbidden, refused by a node that is down, or broken off."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kubetune.k8s.cluster import asking_pods
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk, slow, write_progress

EXEC = ".* pods/exec"
READ, MADE = "get pods/exec", "patch pods"
STOP = {"spec": {"suspend": True}}
TRAINING = """
echo "2026-11-20 10:15:00 [TRAIN] step 5/20 epoch 0.4 loss 2.5000 lr 0.0001 grad_norm 0.800 tokens/s 1234"
trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done
"""
DIAL = "error dialing backend: dial tcp 10.0.0.5:10250: connect: connection refused"

FAULTS: dict[str, dict[str, Any]] = {
    "forbidden": {
        "code": 403,
        "message": 'User "ann" cannot get resource "pods/exec" in API group ""',
    },
    "gone": {"code": 404, "message": 'pods "fit-0" not found'},
    "node down": {"code": 500, "message": DIAL},
    "proxy": {"code": 502, "message": "Bad Gateway", "html": True},
    "cut before": {"cut": "before"},
    "cut within": {"cut": "within"},
}


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path) -> Desk:
    desk = Desk(cluster, tmp_path)
    desk.submit_script(TRAINING, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    write_progress(desk)
    return desk


@pytest.mark.parametrize("fault", [name if name == "node down" else slow(name) for name in FAULTS])
def test_pods_that_cannot_be_asked_end_no_verb(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("kubetune.k8s.cluster.download._PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("kubetune.k8s.cluster.download._PAUSE_SECONDS", 0.05)
    # Each verb asks a pod that a proxy stands before again and again, for so long.
    monkeypatch.setattr(asking_pods, "ASK_SECONDS", 0.2)
    monkeypatch.setattr("kubetune.k8s.api.connection.PATIENCE_SECONDS", 0.2)
    desk.cluster.wait_log(
        desk.cluster.find("Pod", "app.kubernetes.io/component=trainer")[0]["metadata"]["name"], "up"
    )
    desk.cluster.trouble(EXEC, **FAULTS[fault])
    shown = desk.quick("status", "fit").stdout.splitlines()
    assert shown[0] == f"fit: Job in {desk.cluster.namespace}, running, 1 of 1 pods running"
    assert shown[1] == "step 5/20 · loss 2.5000 · 1,234 tokens/s"  # as its log says
    assert shown[2].startswith("! its pods could not be asked for progress: exec in Pod fit-0-")
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert (status["state"], status["step"]) == ("running", 5)
    assert "exec in Pod fit-0-" in status["not_asked"]
    assert desk.quick("status").stdout.splitlines()[1].split()[:4] == [
        "fit",
        "Job",
        "running",
        "1/1",
    ]
    assert "step 5/20" in desk.quick("watch", "fit").stdout
    assert "exec in Pod fit-0-" in desk.quick("exec", "fit", "--", "true", code=3).stderr
    assert "exec in Pod fit-0-" in desk.quick("exec", "fit", "--all", "--", "true", code=3).stderr
    assert "exec in Pod fit-0-" in desk.quick("gpus", "fit").stdout
    assert "exec in Pod fit-0-" in desk.quick("top", "fit").stdout
    if fault == "forbidden":
        assert "ann may not get pods/exec" in desk.quick("cp", "fit", code=3).stderr
    desk.quick("stop", "fit")
    assert desk.cluster.get("Job", "fit")["spec"]["suspend"] is True
    assert desk.cluster.find("Pod", "app.kubernetes.io/component=trainer") == []


@pytest.mark.slow
def test_who_waits_for_a_broken_proxy_hears_what_it_answers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubetune.k8s.api.connection.PATIENCE_SECONDS", 4.0)
    desk.cluster.trouble(EXEC, **FAULTS["proxy"])
    stderr = desk.quick("exec", "fit", "--", "true", code=3).stderr
    assert "refuses for now (502); trying for 4 s" in stderr
    assert "the API server is not ready (502): " in stderr


def test_results_come_home_past_a_pod_whose_node_is_down(desk: Desk) -> None:
    """The next that runs is asked, and else a pod is made that reads the volume."""
    desk.cluster.trouble(EXEC, code=500, message=DIAL, times=1)
    done = desk.quick("cp", "fit")
    assert "its node cannot be asked (500): error dialing backend" in done.stderr
    assert "no pod that runs answers; fit-files-" in done.stderr
    assert (desk.folder / "outputs" / "fit" / "logs" / "rank-0.log").read_text() == "one\ntwo\n"


def test_a_log_is_followed_through_one_pod_while_none_of_the_run_answers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubetune.cli.remote.logs._POLL_SECONDS", 0.02)
    desk.cluster.trouble(EXEC, code=500, message=DIAL, about="^fit-0-")
    log = desk.run_folder() / "logs" / "rank-0.log"

    def go_on() -> None:
        for line in ("three", "four"):
            before = desk.cluster.asked().count(READ)
            while desk.cluster.asked().count(READ) < before + 6:
                time.sleep(0.02)
            with log.open("a") as file:
                file.write(f"{line}\n")
        desk.cluster.trouble(EXEC, code=500, message=DIAL, about="-files-", times=3)
        desk.cluster.request(
            "PATCH", desk.cluster._path("Job", "fit"), STOP, "application/merge-patch+json"
        )

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        done = desk.quick("logs", "-f", "fit", "--rank", "0")
        going.result()
    assert done.stdout == "one\ntwo\nthree\nfour\n"
    assert desk.cluster.asked().count(MADE) == 1
    desk.cluster.wait_pods("app.kubernetes.io/component=files", 0)


@pytest.mark.parametrize("state", ["running", slow("stopped")])
def test_where_nothing_answers_only_so_many_pods_are_made(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    if state == "stopped":
        desk.quick("stop", "fit")
    monkeypatch.setattr("kubetune.cli.remote.logs._POLL_SECONDS", 0.02)
    desk.cluster.trouble(EXEC, cut="within")
    done = desk.quick("logs", "fit", "--rank", "0", code=3)
    why = "no pod that runs answers" if state == "running" else "no pod of fit runs"
    assert f"{why}, and none of the 3 that were made to read its volume answers" in done.stderr
    assert desk.cluster.asked().count(MADE) == 3
    desk.cluster.wait_pods("app.kubernetes.io/component=files", 0)


def test_a_pod_that_does_not_answer_is_not_waited_for_for_ever(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking_pods, "ASK_SECONDS", 0.2)
    desk.cluster.trouble(EXEC, seconds=5.0)
    shown = desk.quick("status", "fit").stdout
    assert "running, 1 of 1 pods running" in shown
    assert "exec in Pod fit-0-" in shown
