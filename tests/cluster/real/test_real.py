"""Ten commands, a kill, a drain, a stop and a resume, for every kind that the cluster serves.

    KUBETUNE_REAL_CLUSTER=1 KUBETUNE_REAL_IMAGE=IMAGE pytest tests/cluster/real

KUBECONFIG names the cluster, KUBETUNE_REAL_NAMESPACE a namespace that is there (else one is made and removed). It has
to have a default storage class, and nothing else that a fresh cluster of kind or minikube lacks. Two pods train the
image's own demo model. They share volumes, which most clusters attach to one node at a time, so both are on one;
KUBETUNE_REAL_STORAGE_CLASS names a class of volumes that many nodes mount at once, and then they may be on any.
KUBETUNE_REAL_KUBELET is a shell command that starts the kubelet of the node `$NODE` anew, as
`docker exec $NODE systemctl restart kubelet`; left out, that is not tried. Queues are tried where Kueue is served.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.offline.sitecustomize import REAL_SERVERS

IMAGE = os.environ.get("KUBETUNE_REAL_IMAGE", "")
# How long anything may take; a first pull of the image is a part of it.
SECONDS = float(os.environ.get("KUBETUNE_REAL_SECONDS", "600"))
# What may itself wait for so long, as `kubectl wait`, gets some more, to say what it has waited for.
COMMAND_SECONDS = SECONDS + 60
SHARED_CLASS = os.environ.get("KUBETUNE_REAL_STORAGE_CLASS", "")
RESTART_KUBELET = os.environ.get("KUBETUNE_REAL_KUBELET", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (os.environ.get("KUBETUNE_REAL_CLUSTER") and IMAGE),
        reason="KUBETUNE_REAL_CLUSTER=1 and KUBETUNE_REAL_IMAGE name no cluster and image",
    ),
]

KINDS = ("job", "jobset", "trainjob", "pytorchjob", "statefulset")
COPY = (
    "import pathlib, shutil, kubetune; "
    "shutil.copytree(pathlib.Path(kubetune.__file__).parent / 'cli/local/embedded/model', '/models/demo')"
)
HOST_LABEL = "kubernetes.io/hostname"
_POLL_SECONDS = 1.0


@dataclass
class Place:
    """A folder here and a namespace there."""

    folder: Path
    namespace: str
    kubeconfig: str = ""  # of a user with few rights; empty: the administrator's
    host: str = ""  # label of the one node that has the volumes; empty: all have

    def run(
        self,
        *argv: str,
        code: int | None = 0,
        stdin: str | None = None,
        kubeconfig: str = "",
    ) -> str:
        """Run a command; what it prints. AssertionError when it ends with another exit code (None: with any)."""
        environ = dict(os.environ)
        if kubeconfig:
            environ["KUBECONFIG"] = kubeconfig
        try:
            done = subprocess.run(
                argv,
                cwd=self.folder,
                env=environ,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            printed = f"{error.stdout!r}\n{error.stderr!r}"
            raise AssertionError(
                f"{' '.join(argv)}: no end in {COMMAND_SECONDS:.0f} s\n{printed}"
            ) from error
        output = f"{' '.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code is None or done.returncode == code, output
        assert "Traceback" not in done.stderr, output
        return done.stdout

    def kubetune(self, *argv: str, code: int | None = 0) -> str:
        return self.run(
            sys.executable, "-m", "kubetune", *argv, code=code, kubeconfig=self.kubeconfig
        )

    def kubectl(self, *argv: str, code: int | None = 0, stdin: str | None = None) -> str:
        return self.run("kubectl", "-n", self.namespace, *argv, code=code, stdin=stdin)

    def status(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(
            self.kubetune("status", name, "-n", self.namespace, "--json")
        )
        return report

    def until(self, name: str, test: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return the run's status once `test` is true of it."""
        deadline = time.monotonic() + SECONDS
        while not test(current := self.status(name)):
            events = self.kubectl("get", "events", code=None)
            assert time.monotonic() < deadline, f"{json.dumps(current, indent=1)}\n{events}"
            time.sleep(_POLL_SECONDS)
        return current

    def pods(self, name: str) -> dict[str, str]:
        """Return the machine of each trainer's pod of a run, by its uid."""
        labels = f"app.kubernetes.io/instance={name},app.kubernetes.io/component=trainer"
        found = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json"))["items"]
        return {pod["metadata"]["uid"]: pod["spec"].get("nodeName", "") for pod in found}

    def write(
        self,
        name: str,
        kind: str,
        kubernetes: Mapping[str, Any] | None = None,
        **training: int,
    ) -> str:
        """Write a run file and return its name. `kubernetes` are more keys of that section."""
        cache = {"size": "1Gi"}
        if SHARED_CLASS:
            cache["storage_class"] = SHARED_CLASS
        config = {
            "name": name,
            "model": {"path": "/models/demo", "local_files_only": True},
            "data": {"train": "train.jsonl", "max_length": 128},
            "lora": {"r": 4},
            "training": {"per_device_train_batch_size": 4, "compile": False, "save_steps": 20, **training},
            "compute": {"nodes": 2, "gpus_per_node": 0, "cpu": "100m", "memory": "1Gi"},
            "kubernetes": {
                "kind": kind, "namespace": self.namespace, "image": IMAGE, "image_pull_policy": "IfNotPresent",
                "spread": "none", "grace_seconds": 60, **self.host_of_volumes(),
                "storage": {"cache": cache, "outputs": {"claim": "kubetune-real-outputs"}},
                "mounts": [{"path": "/models", "claim": "kubetune-real-models"}],
                **(kubernetes or {}),
            },
        }  # fmt: skip
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        return f"{name}.yaml"

    def host_of_volumes(self) -> dict[str, Any]:
        """Return the key that keeps all pods on the node that has the volumes; none where all nodes have."""
        if not self.host:
            return {}
        return {"node_selector": {HOST_LABEL: self.host}}


