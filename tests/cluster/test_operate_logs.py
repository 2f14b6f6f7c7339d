"""Followed logs are whole: over restarts of pods and absences of the API server nothing is lost or comes twice."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess

import pytest

from kubetune.cli.remote.submit import wait_for_end
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster.log_follow import LogFollower, Source
from kubetune.k8s.cluster.run_lookup import find_run
from standin.state.objects import name_of
from tests.cluster.operation import Desk, slow, write_progress


def lines_of(desk: Desk, *argv: str) -> list[str]:
    return desk.quick("logs", *argv).stdout.splitlines()


def test_logs_of_all_pods_are_marked_with_their_node(desk: Desk) -> None:
    desk.submit_script("echo from $JOB_COMPLETION_INDEX")
    desk.cluster.wait_condition("Job", "fit", "Complete")
    assert lines_of(desk, "fit") == ["[node 0] from 0", "[node 1] from 1"]
    assert lines_of(desk, "fit", "--node", "1") == ["[node 1] from 1"]
    assert (
        "--rank: found 2; expected 0 to 1"
        in desk.quick("logs", "fit", "--rank", "2", code=2).stderr
    )


@pytest.mark.slow
def test_the_log_of_a_rank_outlives_its_pods(desk: Desk) -> None:
    desk.submit_script("true")
    write_progress(desk)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    assert lines_of(desk, "fit", "--rank", "0") == ["one", "two"]
    desk.cluster.wait_pods("app.kubernetes.io/component=files", 0)  # the one that read them


COUNT = """
n=0; trap 'echo bye; exit 143' TERM
while [ ! -e /outputs/end ]; do n=$((n+1)); echo line $n; sleep 0.01; done
echo last $n
"""


@pytest.mark.parametrize("seconds", [1, slow(10)])
def test_followed_logs_lose_and_double_nothing_in_an_outage(desk: Desk, seconds: int) -> None:
    desk.submit_script(COUNT, compute__nodes=1)
    (pod,) = desk.cluster.wait_ready("fit")
    with desk.started("logs", "-f", "fit") as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(20)]
        asking = desk.started("status", "fit")
        with asking:
            with desk.cluster.outage(), pytest.raises(subprocess.TimeoutExpired):
                asking.wait(seconds)
            assert "running, 1 of 1 pods running" in asking.communicate(timeout=30)[0]
        desk.cluster.wait_log(name_of(pod), "line")
        (desk.cluster.claim_folder("fit-outputs") / "end").touch()
        seen += process.stdout.readlines()
    assert process.returncode == 0
    count = len(seen) - 1
    assert [line.strip() for line in seen] == [
        *(f"line {n}" for n in range(1, count + 1)),
        f"last {count}",
    ]
    (kept,) = (desk.folder / "outputs" / "fit" / "logs" / "pods").iterdir()
    assert [line.split(" ", 1)[1] for line in kept.read_text().splitlines()] == [
        line.strip() for line in seen
    ]


def test_followed_logs_go_on_after_a_kubelet_has_started_anew(desk: Desk) -> None:
    """It answers 404 at first, for pods that run, whoever asks."""
    desk.submit_script(COUNT, compute__nodes=1)
    (pod,) = desk.cluster.wait_ready("fit")
    with desk.started("logs", "-f", "fit") as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(20)]
        for _ in range(2):
            desk.cluster.restart_kubelet(pod["spec"]["nodeName"])
            seen += [process.stdout.readline() for _ in range(20)]
        desk.cluster.restart_kubelet(pod["spec"]["nodeName"])
        assert desk.quick("exec", "fit", "--", "echo", "here").stdout == "here\n"
        desk.cluster.restart_kubelet(pod["spec"]["nodeName"])
        assert desk.quick("logs", "fit").stdout.startswith("line 1\n")
        (desk.cluster.claim_folder("fit-outputs") / "end").touch()
        seen += process.stdout.readlines()
    assert process.returncode == 0
    count = len(seen) - 1
    lines = [line.strip() for line in seen]
    assert lines == [*(f"line {n}" for n in range(1, count + 1)), f"last {count}"]
    (kept,) = (desk.folder / "outputs" / "fit" / "logs" / "pods").iterdir()
    assert [line.split(" ", 1)[1] for line in kept.read_text().splitlines()] == lines


def test_a_pod_that_the_server_denies_is_read_on_while_the_watch_has_it(desk: Desk) -> None:
    desk.submit_script(COUNT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    desk.cluster.trouble("get pods/log", code=404, message='pods "fit-0" not found', times=2)
    with desk.started("logs", "-f", "fit") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "line 1\n"
        (desk.cluster.claim_folder("fit-outputs") / "end").touch()
        assert process.stdout.readlines()[-1].startswith("last ")


@pytest.mark.parametrize(
    "kind", ["job", *(slow(kind) for kind in ("statefulset", "jobset", "pytorchjob"))]
)
def test_followed_logs_go_on_in_the_pods_of_the_next_start(desk: Desk, kind: str) -> None:
    """Each pod fails once with a code that means: start me again. None ends before its line was seen."""
    script = """
    say() { echo $1; until test -e /outputs/seen-$1; do sleep 0.02; done; }
    if test -e /outputs/$HOSTNAME; then
      say second; test -z "$KUBETUNE_STAY" || exec sleep 600; exit 0
    fi
    touch /outputs/$HOSTNAME; say first; exit 145
    """
    desk.submit_script(script, kubernetes__kind=kind)
    seen: list[tuple[int, str]] = []

    def note(source: Source, text: str) -> None:
        seen.append((source.node, text))
        if sum(line == text for _, line in seen) == 2:
            (desk.cluster.claim_folder("fit-outputs") / f"seen-{text}").touch()
            if kind == "statefulset" and text == "second":
                raise BrokenPipeError  # nobody reads on

    with desk.at():
        client = Client()
        follower = LogFollower(client, find_run(client, "fit"), note)
        with pytest.raises(BrokenPipeError) if kind == "statefulset" else contextlib.nullcontext():
            follower.follow()
    assert [text for node, text in seen if node == 0] == ["first", "second"]
    assert [text for node, text in seen if node == 1] == ["first", "second"]


def test_a_log_that_always_breaks_off_is_an_error_of_logs_once_the_run_is_over(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who waits for the run gets its exit code all the same."""
    monkeypatch.setattr("kubetune.k8s.cluster.log_follow._PATIENCE_SECONDS", 0.5)
    desk.submit_script("echo done", compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    desk.cluster.trouble("get pods/log", cut="within")
    with desk.at():
        client = Client()
        assert wait_for_end(client, find_run(client, "fit"), show_logs=True) == 0
    assert "cannot be read to its end, though the run is over" in capsys.readouterr().err
    done = desk.quick("logs", "-f", "fit", code=3)
    assert done.stdout == ""
    assert "kubetune: the log of fit-0-" in done.stderr
    assert "cannot be read to its end, though the run is over" in done.stderr
    desk.cluster.clear_faults()
    desk.cluster.trouble("get pods/log", cut="within", times=1)
    assert "done" in desk.quick("logs", "-f", "fit").stdout


def test_a_run_of_which_nobody_says_how_it_stands_is_not_followed_for_ever(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubetune.k8s.cluster.log_follow._ABSENCE_SECONDS", 0.5)
    desk.submit_script("echo done", compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    monkeypatch.setattr("kubetune.k8s.api.connection.PATIENCE_SECONDS", 0.3)
    desk.cluster.trouble("get jobs", cut="within")
    assert "does not answer" in desk.quick("logs", "-f", "fit", code=3).stderr


@pytest.mark.slow
def test_watching_goes_on_after_an_outage(desk: Desk) -> None:
    desk.submit_script(COUNT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    write_progress(desk)
    controller, terminal = pty.openpty()
    environment = desk.environment() | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        desk.command("watch", "fit"),
        cwd=desk.folder,
        env=environment,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        read_until(controller, "Ctrl-C leaves")
        with desk.cluster.outage():
            read_until(controller, "trying again")
        read_until(controller, "Ctrl-C leaves")
        process.send_signal(signal.SIGINT)
        read_until(controller, "The run goes on")
    os.close(controller)
    assert process.returncode == 0


def read_until(controller: int, words: str) -> None:
    """Read what a terminal shows until some words are there."""
    text = ""
    while words not in text:
        assert select.select([controller], [], [], 60)[0], (
            f"{words!r} did not come; last: {text[-2000:]}"
        )
        text += os.read(controller, 65536).decode(errors="replace")
