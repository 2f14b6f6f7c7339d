"""What kubetune makes of answers, statuses, times and log ends: pure, so no cluster is needed."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetune.base.gpus import parse_gpus
from kubetune.base.humanize import visible
from kubetune.cli.remote.events import row
from kubetune.cli.remote.logs import _lasting_reasons
from kubetune.cli.remote.status import _pod_row
from kubetune.cli.remote.submit import exit_code
from kubetune.config.resolved import load_resolved
from kubetune.config.schema import Config
from kubetune.errors import ENVIRONMENT, ConfigError
from kubetune.k8s.api.api_errors import ApiCall, MissingRight, missing_rights, refusal
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.causes import find_cause
from kubetune.k8s.cluster.cluster_runs import ObservedRun
from kubetune.k8s.cluster.in_pod import dev_command
from kubetune.k8s.cluster.log_follow import LogCopy, Position
from kubetune.k8s.cluster.run_status import facts, headline, warning_lines
from kubetune.k8s.cluster.termination import last_step, trusted
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.run_spec import RunSpec, spec_of
from kubetune.plan.plan import make_plan
from kubetune.plugins.dev_pods import dev_config, pack_tree

HEAVY = ("torch", "transformers", "datasets", "peft", "numpy")


def sentence(code: int, message: str, kind: str = "Job", **status: Any) -> str:
    return str(
        refusal(ApiCall("apply", KINDS[kind], "ml", "fit"), code, {"message": message, **status})
    )


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (401, "Unauthorized", "log in again"),
        (404, 'namespaces "ml" not found', "kubectl create namespace ml"),
        (
            403,
            'pods "fit" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8',
            "quota gpus",
        ),
        (
            403,
            'pods "fit" is forbidden: violates PodSecurity "restricted:latest": privileged',
            "privileged",
        ),
        (
            409,
            'Apply failed with 1 conflict: conflict with "kubectl": .spec.x',
            "go on with that tool, or remove what it made (kubetune delete RUN",
        ),
        (409, "the object has been modified", "it was changed in the meantime"),
        (503, "etcd leader changed", "try again later"),
        (418, "<html>a proxy</html>", "a proxy"),
    ],
)
def test_every_refusal_is_a_sentence(code: int, message: str, expected: str) -> None:
    assert expected in sentence(code, message)


def test_a_refusal_names_every_field() -> None:
    causes = [{"field": "spec.a", "message": "bad"}, {"field": "spec.b", "message": "worse"}]
    assert "spec.a: bad; spec.b: worse" in sentence(
        422, "long", details={"name": "fit", "causes": causes}
    )


@pytest.mark.parametrize(
    ("kind", "release"), [("JobSet", "jobset"), ("TrainJob", "trainer"), ("PyTorchJob", "v1.9")]
)
def test_a_kind_that_is_not_installed_comes_with_its_release(kind: str, release: str) -> None:
    message = sentence(404, "the server could not find the requested resource", kind)
    assert f"the cluster has no kind {kind}" in message
    assert release in message


def test_a_missing_right_is_granted_by_the_role_shown() -> None:
    cannot = 'User "ann" cannot patch resource "jobs" in API group "batch" in the namespace "ml"'
    message = f'jobs.batch "fit" is forbidden: {cannot}'
    advice = sentence(403, message)
    assert "ann may not patch jobs in API group batch in namespace ml" in advice
    assert "  - apiGroups: [batch]\n    resources: [jobs]\n    verbs: [patch]" in advice


def test_the_end_of_a_log_tells_the_numbers_of_the_last_step() -> None:
    step = "2026-11-20 10:15:00 [TRAIN] step {}/300 epoch 0.4 loss 1.9312 lr 0.00019 grad_norm 0.800 tokens/s 5200"
    expected = {"step": 12, "steps": 300, "loss": 1.9312, "tokens_per_second": 5200}
    assert (
        last_step([step.format(11), step.format(12), "kubetune: ended with exit code 145"])
        == expected
    )
    assert last_step(["no step yet"]) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_a_log_read_over_broken_connections_is_the_log(
    times: list[tuple[int, int]], breaks: list[int]
) -> None:
    """Whatever whole second the server starts again from, and however many lines share a time."""
    stamps = []
    for second, tenth in sorted(times):
        stamps.append(f"2026-11-20T10:15:0{second}.{tenth}Z")

    position = Position()
    seen: list[int] = []  # numbers of lines
    # Each connection breaks after so many lines of the log; the last one reads it to its end.
    for stop in [*breaks, len(stamps)]:
        position.reconnect()
        since = position.since
        last = max(stop, len(seen))
        for number, stamp in enumerate(stamps[:last]):
            # The server knows whole seconds alone.
            is_sent = since is None or stamp[:19] >= since[:19]
            if is_sent and position.is_new(stamp):
                seen.append(number)
    assert seen == list(range(len(stamps)))


def test_a_copy_of_a_log_has_each_line_once(tmp_path: Path) -> None:
    """However often it is read from its start, over how many lines of one time, and whoever else keeps it."""
    lines = [f"2026-11-20T10:15:0{n // 2}Z line {n}\r of {n}" for n in range(9)]

    def follow(kept: LogCopy, *texts: str) -> None:
        for line in texts:
            kept.write(line.partition(" ")[0], line)

    path = tmp_path / "pods" / "fit-0.log"
    follow(LogCopy(path), *lines[:4])
    with path.open("a") as file:
        file.write(lines[4][:30])  # cut off
    follow(LogCopy(path), *lines[:6])
    first = LogCopy(path)
    second = LogCopy(path)
    for line in lines:
        follow(first, line)
        follow(second, line)
    assert path.read_bytes().decode() == "".join(f"{line}\n" for line in lines)


def test_times_of_different_length_compare_right() -> None:
    position = Position()
    assert position.is_new("2026-11-20T10:15:00.119Z")
    assert position.is_new("2026-11-20T10:15:00.12Z")
    position.reconnect()
    assert position.since == "2026-11-20T10:15:00Z"
    assert [position.is_new(f"2026-11-20T10:15:00.{tail}Z") for tail in ("119", "12", "12")] == [
        False,
        False,
        True,
    ]


def pod(**status: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "trainer"}]}
    return {"metadata": {"name": "fit-0", "uid": "u", "labels": {}}, "spec": spec, "status": status}


def trainer_pod(state: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return a pod whose container of the trainer is in a state."""
    container = {"name": "trainer", "restartCount": 0, "state": state}
    return pod(containerStatuses=[container], **status)


