"""The smoke test on real ranks: good where all is well, and it names who is missing, dead, hung or slow."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kubetune import errors
from kubetune.base import processes
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.plugins.diagnostics.smoke import checks, rank_measurements
from kubetune.plugins.diagnostics.smoke.rank_measurements import outliers
from kubetune.plugins.diagnostics.smoke.settings import Settings
from standin.schemas import NEWEST, OLDEST, problems
from tests.ranks import free_port, started, wait_all, wait_until
from tests.toy import is_stopped, wait_until_stopped

# A shared machine slows ranks down at random; only the tests of slowness look at it.
SMALL = Settings(samples=512, batch=32, features=16, slow_factor=1000, timeout=60)


def examine(settings: Settings, folder: Path) -> int:
    """Be a rank that leaves its report, or the error that it ended with, in a file."""
    rank = os.environ["RANK"]
    try:
        facts = checks.examine(settings)
    except errors.KubetuneError as error:
        facts = {"error": str(error), "code": error.exit_code}
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    return 0


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def words(settings: Settings) -> list[str]:
    """Return the flags of a command line that gives these settings."""
    values = asdict(settings)
    del values["volume"], values["json"]
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def run_verb(*args: str, module: Sequence[str] = ("kubetune", "smoke"), **environ: str) -> Any:
    small = [flag for flag in words(SMALL) if not flag.startswith("--timeout")]
    command = [sys.executable, "-m", *module, *small, *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environ}
    )


def test_two_good_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    words = "--processes", "2", "--json", f"--volume={folder}"
    ended = run_verb(*words, PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == errors.OK, ended.stderr
    report = json.loads(ended.stdout)
    assert report["problems"] == []
    assert [place["rank"] for place in report["ranks"]] == [0, 1]
    assert [measurement["bytes"] for measurement in report["all_reduce"]] == [4096, 1 << 20]
    assert all(measurement["bus_gb_per_second"] > 0 for measurement in report["all_reduce"])
    assert [link["ranks"] for link in report["links"]] == [[0, 1]]
    assert len(report["compute_seconds"]) == 2
    (volume,) = report["volumes"]
    assert volume["write_mib_per_second"] > 0
    assert volume["free_bytes"] > 0
    assert list(folder.iterdir()) == []
    training = report["training"]
    assert training["losses"][-1] < training["losses"][0]
    for family in (
        "[STEP]",
        "[DDP]",
        "[TRAIN] epoch 2/2",
        "[RESULT] good",
    ):
        assert family in ended.stderr
    imported = set(re.findall(r"^import time:.*\| +(\w+)\.\w", ended.stderr, re.M))
    assert "torch" in imported
    assert not imported & {"transformers", "peft", "sympy", "scipy"}, (
        "a machine is tested without what models take"
    )


@pytest.mark.slow
def test_four_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    """The same global batches, so the same losses but for rounding; and each rank has a link to the next."""
    for world_size in (1, 4):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        with started(examine, world_size, replace(SMALL, batch=64 // world_size), folder) as ranks:
            assert wait_all(ranks) == [0] * world_size
    alone, together = (reports(tmp_path / size)[0] for size in ("1", "4"))
    assert together["training"]["losses"] == pytest.approx(alone["training"]["losses"], abs=1e-5)
    assert (alone["all_reduce"], alone["links"]) == ([], [])
    assert [link["ranks"] for link in together["links"]] == [[0, 1], [1, 2], [2, 3]]
    assert all(link["gb_per_second"] > 0 for link in together["links"])
    assert (alone["problems"], together["problems"]) == ([], [])


@pytest.mark.slow
def test_under_torchrun() -> None:
    torchrun = (
        "torch.distributed.run",
        f"--master-port={free_port()}",
        "--nproc-per-node=2",
        "-m",
        "kubetune",
        "smoke",
    )
    ended = run_verb("--json", module=torchrun)
    assert ended.returncode == errors.OK, ended.stderr
    assert len(json.loads(ended.stdout)["ranks"]) == 2


def documented() -> list[dict[str, Any]]:
    """Return the Kubernetes objects of docs/smoke.md."""
    text = (Path(__file__).parents[2] / "docs" / "smoke.md").read_text()
    return list(YAML(typ="safe").load_all(text.split("```yaml\n")[1].split("```")[0]))


def test_the_documented_job_is_valid() -> None:
    for version in (OLDEST, NEWEST):
        assert [problems(obj, version) for obj in documented()] == [[], []]


@pytest.mark.slow
def test_the_documented_job_runs(tmp_path: Path) -> None:
    """Its command with its variables, as a process for each pod: all that differs is the address."""
    _, job = documented()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    python, *flags = (
        str(tmp_path) if word == "/outputs" else word for word in container["command"]
    )
    assert (python, [variable["name"] for variable in container["env"]]) == (
        "python",
        ["MASTER_ADDR"],
    )
    small = [flag for flag in words(SMALL) if not flag.startswith("--timeout")]
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pods = [
        subprocess.Popen(
            [sys.executable, *flags, *small],
            env={**where, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
        )
        for index in range(job["spec"]["completions"])
    ]
    first, second = (pod.communicate(timeout=300)[0].decode() for pod in pods)
    assert [pod.returncode for pod in pods] == [errors.OK, errors.OK]
    assert "link: ranks=(0, 1)" in first
    for rank in range(2):
        assert f"volume: rank={rank} path={tmp_path} problem=– free_bytes=" in first
    assert second == ""


@pytest.mark.slow
def test_a_node_that_never_comes_is_named() -> None:
    environ = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run_verb("--nodes=2", "--processes=1", "--timeout=2", "--json", **environ)
    assert ended.returncode == errors.ENVIRONMENT
    (problem,) = json.loads(ended.stdout)["problems"]
    assert problem.startswith("rank 1 (node 1) never came")


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with started(
        examine, 2, replace(SMALL, timeout=5), tmp_path, environ={"WORLD_SIZE": "3"}
    ) as ranks:
        assert wait_all(ranks) == [0, 0]
    for report in reports(tmp_path).values():
        assert report["code"] == errors.ENVIRONMENT
        assert report["error"].startswith("rank 2 never came: 3 ranks were to meet at 127.0.0.1:")
        assert "here are rank 0 on" in report["error"]


def test_no_rank_0_is_said_by_those_who_look_for_it(tmp_path: Path) -> None:
    environ = {"WORLD_SIZE": "2", "RANK": "1"}
    with started(examine, 1, replace(SMALL, timeout=1), tmp_path, environ=environ) as ranks:
        assert wait_all(ranks) == [0]
    assert "rank 1 on" in reports(tmp_path)[1]["error"]
    assert "did not find rank 0 at 127.0.0.1:" in reports(tmp_path)[1]["error"]


@pytest.mark.parametrize(
    ("fault", "lost", "phase"),
    [
        ("signal 9:all_reduce:1:1", 1, "all_reduce"),
        pytest.param("hang:training:1:1", 1, "training", marks=pytest.mark.slow),
    ],
)
def test_a_rank_lost_on_the_way_is_named(tmp_path: Path, fault: str, lost: int, phase: str) -> None:
    environ = {"KUBETUNE_FAULT": fault}
    with started(examine, 2, replace(SMALL, timeout=10), tmp_path, environ=environ) as ranks:
        wait_all(ranks[:1])
    assert reports(tmp_path).keys() == {0}
    report = reports(tmp_path)[0]
    assert report["code"] == errors.ENVIRONMENT
    assert report["error"].startswith(f"rank {lost} on ")
    assert f"died or hangs, last seen at {phase}" in report["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        ("signal 9:all_reduce:1:1", "rank 1 was killed by SIGKILL"),
        ("hang:training:1:1", "rank 1 hangs, and is ended because another one has failed"),
        ("hang:volumes:1:0", "rank 0 hangs, and is ended because another one has failed"),
    ],
)
def test_the_verb_ends_whatever_a_rank_does(fault: str, ended: str) -> None:
    done = run_verb("--processes=2", "--timeout=3", KUBETUNE_FAULT=fault)
    assert done.returncode == errors.ENVIRONMENT
    assert ended in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, errors.PREEMPTED)]
)
def test_asked_to_stop_it_leaves_at_once_and_nobody_behind(
    number: signal.Signals, code: int
) -> None:
    environ = {**os.environ, "KUBETUNE_FAULT": "signal 19:all_reduce:1:1"}
    command = [sys.executable, "-m", "kubetune", "smoke", *words(SMALL), "--processes=2"]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: len(processes.children(process.pid)) == 2)
        ranks = processes.children(process.pid)
        wait_until(lambda: is_stopped(ranks[1]))
        process.send_signal(number)
        assert process.wait(60) == code
        assert not [rank for rank in ranks if processes.is_alive(rank)]
        assert process.stderr is not None
        assert process.stderr.read() == ""


@contextmanager
def throttled(process: ForkServerProcess, *, runs: float, stands: float) -> Iterator[None]:
    """Let a stopped process run only by turns, of so many seconds: really slow, whatever it does."""
    assert process.pid is not None
    done = threading.Event()

    def throttle(pid: int) -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGCONT)
            time.sleep(runs)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stands)

    thread = threading.Thread(target=throttle, args=(process.pid,))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGSTOP:d}:compute_seconds:1:1"}
    with started(examine, 2, replace(SMALL, slow_factor=3), tmp_path, environ=environ) as ranks:
        wait_until_stopped(ranks[1])
        # A thirtieth of the time: its neighbour is never that slow by chance of a busy machine.
        with throttled(ranks[1], runs=0.01, stands=0.29):
            assert wait_all(ranks[:1]) == [0]
    (problem,) = reports(tmp_path)[0]["problems"]
    assert problem.startswith("rank 1 on ")
    assert "is slow: " in problem


def examine_full(settings: Settings, folder: Path) -> int:
    """Be a rank whose files may have a mebibyte, and no more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return examine(settings, folder)


def test_volumes_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    small = tmp_path / "file"
    small.touch()
    out = tmp_path / "out"
    out.mkdir()
    settings = replace(SMALL, volume=(str(small), str(out)))
    with started(examine_full, 1, settings, out) as ranks:
        assert wait_all(ranks) == [0]
    no_folder, full = reports(out)[0]["problems"]
    assert f"volume {small} on rank 0" in no_folder
    assert no_folder.endswith("Not a directory")
    assert full.endswith("File too large")
    assert not [path for path in out.iterdir() if path.suffix != ".json"]


def print_to(path: Path, settings: Settings) -> int:
    """Be a rank as the verb starts it, which prints to a file."""
    with path.open("w") as file, redirect_stdout(file):
        return checks.run_rank(settings)


def test_a_loss_that_does_not_fall_is_bad(tmp_path: Path) -> None:
    with started(print_to, 1, tmp_path / "report.json", replace(SMALL, lr=1e9, json=True)) as ranks:
        assert wait_all(ranks) == [errors.ENVIRONMENT]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"][0].startswith("training did not improve: loss ")


def test_wrong_sums_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of_two = checks.Checks(World(size=2), SMALL)
    monkeypatch.setattr(checks, "_SIZES", {"cpu": (4096,)})
    monkeypatch.setattr(rank_measurements, "all_reduce_seconds", lambda size, world: 1e-3)
    monkeypatch.setattr(process_group, "sum_", lambda tensor, world: tensor)
    monkeypatch.setattr(process_group, "agree", lambda flag, world: flag)
    of_two.all_reduces()
    assert of_two.problems == ["all-reduce of 4,096 bytes gave a wrong sum"]
    monkeypatch.setattr(process_group, "sum_", lambda tensor, world: tensor.fill_(3.0))
    of_two.problems.clear()
    of_two.all_reduces()
    assert of_two.problems == []


