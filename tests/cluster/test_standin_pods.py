"""Pods of the stand-in are real processes: environment, volumes, users, names, signals, exit codes, restarts."""

from __future__ import annotations

import textwrap

import pytest

from standin.state.objects import Object, name_of
from tests.cluster.harness import Cluster
from tests.cluster.manifests import config_map, container, headless_service, job, pod, pod_spec

pytestmark = pytest.mark.slow  # other tests of the default suite use all of it

TALK = textwrap.dedent(
    """
    import os, socket, time
    rank, master, deadline = os.environ["RANK"], (os.environ["MASTER"], 29500), time.monotonic() + 60
    if rank == "0":
        with socket.create_server(("", 29500)) as server:
            connection, (peer, _) = server.accept()
            print(connection.recv(100).decode(), peer != socket.gethostbyname(master[0]))
    else:
        while True:
            try:
                with socket.create_connection(master, timeout=30) as connection:
                    connection.sendall(f"rank {rank} on {socket.gethostname()}".encode())
                break
            except OSError:  # the name appears only when the other pod has an address
                assert time.monotonic() < deadline
                time.sleep(0.05)
    """
)


def exit_code(pod: Object, container: str = "main") -> int:
    entry = next(
        entry for entry in pod["status"]["containerStatuses"] if entry["name"] == container
    )
    code: int = entry["state"]["terminated"]["exitCode"]
    return code


def test_two_pods_of_a_job_talk_by_dns_name(cluster: Cluster) -> None:
    rank = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    env = [{"name": "RANK", "valueFrom": rank}, {"name": "MASTER", "value": "talk-0.talk"}]
    template = pod_spec("python3", "-S", "-c", TALK, subdomain="talk", container={"env": env})
    service = headless_service("talk", **{"batch.kubernetes.io/job-name": "talk"})
    cluster.apply(service, job("talk", template, completions=2, parallelism=2))
    cluster.wait_condition("Job", "talk", "Complete")
    first = cluster.find("Pod", "batch.kubernetes.io/job-completion-index=0")[0]
    assert cluster.log(name_of(first)) == "rank 1 on talk-1 True\n"


def test_environment_is_resolved_as_kubernetes_does(cluster: Cluster) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "stringData": {"token": "s3cret"},
    }
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "BOTH", "value": "$(NAME)/$(TOKEN)/$$(NAME)/$(MISSING)"},
        {
            "name": "ABSENT",
            "valueFrom": {"secretKeyRef": {"name": "none", "key": "x", "optional": True}},
        },
    ]
    container_fields = {
        "env": env,
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "SET_"}],
        "args": ["$(NAME)"],
    }
    script = 'echo "$TOKEN $NAME $BOTH $SET_color ${ABSENT-unset} $0 $HOSTNAME"; hostname -i | grep -qx "$IP"'
    cluster.apply(
        secret,
        config_map("settings", color="green"),
        pod("env", script, container=container_fields),
    )
    assert exit_code(cluster.wait_phase("env", "Succeeded")) == 0
    assert cluster.log("env") == "s3cret env env/s3cret/$(NAME)/$(MISSING) green unset env env\n"


def test_volumes_are_folders_and_the_root_can_be_read_only(cluster: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "outputs"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {
            "name": "config",
            "configMap": {"name": "settings", "items": [{"key": "run", "path": "below/run.yaml"}]},
        },
        {"name": "outputs", "persistentVolumeClaim": {"claimName": "outputs"}},
    ]
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "memory", "mountPath": "/dev/shm"},
        {"name": "config", "mountPath": "/config"},
        {"name": "outputs", "mountPath": "/outputs", "subPath": "run-1"},
    ]
    script = """
        cat /config/below/run.yaml
        stat -f -c "%T $(($(stat -f -c '%b * %S' /dev/shm)))" /dev/shm
        touch /config/x 2>/dev/null || echo config is read-only
        touch /x 2>/dev/null || echo root is read-only
        echo kept > /outputs/result; cat /scratch/from-init
    """
    container_fields = {"volumeMounts": mounts, "securityContext": {"readOnlyRootFilesystem": True}}
    init = container("echo from init > /scratch/from-init", name="init", volumeMounts=mounts[:1])
    spec = {"container": container_fields, "volumes": volumes, "initContainers": [init]}
    cluster.apply(claim, config_map("settings", run="steps: 3\n"), pod("volumes", script, **spec))
    cluster.wait_phase("volumes", "Succeeded")
    expected = [
        "steps: 3",
        f"tmpfs {8 << 20}",
        "config is read-only",
        "root is read-only",
        "from init",
    ]
    assert cluster.log("volumes").splitlines() == expected
    assert (cluster.claim_folder("outputs") / "run-1" / "result").read_text() == "kept\n"


