"""The stand-in where no namespaces are permitted: the same journeys, with pods at loopback addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from standin.control_plane import ControlPlane, Unavailable
from standin.node.loopback import Addresses, translate
from standin.state.objects import name_of
from tests.cluster.harness import Cluster
from tests.cluster.manifests import config_map, job, pod_spec
from tests.cluster.test_operate_training import check, furnish, model, travel  # noqa: F401 - model is a fixture

# Root in name only: it may neither mount nor make namespaces, nor be another user.
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    try:
        started = ControlPlane(tmp_path, "--loopback", prefix=WITHOUT_RIGHTS)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with started:
        yield Cluster(started, "default", tmp_path)


def test_folders_are_translated_whole() -> None:
    folders = {"/outputs": "/x/o", "/etc/kubetune": "/x/c", "/etc/kubetune-data": "/x/d"}
    text = "output: /outputs/fit '/outputs' /my/outputs /outputs-old /etc/kubetune-data/0 /etc/kubetune/run.yaml"
    expected = "output: /x/o/fit '/x/o' /my/outputs /outputs-old /x/d/0 /x/c/run.yaml"
    assert translate(text, folders) == expected


def test_a_host_has_one_address_and_a_master_one_port() -> None:
    known = Addresses()
    env = {"PET_MASTER_ADDR": "fit-0.fit", "PET_MASTER_PORT": "29500"}
    first = known.resolved("a", env)
    second = known.resolved("a", env)
    assert first == second
    assert first["PET_MASTER_ADDR"] == known.of("a", "fit-0") != known.of("b", "fit-0")
    assert first["PET_MASTER_PORT"] != "29500"


def test_pods_see_their_volumes_and_leave_nothing_behind(cluster: Cluster) -> None:
    volumes = [
        {"name": "config", "configMap": {"name": "settings"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts = [{"name": "config", "mountPath": "/config"}, {"name": "tmp", "mountPath": "/scratch"}]
    script = "cat /config/greeting; echo kept > /scratch/file; cat /scratch/file; setsid sleep 600 & exit 3"
    spec = pod_spec(script, container={"volumeMounts": mounts}, volumes=volumes)
    cluster.apply(config_map("settings", greeting="hello\n"), job("fit", spec, backoffLimit=0))
    cluster.wait_condition("Job", "fit", "Failed")
    (pod,) = cluster.find("Pod")
    assert cluster.log(name_of(pod)).split() == ["hello", "kept"]
    assert pod["status"]["podIP"].startswith("127.")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "statefulset", "jobset", "pytorchjob", "trainjob"])
def test_every_kind_trains_on_loopback_addresses(
    cluster: Cluster,
    tmp_path: Path,
    model: Path,  # noqa: F811
    kind: str,
) -> None:
    check(travel(furnish(cluster, tmp_path, model, **{"kubernetes.kind": kind})))
