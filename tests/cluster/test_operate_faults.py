"""Every call of every verb to the API server, refused, cut and delayed: a sentence and an exit code, no traceback.

Which calls a verb makes is not written here: it runs once unharmed, and each kind of call it made then fails in turn.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.k8s.cluster import submit
from kubetune.library.sweep.remote import ClusterRunner
from kubetune.library.sweep.sweep_record import read_record
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk, as_script, slow, write_progress

WAIT = "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"

FAULTS: dict[str, dict[str, Any]] = {
    "forbidden": {"code": 403, "message": 'User "ann" cannot do it'},
    "cut within": {"cut": "within"},
    "broken": {"code": 500, "message": "etcdserver: request timed out"},
    "login page": {"code": 200, "message": "Please log in", "html": True},
    "late": {"seconds": 0.3},
}
RARER: dict[str, dict[str, Any]] = {
    "not logged in": {"code": 401, "message": "Unauthorized"},
    "too old": {"code": 410, "message": "too old resource version"},
    "too many": {"code": 429, "message": "please try again later"},
    "bad gateway": {"code": 502, "message": "Bad Gateway", "html": True},
    "cut before": {"cut": "before"},
}
QUICK = ("cut within",)

VERBS: dict[str, list[str]] = {
    "submit": ["submit", "run.yaml", "--yes"],
    "submit, checked only": ["submit", "run.yaml", "--dry-run=server"],
    "submit, replaced": ["submit", "run.yaml", "compute.memory=2Gi", "--yes"],
    "status of all": ["status"],
    "status": ["status", "fit"],
    "logs": ["logs", "fit"],
    "logs of a rank": ["logs", "fit", "--rank", "0"],
    "events": ["events", "fit"],
    "exec": ["exec", "fit", "--", "true"],
    "exec everywhere": ["exec", "fit", "--all", "--", "true"],
    "cp": ["cp", "fit"],
    "gpus": ["gpus", "fit"],
    "top": ["top", "fit"],
    "watch": ["watch", "fit", "--once"],
    "stop": ["stop", "fit"],
    "stop, not waiting": ["stop", "fit", "--no-wait"],
    "resume": ["resume", "fit"],
    "delete": ["delete", "fit", "--yes"],
    "secret": ["secret", "set", "KEY"],
    "port-forward": ["port-forward", "fit", "tensorboard"],
    "following logs of an end": ["logs", "-f", "fit"],
}
# Verbs which between them get, list, watch, apply, delete, read logs and run commands.
OF_EACH_KIND = ("submit", "status", "logs", "exec", "stop", "delete")
ENDED = ("following logs of an end",)
STOPPED = ("resume",)
CHANGING = ("submit, replaced", "stop", "stop, not waiting", "resume", "delete")


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    for name, seconds in (
        ("k8s.api.connection.PATIENCE_SECONDS", 0.3), ("k8s.api.informer._PAUSE_SECONDS", 0.02),
        ("k8s.cluster.download._PATIENCE_SECONDS", 0.1), ("k8s.cluster.download._PAUSE_SECONDS", 0.02),
        ("k8s.cluster.volume_reader._POD_SECONDS", 2), ("k8s.cluster.asking_pods.ASK_SECONDS", 2.0),
        ("k8s.cluster.volume_reader.ASK_SECONDS", 2.0),
        ("k8s.cluster.log_follow._PATIENCE_SECONDS", 0.5), ("k8s.cluster.log_follow._ABSENCE_SECONDS", 0.5),
        ("library.sweep.remote._WAIT_SECONDS", 0.05), ("library.sweep.remote._UNREACHABLE_SECONDS", 0.5),
    ):  # fmt: skip
        monkeypatch.setattr(f"kubetune.{name}", seconds)
    return Desk(cluster, tmp_path)


def furnisher(desk: Desk, verb: str) -> Callable[[], None]:
    """Return a function that puts the run into the state in which a verb finds it, anew where the verb changes that."""
    (desk.folder / ".env").write_text("KEY=value\n")
    is_there = False

    def furnish() -> None:
        nonlocal is_there
        if is_there and verb not in CHANGING:
            return
        desk.cluster.clear_faults()
        if is_there:
            desk.any_end("delete", "fit", "--yes", "--volumes")  # which may have been done
        is_there = True
        desk.submit_script(
            "echo done" if verb in ENDED else WAIT, compute__nodes=1, kubernetes__grace_seconds=10
        )
        if verb in ENDED:
            desk.cluster.wait_condition("Job", "fit", "Complete")
        else:
            desk.cluster.wait_ready("fit")
        if not desk.run_folder().exists():
            write_progress(desk)
        if verb in STOPPED:
            desk.quick("stop", "fit")

    return furnish


def attempt(desk: Desk, argv: list[str]) -> None:
    """Run a verb; whatever becomes of it, it is one of the ends that are documented, and explained."""
    done = desk.any_end(*argv)
    assert done.returncode in (0, 2, 3), f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    if done.returncode:
        assert "kubetune: " in done.stderr


@pytest.mark.parametrize("verb", [name if name == "exec" else slow(name) for name in VERBS])
@pytest.mark.parametrize("fault", [name if name in QUICK else slow(name) for name in FAULTS])
def test_every_call_may_fail(desk: Desk, verb: str, fault: str) -> None:
    fail_each_call(desk, verb, FAULTS[fault])


@pytest.mark.slow
@pytest.mark.parametrize("verb", OF_EACH_KIND)
@pytest.mark.parametrize("fault", RARER)
def test_a_call_of_each_kind_may_fail_in_rarer_ways(desk: Desk, verb: str, fault: str) -> None:
    fail_each_call(desk, verb, RARER[fault])


def fail_each_call(desk: Desk, verb: str, fault: dict[str, Any]) -> None:
    furnish = furnisher(desk, verb)
    furnish()
    desk.cluster.clear_faults()
    attempt(desk, VERBS[verb])
    calls = dict.fromkeys(desk.cluster.asked())
    assert calls
    for call in calls:
        furnish()
        desk.cluster.trouble(call, **fault)
        attempt(desk, VERBS[verb])
        desk.cluster.clear_faults()


@pytest.mark.slow
def test_a_disk_that_takes_nothing_is_told_of_by_cp(desk: Desk) -> None:
    furnisher(desk, "cp")()
    command = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh", *desk.command("cp", "fit")]
    done = subprocess.run(
        command,
        cwd=desk.folder,
        env=desk.environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert "File too large; allow larger files (ulimit -f)" in done.stderr
    assert "all verified" not in done.stdout


TRIAL = {
    "code": 0,
    "reason": "done",
    "step": 4,
    "progress": {"step": 4, "steps": 4, "best": {"value": 2.5}},
}
SWEEP = [
    "sweep",
    "run.yaml",
    "lora.r=4,8",
    "--sampler",
    "grid",
    "--cluster",
    "--parallel",
    "1",
    "-o",
    "found",
]


@pytest.fixture
def searching(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a user who can sweep: trials end at once, and leave what an agent leaves."""
    pytest.importorskip("optuna")
    script = f"echo '{json.dumps(TRIAL)}' > /dev/termination-log"
    monkeypatch.setattr(
        "kubetune.library.sweep.remote.submit",
        partial(submit.submit, change=partial(as_script, script)),
    )
    desk.write({"compute.nodes": 1, "training.max_steps": 4})
    return desk


