"""The tests for real clusters work: here against the stand-in, as if it were one."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from standin.control_plane import CHECKOUT
from tests.cluster.harness import Cluster
from tests.cluster.real import test_real
from tests.offline.sitecustomize import REAL_SERVERS, is_local

KINDS = ("job", "jobset", "trainjob", "pytorchjob", "statefulset")
TESTS = [
    "followed_to_its_end",
    *(f"submitted_watched_disturbed_stopped_and_resumed[{kind}]" for kind in KINDS),
]


@pytest.mark.slow
@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("test", TESTS)
def test_on_the_stand_in(cluster: Cluster, test: str) -> None:
    run_on_standin(cluster, f"test_a_run_is_{test}")


@pytest.mark.slow
@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("kind", KINDS)
def test_with_few_rights(cluster: Cluster, kind: str) -> None:
    run_on_standin(cluster, f"test_a_user_with_few_rights_does_all_of_it[{kind}]")


@pytest.mark.slow
@pytest.mark.usefixtures("kubectl")
def test_in_a_queue(cluster: Cluster) -> None:
    run_on_standin(cluster, "test_a_queue_admits_a_run_takes_it_back_and_lets_it_return")


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("host", ["192.0.2.20", "[2001:db8::20]"])
def test_the_api_server_may_have_any_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """It alone is allowed beside this machine, in the processes that tests start too."""
    config = {
        "current-context": "real",
        "contexts": [{"name": "real", "context": {"cluster": "real"}}],
        "clusters": [{"name": "real", "cluster": {"server": f"https://{host}:6443"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv(REAL_SERVERS, "")
    address = host.strip("[]")
    assert not is_local((address, 6443))
    test_real.allow_server()
    assert is_local((address, 6443))
    assert not is_local((address, 22))
    assert not is_local((f"{address}1", 6443))


def test_only_a_follower_that_falls_silent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on printing may take longer than any one thing."""
    monkeypatch.setattr(test_real, "COMMAND_SECONDS", 3)
    program = "for step in 1 2 3 4 5; do echo $step; sleep 1; done; exec sleep 600"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert "".join(test_real.lines_of(process)).split() == ["1", "2", "3", "4", "5"]
    assert process.returncode == -signal.SIGKILL


def run_on_standin(cluster: Cluster, test: str) -> None:
    """Run a test for real clusters; its kubelets are those of the stand-in."""
    faults = f"{cluster.control_plane.url}/standin/faults/restart-kubelet"
    program = (
        "import json, os, sys, urllib.request as u; "
        "u.urlopen(u.Request(sys.argv[1], json.dumps({'node': os.environ['NODE']}).encode()))"
    )
    environ = cluster.environment() | {
        "KUBETUNE_REAL_CLUSTER": "1",
        "KUBETUNE_REAL_IMAGE": "registry.example/kubetune:1.0",
        "KUBETUNE_REAL_NAMESPACE": cluster.namespace,
        "KUBETUNE_REAL_KUBELET": shlex.join([sys.executable, "-c", program, faults]),
    }
    file = f"tests/cluster/real/test_real.py::{test}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    # Each thing that such a test does has a limit of its own.
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout
