"""Ten commands, a kill, a drain, a stop and a resume, for every kind that the cluster serves.

    KUBETUNE_REAL_CLUSTER=1 KUBETUNE_REAL_IMAGE=IMAGE pytest tests/cluster/real

KUBECONFIG names the cluster, KUBETUNE_REAL_NAMESPACE a namespace that is there (else one is made and removed). It has
to have a default storage class, and nothing else that a fresh cluster of kind or minikube lacks. Two pods train the
image's own demo model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

IMAGE = os.environ.get("KUBETUNE_REAL_IMAGE", "")
# How long anything may take; a first pull of the image is a part of it.
SECONDS = float(os.environ.get("KUBETUNE_REAL_SECONDS", "600"))

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
_POLL_SECONDS = 1.0


@dataclass
class Place:
    """A folder here and a namespace there."""

    folder: Path
    namespace: str

    def run(self, *argv: str, code: int | None = 0, stdin: str | None = None) -> str:
        """Run a command; what it prints. AssertionError when it ends with another exit code (None: with any)."""
        done = subprocess.run(
            argv,
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        output = f"{' '.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code is None or done.returncode == code, output
        assert "Traceback" not in done.stderr, output
        return done.stdout

    def kubetune(self, *argv: str, code: int | None = 0) -> str:
        return self.run(sys.executable, "-m", "kubetune", *argv, code=code)

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

    def write(self, name: str, kind: str, **training: int) -> str:
        """Write a run file and return its name."""
        config = {
            "name": name,
            "model": {"path": "/models/demo", "local_files_only": True},
            "data": {"train": "train.jsonl", "max_length": 128},
            "lora": {"r": 4},
            "training": {"per_device_train_batch_size": 4, "compile": False, "save_steps": 20, **training},
            "compute": {"nodes": 2, "gpus_per_node": 0, "cpu": "100m", "memory": "1Gi"},
            "kubernetes": {
                "kind": kind, "namespace": self.namespace, "image": IMAGE, "image_pull_policy": "IfNotPresent",
                "spread": "none", "grace_seconds": 60,
                # A claim of the default class is one node's: both pods are on it, as on the only one of kind.
                "storage": {"cache": {"size": "1Gi"}, "outputs": {"claim": "kubetune-real-outputs"}},
                "mounts": [{"path": "/models", "claim": "kubetune-real-models"}],
            },
        }  # fmt: skip
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        return f"{name}.yaml"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Yield a namespace with the model on a claim, and one for results."""
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
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
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
        yield place
    finally:
        if chosen_namespace:
            place.kubectl(
                "delete", "pod,pvc", "kubetune-real-copy", *claims, "--ignore-not-found", code=None
            )
        else:
            place.run("kubectl", "delete", "namespace", place.namespace, "--wait=false")


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

    node = status["pods"][0]["machine"]
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
    restarts = status["restarts"]
    again = place.until(
        name, lambda now: (now["restarts"] or 0) > restarts and saved_by_running(now)
    )
    status = place.until(name, lambda now: saved_by_running(now) > saved_by_running(again))
    reached = status["saved_step"]

    place.kubetune("stop", name, *space)
    status = place.until(name, lambda status: status["state"] == "stopped" and not status["pods"])
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


def test_a_run_is_followed_to_its_end(place: Place) -> None:
    shown = place.kubetune("submit", place.write("real-end", "job", max_steps=4), "--follow")
    assert "step 4/4" in shown
    assert ", done" in place.kubetune("status", "real-end", "-n", place.namespace)
    assert "all verified" in place.kubetune("cp", "real-end", "-n", place.namespace)
    place.kubetune("delete", "real-end", "--yes", "-n", place.namespace)
