"""Indexed Job with a headless Service: needs nothing installed in the cluster.

Each pod of an index is replaced by itself. A pod that lost a peer ends with 145, so the gang starts again together.
"""

from __future__ import annotations

from typing import ClassVar

from kubetune.k8s.manifests.initialisers import init_containers
from kubetune.k8s.manifests.kinds.failure_policy import pod_failure_policy
from kubetune.k8s.manifests.kinds.gang_scheduling import Members, join, pod_group
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.kinds.services import rendezvous_service
from kubetune.k8s.manifests.pod_environment import COMPLETION_INDEX, RUN_NAME, rendezvous
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, kind_and_name
from kubetune.k8s.manifests.samplers import (
    GROUP,
    addresses_beside_job,
    sampler_template,
    samplers_beside_job,
    samplers_name,
)
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
        """Return Service, PodGroup where the run needs it, and Job. Pod names resolve as `NAME-INDEX.NAME`.

        Servers that draw answers come before it, with a Service and a Job of their own.
        """
        variables = rendezvous(spec, f"{RUN_NAME}-0.{RUN_NAME}", COMPLETION_INDEX)
        template = pod_template(
            spec,
            rendezvous=[*variables, *addresses_beside_job(spec)],
            subdomain=spec.name,
            init_containers=init_containers(spec),
        )
        template = join(spec, template)
        members = [Members(template, spec.nodes)]

        servers = []
        samplers = spec.kubernetes.samplers
        if samplers is not None:
            template["metadata"]["annotations"][GROUP] = samplers_name(spec.name)
            server = join(spec, sampler_template(spec, samplers))
            members.append(Members(server, samplers.replicas))
            servers = samplers_beside_job(spec, samplers, server)

        body = indexed_job(spec, template, gang=False)
        if spec.kubernetes.ttl_seconds is not None:
            body["ttlSecondsAfterFinished"] = spec.kubernetes.ttl_seconds
        return [
            rendezvous_service(spec),
            *pod_group(spec, members),
            *servers,
            self.workload(spec, body),
        ]

    def beside(self, spec: RunSpec) -> list[str]:
        """Return the Job of the servers that draw answers, where the run has some."""
        if spec.kubernetes.samplers is None:
            return []
        return [samplers_name(spec.name)]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the only template."""
        pods = int(obj["spec"].get("parallelism", 1))
        return [PodTemplate(kind_and_name(obj), obj["spec"]["template"], pods)]

    def completions(self, workload: Manifest) -> list[int]:
        """Return the number of indexes."""
        return [int(workload["spec"].get("completions", 1))]


KIND = Job()