def test_a_fall_back_to_sockets_is_named(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("NET/IB : No device found.\nhost:1:1 [0] NCCL INFO Using network Socket\n")
    alone = checks.Checks(World(), SMALL, log, ["rank 0 on host-0"])
    assert alone.networks() == ["Socket"]
    assert alone.problems == [
        "rank 0 on host-0: RDMA was asked for (NCCL_IB_HCA), but NCCL uses sockets: no adapter of that name can be "
        "opened"
    ]


def test_outliers_are_measured_by_all_others() -> None:
    assert outliers([1.0], 2) == {}
    assert outliers([1.0, 1.9], 2) == {}
    assert outliers([1.0, 3.0], 2) == {1: 3.0}
    assert outliers([1.0, 5.0, 1.0, 1.2], 2) == {1: 5.0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "--epochs: found '0'; expected a number from 1 on"),
        (["--lr", "nan"], "--lr: found 'nan'; expected a number above 0"),
        (["--nodes", "2"], "NODE_RANK (or PET_NODE_RANK, JOB_COMPLETION_INDEX) is not set"),
        (
            ["--timeout", "1e20"],
            "--timeout: found '1e20'; expected a number above 0, at most 1000000",
        ),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str) -> None:
    ended = run_verb(*flags)
    assert ended.returncode == errors.USER
    assert message in ended.stderr
    assert ended.stdout == ""


RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PET_NNODES": "two"}, "--nodes: found 'two'; expected a number from 1 on"),
        pytest.param(
            RANK | {"RANK": "2"},
            "RANK is 2, but WORLD_SIZE is 1; expected 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RANK | {"WORLD_SIZE": "x"},
            "WORLD_SIZE is 'x'; expected a whole number",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RANK | {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but MASTER_ADDR", marks=pytest.mark.slow
        ),
    ],
)
def test_wrong_variables_are_refused(environ: dict[str, str], message: str) -> None:
    ended = run_verb(**environ)
    assert ended.returncode == errors.USER
    assert message in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
