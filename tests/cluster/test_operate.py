"""What people do with runs on a cluster, through the command line, against pods that are real but train nothing."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

import kubetune
from kubetune.cli.installation import doctor
from kubetune.config.load import load_config
from kubetune.errors import ConfigError, DataError
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster.run_lookup import read_run
from kubetune.library.gpu_pools import gpu_pool
from kubetune.plan.proposals import GpuPool
from standin.state.objects import find_condition, name_of
from tests.cluster.operation import Desk, slow, write_progress
from tests.unit.test_memory import QWEN3_8B

WAIT = "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"
NVIDIA_SMI = """#!/bin/sh
echo "0, NVIDIA H100 80GB HBM3, 97, 61234, 81559, 64, 612.31"
echo "1, NVIDIA H100 80GB HBM3, 3, 12, 81559, 31, [N/A]"
"""


def trainers(desk: Desk) -> list[str]:
    """Return names of the trainer's pods that run, by node."""
    pods = desk.cluster.find("Pod", "app.kubernetes.io/component=trainer")
    return sorted(name_of(pod) for pod in pods if pod["status"].get("phase") == "Running")


def test_the_doctor_asks_the_cluster(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch, which a process of its own imports for it, is asked in tests/unit/test_cli.py.
    monkeypatch.setattr(
        doctor, "CHECKS", [check for check in doctor.CHECKS if check is not doctor._devices]
    )
    desk.write({"kubernetes.kind": "jobset"})
    checks = {
        check["what"]: check
        for check in json.loads(desk.quick("doctor", "run.yaml", "--json").stdout)
    }
    assert "jobset" in checks["cluster"]["result"], checks
    assert checks["rights"]["level"] == "ok"
    assert checks["hub"]["result"].startswith("not asked")


# -- submit
def test_proposals_are_for_the_gpus_of_the_nodes_that_take_pods(desk: Desk) -> None:
    file = desk.write({"compute": {"nodes": 1, "gpus_per_node": 8}})

    def asked(file: Path) -> GpuPool:
        config = load_config(file, environ={})
        return gpu_pool(config.compute, config.kubernetes, "cluster", {})

    def cordon(value: bool | None) -> None:
        merge = "application/merge-patch+json"
        spec = {"spec": {"unschedulable": value}}
        desk.cluster.request("PATCH", "/api/v1/nodes/node-0", spec, merge)

    with desk.at():
        nodes = Client().list("Node")
        assert asked(file) == GpuPool(len(nodes), 8, 81_559 * 2**20)
        cordon(True)
        assert asked(file).nodes == len(nodes) - 1
        cordon(None)
        file = desk.write({"kubernetes.node_selector": {"kubernetes.io/hostname": "node-1"}})
        assert asked(file).nodes == 1


def test_what_auto_is_on_this_cluster_stays_for_all_starts(desk: Desk) -> None:
    desk.cluster.break_image(".")
    model = desk.folder / "models" / "m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "vocab_size": 151_936, **QWEN3_8B})
    )
    changes = {
        "model": str(model),
        "training.parallelism": "auto",
        "compute.nodes": 1,
        "compute.gpus_per_node": 2,
        "kubernetes.mounts": [{"path": str(model.parent), "claim": "models"}],
    }

    def submitted(*overrides: str) -> tuple[str, str]:
        output = desk.quick("submit", "run.yaml", "--yes", *overrides).stderr
        kept = read_run(Client(desk.cluster.namespace), "fit")
        assert kept is not None
        return kept.config.training.parallelism, output

    desk.write(changes)
    with desk.at():
        # The H100s of its nodes have room for the whole.
        chosen, output = submitted()
        assert chosen == "ddp"
        assert "auto -> ddp, because a process has 79.6 GiB and takes about" in output
        chosen, output = submitted("compute.gpu_memory=16G", "compute.gpus_per_node=4")
        assert chosen == "ddp"
        assert "auto" not in output
        desk.quick("delete", "fit", "--yes")
        assert submitted("compute.gpu_memory=16G")[0] == "shard_base"
        desk.quick("delete", "fit", "--yes")
        # Where nobody here knows the model, a pod decides.
        assert submitted("model.path=org/m")[0] == "auto"


