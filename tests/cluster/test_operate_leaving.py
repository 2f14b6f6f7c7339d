"""Whoever looks on sees things when they happen, and may leave: Ctrl-C ends the looking, and says what goes on."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack

import pytest

from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster import stopping
from kubetune.k8s.cluster.stopping import stop
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.rundir.exit_status import ExitStatus, write_exit_status
from standin.state.objects import name_of
from tests.cluster.operation import Desk

TRAINERS = "app.kubernetes.io/component=trainer"
WAIT = "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"
LEFT = json.dumps(
    {
        "code": 143,
        "reason": "stopped after step 7",
        "progress": {
            "step": 7,
            "steps": 20,
            "loss": 2.5,
            "tokens_per_second": 1234,
            "saved_step": 7,
        },
    }
)
TRAINING = f"""
trap 'echo '"'"'{LEFT}'"'"' > /dev/termination-log; exit 143' TERM
echo step 5/20; while :; do sleep 0.02; done
"""


def popen(desk: Desk, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        desk.command(*argv), cwd=desk.folder, env=desk.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def interrupted(process: subprocess.Popen[str]) -> str:
    """Return what a process says on standard error after Ctrl-C, at which it has to end."""
    process.send_signal(signal.SIGINT)
    try:
        stderr = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    return stderr


def test_who_follows_may_leave_and_the_run_goes_on(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-[01]-")
    with popen(desk, "submit", "run.yaml", "--follow") as process:
        assert process.stderr is not None
        assert any("no node fits" in line for line in process.stderr)
        assert (
            f"fit goes on; kubetune stop fit -n {desk.cluster.namespace} would stop it"
            in interrupted(process)
        )
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "waiting"


def test_a_command_in_all_pods_can_be_left(desk: Desk) -> None:
    desk.submit_script(WAIT)
    desk.cluster.wait_ready("fit", pods=2)
    with popen(
        desk, "exec", "fit", "--all", "--", "sh", "-c", "echo here; exec sleep 600"
    ) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == [
            "[node 0] here\n",
            "[node 1] here\n",
        ]
        interrupted(process)


def test_what_a_command_prints_is_shown_at_once(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    script = "echo first; until test -e /outputs/seen; do sleep 0.02; done; echo second"
    with popen(desk, "exec", "fit", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        (desk.cluster.claim_folder("fit-outputs") / "seen").touch()
        assert process.stdout.readline() == "second\n"
    assert process.returncode == 0


def test_who_follows_one_node_learns_why_the_other_does_not_come(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-1-")
    desk.submit_script(WAIT)
    desk.cluster.wait_event("0/2 nodes are available")
    desk.cluster.wait_ready("fit")
    with popen(desk, "logs", "-f", "fit") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "[node 0] up\n"
        assert any("fit-1-" in line and "no node fits" in line for line in process.stderr)
        interrupted(process)


@pytest.mark.slow
def test_a_stopped_run_tells_how_far_it_was(desk: Desk) -> None:
    desk.submit_script(TRAINING)
    for pod in desk.cluster.wait_ready("fit", pods=2):
        desk.cluster.wait_log(name_of(pod), "step 5/20")
    (desk.folder / "fit").mkdir()  # of that name, and not meant
    desk.quick("stop", "fit", "-n", desk.cluster.namespace)
    (desk.folder / "fit").rmdir()
    headline, numbers = desk.quick("status", "fit").stdout.splitlines()
    assert headline == f"fit: Job in {desk.cluster.namespace}, stopped"
    assert numbers == "step 7/20 · loss 2.5000 · 1,234 tokens/s · saved step 7"
    assert "stopped  step 7/20" in desk.quick("watch", "fit").stdout
    desk.quick("stop", "fit")  # twice is once
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["saved_step"] == 7
    assert "which is stopped" in desk.quick("submit", "run.yaml").stdout
    assert "step 7/20" in desk.quick("status", "fit").stdout
    desk.quick("resume", "fit")
    noted = desk.cluster.get("ConfigMap", "fit")["metadata"].get("annotations") or {}
    assert "kubetune/progress" not in noted


def test_stop_hears_pods_that_are_gone_before_its_next_request(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_late(cluster: Client, spec: RunSpec) -> None:
        """Return as a slow connection does: once the pods have saved and their logs are gone."""
        stop(cluster, spec)
        desk.cluster.wait_pods(TRAINERS, 0)

    monkeypatch.setattr(stopping, "stop", stop_late)
    save = "trap 'echo saved step 7; exit 143' TERM"
    desk.submit_script(f"{save}; echo up; while :; do sleep 0.02; done")
    desk.cluster.wait_ready("fit", pods=2)
    lines = desk.quick("stop", "fit").stdout.splitlines()
    assert lines[:2] == ["node 0: saved step 7", "node 1: saved step 7"]


def test_who_stops_a_run_hears_what_becomes_of_it_when_the_server_goes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubetune.k8s.api.connection.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr("kubetune.k8s.cluster.log_follow._ABSENCE_SECONDS", 0.5)
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    with ExitStack() as away:

        def stop_before_the_outage(cluster: Client, spec: RunSpec) -> None:
            stop(cluster, spec)
            away.enter_context(desk.cluster.outage())

        def stop_in_the_outage(cluster: Client, spec: RunSpec) -> None:
            away.enter_context(desk.cluster.outage())
            stop(cluster, spec)

        monkeypatch.setattr(stopping, "stop", stop_in_the_outage)
        stderr = desk.quick("stop", "fit", code=3).stderr
        assert "fit may not have been asked to stop; repeat the command" in stderr
        assert "does not answer" in stderr
        away.close()
        monkeypatch.setattr(stopping, "stop", stop_before_the_outage)
        stderr = desk.quick("stop", "fit", code=3).stderr
        assert "fit saves and stops all the same; see kubetune status fit" in stderr
        assert "does not answer" in stderr
    desk.cluster.wait_pods(TRAINERS, 0)
    assert ", stopped" in desk.quick("status", "fit").stdout


def test_an_end_that_another_start_follows_is_none(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    folder = desk.run_folder()
    folder.mkdir(parents=True)
    for code, state in {145: "running", 143: "running", 2: "failed", 0: "done"}.items():
        write_exit_status(folder, ExitStatus(code, "said so", 3))
        status = json.loads(desk.quick("status", "fit", "--json").stdout)
        assert (status["state"], status["why"]) == (
            state,
            "said so" if state in ("failed", "done") else "",
        )


def test_a_volume_that_is_going_is_waited_for(desk: Desk) -> None:
    """As on any cluster, a deleted claim stays while a pod mounts it; what is applied to it would go with it."""
    desk.submit_script("echo old > /outputs/old", compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "fit-outputs"}}
    container = {"name": "c", "image": "busybox", "command": ["sleep", "600"]}
    spec = {"volumes": [volume], "containers": [container], "terminationGracePeriodSeconds": 0}
    desk.cluster.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": spec}
    )
    before = desk.cluster.get("PersistentVolumeClaim", "fit-outputs")["metadata"]["uid"]
    desk.quick("delete", "fit", "--yes", "--volumes")
    assert (
        "deletionTimestamp" in desk.cluster.get("PersistentVolumeClaim", "fit-outputs")["metadata"]
    )
    with popen(desk, "submit", "run.yaml") as process:
        assert process.stderr is not None
        assert any("claim fit-outputs is being deleted; waiting" in line for line in process.stderr)
        desk.cluster.delete("Pod", "reader")
        assert process.stdout is not None
        assert "was submitted" in process.stdout.read()
    after = desk.cluster.wait(
        "PersistentVolumeClaim", "fit-outputs", lambda claim: "phase" in claim.get("status", {})
    )
    assert after["metadata"]["uid"] != before
    assert "deletionTimestamp" not in after["metadata"]
    assert not (desk.cluster.claim_folder("fit-outputs") / "old").exists()
