"""Pods with vLLM beside the trainer's: in one JobSet, or as a second Job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.k8s.lint.config import lint
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.k8s.manifests.smoke_manifests import smoke_config
from kubetune.plan.plan import make_plan
from kubetune.plugins.dev_pods import dev_config
from kubetune.rundir.exit_status import ExitStatus, clear_exit_statuses, write_exit_status
from standin.schemas import NEWEST, OLDEST, problems
from tests.golden.made import the, variables


def config_of(**changes: Any) -> Config:
    kubernetes = {
        "kind": "jobset",
        "image": "registry.example.com/kubetune:1",
        "namespace": "ml",
        "samplers": {"replicas": 2, "gpus": 4},
        **changes.pop("kubernetes", {}),
    }
    section: dict[str, Any] = {
        "name": "sums",
        "task": "grpo",
        "model": {"path": "org/model", "revision": "main", "dtype": "bfloat16"},
        "data": {"train": "org/prompts", "max_length": 512},
        "lora": {"r": 24},
        "rewards": ["exact_match"],
        "grpo": {"servers": {"lag": 1}, "max_completion_length": 256, "temperature": 0.8},
        "compute": {"nodes": 2, "gpus_per_node": 1, "cpu": 8, "memory": "64Gi"},
        "kubernetes": kubernetes,
        **changes,
    }
    return Config.model_validate(section)


def objects_of(**changes: Any) -> list[dict[str, Any]]:
    config = config_of(**changes)
    return render(config, make_plan(config))


def jobs_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    jobset = the(objects, "JobSet", "sums")
    return {entry["name"]: entry for entry in jobset["spec"]["replicatedJobs"]}


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


BESIDE_JOB = {"kind": "job"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_strict_servers_and_lint_accept_it(kind: str, version: str) -> None:
    for scheduling in ({}, {"gang": "volcano"}):
        objects = objects_of(kubernetes={"kind": kind, "scheduling": scheduling})
        for obj in objects:
            assert not problems(obj, version)
        assert not list(check_objects(objects))


def test_servers_take_what_the_run_sends_them() -> None:
    job = jobs_of(objects_of())["sampler"]
    assert job["template"]["spec"]["completions"] == 2
    (server,) = pod_of(job)["containers"]
    assert server["args"][:3] == ["vllm", "serve", "org/model"]
    assert server["command"][-1] == "/outputs/sums/exit.json"
    for word in (
        "--enable-lora", "--max-lora-rank=32", "--max-loras=2", "--max-model-len=768", "--revision=main",
        "--dtype=bfloat16", "--tensor-parallel-size=4", "--logprobs-mode=processed_logprobs",
    ):  # fmt: skip
        assert word in server["args"]
    assert variables(server)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "4"
    plain = jobs_of(objects_of(grpo={"servers": {}}))["sampler"]
    assert not any("logprobs-mode" in word for word in pod_of(plain)["containers"][0]["args"])


def test_the_trainer_knows_their_addresses_by_the_name_of_the_run() -> None:
    objects = objects_of()
    (trainer,) = pod_of(jobs_of(objects)["node"])["containers"]
    names = [entry["name"] for entry in trainer["env"]]
    # Kubernetes fills in variables that come before.
    assert names.index("KUBETUNE_RUN") < names.index("KUBETUNE_SAMPLERS")
    run = "$(KUBETUNE_RUN)"
    assert variables(trainer)["KUBETUNE_SAMPLERS"].split() == [
        f"http://{run}-sampler-0-0.{run}:8000",
        f"http://{run}-sampler-0-1.{run}:8000",
    ]


def test_both_groups_see_the_adapters_at_one_path() -> None:
    objects = objects_of()
    jobs = jobs_of(objects)
    claims = []
    for name in ("node", "sampler"):
        pod = pod_of(jobs[name])
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "outputs")
        assert mount["mountPath"] == "/outputs"
        claims += [volume for volume in pod["volumes"] if volume["name"] == "outputs"]
    assert claims[0] == claims[1]
    claim = the(objects, "PersistentVolumeClaim", "sums-outputs")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_run_ends_when_the_trainer_does() -> None:
    spec = the(objects_of(), "JobSet", "sums")["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    jobs = jobs_of(objects_of(kubernetes={"initialisers": ["model"]}))
    assert list(jobs) == ["preprocess", "node", "sampler"]
    # Neither holds a GPU while the model is fetched, and the trainer does not wait for the servers to end.
    for name in ("node", "sampler"):
        assert [before["name"] for before in jobs[name]["dependsOn"]] == ["preprocess"]
    without = objects_of(kubernetes={"samplers": None}, grpo={"servers": "http://10.0.0.7:8000"})
    assert "successPolicy" not in the(without, "JobSet", "sums")["spec"]
    assert "sampler" not in jobs_of(without)


def test_beside_a_job_servers_are_a_job_with_a_service() -> None:
    objects = objects_of(kubernetes={**BESIDE_JOB, "max_runtime_seconds": 3600})
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in objects[-4:]]
    assert names == [
        ("Service", "sums"),
        ("Service", "sums-sampler"),
        ("Job", "sums-sampler"),
        ("Job", "sums"),
    ]
    servers = the(objects, "Job", "sums-sampler")["spec"]
    assert (servers["completions"], servers["activeDeadlineSeconds"]) == (2, 3600)
    assert servers["template"]["spec"]["subdomain"] == "sums-sampler"
    # Each pod has an address, however it is named by an overlay of kustomize.
    template = the(objects, "Job", "sums")["spec"]["template"]
    assert template["metadata"]["annotations"]["kubetune/samplers"] == "sums-sampler"
    trainer = variables(template["spec"]["containers"][0])
    group = "$(KUBETUNE_SAMPLER_GROUP)"
    assert trainer["KUBETUNE_SAMPLERS"].split() == [
        f"http://{group}-0.{group}:8000",
        f"http://{group}-1.{group}:8000",
    ]
    path = trainer["KUBETUNE_SAMPLER_GROUP"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['kubetune/samplers']"


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_the_group_of_volcano_counts_both(kind: str) -> None:
    kubernetes = {"kind": kind, "scheduling": {"gang": "volcano"}}
    objects = objects_of(kubernetes=kubernetes)
    group = the(objects, "PodGroup", "sums")["spec"]
    assert group["minMember"] == 4
    # 2 × 64Gi to train and 2 × 64Gi to draw; 2 × 1 GPU and 2 × 4.
    assert group["minResources"] == {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "10"}
    for obj in objects:
        for _, template in pod_templates(obj):
            assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "sums"
            assert template["spec"]["schedulerName"] == "volcano"


def test_a_group_that_nobody_starts_together_is_told() -> None:
    config = config_of(kubernetes=BESIDE_JOB)
    plan = make_plan(config)
    texts = [finding.text for finding in lint(RunSpec.of(config, plan), render(config, plan))]
    assert any("nothing starts the 4 pods together" in text for text in texts)


def test_smoke_tests_and_pods_to_work_in_have_no_servers() -> None:
    config = smoke_config(config_of(kubernetes=BESIDE_JOB))
    assert config.grpo.servers is None
    names = {obj["metadata"]["name"] for obj in render(config, make_plan(config))}
    assert "sums-smoke" in names
    assert "sums-smoke-sampler" not in names
    with pytest.raises(ConfigError, match=re.escape("kubernetes.samplers: the pods of `dev`")):
        dev_config(config_of(kubernetes=BESIDE_JOB))


@contextmanager
def serving(tmp_path: Path, server: str) -> Iterator[subprocess.Popen[str]]:
    """Run the script around a server as a pod has it, with this folder for /tmp."""
    container = the(objects_of(kubernetes=BESIDE_JOB), "Job", "sums-sampler")["spec"]["template"]
    (sh, option, script, _) = container["spec"]["containers"][0]["command"]
    script = script.replace("/tmp/", f"{tmp_path}/").replace("sleep 2", "sleep 0.02")
    script = script.replace("-lt 3600", "-lt 6")
    command = [sh, option, script, str(tmp_path / "exit.json"), "sh", "-c", server]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        # With the server, which is the child of a shell.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_served(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    assert server.stdout.readline() == "serves\n"


SERVES = "trap 'exit 0' TERM; echo serves; while :; do sleep 0.01; done"


def test_a_server_that_is_told_to_stop_or_ends_is_none_that_has_done_its_work(
    tmp_path: Path,
) -> None:
    """vLLM itself ends with 0 then, and Kubernetes would not start it again."""
    with serving(tmp_path, SERVES) as server:
        wait_served(server)
        server.terminate()
        assert server.wait(20) == 143
    for code, expected in ((0, 1), (1, 1), (7, 7)):
        with serving(tmp_path, f"exit {code}") as ended:
            output, _ = ended.communicate(timeout=20)
            assert (ended.returncode, output) == (expected, "")


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        (None, ExitStatus(0, "done"), True),
        (None, ExitStatus(4, "diverged"), True),
        (ExitStatus(4, "diverged"), ExitStatus(5, "gate"), True),
        # It may begin again, but has not within the time that is set.
        (None, ExitStatus(3, "disk"), True),
        (ExitStatus(4, "diverged"), None, True),
        (None, ExitStatus(143, "preempted"), False),
        (ExitStatus(145, "lost a node"), None, False),
        (None, None, False),
    ],
)
def test_a_server_ends_with_its_run(
    tmp_path: Path, before: ExitStatus | None, after: ExitStatus | None, ends: bool
) -> None:
    if before is not None:
        write_exit_status(tmp_path, before)
    with serving(tmp_path, SERVES) as server:
        wait_served(server)
        if after is not None:
            clear_exit_statuses(tmp_path)
            write_exit_status(tmp_path, after)
        if ends:
            assert server.wait(20) == 0
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(0.5)
            server.terminate()
            assert server.wait(20) == 143


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kubernetes": {"kind": "statefulset"}}, "expected jobset or job"),
        ({"kubernetes": {"kind": "trainjob"}}, "expected jobset or job"),
        ({"kubernetes": {"kind": "pytorchjob"}}, "expected jobset or job"),
        ({"kubernetes": {"kind": "job", "queue": "gpu"}}, "Expected kind jobset, of which Kueue"),
        ({"grpo": {}}, "grpo.servers: {}"),
        ({"task": "causal_lm", "rewards": [], "grpo": {}}, "kubernetes.samplers: draw for"),
        ({"grpo": {"servers": "http://10.0.0.7:8000"}}, "leave one of both out"),
        ({"kubernetes": {"samplers": None}}, "grpo.servers.urls: missing"),
    ],
)
def test_pods_that_nobody_would_ask_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        config_of(**changes)


DISTILLING: dict[str, Any] = {
    "task": "distill",
    "rewards": [],
    "grpo": {},
    "distill": {"teacher": "org/large", "revision": "v2", "support": "student_k", "top_k": 32, "max_completion_length": 256},
}  # fmt: skip


def test_servers_have_the_teacher_that_the_run_asks() -> None:
    objects = objects_of(**DISTILLING)
    job = jobs_of(objects)["sampler"]
    (server,) = pod_of(job)["containers"]
    assert server["args"][:3] == ["vllm", "serve", "org/large"]
    assert set(server["args"][5:]) == {
        "--max-logprobs=32", "--enable-scale-out", "--max-model-len=769", "--revision=v2", "--tensor-parallel-size=4"
    }  # fmt: skip
    assert variables(server)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in variables(server)
    (trainer,) = pod_of(jobs_of(objects)["node"])["containers"]
    assert len(variables(trainer)["KUBETUNE_SAMPLERS"].split()) == 2
    for obj in objects:
        assert not problems(obj, NEWEST)
    own_prompt = {**DISTILLING["distill"], "support": "teacher_k", "teacher_prompt": "{prompt}!"}
    (server,) = pod_of(jobs_of(objects_of(**{**DISTILLING, "distill": own_prompt}))["sampler"])[
        "containers"
    ]
    assert not [word for word in server["args"] if word.startswith(("--enable", "--max-model"))]


@pytest.mark.parametrize("teacher", ["self", "http://10.0.0.7:8000"])
def test_pods_have_a_teacher_that_is_named(teacher: str) -> None:
    distill = {"teacher": teacher, "support": "teacher_k", "teacher_prompt": "{prompt}!"}
    with pytest.raises(ValidationError, match="serve the model that"):
        config_of(**{**DISTILLING, "distill": distill})
