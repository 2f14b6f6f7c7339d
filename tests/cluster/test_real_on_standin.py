"""The tests for real clusters work: here against the stand-in, as if it were one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from standin.control_plane import CHECKOUT
from tests.cluster.harness import Cluster


@pytest.mark.slow
@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob", "pytorchjob", "statefulset", None])
def test_on_the_stand_in(cluster: Cluster, kind: str | None) -> None:
    environ = cluster.environment() | {
        "KUBETUNE_REAL_CLUSTER": "1",
        "KUBETUNE_REAL_IMAGE": "registry.example/kubetune:1.0",
        "KUBETUNE_REAL_NAMESPACE": cluster.namespace,
        "KUBETUNE_REAL_SECONDS": "120",
    }
    end = "followed_to_its_end"
    way = f"submitted_watched_disturbed_stopped_and_resumed[{kind}]"
    test = f"tests/cluster/real/test_real.py::test_a_run_is_{way if kind else end}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout
