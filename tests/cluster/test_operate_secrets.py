"""No verb for clusters tells a secret: not on the screen, not in an object, a log, an event or a file it leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetune.plugins.dev_pods import BENCH
from standin.state.objects import name_of
from standin.state.resources import BY_KIND
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk
from tests.cluster.test_operate_training import furnish, model  # noqa: F401 - a fixture
from tests.crash.test_secrets import ENVIRON, TOKEN, leaks_in

pytestmark = pytest.mark.slow

SHA256 = 'printf %s "$HF_TOKEN$MLFLOW_TRACKING_PASSWORD" | sha256sum'
SEARCH = f'! grep -rlF -e "$HF_TOKEN" -e "$MLFLOW_TRACKING_PASSWORD" {BENCH} /outputs /cache'


class Listener:
    """A user whose environment is full of secrets, and somebody who reads all that they see."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.leaks: list[str] = []

    def kubetune(self, *argv: str, code: int | None = 0, kubeconfig: Path | None = None) -> str:
        """Run a verb and search what it prints; AssertionError when it ends with another exit code."""
        environ = {**self.desk.environment(), **ENVIRON}
        if kubeconfig is not None:
            environ["KUBECONFIG"] = str(kubeconfig)
        done = subprocess.run(
            self.desk.command(*argv), cwd=self.desk.folder, env=environ, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=180,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert code is None or done.returncode == code, (
            f"{argv}: {done.returncode}\n{output.decode()}"
        )
        assert b"Traceback" not in output, f"{argv}: {output.decode()}"
        self.leaks += leaks_in(f"kubetune {' '.join(argv)}", output)
        return done.stdout.decode()

    def search_cluster(self, moment: str) -> None:
        """Search every object but the Secrets themselves, and the log of every pod."""
        for kind, resource in BY_KIND.items():
            if resource.namespaced and kind != "Secret":
                text = json.dumps(self.desk.cluster.find(kind))
                self.leaks += leaks_in(f"{moment}: objects of kind {kind}", text.encode())
        for pod in map(name_of, self.desk.cluster.find("Pod")):
            self.leaks += leaks_in(f"{moment}: log of {pod}", self.desk.cluster.log(pod).encode())

    def search_files(self, folder: Path) -> None:
        for path in files(folder):
            if path.name != ".env":
                self.leaks += leaks_in(str(path), path.read_bytes())


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


@pytest.fixture
def listener(cluster: Cluster, tmp_path: Path, model: Path) -> Listener:  # noqa: F811
    secrets = {name: {"secret": "keys", "key": name.lower()} for name in ENVIRON}
    changes = {"kubernetes.secrets": secrets, "training.max_steps": 4, "training.save_steps": 2}
    desk = furnish(cluster, tmp_path, model, **changes)
    # A folder of code in which nobody told git to leave .env alone.
    (tmp_path / ".env").write_text(
        "".join(f"{name}='{value}'\n" for name, value in ENVIRON.items())
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listening = Listener(desk)
    for name in ENVIRON:
        listening.kubetune("secret", "set", name, "run.yaml")
    data = desk.cluster.get("Secret", "keys")["data"]
    assert {key: base64.b64decode(value).decode() for key, value in data.items()} == {
        name.lower(): value for name, value in ENVIRON.items()
    }
    return listening


def check(listener: Listener) -> None:
    desk = listener.desk
    listener.search_cluster("at the end")
    listener.search_files(desk.folder)
    claims = desk.cluster.claim_folder("fit-outputs").parent
    assert any(claims.rglob("rank-0.log"))
    listener.search_files(claims)
    assert listener.leaks == []


def test_a_run_from_submit_to_delete(listener: Listener) -> None:
    listener.kubetune("render", "run.yaml")
    listener.kubetune("submit", "run.yaml", "--dry-run=client")
    listener.kubetune("submit", "run.yaml", "--dry-run=server")
    listener.kubetune("submit", "run.yaml", "--follow")
    listener.kubetune("submit", "run.yaml")
    listener.kubetune("submit", "run.yaml", "training.seed=7", code=2)
    listener.search_cluster("after the run")
    for argv in (
        ["status"], ["status", "fit"], ["status", "run.yaml", "--json"], ["events", "fit"], ["events", "fit", "--json"],
        ["logs", "fit"], ["logs", "fit", "--rank", "1"], ["cp", "run.yaml"], ["watch", "fit", "--once"],
        ["report", "outputs/fit"], ["export", "outputs/fit"], ["stop", "fit"], ["resume", "fit"], ["top", "fit"],
        ["gpus", "fit"], ["port-forward", "fit", "tensorboard"], ["exec", "fit", "--", "true"],
    ):  # fmt: skip
        listener.kubetune(*argv, code=None)
    check(listener)
    listener.kubetune("delete", "fit", "--volumes", "--yes")
    assert listener.leaks == []


def test_runs_that_fail(listener: Listener) -> None:
    desk = listener.desk
    refused = desk.folder / "kubeconfig-refused"
    refused.write_text(
        desk.cluster.kubeconfig.read_text().replace("token: admin", f"token: {json.dumps(TOKEN)}")
    )
    assert refused.read_text() != desk.cluster.kubeconfig.read_text()
    for verb in (
        "submit",
        "status",
        "logs",
        "events",
        "exec",
        "cp",
        "gpus",
        "top",
        "stop",
        "resume",
        "delete",
    ):
        subject = "run.yaml" if verb in ("submit", "status") else "fit"
        more = ["--", "true"] if verb == "exec" else []
        listener.kubetune(verb, subject, *more, code=None, kubeconfig=refused)
        listener.kubetune(verb, TOKEN, *more, code=None)
    refused.unlink()
    for wrong in (
        f"name={TOKEN}",
        f"training.seed={TOKEN}",
        f"kubernetes.image={TOKEN} x",
        f"kubernetes.{TOKEN}=1",
    ):
        listener.kubetune("submit", "run.yaml", wrong, code=2)
    (desk.folder / "train.jsonl").write_text('{"prompt": "1", "completion": "2"}\nnot JSON\n')
    listener.kubetune("submit", "run.yaml", "--follow", "--no-check", code=2)
    listener.kubetune("status", "fit")
    listener.kubetune("events", "fit")
    listener.kubetune("logs", "fit", code=None)
    check(listener)


def test_pods_to_work_in(listener: Listener) -> None:
    desk = listener.desk
    listener.kubetune("dev", "start", "run.yaml")
    for node in range(2):
        desk.cluster.wait_phase(f"fit-dev-{node}", "Running")
        desk.cluster.wait_log(f"fit-dev-{node}", "idle")
    output = listener.kubetune("exec", "fit-dev", "--", "sh", "-c", SHA256)
    secret = ENVIRON["HF_TOKEN"] + ENVIRON["MLFLOW_TRACKING_PASSWORD"]
    assert (
        hashlib.sha256(secret.encode()).hexdigest() in output
    )  # the pods do have what nobody may see
    listener.kubetune("dev", "run", "run.yaml")
    listener.kubetune("dev", "run", "run.yaml", "training.max_steps=8", code=2)
    for verb in ("status", "top", "gpus", "logs", "events"):
        listener.kubetune(verb, "fit-dev", code=None)
    listener.kubetune("exec", "fit-dev", "--all", "--", "sh", "-c", SEARCH)
    listener.kubetune("dev", "stop", "run.yaml", code=None)
    listener.search_cluster("while pods idle")
    claims = desk.cluster.claim_folder("fit-dev-outputs").parent
    assert any(claims.rglob("rank-0.log"))
    listener.search_files(claims)
    listener.search_files(desk.folder)
    listener.kubetune("delete", "fit-dev", "--volumes", "--yes")
    assert listener.leaks == []


def test_the_guard_itself_would_notice(listener: Listener) -> None:
    """Secrets as Kubernetes keeps them are found: in base64, in the objects that are left out elsewhere."""
    text = json.dumps(listener.desk.cluster.find("Secret"))
    assert len(leaks_in("Secrets", text.encode())) >= len(ENVIRON)
    assert os.environ.get("HF_TOKEN") != TOKEN
