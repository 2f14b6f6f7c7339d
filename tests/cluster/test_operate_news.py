"""What status shows is of now: not warnings that are over, nor those of an earlier run of the name."""

from __future__ import annotations

import json

import pytest

from kubetune.cli.remote.logs import teller
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster import log_follow
from kubetune.k8s.cluster.run_lookup import find_run
from kubetune.rundir.exit_status import ExitStatus, write_exit_status
from standin.state.objects import name_of
from tests.cluster.operation import Desk

LABELS = {"app.kubernetes.io/component": "trainer"}
WAIT = "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"


def warnings(desk: Desk) -> list[str]:
    messages: list[str] = json.loads(desk.quick("status", "fit", "--json").stdout)["warnings"]
    return messages


def test_a_warning_is_gone_when_what_it_warned_of_is_over(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-1-")
    desk.submit_script("until test -e /outputs/go; do sleep 0.02; done")
    desk.cluster.wait_event("0/2 nodes are available")
    assert any("0/2 nodes are available" in text for text in warnings(desk))
    assert "no node fits" in desk.quick("status", "fit").stdout
    desk.cluster.clear_faults()
    desk.cluster.wait_ready("fit", pods=2)
    assert warnings(desk) == []
    (desk.cluster.claim_folder("fit-outputs") / "go").touch()
    desk.cluster.wait_condition("Job", "fit", "Complete")


def test_events_of_an_earlier_run_of_the_name_are_not_todays(desk: Desk) -> None:
    """A pod of a StatefulSet has its predecessor's name, and another uid."""
    desk.submit_script(WAIT, kubernetes__kind="statefulset", compute__nodes=1)
    desk.cluster.wait_phase("fit-0", "Running")
    desk.cluster.add_event("Pod", "fit-0", "BackOff", "the dog ate it", uid="of-its-predecessor")
    desk.cluster.add_event("Pod", "fit-9", "BackOff", "of long ago", time="2026-01-01T00:00:00Z")
    shown = desk.quick("status", "fit").stdout
    assert "the dog" not in shown
    assert "long ago" not in shown + desk.quick("events", "fit").stdout
    assert (
        "the dog" in desk.quick("events", "fit").stdout
    )  # which lists all since the run was submitted


def test_a_warning_is_new_by_no_clock_of_this_machine(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    running = desk.cluster.wait_ready("fit")
    (scheduled,) = [
        condition["lastTransitionTime"]
        for condition in running[0]["status"]["conditions"]
        if condition["type"] == "PodScheduled"
    ]
    ours = {
        "type": "Warning",
        "involvedObject": {"name": name_of(running[0])},
        "lastTimestamp": scheduled,
    }
    old = {**ours, "metadata": {"uid": "1"}, "message": "of before"}
    with desk.at():
        client = Client()
        look = teller(client, find_run(client, "fit"))
        look(running, [old])
        look(running, [old, {**ours, "metadata": {"uid": "2"}, "message": "the node is away"}])
    stderr = capsys.readouterr().err
    assert "the node is away" in stderr
    assert "of before" not in stderr


def test_what_was_over_while_all_pods_ran_is_no_news_once_one_goes(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    running = desk.cluster.wait_ready("fit")

    def warning(uid: str, message: str) -> dict[str, object]:
        about = {"kind": "Job", "name": "fit"}
        facts = {"type": "Warning", "involvedObject": about, "message": message}
        return {**facts, "metadata": {"uid": uid}, "lastTimestamp": "2099-01-01T00:00:00Z"}

    with desk.at():
        client = Client()
        look = teller(client, find_run(client, "fit"))
        look(running, [warning("1", "of the start before")])
        look([], [warning("1", "of the start before"), warning("2", "no room")])
    assert capsys.readouterr().err == "kubetune: fit: no room\n"


def test_what_was_known_while_a_pod_was_there_is_no_news_once_it_is_gone(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reason said so before; a warning that comes late, about a pod that is gone, is told."""
    desk.cluster.never_schedule("fit-")
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_event("0/2 nodes are available")
    pod = {
        "metadata": {"name": "fit-0-a", "uid": "a", "labels": LABELS},
        "spec": {"containers": [{"name": "trainer"}], "nodeName": "node-0"},
        "status": {"phase": "Pending"},
    }
    about = {"kind": "Pod", "name": "fit-0-a", "uid": "a"}

    def warning(uid: str, message: str) -> dict[str, object]:
        time = "2099-01-01T00:00:00Z"
        facts = {"type": "Warning", "involvedObject": about, "lastTimestamp": time}
        return {**facts, "metadata": {"uid": uid}, "message": message}

    early = warning("1", "no such disk")
    replacement = {**pod, "metadata": {**pod["metadata"], "uid": "b"}}
    with desk.at():
        client = Client()
        look = teller(client, find_run(client, "fit"))
        waiting = {"reason": "ErrImagePull", "message": "no such disk"}
        status = {
            "phase": "Pending",
            "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}],
        }
        look([{**pod, "status": status}], [early])
        assert "fit-0-a: ErrImagePull: no such disk" in capsys.readouterr().err
        for pods_now in ([], [replacement]):
            look(pods_now, [early])
            assert capsys.readouterr().err == ""
        look([], [early, warning("2", "its disk is lost")])
        assert capsys.readouterr().err == "kubetune: fit-0-a: its disk is lost\n"


def test_a_namespace_that_is_not_there_is_no_empty_one(desk: Desk) -> None:
    assert "there is no namespace nowhere" in desk.quick("status", "-n", "nowhere", code=3).stderr
    assert (
        "there is no namespace nowhere" in desk.quick("logs", "fit", "-n", "nowhere", code=3).stderr
    )
    assert "no runs in namespace" in desk.quick("status", "-n", desk.cluster.namespace).stdout


def test_a_name_that_does_not_fit_comes_with_its_rule(desk: Desk) -> None:
    desk.write({"name": "My Run"})
    stderr = desk.quick("submit", "run.yaml", code=2).stderr
    assert (
        'name: found "My Run"; expected at most 40 lower case letters, digits and dashes' in stderr
    )
    desk.write({"compute.cpu": "500m"})
    shown = desk.quick("render", "run.yaml", "compute.nodes=1").stdout
    assert 'cpu: "500m"' in shown or "cpu: 500m" in shown
    desk.write({"compute.cpu": 0.5})
    assert '"0.5"' in desk.quick("render", "run.yaml").stdout
    desk.write({"compute.cpu": "half"})
    assert (
        'compute.cpu: found "half"; expected a whole number'
        in desk.quick("render", "run.yaml", code=2).stderr
    )


def test_the_end_of_a_statefulset_is_heard_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follow, "_LOOK_SECONDS", 3600)
    desk.submit_script(
        "echo first; echo last; exec sleep 600", kubernetes__kind="statefulset", compute__nodes=1
    )
    desk.cluster.wait_phase("fit-0", "Running")
    folder = desk.run_folder()
    folder.mkdir(parents=True)
    write_exit_status(folder, ExitStatus(0, "done", 3))
    assert desk.quick("logs", "-f", "fit").stdout == "first\nlast\n"


def test_a_claim_that_nothing_provides_is_named(desk: Desk) -> None:
    desk.cluster.leave_unbound("fit-outputs")
    desk.submit_script(WAIT)
    desk.cluster.wait_event("unbound immediate PersistentVolumeClaims")
    shown = desk.quick("status", "fit").stdout
    assert (
        "waiting, 0 of 2 pods running, no node fits: 0/2 nodes are available: 2 pod has unbound immediate"
        in shown
    )
    desk.cluster.clear_faults()
    desk.cluster.wait_ready("fit", pods=2)


def test_an_image_that_a_node_has_thrown_away_is_told_at_the_second_start(desk: Desk) -> None:
    desk.submit_script("test -e /outputs/again || { touch /outputs/again; sleep 600; }", compute__nodes=1,
                       kubernetes__image_pull_policy="Never")  # fmt: skip
    (first,) = desk.cluster.wait_ready("fit")
    desk.cluster.break_image(".")
    desk.cluster.kill_pod(first["metadata"]["name"])
    desk.cluster.wait_event("is not present with pull policy of Never")
    shown = desk.quick("status", "fit").stdout
    assert "ErrImageNeverPull: Container image" in shown
    assert "load it again, or change kubernetes.image_pull_policy" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [", "no YAML", marks=pytest.mark.slow),
        pytest.param("[]", "Input should be an object", marks=pytest.mark.slow),
        pytest.param(
            "name: fit\nof_a_newer_version: 1\n",
            "of_a_newer_version: Extra inputs are not permitted",
            marks=pytest.mark.slow,
        ),
        ("!!python/object/apply:os.system [id]", "no YAML"),
    ],
)
def test_a_run_that_cannot_be_read_hides_no_other(desk: Desk, text: str, message: str) -> None:
    labels = {"app.kubernetes.io/managed-by": "kubetune", "app.kubernetes.io/component": "trainer"}
    for name, data in (("odd", {"run.yaml": text}), ("empty", {})):
        metadata = {"name": name, "labels": labels}
        desk.cluster.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    desk.submit_script("true")
    shown = desk.quick("status", "-n", desk.cluster.namespace).stdout
    assert message in next(line for line in shown.splitlines() if line.startswith("odd"))
    assert any(line.startswith("fit ") for line in shown.splitlines())
    runs = json.loads(desk.quick("status", "-n", desk.cluster.namespace, "--json").stdout)
    assert {run["name"]: run["state"] for run in runs}["odd"] == "unknown"
    for verb in ("status", "logs", "stop"):
        assert message in desk.quick(verb, "odd", "-n", desk.cluster.namespace, code=2).stderr


def test_what_a_cluster_says_does_not_steer_the_terminal(desk: Desk) -> None:
    desk.submit_script(WAIT)
    desk.cluster.add_event("Job", "fit", "BackOff", "wiped \x1b[2J")
    shown = desk.quick("events", "fit").stdout + desk.quick("status", "fit").stdout
    assert r"wiped \x1b[2J" in shown
    assert "\x1b" not in shown