def test_a_dry_run_changes_nothing(desk: Desk) -> None:
    assert "kind: Job" in desk.quick("submit", "run.yaml", "--dry-run=client").stdout
    assert "would accept Job fit" in desk.quick("submit", "run.yaml", "--dry-run=server").stdout
    assert desk.cluster.find("Job") == desk.cluster.find("ConfigMap") == []


def test_a_bad_record_of_this_machine_goes_nowhere(desk: Desk) -> None:
    (desk.folder / "train.jsonl").write_text('{"prompt": "1", "completion": "2"}\nnot JSON\n')
    refused = desk.quick("submit", "run.yaml", code=2).stderr
    assert "train.jsonl:2: is not JSON" in refused
    assert refused.endswith("\nNothing was changed. --no-check submits it all the same.\n")
    (desk.folder / "train.jsonl").write_text("")
    assert (
        "train.jsonl holds no records."
        in desk.quick("submit", "run.yaml", "--dry-run=server", code=2).stderr
    )
    assert desk.cluster.find("ConfigMap") == []
    desk.cluster.break_image(".")
    assert "was submitted" in desk.quick("submit", "run.yaml", "--no-check").stdout


def test_submitting_twice_is_submitting_once(desk: Desk) -> None:
    desk.cluster.break_image(".")
    desk.quick("submit", "run.yaml")
    first = desk.cluster.get("Job", "fit")["metadata"]
    assert "was there already" in desk.quick("submit", "run.yaml").stdout
    second = desk.cluster.get("Job", "fit")["metadata"]
    assert (first["uid"], first["generation"]) == (second["uid"], second["generation"])


def test_another_run_of_the_same_name_is_refused(desk: Desk) -> None:
    desk.cluster.break_image(".")
    desk.quick("submit", "run.yaml")
    refused = desk.quick("submit", "run.yaml", "training.seed=7", "--yes", code=2).stderr
    assert "training.seed was 42, now is 7" in refused
    assert "choose another name. Nothing was changed." in refused
    (desk.folder / "train.jsonl").write_text('{"text": "other data"}\n')
    assert (
        "train.jsonl: its contents have changed" in desk.quick("submit", "run.yaml", code=2).stderr
    )


def test_a_job_of_somebody_else_is_left_alone(desk: Desk) -> None:
    spec = {
        "template": {
            "spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "none"}]}
        }
    }
    desk.cluster.apply(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "fit"}, "spec": spec}
    )
    assert "none of kubetune's" in desk.quick("submit", "run.yaml", "--yes", code=2).stderr


def test_replacing_is_asked_for_once_and_lets_the_pods_save(desk: Desk) -> None:
    desk.submit_script(WAIT)
    desk.cluster.wait_ready("fit", pods=2)
    first = desk.cluster.get("Job", "fit")["metadata"]["uid"]
    refused = desk.quick("submit", "run.yaml", "compute.memory=2Gi", code=2).stderr
    assert "Its pods are stopped (they save first), and new ones go on" in refused
    assert "Replace it? There is no terminal to ask on" in refused
    assert desk.cluster.get("Job", "fit")["metadata"]["uid"] == first
    desk.cluster.break_image(".")
    assert "was replaced" in desk.quick("submit", "run.yaml", "compute.memory=2Gi", "--yes").stdout
    assert desk.cluster.get("Job", "fit")["metadata"]["uid"] != first


def test_everything_the_cluster_refuses_is_told_at_once(desk: Desk) -> None:
    desk.write({"kubernetes.secrets": {"HF_TOKEN": "hf-token"}, "kubernetes.kind": "jobset"})
    desk.cluster.uninstall("JobSet")
    desk.cluster.refuse(
        "PersistentVolumeClaim", "exceeded quota: disk, requested: 1Gi, used: 9Gi, limited: 9Gi"
    )
    refused = desk.quick("submit", "run.yaml", code=3).stderr
    assert "Secret hf-token does not exist; make it: kubetune secret set HF_TOKEN" in refused
    assert (
        "the cluster has no kind JobSet in jobset.x-k8s.io/v1alpha2; install JobSet v0.12.0"
        in refused
    )
    assert "quota disk of namespace" in refused
    assert refused.endswith("Nothing was changed.\n")
    assert desk.cluster.find("ConfigMap") == []


