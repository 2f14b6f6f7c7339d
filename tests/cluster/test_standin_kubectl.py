"""The real kubectl works against the stand-in: the proof that the stand-in speaks the real protocol."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from standin.state.objects import Object, name_of, terminating
from tests.cluster.harness import Cluster
from tests.cluster.manifests import config_map, job, pod, pod_spec

pytestmark = [
    pytest.mark.usefixtures("kubectl"),
    pytest.mark.slow,  # other tests of the default suite use all of it
]


@pytest.fixture
def shell(cluster: Cluster) -> Cluster:
    """Return a cluster with a running pod `box` to work in."""
    cluster.apply(pod("box", "echo started; exec sleep 600", terminationGracePeriodSeconds=0))
    cluster.wait_phase("box", "Running")
    return cluster


def text(*objects: Object) -> str:
    return yaml.safe_dump_all(objects)


def test_apply_get_describe_diff_delete(cluster: Cluster) -> None:
    manifest = text(job("fit", pod_spec("echo done")), config_map("settings", a="1"))
    applied = cluster.kubectl("apply", "-f", "-", stdin=manifest).stdout
    assert applied.splitlines() == ["job.batch/fit created", "configmap/settings created"]
    cluster.kubectl("wait", "--for=condition=Complete", "job/fit", "--timeout=50s")
    again = cluster.kubectl("apply", "-f", "-", stdin=manifest).stdout
    assert again.splitlines() == ["job.batch/fit unchanged", "configmap/settings unchanged"]
    assert cluster.kubectl("diff", "-f", "-", stdin=manifest).stdout == ""
    name, _ = cluster.kubectl("get", "jobs", "--no-headers").stdout.split()
    assert name == "fit"
    assert "Job completed" in cluster.kubectl("describe", "job", "fit").stdout
    assert "job.batch/fit" in cluster.kubectl("get", "all", "-o", "name").stdout.splitlines()
    assert cluster.kubectl("logs", "job/fit").stdout == "done\n"
    cluster.kubectl("delete", "job/fit", "configmap/settings")
    assert cluster.kubectl("get", "jobs,pods,configmaps").stdout == ""


def test_server_side_apply_and_dry_run(cluster: Cluster) -> None:
    dry = cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "-f", "-", stdin=text(config_map("m", a="1"))
    )
    assert "serverside-applied (server dry run)" in dry.stdout
    assert cluster.find("ConfigMap") == []
    for data in ({"a": "1", "b": "1"}, {"a": "2"}):
        manifest = text(config_map("m", **data))
        cluster.kubectl("apply", "--server-side", "--field-manager=one", "-f", "-", stdin=manifest)
    assert cluster.get("ConfigMap", "m")["data"] == {"a": "2"}
    other = ("apply", "--server-side", "--field-manager=other", "-f", "-")
    refused = cluster.kubectl(*other, stdin=text(config_map("m", a="3")), check=False)
    assert 'conflict with "one": .data.a' in refused.stderr
    cluster.kubectl(*other, "--force-conflicts", stdin=text(config_map("m", a="3")))
    assert cluster.get("ConfigMap", "m")["data"] == {"a": "3"}


def test_logs_are_followed_to_the_end(cluster: Cluster) -> None:
    cluster.apply(
        pod("count", "for i in 1 2 3; do echo line $i; sleep 0.1; done; printf unfinished")
    )
    cluster.wait_phase("count", "Running", "Succeeded")
    expected = ["line 1", "line 2", "line 3", "unfinished"]
    assert cluster.kubectl("logs", "-f", "count").stdout.splitlines() == expected
    assert cluster.kubectl("logs", "--tail=2", "count").stdout.splitlines() == expected[2:]
    prefixed = cluster.kubectl(
        "logs", "-l", "app=count", "--prefix", "--timestamps"
    ).stdout.splitlines()
    assert all(line.startswith("[pod/count/main] 20") for line in prefixed)


def test_exec_passes_streams_and_exit_code(shell: Cluster) -> None:
    done = shell.kubectl(
        "exec", "box", "--", "sh", "-c", "echo out; echo err >&2; exit 4", check=False
    )
    assert (done.stdout, done.returncode) == ("out\n", 4)
    assert done.stderr.startswith("err\n")
    big = shell.kubectl("exec", "-i", "box", "--", "tr", "a-z", "A-Z", stdin="x\n" * 50_000)
    assert big.stdout == "X\n" * 50_000
    script = "kubectl exec -it box -- sh -c 'tty; exit 5'; echo code $?"
    terminal = subprocess.run(
        ["script", "-qec", script, "/dev/null"],
        env=shell.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "/dev/pts/" in terminal.stdout
    assert "code 5" in terminal.stdout


def test_exec_is_the_containers_user_with_its_groups(cluster: Cluster) -> None:
    context = {"runAsUser": 10001, "runAsGroup": 10002, "fsGroup": 10003}
    cluster.apply(
        pod("box", "exec sleep 600", securityContext=context, terminationGracePeriodSeconds=0)
    )
    cluster.wait_phase("box", "Running")
    assert (
        cluster.kubectl("exec", "box", "--", "sh", "-c", "id -u; id -G").stdout
        == "10001\n10002 10003\n"
    )


def test_cp_brings_a_folder_there_and_back(shell: Cluster, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "weights.bin").write_bytes(content := os.urandom(300_000))
    shell.kubectl("cp", str(tmp_path / "there"), "box:/tmp/copied")
    shell.kubectl("cp", "box:/tmp/copied", str(tmp_path / "back"))
    assert (tmp_path / "back" / "weights.bin").read_bytes() == content


def test_port_forward_reaches_the_pods_own_loopback(cluster: Cluster) -> None:
    serve = "cd /etc && exec python3 -m http.server --bind 127.0.0.1 8000"
    container = {"env": [{"name": "PYTHONUNBUFFERED", "value": "1"}]}
    cluster.apply(pod("web", serve, container=container, terminationGracePeriodSeconds=0))
    cluster.wait_phase("web", "Running")
    cluster.wait_log("web", "Serving HTTP")
    with subprocess.Popen(
        ["kubectl", "port-forward", "pod/web", ":8000"],
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as forward:
        try:
            assert forward.stdout is not None
            port = forward.stdout.readline().split("127.0.0.1:")[1].split()[0]
            for _ in range(2):
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/hostname", timeout=60
                ) as answer:
                    assert answer.read() == b"web\n"
        finally:
            forward.terminate()


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_rollout_and_scale(cluster: Cluster, kind: str) -> None:
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}}
    template["spec"] = pod_spec("exec sleep 600", restart="Always", terminationGracePeriodSeconds=0)
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    if kind == "StatefulSet":
        spec |= {"serviceName": "web", "podManagementPolicy": "Parallel"}
    manifest = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "web"}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", stdin=text(manifest))
    cluster.kubectl("rollout", "status", f"{kind}/web", "--timeout=50s")
    cluster.kubectl("set", "env", f"{kind}/web", "COLOR=green")
    cluster.kubectl("rollout", "status", f"{kind}/web", "--timeout=50s")
    pods = [web_pod for web_pod in cluster.find("Pod") if not terminating(web_pod)]
    assert [web_pod["spec"]["containers"][0]["env"][0]["value"] for web_pod in pods] == [
        "green"
    ] * 2
    cluster.kubectl("patch", f"{kind}/web", "--type=merge", '--patch={"spec": {"replicas": 1}}')
    cluster.wait(kind, "web", lambda obj: obj["status"]["replicas"] == 1)


def test_drain_evicts_with_the_grace_period(cluster: Cluster) -> None:
    script = "trap 'echo saved; exit 143' TERM; echo up; while :; do sleep 0.02; done"
    ignore = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    cluster.apply(job("fit", pod_spec(script), podFailurePolicy={"rules": [ignore]}))
    (first,) = cluster.wait_ready("fit")
    cluster.wait_log(name_of(first), "up")
    node = first["spec"]["nodeName"]
    cluster.kubectl("drain", node, "--timeout=50s", "--pod-selector=job-name=fit")
    second = cluster.wait_replacement(first)
    assert second["spec"]["nodeName"] != node
    assert cluster.get("Job", "fit")["status"].get("failed", 0) == 0
    cluster.kubectl("uncordon", node)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completionsMode": "Indexed"}, 'unknown field "spec.completionsMode"'),
        ({"completionMode": "Index"}, 'Unsupported value: "Index"'),
        ({"parallelism": "two"}, "cannot unmarshal"),
        ({"completions": None}, "when completion mode is Indexed"),
    ],
)
def test_mistakes_are_refused_with_the_field_named(
    cluster: Cluster, change: Object, message: str
) -> None:
    refused = cluster.kubectl(
        "apply", "-f", "-", stdin=text(job("fit", pod_spec("true"), **change)), check=False
    )
    assert message in refused.stderr
    assert cluster.find("Job") == []
