"""Indexed Job with a headless Service: needs nothing installed in the cluster.

Each pod of an index is replaced by itself. A pod that lost a peer ends with 145, so the gang starts again together.
"""

from __future__ import annotations

from typing import ClassVar

from kubetune.k8s.manifests.environment import COMPLETION_INDEX, RUN_NAME, rendezvous
from kubetune.k8s.manifests.initialisers import init_containers
from kubetune.k8s.manifests.kinds.failure import pod_failure_policy
from kubetune.k8s.manifests.kinds.gang import join, pod_group
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.kinds.services import headless_service
from kubetune.k8s.manifests.spec import Manifest, RunSpec, kind_and_name
from kubetune.k8s.manifests.trainer import pod_template


def indexed_job(spec: RunSpec, template: Manifest, *, gang: bool) -> Manifest:
    """Return the spec of a Job with one index per node. With `gang` its owner restarts it, so it never retries."""
    k = spec.kubernetes
    if gang:
        retries = {"backoffLimit": 0}
    else:
        # A failure of the gang costs one pod of each node, which is one restart of each index. A count for the whole
        # Job would count it once for each node, and double the delay before the next start as often.
        retries = {"backoffLimitPerIndex": k.max_restarts, "maxFailedIndexes": 0}
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        **retries,
        # Never two pods of one index: both would believe to be the same rank and write the same files.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": pod_failure_policy(gang=gang),
    }
    if k.max_runtime_seconds is not None:
        job["activeDeadlineSeconds"] = k.max_runtime_seconds
    job["template"] = template
    return job


class Job(WorkloadKind):
    """A Job with one index per node."""

    resource = Resource("Job", "batch/v1", "jobs")
    template_paths: ClassVar = {"Job": ("spec/template",)}

    def render(self, spec: RunSpec) -> list[Manifest]:
        """Return Service, PodGroup where the run needs it, and Job. Pod names resolve as `NAME-INDEX.NAME`."""
        template = pod_template(
            spec,
            rendezvous=rendezvous(spec, f"{RUN_NAME}-0.{RUN_NAME}", COMPLETION_INDEX),
            subdomain=spec.name,
            init_containers=init_containers(spec),
        )
        template = join(spec, template)
        body = indexed_job(spec, template, gang=False)
        if spec.kubernetes.ttl_seconds is not None:
            body["ttlSecondsAfterFinished"] = spec.kubernetes.ttl_seconds
        return [
            headless_service(spec),
            *pod_group(spec, template),
            self.workload(spec, body),
        ]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the only template."""
        pods = int(obj["spec"].get("parallelism", 1))
        return [PodTemplate(kind_and_name(obj), obj["spec"]["template"], pods)]

    def completions(self, workload: Manifest) -> list[int]:
        """Return the number of indexes."""
        return [int(workload["spec"].get("completions", 1))]


KIND = Job()