def allow_server() -> None:
    """Let tests, which otherwise stay on this machine, connect to the API server that KUBECONFIG names."""
    view = ["kubectl", "config", "view", "--minify", "-o", "json"]
    done = subprocess.run(view, capture_output=True, text=True, timeout=SECONDS, check=True)
    cluster = json.loads(done.stdout)["clusters"][0]["cluster"]
    allowed = []
    for key in ("server", "proxy-url"):
        if cluster.get(key):
            parts = urlsplit(cluster[key])
            port = parts.port or (443 if parts.scheme == "https" else 80)
            for _, _, _, _, address in socket.getaddrinfo(
                parts.hostname, port, type=socket.SOCK_STREAM
            ):
                allowed.append(f"{address[0]} {port}")
            allowed.append(f"{parts.hostname} {port}")
    os.environ[REAL_SERVERS] = ",".join(allowed)


def is_served(resource: str) -> bool:
    """True if the cluster has a kind of object: `clusterqueues.kueue.x-k8s.io`."""
    done = subprocess.run(
        ["kubectl", "get", resource, "-A"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode == 0


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Yield a namespace with the model on a claim, and one for results."""
    allow_server()
    chosen_namespace = os.environ.get("KUBETUNE_REAL_NAMESPACE")
    place = Place(
        tmp_path_factory.mktemp("real"), chosen_namespace or f"kubetune-real-{os.getpid()}"
    )
    rows = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}"} for n in range(64)]
    (place.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not chosen_namespace:
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": place.namespace},
        }
        place.run("kubectl", "apply", "-f", "-", stdin=json.dumps(namespace))
    try:
        claims = [f"kubetune-real-{name}" for name in ("models", "outputs")]
        spec = claim_spec()
        for name in claims:
            claim = {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name},
                "spec": spec,
            }
            place.kubectl("apply", "-f", "-", stdin=json.dumps(claim))
        place.kubectl("apply", "-f", "-", stdin=json.dumps(copying_pod(claims)))
        done = "jsonpath={.status.phase}=Succeeded"
        place.kubectl(
            "wait", f"--for={done}", "pod/kubetune-real-copy", f"--timeout={SECONDS:.0f}s"
        )
        if not SHARED_CLASS:
            pod = json.loads(place.kubectl("get", "pod", "kubetune-real-copy", "-o", "json"))
            place.host = host_label(place, pod["spec"]["nodeName"])
        # A volume of one node is let go only with the last pod that mounts it.
        place.kubectl("delete", "pod", "kubetune-real-copy")
        yield place
    finally:
        if chosen_namespace:
            place.kubectl(
                "delete", "pod,pvc", "kubetune-real-copy", *claims, "--ignore-not-found", code=None
            )
        else:
            place.run("kubectl", "delete", "namespace", place.namespace, "--wait=false")


def claim_spec() -> dict[str, Any]:
    """Return what a claim asks for: a volume of one node, or of all in the class that was named."""
    size = {"requests": {"storage": "1Gi"}}
    if not SHARED_CLASS:
        return {"accessModes": ["ReadWriteOnce"], "resources": size}
    return {
        "accessModes": ["ReadWriteMany"],
        "resources": size,
        "storageClassName": SHARED_CLASS,
    }


def host_label(place: Place, node: str) -> str:
    """Return the label by which pods ask for a node. It need not be the node's name."""
    labels: dict[str, str] = json.loads(place.run("kubectl", "get", "node", node, "-o", "json"))[
        "metadata"
    ]["labels"]
    return labels[HOST_LABEL]


def copying_pod(claims: list[str]) -> dict[str, Any]:
    """Return a pod that copies the image's model; it mounts the claim for results too, so that both lie on one node."""
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
    mounts = [{"name": name, "mountPath": f"/{name.rpartition('-')[2]}"} for name in claims]
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "copy", "image": IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["python", "-c", COPY],
        "volumeMounts": mounts, "securityContext": security,
    }  # fmt: skip
    user = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "restartPolicy": "Never",
        "securityContext": user,
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "kubetune-real-copy"},
        "spec": spec,
    }


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, place: Place) -> str:
    """Return each kind that the cluster serves."""
    kind_name = str(request.param)
    file = place.write(f"real-{kind_name}", kind_name, max_steps=2)
    done = subprocess.run(
        [sys.executable, "-m", "kubetune", "submit", file, "--dry-run=server"],
        cwd=place.folder, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    if "the cluster has no kind" in done.stderr:
        pytest.skip(f"this cluster serves no {kind_name}")
    assert done.returncode == 0, done.stderr
    return kind_name


def saved_by_running(now: dict[str, Any]) -> int:
    """Return the newest checkpoint of a run that goes on; 0 while its pods, just started, cannot be asked for it."""
    return (now["saved_step"] or 0) if now["state"] == "running" else 0


def has_stopped(status: dict[str, Any]) -> bool:
    """True once no pod of a stopped run goes on. A Job keeps those that were killed before."""
    phases = {pod["phase"] for pod in status["pods"]}
    return status["state"] == "stopped" and phases <= {"Succeeded", "Failed"}


def running_on(status: dict[str, Any]) -> str:
    """Return the node of a pod that runs. A Job keeps those of earlier starts, which may have been on another one."""
    return str(next(pod["machine"] for pod in status["pods"] if pod["phase"] == "Running"))


def restart_kubelet(node: str) -> None:
    environ = os.environ | {"NODE": node}
    subprocess.run(["sh", "-c", RESTART_KUBELET], env=environ, timeout=SECONDS, check=True)


def test_a_run_is_submitted_watched_disturbed_stopped_and_resumed(place: Place, kind: str) -> None:
    name = f"real-{kind}"
    space = ("-n", place.namespace)
    place.kubetune("submit", place.write(name, kind, max_steps=100_000))
    place.until(name, lambda status: (status["step"] or 0) >= 3)
    assert "2 of 2 pods running" in place.kubetune("status", name, *space)
    assert "step " in place.kubetune("logs", name, *space)
    assert place.kubetune("logs", name, "--rank", "1", *space)
    assert len(place.kubetune("exec", name, "--all", *space, "--", "hostname").splitlines()) == 2
    assert place.kubetune("gpus", name, *space).startswith("NODE")
    assert place.kubetune("top", name, *space).startswith("NODE")
    assert place.kubetune("events", name, *space).startswith("AGE")

    # A step may be one of a start before; a checkpoint that is newer is of this one.
    saved = place.until(name, lambda now: now["saved_step"])["saved_step"]
    place.kubetune("exec", name, "--node", "1", *space, "--", "sh", "-c", "kill -9 -1", code=None)
    status = place.until(name, lambda now: now["restarts"] and saved_by_running(now) > saved)

    # Pods that are drained save, which is no failure, so not each kind counts them as a restart.
    before = place.pods(name)
    node = running_on(status)
    drained = {uid for uid, machine in before.items() if machine == node}
    saved = status["saved_step"]
    selector = f"--pod-selector=app.kubernetes.io/instance={name}"
    place.kubectl(
        "drain",
        node,
        selector,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        "--timeout=120s",
    )
    place.kubectl("uncordon", node)
    assert drained
    status = place.until(
        name, lambda now: not drained & place.pods(name).keys() and saved_by_running(now) > saved
    )
    reached = status["saved_step"]

    if RESTART_KUBELET:
        restart_kubelet(running_on(status))
        assert "step " in place.kubetune("logs", name, *space)
        status = place.until(name, lambda now: saved_by_running(now) > reached)
        reached = status["saved_step"]

    place.kubetune("stop", name, *space)
    status = place.until(name, has_stopped)
    assert "all verified" in place.kubetune("cp", name, *space)
    last = (place.folder / "outputs" / name / "checkpoints" / "last").resolve()
    assert (last / "manifest.json").is_file()
    assert int(last.name.removeprefix("step-")) >= reached
    assert status["saved_step"] == int(last.name.removeprefix("step-"))
    place.kubetune("resume", name, *space)
    place.until(name, lambda now: saved_by_running(now) > status["saved_step"])
    place.kubetune("delete", name, "--yes", *space)
    assert (
        place.kubectl(
            "get", "pods,configmaps", "-l", f"app.kubernetes.io/instance={name}", "-o", "name"
        )
        == ""
    )


def as_user_with_few_rights(place: Place, kind: str) -> Place:
    """Return a service account with the Role that `kubernetes.operators` renders, for whom the administrator speaks."""
    account = "kubetune-real-user"
    about = {"kind": "ServiceAccount", "name": account}
    obj = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
    place.kubectl("apply", "-f", "-", stdin=json.dumps(obj))
    file = place.write("real-roles", kind, {"operators": [about]})
    rendered = yaml.safe_load_all(place.kubetune("render", file))
    rights = {obj["kind"]: obj for obj in rendered if obj and obj["kind"].startswith("Role")}
    assert rights["RoleBinding"]["subjects"] == [{**about, "namespace": place.namespace}]
    for obj in rights.values():
        assert obj["metadata"]["namespace"] == place.namespace
        place.kubectl("apply", "-f", "-", stdin=json.dumps(obj))
    view = place.run("kubectl", "config", "view", "--raw", "--minify", "--flatten", "-o", "json")
    config = json.loads(view)
    config["users"][0]["user"]["as"] = f"system:serviceaccount:{place.namespace}:{account}"
    path = place.folder / "kubeconfig-of-user"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    user = Place(place.folder, place.namespace, str(path), place.host)
    # kubectl says who asks over TLS only, and the stand-in has none.
    if config["clusters"][0]["cluster"]["server"].startswith("https:"):
        wait_for_rights(user, rights["Role"]["rules"])
    return user


def wait_for_rights(user: Place, rules: list[dict[str, Any]]) -> None:
    """Return once the API server, which learns of a Role some moments later, grants it; and nothing beside it."""
    deadline = time.monotonic() + SECONDS
    for rule in rules:
        if "list" not in rule["verbs"]:
            continue
        for resource in rule["resources"]:
            # A log is listed by its pod alone.
            if "/" in resource:
                continue
            name = ".".join(filter(None, (resource, *rule["apiGroups"])))
            while not may_list(user, name):
                assert time.monotonic() < deadline, f"the user may not list {name}"
                time.sleep(_POLL_SECONDS)
    assert not may_list(user, "secrets")


def may_list(user: Place, resource: str) -> bool:
    """True if the user may list a kind of object in the namespace."""
    command = ["kubectl", "--kubeconfig", user.kubeconfig, "-n", user.namespace, "get", resource]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    assert done.returncode == 0 or "forbidden" in done.stderr, done.stderr
    return done.returncode == 0


def test_a_user_with_few_rights_does_all_of_it(place: Place, kind: str) -> None:
    user = as_user_with_few_rights(place, kind)
    name = f"few-{kind}"
    space = ("-n", place.namespace)
    user.kubetune("submit", user.write(name, kind, max_steps=100_000), "--dry-run=server")
    user.kubetune("submit", f"{name}.yaml")
    saved = user.until(name, saved_by_running)["saved_step"]
    assert "step " in user.kubetune("logs", name, *space)
    assert user.kubetune("exec", name, *space, "--", "hostname")
    assert user.kubetune("events", name, *space).startswith("AGE")
    user.kubetune("stop", name, *space)
    user.until(name, has_stopped)
    assert "all verified" in user.kubetune("cp", name, *space)
    user.kubetune("resume", name, *space)
    user.until(name, lambda now: saved_by_running(now) > saved)
    user.kubetune("delete", name, "--yes", *space)


def test_a_queue_admits_a_run_takes_it_back_and_lets_it_return(place: Place) -> None:
    """A second run of higher priority takes the quota of the first, which saves, waits and goes on from there."""
    if not is_served("clusterqueues.kueue.x-k8s.io"):
        pytest.skip("this cluster serves no Kueue")
    space = ("-n", place.namespace)
    shared = queue_objects(place.namespace)
    try:
        for obj in shared:
            place.kubectl("apply", "-f", "-", stdin=json.dumps(obj))
        low = {"queue": "kubetune-real", "queue_priority": "kubetune-real-low"}
        high = {"queue": "kubetune-real", "queue_priority": "kubetune-real-high"}
        place.kubetune("submit", place.write("low", "job", low, max_steps=100_000))
        place.until("low", saved_by_running)
        place.kubetune("submit", place.write("high", "job", high, max_steps=4), "--wait")
        assert ", done" in place.kubetune("status", "high", *space)
        # It runs again, so what it has saved by now includes the step at which it had to go.
        saved = place.until("low", saved_by_running)["saved_step"]
        place.until("low", lambda now: saved_by_running(now) > saved)
        place.kubetune("delete", "low", "--yes", *space)
        place.kubetune("delete", "high", "--yes", *space)
    finally:
        for obj in reversed(shared):
            place.kubectl(
                "delete",
                "-f",
                "-",
                "--ignore-not-found",
                "--wait=false",
                stdin=json.dumps(obj),
                code=None,
            )


def queue_objects(namespace: str) -> list[dict[str, Any]]:
    """Return a queue with room for one run, and two priorities. It serves this namespace alone."""
    name = "kubetune-real"

    def obj(kind: str, name: str, version: str = "v1beta1", **fields: Any) -> dict[str, Any]:
        return {
            "apiVersion": f"kueue.x-k8s.io/{version}",
            "kind": kind,
            "metadata": {"name": name},
            **fields,
        }

    version = "v1beta2" if is_served("clusterqueues.v1beta2.kueue.x-k8s.io") else "v1beta1"
    resources = [{"name": "cpu", "nominalQuota": "300m"}, {"name": "memory", "nominalQuota": "3Gi"}]
    group = {
        "coveredResources": ["cpu", "memory"],
        "flavors": [{"name": name, "resources": resources}],
    }
    only = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    preemption = {"withinClusterQueue": "LowerPriority"}
    queue = {"resourceGroups": [group], "namespaceSelector": only, "preemption": preemption}
    return [
        obj("ResourceFlavor", name, version),
        obj("ClusterQueue", name, version, spec=queue),
        obj("LocalQueue", name, version, spec={"clusterQueue": name}),
        obj("WorkloadPriorityClass", f"{name}-low", version, value=1),
        obj("WorkloadPriorityClass", f"{name}-high", version, value=2),
    ]


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield what a process prints, and end one that falls silent: what it has printed tells where."""
    assert process.stdout is not None
    while True:
        limit = threading.Timer(COMMAND_SECONDS, process.kill)
        limit.start()
        line = process.stdout.readline()
        limit.cancel()
        if not line:
            return
        yield line


def test_a_run_is_followed_to_its_end(place: Place) -> None:
    file = place.write("real-end", "job", max_steps=400)
    command = [sys.executable, "-m", "kubetune", "submit", file, "--follow"]
    with subprocess.Popen(command, cwd=place.folder, stdout=subprocess.PIPE, text=True) as follower:
        lines = []
        for line in lines_of(follower):
            lines.append(line)
            # For a moment it then denies the pods that run on it.
            if RESTART_KUBELET and "step 40/400" in line:
                restart_kubelet(running_on(place.status("real-end")))
    shown = "".join(lines)
    assert follower.returncode == 0, shown
    assert "step 400/400" in shown
    assert ", done" in place.kubetune("status", "real-end", "-n", place.namespace)
    assert "all verified" in place.kubetune("cp", "real-end", "-n", place.namespace)
    place.kubetune("delete", "real-end", "--yes", "-n", place.namespace)