def assert_goes_on(desk: Desk) -> None:
    """Require that the same command, when all is well again, brings the sweep to its end."""
    done = desk.quick(*SWEEP)
    assert "trials     2 trials: 2 done" in done.stdout, done.stdout
    assert [trial.value for trial in read_record(desk.folder / "found").trials] == [2.5, 2.5]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_a_sweep_may_fail(searching: Desk, fault: str) -> None:
    desk = searching
    desk.cluster.clear_faults()
    assert_goes_on(desk)
    calls = dict.fromkeys(desk.cluster.asked())
    assert {"list pods", "patch jobs", "get jobs"} <= set(calls)
    for call in calls:
        for name in ("fit-000", "fit-001"):
            desk.quick("delete", name, "--yes", "--volumes")
        shutil.rmtree(desk.folder / "found")
        desk.cluster.trouble(call, **FAULTS[fault])
        attempt(desk, SWEEP)
        desk.cluster.clear_faults()
        assert_goes_on(desk)


def test_a_sweep_outlives_an_api_server_that_is_away_for_a_while(
    searching: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells, where it stays away, that its trials go on, which the same command finds again."""
    desk = searching
    waits = itertools.count()
    is_over = desk.cluster.claim_folder("fit-000-outputs") / "over"
    script = f"until [ -e /outputs/over ]; do sleep 0.02; done; echo '{json.dumps(TRIAL)}' > /dev/termination-log"
    monkeypatch.setattr(
        "kubetune.library.sweep.remote.submit",
        partial(submit.submit, change=partial(as_script, script)),
    )
    with ExitStack() as away:

        def wait(runner: ClusterRunner) -> None:
            time.sleep(0.05)
            turn = next(waits)
            if turn == 0:
                away.enter_context(desk.cluster.outage())
            elif runner._messages and not is_over.exists():
                is_over.touch()
                away.close()

        monkeypatch.setattr(ClusterRunner, "wait", wait)
        monkeypatch.setattr("kubetune.library.sweep.remote._UNREACHABLE_SECONDS", 0.0)
        alone = desk.quick(*SWEEP, "--trials", "1", code=errors.ENVIRONMENT)
        last = alone.stderr.splitlines()[-1]
        assert (
            last
            == "These runs were not stopped and continue in the cluster: fit-000; repeat the command to continue them"
        )
        away.close()
        waits = itertools.count()
        monkeypatch.setattr("kubetune.library.sweep.remote._UNREACHABLE_SECONDS", 60.0)
        done = desk.quick(*SWEEP, "--trials", "1")
    assert "does not answer: " in done.stderr
    assert "; runs continue in the cluster. Trying again for 60 s" in done.stderr
    assert "trials     1 trial: 1 done" in done.stdout
