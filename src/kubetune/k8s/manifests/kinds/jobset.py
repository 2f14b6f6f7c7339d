"""JobSet (jobset.x-k8s.io/v1alpha2): restarts all pods together when one fails, and makes the headless Service.

What is fetched and prepared before training is its first Job. The trainer's begins once that has ended well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

from kubetune.k8s.manifests.initialisers import PREPROCESS, preparing_job_of_all_steps
from kubetune.k8s.manifests.kinds.failure_policy import jobset_failure_policy
from kubetune.k8s.manifests.kinds.gang_scheduling import Members, join, pod_group
from kubetune.k8s.manifests.kinds.job import indexed_job
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.mistakes import Mistake, error
from kubetune.k8s.manifests.pod_environment import COMPLETION_INDEX, RUN_NAME, rendezvous
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, kind_and_name, non_empty
from kubetune.k8s.manifests.samplers import (
    SAMPLER,
    addresses_in_jobset,
    sampler_job,
    sampler_template,
)
from kubetune.k8s.manifests.storage import cache_is_jobsets, jobsets_cache, shared_cache_spec
from kubetune.k8s.manifests.trainer import pod_template

REPLICATED_JOB = "node"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def replicated_job(
    name: str,
    job: Manifest,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Manifest:
    """Return an entry of `replicatedJobs` that is one Job, with these labels and annotations."""
    metadata = non_empty(labels=labels, annotations=annotations)
    template = {**non_empty(metadata=metadata), "spec": job}
    return {"name": name, "replicas": 1, "template": template}


def jobset_spec(
    spec: RunSpec,
    template: Manifest,
    before: list[Manifest],
    labels: dict[str, str],
    beside: Sequence[Manifest] = (),
) -> Manifest:
    """Return the spec of a JobSet: Jobs that run before, one after the other, then one pod on each node.

    `labels` are those of the trainer's Job. `beside`: Jobs that start with it; the JobSet does not wait for their end.
    """
    k = spec.kubernetes
    annotations = {}
    if k.jobset.exclusive:
        # Only on the trainer's Job: the preparing Job would hold a domain too.
        annotations[EXCLUSIVE] = k.jobset.exclusive
    job_of_ranks = indexed_job(spec, template, gang=True)
    trainer = replicated_job(REPLICATED_JOB, job_of_ranks, labels, annotations)

    # Each Job begins once the one before it is complete.
    jobs = [*before, trainer]
    for previous, job in pairwise(jobs):
        job["dependsOn"] = [{"name": previous["name"], "status": "Complete"}]
    for job in beside:
        if before:
            job["dependsOn"] = trainer["dependsOn"]
        jobs.append(job)

    # Ranks look each other up before any of them is ready, so names of pods that are not ready must resolve too.
    body: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": jobset_failure_policy(
            k.max_restarts,
            deadline=k.max_runtime_seconds is not None,
            alone=k.jobset.restart == "trainer",
        ),
        "replicatedJobs": jobs,
    }
    if beside:
        # Once the trainer has ended well, the JobSet has, and deletes the pods of its other Jobs.
        body["successPolicy"] = {"operator": "All", "targetReplicatedJobs": [REPLICATED_JOB]}

    if cache_is_jobsets(spec):
        body["volumeClaimPolicies"] = [_cache_policy(spec)]
        for job in jobs:
            # The JobSet gives a volume of the claim's name to every pod that mounts one.
            pod = job["template"]["spec"]["template"]["spec"]
            pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "cache"]
    if k.ttl_seconds is not None:
        body["ttlSecondsAfterFinished"] = k.ttl_seconds
    return body


def _cache_policy(spec: RunSpec) -> Manifest:
    """Return the entry by which the JobSet makes a cache claim, and deletes it with itself."""
    claim = {
        "metadata": {"name": "cache", "labels": spec.labels("storage")},
        "spec": shared_cache_spec(spec),
    }
    return {"templates": [claim], "retentionPolicy": {"whenDeleted": "Delete"}}


def replicated_templates(title: str, spec: Manifest) -> list[PodTemplate]:
    """Return the pod templates of a JobSet's spec."""
    templates = []
    for entry in spec["replicatedJobs"]:
        job = entry["template"]["spec"]
        pods = int(entry.get("replicas", 1) * job.get("parallelism", 1))
        templates.append(PodTemplate(f"{title} {entry['name']}", job["template"], pods))
    return templates


class JobSet(WorkloadKind):
    """A JobSet of the Job that prepares, where the run has one, and the trainer's."""

    resource = Resource("JobSet", "jobset.x-k8s.io/v1alpha2", "jobsets")
    install = (
        "install JobSet v0.12.0 or newer: kubectl apply --server-side -f "
        "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
    )
    starts_in_order = True
    jobset_keys = frozenset({"restart", "exclusive", "cache_with_run"})
    ended_well = ("Completed",)
    template_paths: ClassVar = {"JobSet": ("spec/replicatedJobs/template/spec/template",)}
    label_paths = ("spec/volumeClaimPolicies/templates/metadata/labels",)

    def render(self, spec: RunSpec) -> list[Manifest]:
        """Return PodGroup where the run needs it, and JobSet. Pod names resolve as `NAME-node-0-INDEX.NAME`."""
        master = f"{RUN_NAME}-{REPLICATED_JOB}-0-0.{RUN_NAME}"
        variables = [*rendezvous(spec, master, COMPLETION_INDEX), *addresses_in_jobset(spec)]
        template = pod_template(spec, rendezvous=variables)
        template = join(spec, template)
        members = [Members(template, spec.nodes)]

        before = []
        if spec.prepares:
            before.append(replicated_job(PREPROCESS, preparing_job_of_all_steps(spec)))
        beside = []
        samplers = spec.kubernetes.samplers
        if samplers is not None:
            server = join(spec, sampler_template(spec, samplers))
            members.append(Members(server, samplers.replicas))
            beside.append(replicated_job(SAMPLER, sampler_job(samplers, server)))
        body = jobset_spec(spec, template, before, labels={}, beside=beside)
        return [*pod_group(spec, members), self.workload(spec, body)]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the template of each of its Jobs."""
        return replicated_templates(kind_and_name(obj), obj["spec"])

    def claims(self, spec: RunSpec) -> list[str]:
        """Return the cache's, where it goes with the JobSet."""
        return [jobsets_cache(spec)] if cache_is_jobsets(spec) else []

    def completions(self, workload: Manifest) -> list[int]:
        """Return the number of indexes of each of its Jobs."""
        completions = []
        for entry in workload["spec"]["replicatedJobs"]:
            job = entry["template"]["spec"]
            completions.append(int(job.get("completions", 1)))
        return completions

    def findings(self, spec: RunSpec) -> Iterator[Mistake]:
        """Yield what a cache that goes with the run needs."""
        cache = spec.kubernetes.storage.cache
        is_shared = cache.size is not None and cache.access == "ReadWriteMany"
        if spec.kubernetes.jobset.cache_with_run and not is_shared:
            yield error(
                "kubernetes.jobset.cache_with_run",
                "is for one new claim of all pods; give storage.cache a size and access: ReadWriteMany",
            )


KIND = JobSet()