RUNNING: dict[str, Any] = {"running": {}}
DISRUPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "by x-1",
}
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}


def end_of(exit_code: int, **facts: Any) -> dict[str, Any]:
    """Return the state of a container that has ended."""
    return {"terminated": {"exitCode": exit_code, **facts}}


def test_a_pod_that_runs_says_nothing() -> None:
    assert pods.why(trainer_pod(RUNNING, phase="Running")) == ""


def test_a_pod_that_waits_for_a_secret_says_how_to_make_it() -> None:
    waiting = {
        "waiting": {
            "reason": "CreateContainerConfigError",
            "message": 'secret "hf-token" not found',
        }
    }
    assert "kubetune secret set" in pods.why(trainer_pod(waiting, phase="Pending"))


def test_a_pod_that_was_killed_for_memory_says_so() -> None:
    killed = trainer_pod(end_of(137, reason="OOMKilled"), phase="Failed")
    assert pods.why(killed).endswith("(OOMKilled)")


def test_an_evicted_pod_says_why_with_and_without_an_exit_code() -> None:
    assert (
        pods.why(pod(phase="Failed", reason="Evicted", message="disk pressure"))
        == "Evicted: disk pressure"
    )
    dead = trainer_pod(end_of(137, reason="Error"), phase="Failed", **EVICTED)
    assert pods.why(dead) == f"exit code 137: Evicted: {EVICTED['message']}"


def test_a_pod_that_has_to_go_says_who_wants_its_place() -> None:
    running = trainer_pod(RUNNING, phase="Running", conditions=[DISRUPTED])
    assert pods.why(running) == "PreemptionByScheduler: by x-1"

    last_word = '{"code": 143, "reason": "stopped after step 4", "step": 4}'
    saved = trainer_pod(end_of(143, message=last_word), phase="Running", conditions=[DISRUPTED])
    expected = "exit code 143: stopped after step 4; PreemptionByScheduler: by x-1"
    assert pods.why(saved) == expected


def test_a_pod_without_a_state_says_its_last_warning() -> None:
    event = {"type": "Warning", "message": "Multi-Attach error"}
    assert pods.why(pod(phase="Pending"), [event]) == "Multi-Attach error"


