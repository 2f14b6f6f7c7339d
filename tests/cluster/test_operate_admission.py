"""What a cluster refuses until something else is there, and what becomes of a submission that is refused half-way."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from kubetune.k8s.cluster import admission
from kubetune.k8s.manifests.run_spec import Manifest
from tests.cluster.manifests import pod
from tests.cluster.operation import Desk, slow
from tests.cluster.test_operate_queue import SCRIPT, queue
from tests.ranks import wait_until

RUN = "app.kubernetes.io/instance=fit"
MADE = ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount", "NetworkPolicy", "TrainingRuntime", "TrainJob")  # fmt: skip
NEEDS_RUNTIME = "specified trainingRuntime must be created before the TrainJob is created"

UNKNOWN = f'TrainingRuntime "fit" not found: {NEEDS_RUNTIME}'


def made(desk: Desk) -> list[str]:
    """Return what the namespace has of the run."""
    return [f"{kind}/{obj['metadata']['name']}" for kind in MADE for obj in desk.cluster.find(kind, RUN)]  # fmt: skip


def test_a_train_job_is_submitted_where_webhooks_look_up_its_runtime(desk: Desk) -> None:
    """Kueue's knows the runtime only after it was asked a few times."""
    queue(desk)
    desk.submit_script("echo done", kubernetes__kind="trainjob", kubernetes__queue="gpu", compute__nodes=1)  # fmt: skip
    desk.cluster.wait_condition("TrainJob", "fit", "Complete")


def test_a_dry_run_says_what_it_could_not_check(desk: Desk) -> None:
    desk.write({"kubernetes.kind": "trainjob"})
    done = desk.quick("submit", "run.yaml", "--dry-run=server")
    assert "it cannot check TrainJob/fit before the object exists that it refers to" in done.stdout
    assert made(desk) == []


def test_a_workload_that_is_refused_for_good_leaves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_LEARNING_SECONDS", 0.1)
    desk.write({"kubernetes.kind": "trainjob"})
    desk.cluster.trouble("patch trainjobs", code=403, message=UNKNOWN)
    done = desk.quick("submit", "run.yaml", code=3)
    assert NEEDS_RUNTIME in done.stderr
    assert "removed again: TrainingRuntime fit" in done.stderr
    assert made(desk) == []


def test_what_was_there_before_stays_where_the_rest_is_refused(desk: Desk) -> None:
    desk.write({"kubernetes.kind": "trainjob"})
    desk.quick("submit", "run.yaml")
    desk.cluster.delete("TrainJob", "fit")
    before = [title for title in made(desk) if not title.startswith("TrainJob")]
    # The dry run passes, as the runtime is there.
    desk.cluster.trouble(
        "patch trainjobs", after=1, code=403, message="exceeded quota: runs, used: 1"
    )
    done = desk.quick("submit", "run.yaml", code=3)
    assert "removed again" not in done.stderr
    assert made(desk) == before


def test_a_quota_that_is_used_up_meanwhile_leaves_nothing(desk: Desk) -> None:
    desk.write({"kubernetes.jupyter": {}})
    desk.cluster.trouble("patch jobs", after=1, code=403, message="exceeded quota: runs, used: 1")
    done = desk.quick("submit", "run.yaml", code=3)
    assert "removed again: Pod fit-jupyter, " in done.stderr
    # They stay as long as the pod does, which is killed.
    for claim in ("fit-cache", "fit-outputs"):
        desk.cluster.wait_gone("PersistentVolumeClaim", claim)
    assert made(desk) == []
    assert desk.cluster.find("Secret", RUN) == []


@pytest.mark.parametrize("before", ["replaced", slow("deleted")])
def test_a_jobset_that_makes_its_cache_is_made_anew(desk: Desk, before: str) -> None:
    """Its webhook refuses a claim that is there, also that of the JobSet before, which goes with the last pod."""
    cache = {"size": "1Gi", "access": "ReadWriteMany"}
    keys = {
        "kubernetes__kind": "jobset", "compute__nodes": 1, "kubernetes__jobset": {"cache_with_run": True},
        "kubernetes__storage": {"cache": cache, "outputs": {"size": "1Gi"}},
    }  # fmt: skip
    desk.submit_script(f"touch /cache/here; {SCRIPT}", **keys)
    wait_until((desk.cluster.claim_folder("cache-fit") / "here").exists)
    claim = desk.cluster.get("PersistentVolumeClaim", "cache-fit")
    volumes = [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache-fit"}}]
    desk.cluster.apply(pod("holder", "sleep 600", volumes=volumes, terminationGracePeriodSeconds=0))

    if before == "deleted":
        desk.quick("delete", "fit", "--yes")
    timer = threading.Timer(2.0, desk.cluster.delete, ("Pod", "holder"))
    timer.start()
    desk.submit_script("test ! -e /cache/here", compute__memory="2Gi", **keys)
    timer.join()
    desk.cluster.wait_condition("JobSet", "fit", "Completed")
    assert (
        desk.cluster.get("PersistentVolumeClaim", "cache-fit")["metadata"]["uid"]
        != claim["metadata"]["uid"]
    )


def test_ctrl_c_leaves_nothing(desk: Desk) -> None:
    desk.write({"kubernetes.kind": "trainjob"})
    desk.cluster.trouble("patch trainjobs", code=403, message=UNKNOWN)
    command = subprocess.Popen(
        [sys.executable, "-m", "kubetune", "submit", "run.yaml"],
        cwd=desk.folder, env=desk.environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    desk.cluster.wait("TrainingRuntime", "fit", bool)
    command.send_signal(signal.SIGINT)
    _, stderr = command.communicate(timeout=60)
    assert "removed again: TrainingRuntime fit" in stderr
    assert made(desk) == []


def test_a_binding_is_granted_by_somebody_whose_rights_are_looked_up(desk: Desk) -> None:
    """Who may not grant everything is refused a RoleBinding whose Role is not there."""
    rights = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    api = "rbac.authorization.k8s.io"
    desk.cluster.apply(
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": {"name": "all"}, "rules": [rights]},
        {
            "apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": {"name": "all"},
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "all"},
            "subjects": [{"kind": "ServiceAccount", "name": "ann", "namespace": desk.cluster.namespace}],
        },
    )  # fmt: skip
    text = desk.cluster.kubeconfig.read_text()
    token = f"token: sa:{desk.cluster.namespace}:ann"
    desk.cluster.kubeconfig.write_text(text.replace("token: admin", token))
    desk.write({"kubernetes.operators": [{"kind": "User", "name": "ben"}], "compute.nodes": 1})
    desk.quick("submit", "run.yaml")
    assert desk.cluster.get("RoleBinding", "fit-operator")["roleRef"]["name"] == "fit-operator"


def test_references_are_found_by_kind_and_name() -> None:
    def obj(kind: str, **fields: object) -> Manifest:
        return {"kind": kind, "metadata": {"name": "fit"}, **fields}

    runtime = obj("TrainingRuntime", spec={"template": {"kind": "Role", "name": "other"}})
    job = obj("TrainJob", spec={"runtimeRef": {"kind": "TrainingRuntime", "name": "fit"}})
    account = obj("ServiceAccount")
    pod = obj("Pod", spec={"serviceAccountName": "fit"})
    objects = [runtime, job, account, pod]
    assert admission.referred(job, objects) == [runtime]
    assert admission.referred(pod, objects) == [account]
    assert admission.referred(runtime, objects) == []
