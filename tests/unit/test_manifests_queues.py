"""What only Kueue and JobSet can do: nearness that is required, fewer pods refused, restarts, claims and domains."""

from __future__ import annotations

from typing import Any

import pytest

from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import KINDS, render
from kubetune.k8s.manifests.mistakes import Mistake
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import RunSpec
from standin.schemas import problems
from tests.golden.made import MINIMAL, made, planned, the

QUEUED = ("kubernetes.queue=gpu", "compute.nodes=4")
TOPOLOGY = "kueue.x-k8s.io/podset-"
NEAR = "kubernetes.scheduling.topology={required: example.com/block, slice: example.com/rack, slice_nodes: 2}"
SHARED = "kubernetes.storage.cache={size: 1Ti, access: ReadWriteMany}"


def findings(*overrides: str) -> dict[str, Mistake]:
    """Return the findings about a minimal run with changes, by key."""
    config, plan = planned(*overrides, file=MINIMAL)
    return {
        finding.key: finding for finding in lint(RunSpec.of(config, plan), render(config, plan))
    }


def topology_of(objects: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return what Kueue is told by each pod template that trains."""
    return [
        {
            key.removeprefix(TOPOLOGY): text
            for key, text in template["metadata"]["annotations"].items()
            if TOPOLOGY in key
        }
        for obj in objects
        for _, template in pod_templates(obj)
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
    ]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"pytorchjob"}))
def test_pods_are_near_each_other_or_wait(kind: str) -> None:
    objects = made(kind, *QUEUED, NEAR, file=MINIMAL)
    near = {
        "required-topology": "example.com/block",
        "slice-required-topology": "example.com/rack",
        "slice-size": "2",
    }
    assert topology_of(objects) == [near]
    assert [problem for obj in objects for problem in problems(obj)] == []


def test_nearness_may_be_preferred_and_is_not_told_to_pods_that_prepare() -> None:
    preferred = "kubernetes.scheduling.topology.preferred=example.com/rack"
    objects = made(
        "jobset", *QUEUED, preferred, "kubernetes.initialisers=[model]", SHARED, file=MINIMAL
    )
    assert topology_of(objects) == [{"preferred-topology": "example.com/rack"}]
    others = [
        t for obj in objects for _, t in pod_templates(obj) if "annotations" not in t["metadata"]
    ]
    assert len(others) == 1


def test_a_master_is_near_its_workers() -> None:
    required = "kubernetes.scheduling.topology.required=example.com/rack"
    together = {"required-topology": "example.com/rack", "group-name": "trainer"}
    assert topology_of(made("pytorchjob", *QUEUED, required, file=MINIMAL)) == [together, together]
    alone = topology_of(made("pytorchjob", "kubernetes.queue=gpu", required, file=MINIMAL))
    assert alone == [{"required-topology": "example.com/rack"}], "a group has two sets of pods"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("compute.nodes=4", NEAR), "kubernetes.scheduling.topology", "give kubernetes.queue"),
        (
            (*QUEUED, NEAR, "compute.nodes=3"),
            "kubernetes.scheduling.topology.slice_nodes",
            "2 does not divide the 3",
        ),
        (
            (*QUEUED, NEAR, "kubernetes.kind=pytorchjob"),
            "kubernetes.scheduling.topology.slice",
            "use kind jobset",
        ),
        (
            ("kubernetes.jobset.exclusive=zone",),
            "kubernetes.jobset.exclusive",
            "only kind jobset and trainjob",
        ),
        (("kubernetes.jobset.restart=trainer",), "kubernetes.jobset.restart", "and kind is job"),
        (
            ("kubernetes.kind=trainjob", "kubernetes.jobset.cache_with_run=true", SHARED),
            "kubernetes.jobset.cache_with_run",
            "only kind jobset can",
        ),
        (
            ("kubernetes.kind=jobset", "kubernetes.jobset.cache_with_run=true"),
            "kubernetes.jobset.cache_with_run",
            "access: ReadWriteMany",
        ),
        (
            (*QUEUED, 'kubernetes.annotations={kueue.x-k8s.io/job-min-parallelism: "2"}'),
            "kubernetes.annotations",
            "lets Kueue start fewer pods",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], key: str, message: str) -> None:
    finding = findings(*overrides)[key]
    assert finding.fatal
    assert message in finding.text


def test_as_many_pods_as_there_are_may_be_said_to_be_the_least() -> None:
    assert "kubernetes.annotations" not in findings(
        *QUEUED, 'kubernetes.annotations={kueue.x-k8s.io/job-min-parallelism: "4"}'
    )


def test_the_trainer_alone_starts_again() -> None:
    policy = the(made("jobset", "kubernetes.jobset.restart=trainer"), "JobSet")["spec"][
        "failurePolicy"
    ]
    actions = {rule["name"]: rule["action"] for rule in policy["rules"]}
    assert actions == {
        "final": "FailJobSet",
        "preempted": "RestartJobAndIgnoreMaxRestarts",
        "deadline": "FailJobSet",
        "failed": "RestartJob",
    }
    assert list(actions)[-1] == "failed", "it matches everything"
    runtime = the(made("trainjob", "kubernetes.jobset.restart=trainer"), "TrainingRuntime")
    assert runtime["spec"]["template"]["spec"]["failurePolicy"] == policy


def test_the_trainers_job_alone_has_a_domain_to_itself() -> None:
    objects = made("jobset", "kubernetes.jobset.exclusive=example.com/rack")
    jobset = the(objects, "JobSet")
    preparing, trainer = (job["template"] for job in jobset["spec"]["replicatedJobs"])
    expected = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "example.com/rack"}
    assert trainer["metadata"]["annotations"] == expected
    assert "metadata" not in preparing
    assert (
        "annotations" not in jobset["metadata"]
        or not expected.items() <= jobset["metadata"]["annotations"].items()
    )
    assert problems(jobset) == []


def test_a_cache_can_go_with_its_jobset() -> None:
    config, plan = planned(
        "kubernetes.kind=jobset", "kubernetes.jobset.cache_with_run=true", SHARED
    )
    objects = render(config, plan)
    spec = the(objects, "JobSet")["spec"]
    (policy,) = spec["volumeClaimPolicies"]
    assert policy["retentionPolicy"] == {"whenDeleted": "Delete"}
    (template,) = policy["templates"]
    assert (template["metadata"]["name"], template["spec"]["accessModes"]) == (
        "cache",
        ["ReadWriteMany"],
    )
    for job in spec["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert "cache" in mounts
        assert "cache" not in {volume["name"] for volume in pod["volumes"]}, (
            "JobSet adds it, and refuses two"
        )
    assert not [
        o
        for o in objects
        if o["kind"] == "PersistentVolumeClaim" and o["metadata"]["name"].endswith("cache")
    ]
    jupyter = {
        volume["name"]: volume
        for volume in the(objects, "Pod", "support-bot-jupyter")["spec"]["volumes"]
    }
    assert jupyter["cache"]["persistentVolumeClaim"]["claimName"] == "cache-support-bot"
    assert [problem for obj in objects for problem in problems(obj)] == []
    assert [
        f.text for f in lint(RunSpec.of(config, plan), objects) if f.fatal and "cache" in f.text
    ] == []


def test_operators_may_take_a_run_from_its_queue() -> None:
    rules = the(made("job"), "Role", "support-bot-operator")["rules"]
    rights = [
        (rule["resources"], rule["verbs"])
        for rule in rules
        if rule["apiGroups"] == ["kueue.x-k8s.io"]
    ]
    assert rights == [
        (["workloads"], ["get", "list", "patch"]),
        (["localqueues"], ["get", "list"]),
    ]
    without = the(
        made("job", "kubernetes.queue=null", "kubernetes.queue_priority=null"),
        "Role",
        "support-bot-operator",
    )
    assert "kueue.x-k8s.io" not in {
        group for rule in without["rules"] for group in rule["apiGroups"]
    }
