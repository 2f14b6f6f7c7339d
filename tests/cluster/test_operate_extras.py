"""What can stand beside a run, really started: its smoke test, TensorBoard with its results, JupyterLab."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests import browser
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk, slow
from tests.cluster.test_operate_training import furnish, model  # noqa: F401 - a fixture
from tests.ranks import wait_until
from tests.run.test_ui_clicked import Server, fill, go, wait

pytestmark = pytest.mark.slow


@contextmanager
def forwarded(desk: Desk, server: str) -> Iterator[str]:
    """Yield the address on this machine of a server of the run."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = desk.command("port-forward", "fit", server, "--port", port)
    with subprocess.Popen(
        command,
        cwd=desk.folder,
        env=desk.environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Forwarding from 127.0.0.1" in line:
                break
        assert "token=" not in "".join(lines)  # shown on a terminal only
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        content: bytes = answer.read()
    return content


@pytest.mark.parametrize("kind", ["job", slow("pytorchjob"), slow("trainjob")])
def test_two_nodes_are_found_fit(desk: Desk, kind: str) -> None:
    desk.write({"kubernetes.kind": kind, "compute.memory": "4Gi"})
    more = ("--smoke", "--follow", "-n", desk.cluster.namespace)
    done = desk.kubetune("submit", "run.yaml", *more)
    assert "fit-smoke" in done.stdout
    assert "/cache" in done.stdout
    assert "/outputs" in done.stdout
    assert "done" in desk.quick("status", "fit-smoke", "-n", desk.cluster.namespace).stdout
    assert "was there already, which is done" in desk.quick("submit", "run.yaml", "--smoke").stdout
    desk.quick("delete", "fit-smoke", "--yes", "--volumes", "-n", desk.cluster.namespace)
    assert desk.cluster.find("Pod") == []


@pytest.mark.usefixtures("kubectl")
def test_tensorboard_shows_the_run(cluster: Cluster, tmp_path: Path, model: Path) -> None:  # noqa: F811
    changes = {
        "training.max_steps": 4,
        "tracking.tensorboard": True,
        "kubernetes.tensorboard": True,
    }
    desk = furnish(cluster, tmp_path, model, **changes)
    desk.kubetune("submit", "run.yaml", "--follow")
    desk.cluster.wait(
        "Deployment",
        "fit-tensorboard",
        lambda deployment: deployment["status"].get("readyReplicas"),
        seconds=60,
    )
    (pod,) = desk.cluster.find("Pod", "app.kubernetes.io/component=tensorboard")
    desk.cluster.wait_log(pod["metadata"]["name"], "TensorBoard", seconds=60)
    with forwarded(desk, "tensorboard") as url:
        # TensorBoard answers before it has looked into its folder.
        wait_until(
            lambda: any(name.startswith("fit") for name in json.loads(read(f"{url}/data/runs")))
        )
        assert b"loss" in read(f"{url}/data/plugin/scalars/tags")
    desk.quick("delete", "fit", "--yes")


@pytest.mark.usefixtures("kubectl")
def test_a_server_that_crashes_is_named_and_not_forwarded_to(desk: Desk) -> None:
    """Its image lacks the program: the pod ends again and again, and nothing would answer."""
    patch = {
        "target": {"kind": "Deployment", "name": "fit-ui"},
        "patch": [
            {
                "op": "replace",
                "path": "/spec/template/spec/containers/0/command",
                "value": ["false"],
            }
        ],
    }
    desk.write({"kubernetes.ui": True, "kubernetes.patches": [patch]})
    desk.cluster.never_schedule("fit-[01]-")
    desk.quick("submit", "run.yaml")
    (pod,) = desk.cluster.wait_pods("app.kubernetes.io/component=ui", 1)
    name = pod["metadata"]["name"]

    def has_crashed(pod: Mapping[str, Any]) -> bool:
        (status,) = pod["status"].get("containerStatuses") or [{}]
        return int(status.get("restartCount", 0)) > 0

    desk.cluster.wait("Pod", name, has_crashed, seconds=60)
    shown = desk.quick("status", "fit").stdout
    assert f"! ui does not answer: {name}: " in shown
    stderr = desk.quick("port-forward", "fit", "ui", code=3).stderr
    assert f"ui does not answer: {name}: " in stderr
    assert f"see kubectl logs -n {desk.cluster.namespace} {name}" in stderr
    desk.quick("delete", "fit", "--yes")


@pytest.mark.usefixtures("kubectl")
def test_jupyter_opens_with_its_token_only_and_never_prints_it(desk: Desk) -> None:
    desk.write({"kubernetes.jupyter": {"cpu": 1, "memory": "1Gi"}})
    desk.cluster.never_schedule("fit-[01]-")
    desk.quick("submit", "run.yaml")
    token = base64.b64decode(desk.cluster.get("Secret", "fit-jupyter")["data"]["token"]).decode()
    desk.cluster.wait_phase("fit-jupyter", "Running")
    desk.cluster.wait_log("fit-jupyter", "Jupyter Server", seconds=60)
    desk.cluster.wait_log("fit-jupyter", "is running at", seconds=60)
    with forwarded(desk, "jupyter") as url:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            read(f"{url}/api/contents")
        listed = json.loads(read(f"{url}/api/contents?token={token}"))
        assert listed["type"] == "directory"
        assert b"jupyterlab" in read(f"{url}/lab?token={token}").lower()
    assert token not in desk.cluster.log("fit-jupyter") + desk.quick("render", "run.yaml").stdout
    desk.quick("delete", "fit", "--yes")
    assert desk.cluster.find("Secret") == []


@browser.needed
def test_a_run_is_submitted_from_the_form_and_seen_in_the_namespace(
    cluster: Cluster,
    tmp_path: Path,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = furnish(cluster, tmp_path, model)
    # The page sends files of the folder in which it is started.
    monkeypatch.chdir(tmp_path)
    errors = list[str]()
    server = Server(
        tmp_path / "outputs", "--namespace", cluster.namespace, environ=desk.environment()
    )
    try:
        with browser.opened(errors) as tab:
            server.enter(tab)
            go(tab, server, "/new")
            fill(tab, {
                "name": "far", "model.path": str(model), "data.train": str(tmp_path / "train.jsonl"), "lora": "true",
                "lora.r": "4", "training.max_steps": "4", "compute.nodes": "2", "compute.gpus_per_node": "0",
                "compute.cpu": "1", "compute.memory": "1Gi", "kubernetes.namespace": cluster.namespace,
                "kubernetes.image": "registry.example/kubetune:1.0", "kubernetes.storage.cache.size": "1Gi",
                "kubernetes.storage.outputs.size": "1Gi",
            })  # fmt: skip
            # The check of the form says what `submit` would. The button leads to that then.
            wait(tab, "document.querySelector('#settings').textContent.includes('not in the pods')")
            assert f"{model} is not in the pods" in tab.inner_text("#settings")
            tab.click("#submit")
            assert "was submitted" not in tab.inner_text("#output")
            fill(
                tab,
                {"kubernetes.mounts": json.dumps([{"path": str(model.parent), "claim": "models"}])},
            )
            wait(tab, "document.querySelector('#yaml').textContent.includes('claim: models')")
            tab.click("#submit")
            wait(tab, "document.querySelector('#output').textContent.includes('far in namespace')")
            assert "was submitted" in tab.inner_text("#output")
            go(tab, server, "/cluster")
            tab.click("text=far")
            tab.get_by_text("4 of 4 steps").wait_for()
            tab.locator(".state.done").wait_for()
        assert not errors
    finally:
        server.end()
    desk.quick("delete", "far", "--yes", "-n", cluster.namespace)


@pytest.mark.usefixtures("kubectl")
def test_the_page_opens_with_its_token_only_and_shows_the_namespace(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write({"kubernetes.ui": True})
    desk.cluster.never_schedule("fit-[01]-")
    desk.quick("submit", "run.yaml")
    token = base64.b64decode(desk.cluster.get("Secret", "fit-ui")["data"]["token"]).decode()
    desk.cluster.wait(
        "Deployment",
        "fit-ui",
        lambda deployment: deployment["status"].get("readyReplicas"),
        seconds=60,
    )
    with forwarded(desk, "ui") as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(f"{url}/")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(f"{url}/?token={token}", timeout=60).close()
        with opener.open(f"{url}/", timeout=60) as page:
            assert b"/outputs" in page.read()
    for name, value in desk.environment().items():
        monkeypatch.setenv(name, value)
    with TestClient(
        application(Site.of(desk.folder, desk.cluster.namespace), token), "http://localhost"
    ) as client:
        client.get("/", params={"token": token})
        assert "/cluster?name=fit" in client.get("/cluster/part").text
        assert "waiting" in client.get("/cluster/part?name=fit").text
    desk.quick("delete", "fit", "--yes")
    assert desk.cluster.find("Secret") == []