def test_containers_run_as_the_user_they_name(cluster: Cluster) -> None:
    context = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10002, "fsGroup": 10003}
    volumes = [{"name": "data", "emptyDir": {}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    script = "id -u; id -g; id -G; stat -c %g /data; touch /data/mine && echo ok; grep NoNewPrivs /proc/self/status"
    container_fields = {
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    cluster.apply(
        pod("user", script, container=container_fields, securityContext=context, volumes=volumes)
    )
    cluster.wait_phase("user", "Succeeded")
    expected = ["10001", "10002", "10002 10003", "10003", "ok", "NoNewPrivs:\t1"]
    assert cluster.log("user").splitlines() == expected


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("trap 'echo saved; exit 143' TERM; echo up; while :; do sleep 0.02; done", 143),
        ("echo up; exec sleep 60", 137),
    ],
    ids=["handles SIGTERM", "has no handler as process 1"],
)
def test_deletion_is_sigterm_then_sigkill(cluster: Cluster, script: str, code: int) -> None:
    # a finalizer keeps the object, so that its last status can be read
    manifest = pod("stop", script, terminationGracePeriodSeconds=1)
    manifest["metadata"]["finalizers"] = ["test/keep"]
    cluster.apply(manifest)
    cluster.wait_phase("stop", "Running")
    cluster.wait_log("stop", "up")
    cluster.delete("Pod", "stop")
    assert exit_code(cluster.wait_phase("stop", "Failed")) == code
    assert ("saved" in cluster.log("stop")) == (code == 143)
    patch = {"metadata": {"finalizers": None}}
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/stop"
    cluster.request("PATCH", path, patch, "application/merge-patch+json")
    cluster.wait_gone("Pod", "stop")


def test_a_failing_container_restarts_with_back_off(cluster: Cluster) -> None:
    volumes = [{"name": "data", "emptyDir": {}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    script = "echo x >> /data/runs; test $(wc -l < /data/runs) -ge 3"
    cluster.apply(
        pod(
            "flaky",
            script,
            restart="OnFailure",
            container={"volumeMounts": mounts},
            volumes=volumes,
        )
    )
    done = cluster.wait_phase("flaky", "Succeeded")
    assert done["status"]["containerStatuses"][0]["restartCount"] == 2
    assert {"BackOff", "Started", "Scheduled"} <= {
        event["reason"] for event in cluster.find("Event")
    }


def test_a_failed_init_container_keeps_the_others_from_starting(cluster: Cluster) -> None:
    init = container("exit 4", name="init")
    cluster.apply(pod("no", "touch /started", initContainers=[init]))
    failed = cluster.wait_phase("no", "Failed")
    assert failed["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    assert "waiting" in failed["status"]["containerStatuses"][0]["state"]


@pytest.mark.slow
def test_a_command_that_is_not_there_is_a_start_error(cluster: Cluster) -> None:
    cluster.apply(pod("typo", "no-such-command", "--flag"))
    status = cluster.wait_phase("typo", "Failed")["status"]
    assert "terminated" in status["containerStatuses"][0]["state"], status
    state = status["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["reason"]) == (128, "StartError")
    assert "No such file or directory" in state["message"]


def test_a_claim_for_one_node_cannot_be_used_on_two(cluster: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "block"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    shared = {"volumes": [{"name": "block", "persistentVolumeClaim": {"claimName": "block"}}]}
    here, second = ({"nodeSelector": {"kubernetes.io/hostname": f"node-{i}"}} for i in (0, 1))
    cluster.apply(
        claim, pod("first", "exec sleep 60", **shared, **here, terminationGracePeriodSeconds=0)
    )
    cluster.wait_phase("first", "Running")
    cluster.apply(pod("second", "true", **shared, **second))
    cluster.wait_event("Multi-Attach error")
    cluster.delete("Pod", "first")
    cluster.wait_phase("second", "Succeeded")
