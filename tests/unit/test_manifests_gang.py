"""Gang scheduling: what each scheduler and each operator looks for, and what lint says where nothing does it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kubetune.k8s.lint.config import lint
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import local_files, render
from kubetune.k8s.manifests.kinds.gang_scheduling import total
from kubetune.k8s.manifests.run_spec import RunSpec
from tests.golden.made import MINIMAL, made, planned, the, trainer_pods

VOLCANO = "kubernetes.scheduling={gang: volcano, queue: research}"
SECTION = "kubernetes.scheduling."


def findings(*overrides: str) -> list[tuple[str, bool, str]]:
    """Return what lint says about scheduling."""
    config, plan = planned("compute.cpu=1", *overrides, file=MINIMAL)
    files = local_files(config)
    advice = lint(RunSpec.of(config, plan, files), render(config, plan, files))
    return [
        (f.key.removeprefix(SECTION), f.fatal, f.text) for f in advice if f.key.startswith(SECTION)
    ]


def trainers(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the pod template of the trainer, of a Job, a StatefulSet or a JobSet."""
    spec = the(objects, kind)["spec"]
    if kind == "JobSet":
        spec = spec["replicatedJobs"][-1]["template"]["spec"]
    return dict(spec["template"])


@pytest.mark.parametrize(
    ("kind", "owner"), [("job", "Job"), ("statefulset", "StatefulSet"), ("jobset", "JobSet")]
)
def test_a_pod_group_holds_all_trainers_and_nothing_else(kind: str, owner: str) -> None:
    """With what all of them ask for together, and before the pods that need it."""
    everything = {"cpu": "256", "memory": "3200Gi", "nvidia.com/gpu": "32"}
    queued = "kubernetes.queue=null"

    objects = made(kind, VOLCANO, queued)
    group = the(objects, "PodGroup")
    template = trainers(objects, owner)
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"].pop("minResources") == everything
    assert group["spec"] == {"minMember": 4, "queue": "research", "priorityClassName": "training"}
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "support-bot"
    assert template["spec"]["schedulerName"] == "volcano"
    assert objects.index(group) < objects.index(the(objects, owner))
    assert (
        str(objects).count("'scheduling.k8s.io/group-name'")
        == str(objects).count("'schedulerName'")
        == 1
    )


def test_operators_make_the_group_themselves() -> None:
    bare = [
        "kubernetes.queue=null",
        "kubernetes.initialisers=[]",
        "kubernetes.preprocess=null",
        VOLCANO,
    ]
    objects = made("trainjob", *bare)
    runtime = the(objects, "TrainingRuntime")["spec"]
    assert runtime["podGroupPolicy"] == {"volcano": {}}
    # The Trainer reads the queue from the template's annotations, and never sets a scheduler.
    queue = {"annotations": {"scheduling.volcano.sh/queue-name": "research"}}
    assert runtime["template"]["metadata"] == queue
    (pod,) = trainer_pods(objects)
    assert pod["schedulerName"] == "volcano"
    assert not [obj for obj in objects if obj["kind"] == "PodGroup"]

    objects = made("pytorchjob", *bare)
    policy = the(objects, "PyTorchJob")["spec"]["runPolicy"]["schedulingPolicy"]
    assert policy.pop("minResources")["nvidia.com/gpu"] == "32"
    assert policy == {"minAvailable": 4, "queue": "research", "priorityClass": "training"}
    # The training operator sets the scheduler that it was started with, unless the pods name one.
    assert not [pod for pod in trainer_pods(objects) if "schedulerName" in pod]
    assert not [obj for obj in objects if obj["kind"] == "PodGroup"]


def test_what_is_left_out_is_decided_by_queue_and_scheduler() -> None:
    def groups(*overrides: str) -> list[str]:
        return [
            o["apiVersion"]
            for o in made("job", *overrides, file=MINIMAL)
            if o["kind"] == "PodGroup"
        ]

    assert (
        groups()
        == groups("kubernetes.queue=gpu")
        == groups("kubernetes.scheduling.gang=none")
        == []
    )
    assert groups("kubernetes.scheduler=volcano") == ["scheduling.volcano.sh/v1beta1"]
    assert groups("kubernetes.scheduler=volcano", "kubernetes.queue=gpu") == []
    # Another name of the same scheduler.
    (pod,) = trainer_pods(made("job", VOLCANO, "kubernetes.scheduler=gangs", file=MINIMAL))
    assert pod["schedulerName"] == "gangs"


@pytest.mark.parametrize(
    ("overrides", "key", "fatal", "words"),
    [
        (["compute.nodes=2"], "gang", False, "nothing starts the 2 pods together"),
        (["kubernetes.scheduling.gang=kueue"], "gang", True, "give kubernetes.queue"),
        (["kubernetes.scheduling.queue=research"], "queue", True, "Kueue's is kubernetes.queue"),
        (
            [VOLCANO, "kubernetes.kind=trainjob", "kubernetes.initialisers=[model]"],
            "gang",
            True,
            "would ever start",
        ),
        ([VOLCANO, "kubernetes.queue=gpu"], "gang", False, "while Kueue still holds its pods back"),
        ([VOLCANO, "kubernetes.kind=pytorchjob"], "gang", False, "--gang-scheduler-name=volcano"),
    ],
)
def test_lint(overrides: list[str], key: str, fatal: bool, words: str) -> None:
    (finding,) = findings(*overrides)
    assert finding[:2] == (key, fatal)
    assert words in finding[2]


@pytest.mark.parametrize(
    "answer", ["kubernetes.scheduling.gang=none", "kubernetes.queue=gpu", VOLCANO]
)
def test_several_nodes_with_an_answer_get_no_advice(answer: str) -> None:
    assert findings("compute.nodes=2", answer) == []


@pytest.mark.parametrize("kind", ["job", "jobset", "statefulset"])
def test_groups_that_can_never_be_whole_are_found(kind: str) -> None:
    """In manifests changed by hand: too few members, or members of a group that nobody makes."""
    objects = copy.deepcopy(made(kind, VOLCANO, "kubernetes.queue=null"))
    assert list(check_objects(objects)) == []
    the(objects, "PodGroup")["spec"]["minMember"] = 5
    assert [f.text for f in check_objects(objects)] == [
        "PodGroup/support-bot: waits for 5 pods, but has 4"
    ]
    the(objects, "PodGroup")["metadata"]["name"] = "other"
    texts = [f.text for f in check_objects(objects)]
    assert texts[1:] == ["PodGroup/support-bot: pods belong to it, but it is not made here"]


@pytest.mark.parametrize(
    ("name", "amounts", "expected"),
    [
        ("cpu", [("500m", 3)], "1500m"),
        ("memory", [("1.5Gi", 3)], "4.5Gi"),
        ("cpu", [("64", 4)], "256"),
        ("cpu", [("0.5", 2)], "1"),
        ("memory", [("64Gi", 2), ("16Gi", 1)], "144Gi"),
        ("memory", [("1Gi", 1), ("512Mi", 2)], str(2 << 30)),
        ("cpu", [("4", 2), ("500m", 2)], "9000m"),
    ],
)
def test_quantities_are_added_in_their_unit(
    name: str, amounts: list[tuple[str, int]], expected: str
) -> None:
    assert total(name, amounts) == expected


def test_rights_of_operators_cover_the_group() -> None:
    role = the(made("job", VOLCANO), "Role", "support-bot-operator")
    rules = {group: rule["verbs"] for rule in role["rules"] for group in rule["apiGroups"]}
    assert "delete" in rules["scheduling.volcano.sh"]
