"""What the stand-in leaves behind, which is nothing; and how it runs where there is no root."""

from __future__ import annotations

import getpass
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from standin.control_plane import CHECKOUT, ControlPlane, Unavailable
from standin.schemas import OLDEST
from standin.state.objects import name_of
from tests.cluster.harness import Cluster
from tests.cluster.manifests import config_map, headless_service, job, pod_spec

pytestmark = pytest.mark.slow  # other tests of the default suite use all of it

NOBODY = 65534


@pytest.fixture
def own_control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """Yield a server that a test may kill."""
    try:
        started = ControlPlane(tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with started:
        yield started


def processes_with(marker: str) -> list[int]:
    """Return the ids of all processes on this machine that have the marker in their environment."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it ended in between, or is a kernel thread
            continue
        if f"MARKER={marker}".encode() in environment:
            pids.append(int(folder.name))
    return pids


def descendants_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [
        descendant for child in children for descendant in descendants_of(int(child))
    ]


def mounts_but_of_others(folder: Path) -> list[str]:
    """Return all that is mounted on this machine, without the disks of tests that run beside this one."""
    ours = f"{folder}/"
    everyones = f"/pytest-of-{getpass.getuser()}/"
    return [
        line
        for line in Path("/proc/self/mounts").read_text().splitlines()
        if ours in line or everyones not in line
    ]


def test_nothing_outlives_a_killed_server(own_control_plane: ControlPlane, tmp_path: Path) -> None:
    cluster = Cluster(own_control_plane, "default", tmp_path)
    marker = f"standin-{os.getpid()}"
    memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}
    container = {
        "env": [{"name": "MARKER", "value": marker}],
        "volumeMounts": [{"name": "memory", "mountPath": "/memory"}],
    }
    script = "trap '' TERM HUP INT; setsid sleep 600 & echo up; wait"
    template = pod_spec(script, container=container, volumes=[memory])
    mounts = mounts_but_of_others(tmp_path)
    links = os.listdir("/sys/class/net")
    cluster.apply(job("fit", template, completions=2, parallelism=2))
    cluster.wait_ready("fit", pods=2)
    running = {*descendants_of(own_control_plane.process.pid), *processes_with(marker)}
    assert len(processes_with(marker)) >= 2
    own_control_plane.process.kill()
    own_control_plane.process.wait()
    for pid in running:
        wait_until_dead(pid)
    assert processes_with(marker) == []
    assert mounts_but_of_others(tmp_path) == mounts
    assert os.listdir("/sys/class/net") == links


def wait_until_dead(pid: int) -> None:
    """Return when a process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor) as process:
        assert select.select([process], [], [], 60)[0], f"process {pid} is still there"


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    starter = "import sys, time; from pathlib import Path; from standin.control_plane import ControlPlane; "
    starter += "print(ControlPlane(Path(sys.argv[1])).process.pid, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", starter, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        server = process.stdout.readline()
        process.kill()
    if not server:
        pytest.skip("this machine cannot run the stand-in cluster")
    wait_until_dead(int(server))


def test_by_hand_it_says_where_its_kubeconfig_is_until_ctrl_c(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "standin",
        str(tmp_path / "new"),
        "--nodes",
        "3",
        "--gpus",
        "0",
    ]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        hint = next(line for line in lines if "KUBECONFIG" in line)
        kubeconfig = yaml.safe_load(Path(hint.split()[1].removeprefix("KUBECONFIG=")).read_text())
        with urlopen(f"{kubeconfig['clusters'][0]['cluster']['server']}/api/v1/nodes") as answer:
            nodes = json.load(answer)["items"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert [(name_of(node), node["status"]["capacity"]["nvidia.com/gpu"]) for node in nodes] == [
        ("node-0", "0"),
        ("node-1", "0"),
        ("node-2", "0"),
    ]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that any user may enter and fill; pytest's own lie below one that only root may."""
    with tempfile.TemporaryDirectory(prefix="standin-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


AS_NOBODY = (
    "setpriv",
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--no-new-privs",
    "--",
)
AS_ROOT_OF_NOTHING = ("unshare", "--user", "--map-root-user")


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests run without root here already")
@pytest.mark.parametrize(
    "prefix", [AS_NOBODY, AS_ROOT_OF_NOTHING], ids=["unprivileged", "in a user namespace"]
)
def test_it_runs_where_there_is_one_user_only(
    prefix: tuple[str, ...], open_folder: Path, tmp_path: Path
) -> None:
    try:
        started = ControlPlane(open_folder, prefix=prefix)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with started:
        cluster = Cluster(started, "default", tmp_path)
        volumes = [{"name": "config", "configMap": {"name": "settings"}}]
        container = {"volumeMounts": [{"name": "config", "mountPath": "/mnt"}]}
        script = "cat /mnt/greeting; until getent hosts fit-0.fit; do sleep 0.02; done; hostname -i"
        service = headless_service("fit", **{"job-name": "fit"})
        spec = pod_spec(script, container=container, volumes=volumes, subdomain="fit")
        cluster.apply(config_map("settings", greeting="hello\n"), service, job("fit", spec))
        cluster.wait_condition("Job", "fit", "Complete")
        (created,) = cluster.find("Pod")
        ip = created["status"]["podIP"]
        assert cluster.log(name_of(created)).split() == [
            "hello",
            ip,
            "fit-0.fit.default.svc.cluster.local",
            ip,
        ]


@pytest.mark.slow
def test_it_can_be_the_oldest_supported_release(tmp_path: Path) -> None:
    try:
        started = ControlPlane(tmp_path, "--kubernetes-version", OLDEST, "--nodes", "3")
    except Unavailable as reason:
        pytest.skip(str(reason))
    with started:
        cluster = Cluster(started, "default", tmp_path)
        version = cluster.request("GET", "/version")
        assert f"{version['major']}.{version['minor']}" == OLDEST
        assert [name_of(node) for node in cluster.find("Node")] == ["node-0", "node-1", "node-2"]
        cluster.apply(job("fit", pod_spec("echo hi")))
        cluster.wait_condition("Job", "fit", "Complete")
        if shutil.which(
            "kubectl"
        ):  # some installations start a client of the server's own release, others a newer one
            assert cluster.kubectl("logs", "job/fit").stdout == "hi\n"
            manifest = yaml.safe_dump(job("other", pod_spec("true")))
            applied = cluster.kubectl("apply", "--server-side", "-f", "-", stdin=manifest).stdout
            assert applied == "job.batch/other serverside-applied\n"
