"""Fixtures: one stand-in cluster for the session, one namespace of it for each test."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from standin.control_plane import ControlPlane, Unavailable
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def any_control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Yield a running stand-in cluster; its pods have loopback addresses where this machine permits no namespaces."""
    try:
        started = ControlPlane(tmp_path_factory.mktemp("standin"))
    except Unavailable as reason:
        started = ControlPlane(tmp_path_factory.mktemp("standin"), "--loopback")
        started.why_loopback = str(reason)
    with started:
        yield started


@pytest.fixture(scope="session")
def control_plane(any_control_plane: ControlPlane) -> ControlPlane:
    """Return a running stand-in cluster whose pods have namespaces of their own; skip where there can be none."""
    if any_control_plane.why_loopback:
        pytest.skip(any_control_plane.why_loopback)
    return any_control_plane


@pytest.fixture
def cluster(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Cluster]:
    """Yield an empty namespace of the cluster, and no faults; both are cleared up afterwards."""
    cluster = Cluster(control_plane, f"test-{next(_numbers)}", tmp_path)
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}
    )
    with cluster.borrowed():
        yield cluster


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path) -> Desk:
    """Return a user's folder with a run file, beside the empty namespace."""
    return Desk(cluster, tmp_path)


@pytest.fixture(scope="session")
def kubectl() -> str:
    """Return the real kubectl; skip where there is none."""
    path = shutil.which("kubectl")
    if path is None:
        pytest.skip("kubectl is not installed (Debian: kubernetes-client)")
    return path
