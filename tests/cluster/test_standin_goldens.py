"""What `kubetune render` writes is accepted by a server, and all pods of the run are made: every golden manifest."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import yaml

from tests.cluster.harness import Cluster
from tests.golden.manifests import CASES, rendered

UNRESTRICTED = (
    "existing",
    "rdma",
    "rdma-host",
)  # they mount what the machine has, or ask for more rights
QUICK = ("job", "statefulset", "jobset", "pytorchjob", "trainjob", "existing")
ASSUMED = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": "trainer"},
}  # by the case "existing"


def nodes(case: str) -> int:
    file, *words = CASES[case]
    counts = [
        int(word.removeprefix("compute.nodes="))
        for word in words
        if word.startswith("compute.nodes=")
    ]
    return counts[0] if counts else 4 if file == "full.yaml" else 1


def jobs_of(obj: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Jobs of a JobSet or of a TrainingRuntime's JobSet."""
    spec = obj.get("spec") or {}
    jobs: list[dict[str, Any]] = spec.get("replicatedJobs") or []
    return jobs if obj["kind"] != "TrainingRuntime" else spec["template"]["spec"]["replicatedJobs"]


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_rendered_run_is_accepted_and_its_pods_are_made(cluster: Cluster, case: str) -> None:
    objects = [obj for obj in yaml.safe_load_all(rendered(case)) if obj]
    for obj in objects:
        obj["metadata"]["namespace"] = cluster.namespace
        for job in jobs_of(obj):
            job.pop("dependsOn", None)  # as if what comes before had ended: nothing here does
    if case not in UNRESTRICTED:
        label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
        cluster.request(
            "PATCH",
            f"/api/v1/namespaces/{cluster.namespace}",
            label,
            "application/merge-patch+json",
        )
    cluster.break_image(".")  # the pods are not to run: that needs the run's model and data
    cluster.apply(ASSUMED)
    apply = partial(
        cluster.kubectl, "apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects)
    )
    # The docs say to repeat it: Kueue learns of a runtime some moments after it was made.
    if any(obj["kind"] == "TrainJob" for obj in objects):
        apply(check=False)
    applied = apply()
    assert applied.stderr == ""  # where warnings go
    assert len(applied.stdout.splitlines()) == len(objects)
    cluster.wait_pods("app.kubernetes.io/component=trainer", nodes(case))
    assert [
        event["message"] for event in cluster.find("Event") if event["reason"] == "FailedCreate"
    ] == []