def test_a_missing_namespace_is_one_sentence(desk: Desk) -> None:
    refused = desk.quick("submit", "run.yaml", "-n", "nowhere", code=3).stderr
    assert (
        refused.count("there is no namespace nowhere; create it (kubectl create namespace nowhere)")
        == 1
    )


def test_a_missing_right_comes_with_the_role_that_grants_it(desk: Desk) -> None:
    text = desk.cluster.kubeconfig.read_text()
    desk.cluster.kubeconfig.write_text(
        text.replace("token: admin", f"token: sa:{desk.cluster.namespace}:guest")
    )
    refused = desk.quick("status", code=3).stderr
    assert f"guest may not list configmaps in namespace {desk.cluster.namespace}" in refused
    assert "kind: Role\n" in refused
    assert "resources: [configmaps]\n    verbs: [list]" in refused
    role = yaml.safe_load(refused.partition(":\napi")[2].join(("api", "")))
    desk.cluster.apply(role, bound(role, desk.cluster.namespace))
    assert "no runs in namespace" in desk.quick("status").stdout


def bound(role: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return the binding that gives a Role to the account `guest`."""
    reference = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    subject = {"kind": "ServiceAccount", "name": "guest", "namespace": namespace}
    facts = {
        "apiVersion": role["apiVersion"],
        "kind": "RoleBinding",
        "metadata": {"name": "guests"},
    }
    return {**facts, "roleRef": reference, "subjects": [subject]}


def test_warnings_of_the_server_are_shown(desk: Desk) -> None:
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    path = f"/api/v1/namespaces/{desk.cluster.namespace}"
    desk.cluster.request("PATCH", path, label, "application/merge-patch+json")
    desk.write({"kubernetes.profile": "rdma", "kubernetes.rdma": {"privileged": True}})
    stderr = desk.quick("submit", "run.yaml").stderr
    assert stderr.count('the cluster warns: would violate PodSecurity "restricted:latest"') == 1
    desk.cluster.wait_event("violates PodSecurity")
    shown = desk.quick("status", "fit").stdout
    assert "violates PodSecurity" in shown.splitlines()[1]


# -- status
def test_status_shows_progress_from_the_run_directory(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.submit_script(WAIT)
    desk.cluster.wait_ready("fit", pods=2)
    write_progress(desk)
    shown = desk.quick("status", "run.yaml").stdout
    assert f"fit: Job in {desk.cluster.namespace}, running, 2 of 2 pods running" in shown
    assert (
        "step 5/20 · loss 2.5000 · 1,234 tokens/s · ETA 30s · eval_loss 2.2500 at step 5 · saved step 4"
        in shown
    )
    facts = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert (facts["state"], facts["step"], facts["seconds_left"]) == ("running", 5, 30.0)
    assert [pod["node"] for pod in facts["pods"]] == [0, 1]
    head, row = desk.quick("status").stdout.splitlines()
    assert head.split() == [
        "RUN",
        "KIND",
        "STATE",
        "PODS",
        "RESTARTS",
        "STEP",
        "LOSS",
        "TOKENS/S",
        "ETA",
        "WHY",
    ]
    assert row.split() == ["fit", "Job", "running", "2/2", "0", "5/20", "2.5000", "1,234", "30s"]
    monkeypatch.setenv("COLUMNS", "120")  # a narrow terminal breaks the line
    watched = desk.quick("watch", "fit").stdout
    where = f"{desk.cluster.namespace}, 2 of 2 pods running"
    assert f"fit  running  step 5/20 (25%)  ETA 30s  {where}" in watched
    assert re.search(r"checkpoint +step=4", watched)
    assert "two" in watched


def test_status_says_why_a_pod_does_not_come(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-1-")
    desk.submit_script(WAIT)
    desk.cluster.wait_event("0/2 nodes are available")
    desk.cluster.wait_ready("fit")
    shown = desk.quick("status", "fit").stdout
    assert "1 of 2 pods running" in shown
    assert "no node fits: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu." in shown
    assert "FailedScheduling" in desk.quick("events", "fit").stdout


def test_status_says_why_an_image_is_not_there(desk: Desk) -> None:
    desk.cluster.break_image(".")
    desk.quick("submit", "run.yaml")
    desk.cluster.wait_event("Back-off pulling image")
    shown = desk.quick("status", "fit").stdout
    assert "waiting" in shown
    assert "ImagePullBackOff" in shown
    assert "check kubernetes.image" in shown


def test_status_names_the_cause_of_a_failure(desk: Desk) -> None:
    left = json.dumps({"code": 2, "reason": "train.jsonl:3: not JSON"})
    script = f"echo '{left}' > /dev/termination-log; exit 2"
    desk.submit_script(script, compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Failed")
    shown = desk.quick("status", "fit").stdout
    assert "fit: Job" in shown
    assert "failed, train.jsonl:3: not JSON" in shown
    assert "exit code 2: train.jsonl:3: not JSON" in shown


def test_an_unknown_run_is_named_with_those_there_are(desk: Desk) -> None:
    desk.cluster.break_image(".")
    desk.quick("submit", "run.yaml")
    refused = desk.quick("status", "fti", "-n", desk.cluster.namespace, code=2).stderr
    assert f"there is no run fti in namespace {desk.cluster.namespace}; runs there: fit" in refused
    for nameless, shown in (("", "''"), ("..", "..")):
        refused = desk.quick(
            "delete", nameless, "--yes", "-n", desk.cluster.namespace, code=2
        ).stderr
        assert f"there is no run {shown} in namespace" in refused


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "Upper"])
def test_a_namespace_that_none_can_be_called_is_refused_before_anything_is_asked(
    desk: Desk, namespace: str
) -> None:
    refused = desk.quick("status", "-n", namespace, code=2).stderr
    assert f"namespace: found {namespace!r}; expected" in refused


# -- exec, cp, gpus, top
def test_exec_runs_in_one_pod_or_all_and_passes_the_exit_code_on(desk: Desk) -> None:
    desk.submit_script(WAIT)
    desk.cluster.wait_ready("fit", pods=2)
    assert desk.quick("exec", "fit", "--node", "1", "--", "hostname").stdout == "fit-1\n"
    everywhere = desk.quick(
        "exec", "fit", "--all", "--", "sh", "-c", "hostname; exit 7", code=7
    ).stdout
    assert sorted(everywhere.splitlines()) == ["[node 0] fit-0", "[node 1] fit-1"]
    assert "found no command" in desk.quick("exec", "fit", code=2).stderr
    done = subprocess.run(
        desk.command("exec", "fit", "--stdin", "--", "cat"),
        cwd=desk.folder, env=desk.environment(), input=bytes(range(256)), capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == bytes(range(256))


def test_cp_brings_the_results_and_what_is_there_stays(desk: Desk) -> None:
    desk.submit_script("true")
    desk.cluster.wait_condition("Job", "fit", "Complete")
    source = write_progress(desk)
    here = desk.folder / "outputs" / "fit"
    (source / "weights.bin").write_bytes(os.urandom(3_000_000))
    first = desk.quick("cp", "fit").stdout
    assert "all verified" in first
    assert (here / "weights.bin").read_bytes() == (source / "weights.bin").read_bytes()
    assert (here / "checkpoints" / "last" / "manifest.json").read_text() == "4"
    assert not (here / "checkpoints" / "step-000002").exists()
    (here / "weights.bin").write_bytes(b"damaged")
    second = desk.quick("cp", "fit")
    assert "1 file (2.86 MiB)" in second.stdout
    assert (here / "weights.bin").read_bytes() == (source / "weights.bin").read_bytes()
    desk.quick("cp", "fit", "checkpoints/step-000002", "-o", "elsewhere")
    assert [p.name for p in (desk.folder / "elsewhere").rglob("*") if p.is_file()] == [
        "manifest.json"
    ]


def test_cp_of_a_run_that_runs_copies_what_grows_and_no_heartbeats(desk: Desk) -> None:
    """Files are listed with their hash, and copied up to the length they had then; a beat never stays the same."""
    write_progress(desk)
    script = """
    trap 'exit 143' TERM
    cd /outputs/fit
    while :; do
      echo $((n += 1)) > beat; mv beat logs/rank-0.beat.json; echo "line $n" >> logs/rank-0.log
    done
    """
    desk.submit_script(script, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    assert "all verified" in desk.quick("cp", "fit").stdout
    logs = desk.folder / "outputs" / "fit" / "logs"
    assert (logs / "rank-0.log").read_text().startswith("one\ntwo\n")
    assert not (logs / "rank-0.beat.json").exists()


def test_a_broken_off_cp_goes_on_where_it_was(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    big = desk.run_folder() / "weights.bin"
    big.parent.mkdir(parents=True)
    big.write_bytes(os.urandom(60_000_000))
    here = desk.folder / "outputs" / "fit"
    with desk.started("cp", "fit", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "weights.bin (60,000,000 bytes)" in process.stderr.readline()
        while not any(part.stat().st_size for part in here.glob(".*.part")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    (part,) = here.glob(".*.part")
    assert 0 < part.stat().st_size < 60_000_000
    assert "going on after" in desk.quick("cp", "fit").stderr
    assert (here / "weights.bin").read_bytes() == big.read_bytes()
    assert list(here.glob(".*")) == []


def test_cp_of_a_run_that_ends_meanwhile_goes_on(desk: Desk) -> None:
    """The container that was asked first is gone before the second file; another pod reads the volume."""
    desk.submit_script("while ! [ -e /outputs/go ]; do sleep 0.05; done", compute__nodes=1)
    desk.cluster.wait_ready("fit")
    source = desk.run_folder()
    source.mkdir(parents=True)
    for name in ("a.bin", "b.bin", "c.bin"):
        (source / name).write_bytes(os.urandom(20_000_000))
    with desk.started("cp", "fit", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "a.bin (20,000,000 bytes)" in process.stderr.readline()
        process.send_signal(signal.SIGSTOP)
        (source.parent / "go").touch()
        desk.cluster.wait_condition("Job", "fit", "Complete")
        process.send_signal(signal.SIGCONT)
        output = process.stderr.read()
        assert process.wait() == 0, output
    for name in ("a.bin", "b.bin", "c.bin"):
        here = desk.folder / "outputs" / "fit" / name
        assert here.read_bytes() == (source / name).read_bytes()
    assert "asking another container" in output


def test_cp_writes_nothing_outside_of_its_folder(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    source = desk.run_folder()
    source.mkdir(parents=True)
    (source / "plan.json").write_text("{}")
    os.mkfifo(source / "pipe")  # which nobody writes to
    assert "pipe left out: neither a file nor a link" in desk.quick("cp", "fit").stderr
    (source / "evil").symlink_to("../../../secret")
    assert "leads outside" in desk.quick("cp", "fit", code=3).stderr


def test_gpus_of_all_pods_are_one_table(desk: Desk) -> None:
    """nvidia-smi is a script that prints what the real one does: this machine has no GPU."""
    bin_folder = desk.cluster.claim_folder("models")
    bin_folder.mkdir(parents=True, exist_ok=True)
    (bin_folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (bin_folder / "nvidia-smi").chmod(0o755)
    desk.submit_script(WAIT, kubernetes__env={"PATH": f"/models:{os.environ['PATH']}"})
    desk.cluster.wait_ready("fit", pods=2)
    head, *rows = desk.quick("gpus", "fit").stdout.splitlines()
    assert head.split() == ["NODE", "POD", "GPU", "NAME", "LOAD", "MEMORY", "HEAT", "POWER"]
    assert len(rows) == 4
    assert "NVIDIA H100 80GB HBM3  97%   61234/81559 MiB" in rows[0]
    facts = json.loads(desk.quick("gpus", "fit", "--json").stdout)
    assert facts[1]["rows"][1]["power_watts"] is None
    (bin_folder / "nvidia-smi").unlink()
    assert "there is no nvidia-smi in this pod" in desk.quick("gpus", "fit").stdout


def test_top_needs_no_metrics_server(desk: Desk) -> None:
    desk.submit_script("while :; do :; done", compute__nodes=1)
    desk.cluster.wait_ready("fit")
    (use,) = json.loads(desk.quick("top", "fit", "--json").stdout)
    assert use["cpu_cores"] > 0.1
    assert use["memory_bytes"] > 0
    assert use["shm_total_bytes"] == 256 * 1024 * 1024
    assert "OUTPUTS FREE" in desk.quick("top", "fit").stdout


# -- stop, resume, delete
@pytest.mark.parametrize(
    "kind", ["job", *(slow(kind) for kind in ("statefulset", "jobset", "pytorchjob", "trainjob"))]
)
def test_a_stopped_run_holds_no_pod_until_it_is_resumed(desk: Desk, kind: str) -> None:
    script = "trap 'echo saved step 7; exit 143' TERM; echo up; while :; do sleep 0.02; done"
    desk.submit_script(script, kubernetes__kind=kind)
    desk.cluster.wait_pods("app.kubernetes.io/component=trainer", 2)
    for pod in desk.cluster.find("Pod", "app.kubernetes.io/component=trainer"):
        desk.cluster.wait_phase(name_of(pod), "Running")
        desk.cluster.wait_log(name_of(pod), "up")
    stdout = desk.quick("stop", "fit").stdout
    assert "node 0: saved step 7" in stdout
    assert desk.cluster.find("Pod", "app.kubernetes.io/component=trainer") == []
    assert ", stopped" in desk.quick("status", "fit").stdout
    assert "fit has no pod now; see kubetune status fit" in desk.quick("logs", "-f", "fit").stderr
    again = desk.submit_script(script, kubernetes__kind=kind)
    assert (again.outcome, again.state) == ("unchanged", "stopped")
    # Other pods than those of the script, such as another release of kubetune would write.
    if kind == "jobset":
        refused = desk.quick("submit", "run.yaml", code=3).stderr
        assert "kubetune delete fit -n" in refused
        assert "then submit again; the results stay" in refused
    else:
        assert "kubetune resume fit" in desk.quick("submit", "run.yaml").stdout
    desk.quick("resume", "fit")
    desk.cluster.wait_pods("app.kubernetes.io/component=trainer", 2)
    assert "is not stopped" in desk.quick("resume", "fit", code=2).stderr


def test_delete_says_what_goes_and_keeps_the_results(desk: Desk) -> None:
    desk.submit_script(WAIT)
    desk.cluster.wait_ready("fit", pods=2)
    refused = desk.quick("delete", "fit", code=2)
    assert "There is no terminal to ask on; add --yes" in refused.stderr
    assert "Job fit" in refused.stdout
    assert len(trainers(desk)) == 2
    stdout = desk.quick("delete", "fit", "--yes").stdout
    assert "results on claim fit-outputs stay" in stdout
    for kind in ("Job", "Service", "ConfigMap", "ServiceAccount", "Pod"):
        assert desk.cluster.find(kind, "app.kubernetes.io/instance=fit") == []
    assert "fit-outputs" in [name_of(claim) for claim in desk.cluster.find("PersistentVolumeClaim")]
    desk.submit_script("true")
    assert "lost for ever" in desk.quick("delete", "fit", "--volumes", "--yes").stdout
    assert "fit-outputs" not in [
        name_of(claim) for claim in desk.cluster.find("PersistentVolumeClaim")
    ]


# -- secrets, ports, dev
def test_a_secret_is_set_unseen_and_beside_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk.folder / ".env").write_text("# mine\nexport HF_TOKEN='hf_from_the_file'\n")
    desk.write({"kubernetes.secrets": {"HF_TOKEN": {"secret": "keys", "key": "hf"}}})
    done = desk.quick("secret", "set", "HF_TOKEN", "run.yaml")
    assert "hf_from" not in done.stdout + done.stderr
    monkeypatch.setenv("OTHER_KEY", "another value")
    desk.quick("secret", "set", "OTHER_KEY", "--secret", "keys", "-n", desk.cluster.namespace)
    data = desk.cluster.get("Secret", "keys")["data"]
    assert {key: base64.b64decode(value) for key, value in data.items()} == {
        "hf": b"hf_from_the_file", "OTHER_KEY": b"another value",
    }  # fmt: skip
    missing = desk.quick("secret", "set", "NO_SUCH", "-n", desk.cluster.namespace, code=2).stderr
    assert "NO_SUCH is neither in .env nor in the environment" in missing
    typed = desk.quick("secret", "set", "hf_abc=def", code=2).stderr
    assert "hf_abc" not in typed


@pytest.mark.usefixtures("kubectl")
def test_tensorboard_is_reached_on_this_machine(desk: Desk) -> None:
    """What answers in its place is Python's own server: whether TensorBoard works is not asked here."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    desk.submit_script(
        "cd /outputs && exec python3 -m http.server 6006", kubernetes__tensorboard=True
    )
    desk.cluster.wait(
        "Deployment",
        "fit-tensorboard",
        lambda deployment: deployment["status"].get("readyReplicas"),
    )
    assert (
        "has no jupyter; put `kubernetes.jupyter: {}`"
        in desk.quick("port-forward", "fit", "jupyter", code=2).stderr
    )
    command = desk.command("port-forward", "fit", "tensorboard", "--port", port)
    with subprocess.Popen(
        command,
        cwd=desk.folder,
        env=desk.environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any("Forwarding from 127.0.0.1" in line for line in process.stdout)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            assert b"Directory listing" in answer.read()
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C


def test_jupyter_gets_a_token_that_stays(desk: Desk) -> None:
    desk.cluster.break_image(".")
    desk.write({"kubernetes.jupyter": {}})
    desk.quick("submit", "run.yaml")
    token = desk.cluster.get("Secret", "fit-jupyter")["data"]["token"]
    assert len(base64.b64decode(token)) >= 32
    desk.quick("submit", "run.yaml")
    assert desk.cluster.get("Secret", "fit-jupyter")["data"]["token"] == token


def test_events_are_those_of_the_run_alone(desk: Desk) -> None:
    desk.submit_script("true", name="fit")
    desk.submit_script("true", name="fit-2")
    desk.cluster.wait_condition("Job", "fit", "Complete")
    desk.cluster.wait_condition("Job", "fit-2", "Complete")
    about = {
        event["involvedObject"]["name"]
        for event in json.loads(desk.quick("events", "fit", "--json").stdout)
    }
    assert about
    assert not [name for name in about if name.startswith("fit-2")]


def test_condition_of_a_pod_is_asked_of_the_right_pod(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-0-")
    desk.submit_script(WAIT)
    desk.cluster.wait_event("0/2 nodes")
    (never,) = desk.cluster.find("Pod", "batch.kubernetes.io/job-completion-index=0")
    assert find_condition(never, "PodScheduled")["reason"] == "Unschedulable"
    assert "no pod of node 0 is running" in desk.quick("exec", "fit", "--", "true", code=2).stderr


# -- from Python
def test_the_example_of_submitting_from_python_does_what_the_verb_does(desk: Desk) -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    [block] = re.findall(r"^```python submit\n(.*?)^```$", page, re.M | re.S)
    desk.cluster.break_image(".")
    desk.write({"compute.nodes": 1})  # of two, advice would be a warning
    names: dict[str, Any] = {"kubetune": kubetune}
    with desk.at():
        assert kubetune.submit("run.yaml", dry_run=True).outcome == "checked"
        exec(block, names)
        assert (names["job"].outcome, names["job"].name) == ("submitted", "fit")
        assert kubetune.submit("run.yaml").outcome == "unchanged"
        desk.write({"compute.nodes": 1, "logging.level": "DEBUG"})
        with pytest.raises(
            ConfigError,
            match=r"Job fit .*\. Replace it\? Call with replace=True for that\. Nothing",
        ):
            kubetune.submit("run.yaml")
        (desk.folder / "train.jsonl").write_text("not JSON\n")
        with pytest.raises(
            DataError,
            match=r"train\.jsonl:1: is not JSON(.|\n)*check=False submits it all the same",
        ):
            kubetune.submit("run.yaml")
