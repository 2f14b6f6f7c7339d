"""How pods and runs end: heard however early, last words kept, causes named, results had after all.

And verbs that have nothing to show say why.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kubetune.errors import EnvironmentFault
from kubetune.k8s.cluster.download import _Link, _link
from standin.state.objects import name_of
from tests.cluster.operation import Desk, slow

TRAINERS = "app.kubernetes.io/component=trainer"

# As Python does while it starts, process 1 begins without a handler for SIGTERM, which is then thrown away. Nor does it
# start others meanwhile: while it did, all signals would be blocked for a moment, which looks like listening.
STARTS_SLOWLY = """
read _ < /outputs/go
trap 'touch /outputs/heard-$HOSTNAME; exit 143' TERM
while :; do sleep 0.02; done
"""


def test_a_pod_that_only_starts_hears_that_it_is_to_stop(desk: Desk) -> None:
    outputs = desk.cluster.claim_folder("fit-outputs")
    outputs.mkdir(parents=True)
    outputs.chmod(0o777)
    os.mkfifo(outputs / "go")
    (outputs / "go").chmod(0o666)
    desk.submit_script(STARTS_SLOWLY, kubernetes__grace_seconds=60)
    desk.cluster.wait_ready("fit", pods=2)
    desk.quick("stop", "fit", "--no-wait")
    for pod in desk.cluster.find("Pod", TRAINERS):
        desk.cluster.wait(
            "Pod", name_of(pod), lambda current: current["metadata"].get("deletionTimestamp")
        )
    with (outputs / "go").open("r+b", buffering=0) as go:
        go.write(b"\n\n")
        desk.cluster.wait_pods(TRAINERS, 0)
    assert sorted(path.name for path in outputs.glob("heard-*")) == ["heard-fit-0", "heard-fit-1"]


LAST_WORDS = """
mkdir -p /outputs/fit/logs
if test $PET_NODE_RANK = 0; then until test -e /outputs/go; do sleep 0.02; done; echo done; exit 0; fi
trap 'echo last words | tee /outputs/fit/logs/rank-1.log; exit 143' TERM
echo up
while :; do sleep 0.02; done
"""


@pytest.mark.slow
def test_the_log_of_a_worker_that_a_pytorchjob_removes_is_kept(desk: Desk) -> None:
    """When the master has ended well, its operator deletes the workers that still run, and their logs with them."""
    desk.submit_script(LAST_WORDS, kubernetes__kind="pytorchjob")
    desk.cluster.wait_pods(TRAINERS, 2)
    with desk.started("logs", "-f", "fit") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[node 1] up\n"
        (desk.cluster.claim_folder("fit-outputs") / "go").touch()
        lines = process.stdout.readlines()
    assert process.returncode == 0
    assert sorted(lines) == ["[node 0] done\n", "[node 1] last words\n"]
    kept = {
        path.name.split(".")[0]: path.read_text()
        for path in (desk.folder / "outputs/fit/logs/pods").iterdir()
    }
    assert kept["fit-worker-0"].endswith("last words\n")
    desk.cluster.wait_gone("Pod", "fit-worker-0")
    assert "done" in desk.quick("status", "fit").stdout
    assert desk.quick("logs", "fit", "--rank", "1").stdout == "last words\n"


@pytest.mark.parametrize("kind", ["jobset", slow("trainjob")])
def test_what_prepares_is_named_as_the_cause_of_a_failure(desk: Desk, kind: str) -> None:
    """The workload itself says how often it began again only."""
    desk.submit_script(
        "echo 'kubetune: model org/x is gated'; exit 3",
        kubernetes__kind=kind, kubernetes__initialisers=["model"], kubernetes__max_restarts=0,
    )  # fmt: skip
    owner = {"jobset": "JobSet", "trainjob": "TrainJob"}[kind]
    desk.cluster.wait_condition(owner, "fit", "Failed")
    headline, *rows = desk.quick("status", "fit").stdout.splitlines()
    assert headline == f"fit: {owner} in {desk.cluster.namespace}, failed, model org/x is gated"
    assert any("exit code 3: disk, device or cluster" in row for row in rows), rows


@pytest.mark.slow
def test_a_run_that_misses_its_gate_is_not_started_again(desk: Desk) -> None:
    desk.submit_script(
        "echo start >> /outputs/starts; exit 5", compute__nodes=1, kubernetes__max_restarts=3
    )
    desk.cluster.wait_condition("Job", "fit", "Failed")
    stdout = desk.quick("status", "fit").stdout
    assert "failed" in stdout.splitlines()[0]
    assert "exit code 5: the gate of the evaluation failed" in stdout
    assert (desk.cluster.claim_folder("fit-outputs") / "starts").read_text() == "start\n"


def test_results_come_home_though_the_run_was_deleted(desk: Desk) -> None:
    desk.submit_script(
        "mkdir -p /outputs/fit && echo result > /outputs/fit/result", compute__nodes=1
    )
    desk.cluster.wait_condition("Job", "fit", "Complete")
    stdout = desk.quick("delete", "run.yaml", "--yes").stdout
    assert stdout.endswith("fit was deleted; copy its results with kubetune cp run.yaml\n")
    assert (
        "there is no run fit"
        in desk.quick("cp", "fit", "-n", desk.cluster.namespace, code=2).stderr
    )
    assert "1 file (7 B) in outputs/fit, all verified" in desk.quick("cp", "run.yaml").stdout
    assert (desk.folder / "outputs" / "fit" / "result").read_text() == "result\n"
    nothing = desk.quick("cp", "run.yaml", "checkpoints", "nix*", code=2).stderr
    assert "nothing in /outputs/fit matches checkpoints or nix*. Nothing was copied." in nothing
    desk.write({"name": "other"})
    assert "there is no run other" in desk.quick("cp", "run.yaml", code=2).stderr


def test_silence_is_explained(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-[01]-")
    desk.submit_script("true")
    desk.cluster.wait_event("0/2 nodes are available")
    desk.cluster.add_event(
        "Job", "fit", "FailedCreate", "of an earlier run", time="2026-01-01T00:00:00Z"
    )
    silent = desk.quick("logs", "fit")
    assert silent.stdout == ""
    first, *reasons = silent.stderr.splitlines()
    assert first == "kubetune: no pod of fit has printed anything so far"
    assert len(reasons) == 2, reasons  # one for each pod, though an event says the same
    assert all("no node fits: 0/2 nodes are available" in reason for reason in reasons)
    assert (
        "no start of rank 1 of fit has printed" in desk.quick("logs", "fit", "--rank", "1").stderr
    )
    assert (
        "is empty so far. Nothing was copied."
        in desk.quick("cp", "fit", "-n", desk.cluster.namespace, code=2).stderr
    )
    refused = desk.quick("exec", "fit", "--", "true", code=2).stderr
    assert f"(running: none); see kubetune status fit -n {desk.cluster.namespace}" in refused


def test_a_missing_namespace_hides_what_only_follows_from_it(desk: Desk) -> None:
    desk.write({"kubernetes.secrets": {"HF_TOKEN": "hf-token"}})
    refused = desk.quick("submit", "run.yaml", "-n", "nowhere", code=3).stderr
    assert "there is no namespace nowhere" in refused
    assert "hf-token" not in refused
    assert refused.endswith(" Nothing was changed.\n")


def test_dev_alone_means_start(desk: Desk) -> None:
    assert (
        "found 'stat'; expected start, run, stop, or a run file"
        in desk.quick("dev", "stat", code=2).stderr
    )
    desk.cluster.break_image(".")
    stdout = desk.quick("dev", "run.yaml").stdout
    assert (
        "2 pods of fit-dev come up and idle; to train in them: kubetune dev run run.yaml" in stdout
    )
    assert desk.cluster.get("StatefulSet", "fit-dev")["spec"]["replicas"] == 2
    assert (
        "0 of 2 pods are running; see kubetune status fit-dev -n "
        in desk.quick("dev", "run", "run.yaml", code=2).stderr
    )


@pytest.mark.parametrize(
    "links",
    [
        [("x/y", ".."), ("z", "x/y/../victim")],  # by text z is x/victim, on disk it is ../victim
        [("a", "b/c/../../victim"), ("b/c", "../..")],
        [("a", "b/../x/victim"), ("x", "..")],  # a led inside until x was there
        [("loop", "loop/x")],
        [("up", "..")],
        [("abs", "/etc/passwd")],
    ],
)
def test_links_of_a_pod_lead_nowhere_else(tmp_path: Path, links: list[tuple[str, str]]) -> None:
    """Who wrote the run directory is not trusted with the rest of this disk, by whatever steps a link goes."""
    to = tmp_path / "home" / "fit"
    to.mkdir(parents=True)
    (tmp_path / "home" / "victim").write_text("mine")
    *before, last = [_Link(path, target) for path, target in links]
    for entry in before:
        _link(to, entry)
    with pytest.raises(EnvironmentFault, match=r"refused to copy.*what was copied before it stays"):
        _link(to, last)
    for folder, folders, names in os.walk(to):
        for name in (*folders, *names):
            assert Path(folder, name).resolve().is_relative_to(to)


def test_links_of_a_run_directory_are_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    for _ in range(2):
        _link(tmp_path, _Link("checkpoints/last", "step-000004"))
        _link(tmp_path, _Link("checkpoints/best", "last"))
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-000004"


def test_a_stopped_run_tells_its_last_numbers_though_a_pod_of_an_earlier_start_stays(
    desk: Desk,
) -> None:
    def word(code: int, saved: int) -> str:
        progress = {"step": saved, "saved_step": saved}
        text = json.dumps({"code": code, "reason": "it ended", "progress": progress})
        return f"echo '{text}' > /dev/termination-log; exit {code}"

    desk.submit_script(
        "if mkdir /outputs/first; then echo of before; until test -e /outputs/go; do sleep 0.02; done\n"
        f"{word(145, 4)}; fi\n"
        f"last() {{ {word(143, 9)}; }}\n"
        "trap last TERM; echo up; while :; do sleep 0.02; done",
        compute__nodes=1,
    )
    (first,) = desk.cluster.wait_ready("fit")
    (desk.cluster.claim_folder("fit-outputs") / "go").touch()
    second = desk.cluster.wait_replacement(first)
    desk.cluster.wait_log(name_of(second), "up")
    stopped = desk.quick("stop", "fit").stdout
    assert "node 0: up" in stopped
    assert "of before" not in stopped
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert [entry["exit_code"] for entry in status["pods"]] == [145]
    assert (status["state"], status["saved_step"]) == ("stopped", 9)


def test_a_stopped_job_keeps_the_pod_that_was_killed_before(desk: Desk) -> None:
    """As a real one does; the run is stopped all the same, and goes on."""
    desk.submit_script(
        "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done", compute__nodes=1
    )
    (pod,) = desk.cluster.wait_ready("fit")
    desk.cluster.kill_pod(name_of(pod))
    desk.cluster.wait_replacement(pod)
    desk.quick("stop", "fit")
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert (status["state"], [entry["phase"] for entry in status["pods"]]) == (
        "stopped",
        ["Failed"],
    )
    desk.quick("resume", "fit")
    desk.cluster.wait_ready("fit")