def test_a_queued_run_waits_and_is_not_stopped() -> None:
    job = {
        "kind": "Job",
        "metadata": {"name": "fit", "labels": {"kueue.x-k8s.io/queue-name": "gpu"}},
    }
    assert pods.state_of({**job, "spec": {"suspend": True}}, [])[0] == "waiting"
    assert (
        pods.state_of({**job, "metadata": {"name": "fit"}, "spec": {"suspend": True}}, [])[0]
        == "stopped"
    )


def test_what_a_gpu_does_not_tell_is_none() -> None:
    (gpu,) = parse_gpus("Reboot required\n\n0, NVIDIA H200, 12, 100, 143771, 35, [N/A]\n")
    assert (gpu["name"], gpu["utilization_percent"], gpu["power_watts"]) == (
        "NVIDIA H200",
        12,
        None,
    )


def test_only_code_is_copied_into_pods(tmp_path: Any) -> None:
    for name in ("mine.py", "deep/other.py", ".git/config", "__pycache__/x.pyc", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    with tarfile.open(fileobj=io.BytesIO(pack_tree(tmp_path, "name: fit\n"))) as tar:
        assert sorted(tar.getnames()) == ["run.yaml", "tree/deep/other.py", "tree/mine.py"]
    (tmp_path / "weights.bin").write_bytes(bytes(65 * 1024 * 1024))
    with pytest.raises(ConfigError, match=r"weights\.bin is one too many"):
        pack_tree(tmp_path, "")


def test_secrets_that_git_was_not_told_to_ignore_stay_here(tmp_path: Any) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("mine.py", ".env", "deep/.env", ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with tarfile.open(fileobj=io.BytesIO(pack_tree(tmp_path, "name: fit\n"))) as tar:
        assert sorted(tar.getnames()) == ["run.yaml", "tree/.gitignore", "tree/mine.py"]


def test_dev_pods_have_a_name_that_fits() -> None:
    config = load_resolved(
        {"name": "a" * 40, "model": "m/m", "data": {"train": "d/d"}, "kubernetes": {"image": "i"}}
    )
    name = dev_config(config).name
    assert name == "a" * 36 + "-dev"


def test_no_verb_imports_what_training_needs() -> None:
    program = f"""
import contextlib, io, sys
import kubetune.k8s.api.client, kubetune.k8s.cluster.log_follow, kubetune.k8s.cluster.download, kubetune.plugins.dev_pods
from kubetune.cli import main
for verb in "submit status logs events exec cp gpus top stop resume delete port-forward secret dev".split():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([verb, "--help"])
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("word", ["[" * 4000, "[]", '{"reason": 3}', '{"code": 2}', "\x00", ""])
def test_whatever_a_pod_leaves_as_its_last_word_ends_no_verb(word: str) -> None:
    failed = trainer_pod(end_of(1, message=word), phase="Failed")
    assert pods.why(failed).startswith("exit code 1")


@pytest.mark.parametrize(
    "wrong", ["x", [1], {}, {"step": 1, "code": "x", "reason": 3, "eval_loss": "y"}]
)
def test_progress_that_is_none_ends_no_verb(wrong: object) -> None:
    """Pods, and whoever may change a ConfigMap, write what they like there."""
    words = "step steps loss tokens_per_second seconds_left evaluation saved_step last_exit".split()
    facts_of_pod = dict.fromkeys([*words, "exit_status", "restarts"], wrong)
    progress = trusted({**facts_of_pod, "phase": 3})
    config = load_resolved(
        {"name": "fit", "model": "m/m", "data": {"train": "d/d"}, "kubernetes": {"image": "i"}}
    )
    states: tuple[State, ...] = ("running", "stopped", "failed")
    for state in states:
        observed = ObservedRun(spec_of(config), None, [], [], state, "", progress)
        assert next(headline(observed)).startswith("fit: Job in default")
        assert exit_code(observed) in (3, 143)


@pytest.mark.parametrize("wrong", [[], "x", None, 3])
def test_progress_is_known_or_not(wrong: object) -> None:
    assert trusted(wrong) is None
    assert trusted({"step": 3, "loss": 2, "measures": {"a": 1}}) == {
        "step": 3,
        "loss": 2,
        "measures": {"a": 1},
    }


def test_what_is_no_time_has_no_age() -> None:
    assert [pods.age_seconds(stamp) for stamp in (None, "", "yesterday")] == [None] * 3
    ages = [pods.age_seconds(stamp) for stamp in ("2026-11-20T10:15:00", "2026-11-20T10:15:00Z")]
    assert ages[0] == pytest.approx(ages[1], abs=9)


TEXT = st.one_of(st.none(), st.text("ab é\x1b\n", max_size=6))
TIME = st.one_of(st.none(), st.integers(0, 59).map("2026-11-20T10:15:{:02}Z".format))
COUNT = st.one_of(st.none(), st.integers(0, 9))
EVENTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["Normal", "Warning", "Other", None]), "reason": TEXT, "message": TEXT,
            "count": COUNT, "lastTimestamp": TIME, "eventTime": TIME, "metadata": st.just({}),
            "series": st.none() | st.fixed_dictionaries({}, optional={"count": COUNT, "lastObservedTime": TIME}),
            "involvedObject": st.fixed_dictionaries({}, optional={"kind": TEXT, "name": TEXT, "uid": TEXT}),
        },
    ),
    max_size=8,
)  # fmt: skip


@settings(max_examples=30)
@given(EVENTS)
def test_every_event_is_a_line_and_every_warning_is_shown_or_counted(
    events: list[dict[str, Any]],
) -> None:
    """Of events a server promises no field but the object, and newer controllers fill others than older ones."""
    for event in events:
        line = " ".join(row(event))
        assert "\x1b" not in line
        assert all(
            visible(str(event[key])) in line
            for key in ("type", "reason", "message")
            if event.get(key)
        )
    config = {"model": "m", "data": {"train": "d"}, "name": "fit", "kubernetes": {"image": "i:1"}}
    loaded = Config.model_validate(config)
    spec = RunSpec.of(loaded, make_plan(loaded))
    observed = ObservedRun(spec, None, [], events, "waiting", "", None)
    warnings = [event for event in events if event.get("type") == "Warning"]
    shown = [*warning_lines(observed)]
    number = 0
    for line in shown:
        earlier = re.match(r"! (\d+) earlier warning", line)
        repeated = re.search(r" \((\d+) times\)$", line)
        number += int((earlier or repeated or [0, 1])[1])
    assert number == len(warnings)
    if warnings:
        last = warnings[-1]
        assert str(last.get("message") or last.get("reason") or "without a word") in shown[-1]
    assert len(facts(observed)["warnings"]) == len(warnings)


def test_the_exit_code_of_what_ends_in_a_pod_is_waited_for(tmp_path: Path) -> None:
    """Between its end and the writing of its code by the one that watches it, it is no success."""
    os.mkfifo(tmp_path / "go")
    (tmp_path / "log").write_text("refused\n")
    script = f"read _ < {tmp_path / 'go'}; echo 2 > {tmp_path / 'exit'}"
    with subprocess.Popen(["true"]) as ended, subprocess.Popen(["sh", "-c", script]) as watcher:
        ended.wait()
        (tmp_path / "pid").write_text(str(ended.pid))
        (tmp_path / "watcher").write_text(str(watcher.pid))
        command = [
            sys.executable,
            "-P",
            "-m",
            "kubetune.k8s.cluster.in_pod",
            "follow",
            str(tmp_path),
            "0",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline() == "refused\n"
            (tmp_path / "go").write_text("\n")
            assert follower.wait() == 2
    (tmp_path / "exit").unlink()
    assert dev_command.follow(tmp_path, 0) == ENVIRONMENT, "killed with what it watched"


def observed_run(state: State, *pods_of_run: dict[str, Any], **progress: Any) -> ObservedRun:
    """Return a run of two nodes with these pods."""
    config = load_resolved(
        {"name": "fit", "model": "m/m", "data": {"train": "d/d"}, "kubernetes": {"image": "i"}}
    )
    return ObservedRun(spec_of(config), None, [*pods_of_run], [], state, "", progress or None)


def ended_pod(node: int, code: int, reason: str, error: str | None) -> dict[str, Any]:
    """Return a pod that has ended and left word."""
    word = json.dumps({"code": code, "reason": reason, "error": error})
    terminated = {"exitCode": code, "message": word, "finishedAt": "2026-11-20T10:15:00Z"}
    index = {"batch.kubernetes.io/job-completion-index": str(node)}
    return {
        "metadata": {"name": f"fit-{node}-x", "labels": index, "uid": str(node)},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}],
        },
    }


def test_a_rank_that_was_killed_comes_before_those_that_lost_it() -> None:
    victim = ended_pod(0, 145, "lost another rank: Connection reset by peer", "LostPeer")
    cause = ended_pod(1, 145, "rank 1 was killed by SIGKILL", "RankDied")
    for victims in ([victim, cause], [cause, victim]):
        waiting = observed_run("waiting", *victims)
        assert next(headline(waiting)).endswith("exit code 145: rank 1 was killed by SIGKILL")
        known = find_cause(victims, [])
        assert known is not None
        assert known["pod"] == "fit-1-x"
        # What followers tell.
        assert next(iter(_lasting_reasons(victims))) == "fit-1-x"
    shown = [*headline(observed_run("failed", ended_pod(0, 6, "much " * 60, "OutOfMemoryAgain")))]
    assert shown[0].endswith(", failed")
    assert shown[1] == f"why: {'much ' * 60}"


def test_a_victim_is_not_the_reason_while_the_cause_is_not_known() -> None:
    """For seconds after a kill only the pods that lost the killed one have ended."""
    lost = "lost another rank: Connection reset by peer"
    restarting = ended_pod(0, 145, lost, "LostPeer")
    restarting["status"]["phase"] = "Running"
    for victim in (ended_pod(0, 145, lost, "LostPeer"), restarting):
        line = next(headline(observed_run("waiting", victim)))
        assert "145" not in line
        assert line.endswith("; restarting")


def test_a_long_reason_stands_there_once() -> None:
    reason = "rank 0 was killed by SIGKILL for lack of memory, after step 40; " + "allow more " * 12
    failed = observed_run("failed", ended_pod(0, 6, reason, "OutOfMemoryAgain"))
    assert "\n".join(headline(failed)).count("for lack of memory") == 1
    assert _pod_row(failed, failed.pods[0])[-1] == "exit code 6, see above"
    brief = observed_run("failed", ended_pod(0, 2, "a bad record", "DataError"))
    assert _pod_row(brief, brief.pods[0])[-1] == "exit code 2: a bad record"


def server_pod(state: dict[str, Any], ready: str) -> dict[str, Any]:
    """Return the pod of a run's page that has crashed twice."""
    crashed = {"terminated": {"exitCode": 127, "reason": "Error"}}
    container = {"name": "ui", "restartCount": 2, "state": state, "lastState": crashed}
    return {
        "metadata": {
            "name": "fit-ui-x",
            "uid": "u",
            "namespace": "ml",
            "labels": {"app.kubernetes.io/component": "ui"},
        },
        "spec": {"containers": [{"name": "ui"}]},
        "status": {
            "phase": "Running",
            "containerStatuses": [container],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def test_a_server_beside_the_run_that_crashes_is_named() -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    observed = observed_run("done")
    for state, reason in (
        (
            waiting,
            "CrashLoopBackOff: back-off 10s; exit code 127: its image has no such program",
        ),
        (RUNNING, "exit code 127: its image has no such program"),
    ):
        observed.servers[:] = [server_pod(state, "False")]
        *_, last = headline(observed)
        assert last == (
            f"! ui does not answer: fit-ui-x: {reason}; see kubectl logs -n ml fit-ui-x"
        )
        assert facts(observed)["servers"][0]["ready"] is False
    observed.servers[:] = [server_pod(RUNNING, "True")]
    assert not any("ui" in line for line in headline(observed))


@pytest.mark.parametrize(
    ("code", "meaning"),
    [(126, "its image's program may not be started"), (127, "its image has no such program")],
)
def test_a_sampler_whose_image_has_no_server_says_so(code: int, meaning: str) -> None:
    ended = trainer_pod(end_of(code, reason="Error"), phase="Failed")
    assert pods.why_server(ended) == f"exit code {code}: {meaning}"


def test_a_program_that_the_runtime_could_not_start_is_named() -> None:
    """Its log is empty: only the runtime knows."""
    words = 'exec: "vllm": executable file not found in $PATH'
    message = f"failed to create containerd task: runc create failed: unable to start: {words}"
    ended = trainer_pod(end_of(128, reason="StartError", message=message), phase="Failed")
    assert pods.why_server(ended) == f"exit code 128: StartError: {words}"


def pod_of(node: int, code: int, reason: str, *, began: int, ended: int) -> dict[str, Any]:
    """Return a pod that began and ended at these seconds."""
    pod = ended_pod(node, code, reason, None)
    pod["metadata"]["name"] = f"fit-{node}-{began}"
    (status,) = pod["status"]["containerStatuses"]
    status["state"]["terminated"] |= {"startedAt": at(began), "finishedAt": at(ended)}
    return pod


def at(second: int) -> str:
    return f"2026-11-20T10:15:{second:02}Z"


def event_of(pod: str, second: int, reason: str, message: str) -> dict[str, Any]:
    about = {"kind": "Pod", "name": pod}
    facts = {"reason": reason, "message": message, "lastTimestamp": at(second)}
    return {"metadata": {}, "involvedObject": about, **facts}


def test_the_cause_is_of_the_start_that_ended_last() -> None:
    first = pod_of(0, 137, "", began=1, ended=10)
    follower = pod_of(1, 145, "lost another rank", began=1, ended=11)
    second = pod_of(1, 137, "", began=20, ended=30)
    # Node 0 has not lost its peer yet, and then it has.
    loser = pod_of(0, 145, "lost another rank", began=20, ended=31)
    for ended in ([first, follower, second], [first, follower, second, loser]):
        cause = find_cause(ended, [])
        assert cause is not None
        assert cause["pod"] == "fit-1-20"
    # Of the second start only a pod is left that lost another.
    assert find_cause([first, pod_of(1, 145, "lost another rank", began=20, ended=31)], []) is None
    # A mistake ends the run, so no start came after it: the other pod only began late.
    late = pod_of(1, 145, "lost another rank", began=20, ended=31)
    cause = find_cause([pod_of(0, 2, "a bad record", began=1, ended=3), late], [])
    assert cause is not None
    assert cause["code"] == 2


def test_a_start_that_was_drained_did_not_end_by_what_ended_the_one_before() -> None:
    first = pod_of(0, 137, "", began=1, ended=10)
    drained = [
        event_of("fit-0-20", 20, "Started", "Started container trainer"),
        event_of("fit-0-20", 30, "Killing", "Stopping container trainer"),
    ]
    waiting = observed_run("waiting", first)
    assert next(headline(waiting)).endswith(
        "killed (SIGKILL): out of memory, or its grace period was over"
    )
    waiting.events.extend(drained)
    assert next(headline(waiting)).endswith(", waiting, 0 of 1 pods running")
    assert (find_cause([first], drained) or {})["pod"] == "fit-0-20"
    # Another pod of the same start was told to end after it.
    of_same_start = [
        event_of("fit-1-1", 1, "Started", "Started container trainer"),
        event_of("fit-1-1", 11, "Killing", "Stopping container trainer"),
    ]
    assert find_cause([first], of_same_start) is not None


def test_an_event_names_the_cause_of_the_start_that_ended_last() -> None:
    failed = "Container trainer for pod finetune/{} failed with exit code {} matching FailJob rule"
    events = [
        event_of("fit-0-1", 1, "Started", "Started container trainer"),
        event_of("fit", 10, "PodFailurePolicy", failed.format("fit-0-1", 137)),
        event_of("fit-1-20", 20, "Started", "Started container trainer"),
        event_of("fit", 30, "PodFailurePolicy", failed.format("fit-1-20", 145)),
    ]
    cause = find_cause([], events[:2])
    assert cause is not None
    assert cause["pod"] == "fit-0-1"
    assert find_cause([], events) is None


def test_a_container_beside_the_trainer_is_no_cause_of_its_end() -> None:
    """Kubelet sorts the states by name, and a service mesh may be killed once the trainer has ended."""
    killed = {"state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    pod = ended_pod(0, 2, "a bad record", "DataError")
    pod["spec"]["containers"].append({"name": "istio-proxy"})
    pod["status"]["containerStatuses"].insert(0, {"name": "istio-proxy", **killed})
    assert pods.exit_code(pod) == 2
    assert pods.why(pod) == "exit code 2: a bad record"

    done = ended_pod(0, 0, "done", None)
    done["spec"]["initContainers"] = [{"name": "istio-proxy", "restartPolicy": "Always"}]
    done["status"] |= {
        "phase": "Succeeded",
        "initContainerStatuses": [{"name": "istio-proxy", **killed}],
    }
    assert pods.exit_code(done) == 0
    assert pods.why(done) == ""
    assert pods.culprit([done]) is None


@pytest.mark.parametrize(("cause", "expected"), [(137, 137), (2, 2), (3, 3)])
def test_the_code_of_a_failed_run_is_that_of_its_cause(cause: int, expected: int) -> None:
    guilty = ended_pod(0, cause, "the cause", "Killed")
    victim = ended_pod(1, 145, "lost another rank", "LostPeer")
    failed = observed_run("failed", guilty, victim)
    assert exit_code(failed) == expected
    assert next(headline(failed)).endswith("failed, the cause")


def test_a_trial_of_a_sweep_fails_by_its_cause() -> None:
    """By the code of a node that only lost it, the trial would be started again."""
    pytest.importorskip("optuna")
    from kubetune.library.sweep.observed_trial import status_of

    victim = ended_pod(0, 145, "lost another rank", "LostPeer")
    failed = observed_run("failed", victim, ended_pod(1, 2, "a bad record", "DataError"))
    status = status_of(failed, pauses=False)
    assert status is not None
    assert (status.code, status.reason) == (2, "a bad record")


@pytest.mark.parametrize("state", ["failed", "absent"])
def test_a_run_that_the_cluster_has_ended_is_no_bug(state: State) -> None:
    """Its deadline was over, or somebody deleted it: no pod is left that tells a code."""
    assert exit_code(observed_run(state)) == ENVIRONMENT


def test_speed_and_time_left_are_those_of_the_start_that_runs() -> None:
    numbers = {"step": 5, "steps": 20, "loss": 2.5, "tokens_per_second": 9.0, "seconds_left": 60}
    (_, before) = headline(observed_run("running", starting=True, **numbers))
    assert before == "step 5/20 · loss 2.5000 · from before the restart, which is still preparing"
    (_, now) = headline(observed_run("running", starting=False, **numbers))
    assert now.startswith("step 5/20 · loss 2.5000 · 9 tokens/s · ETA ")


def test_warnings_of_the_time_before_a_pod_had_its_node_are_over() -> None:
    scheduled = {
        "type": "PodScheduled",
        "status": "True",
        "lastTransitionTime": "2026-11-20T10:15:00Z",
    }
    waiting = pod(phase="Pending", conditions=[scheduled])
    waiting["spec"]["nodeName"] = "node-0"
    facts_of = {"type": "Warning", "lastTimestamp": "2026-11-20T10:15:00Z"}
    early = {**facts_of, "reason": "FailedScheduling", "message": "unbound claims"}
    late = {**facts_of, "reason": "FailedMount", "message": "no such Secret"}
    assert pods.why(waiting, [early]) == ""
    assert pods.why(waiting, [late, early]) == "no such Secret"


def test_warnings_that_differ_by_the_name_of_a_pod_are_told_once() -> None:
    event = {"type": "Warning", "reason": "FailedCreate", "involvedObject": {"name": "fit"}}
    texts = [f'Error creating: pods "fit-0-{name}" is forbidden: quota' for name in "abc"]
    observed = observed_run("waiting")
    observed.events.extend({**event, "message": text, "metadata": {}} for text in texts)
    (line,) = warning_lines(observed)
    assert line.endswith('Error creating: pods "fit-0-c" is forbidden: quota (3 times)')


def test_rights_that_are_missing_are_granted_by_one_role() -> None:
    def right(verb: str, resource: str, group: str) -> MissingRight:
        message = f'User "ann" cannot {verb} resource "{resource}" in API group "{group}"'
        error = refusal(ApiCall(verb, KINDS["Role"], "ml", "fit"), 403, {"message": message})
        assert isinstance(error, MissingRight)
        return error

    advice = missing_rights([right("get", "jobs", "batch"), right("patch", "jobs", "batch")])
    assert advice.count("kind: Role") == 1
    assert "resources: [jobs]\n    verbs: [get, patch]" in advice
    assert "kubernetes.operators in a run file makes one" in advice
    advice = str(right("patch", "roles", "rbac.authorization.k8s.io"))
    assert "Roles are for an administrator to make" in advice
    assert "makes one with all rights" not in advice


def test_a_refusal_of_a_policy_names_no_field() -> None:
    cause = {"message": "ValidatingAdmissionPolicy 'team-label' denied request: no label team"}
    message = sentence(422, "invalid", details={"causes": [cause]})
    assert message.endswith(
        "as invalid: ValidatingAdmissionPolicy 'team-label' denied request: no label team"
    )
