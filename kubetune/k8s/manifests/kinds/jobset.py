"""JobSet (jobset.x-k8s.io/v1alpha2): restarts all pods together when one fails, and makes the headless Service.

What is fetched and prepared before training is its first Job; the trainer's begins once that has ended well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kubetune.k8s.lint.finding import Finding, error
from kubetune.k8s.manifests.environment import COMPLETION_INDEX, RUN_NAME, rendezvous
from kubetune.k8s.manifests.initialisers import PREPROCESS, one_after_the_other
from kubetune.k8s.manifests.kinds.failure import jobset_failure_policy
from kubetune.k8s.manifests.kinds.gang import join, pod_group
from kubetune.k8s.manifests.kinds.job import indexed_job
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, given, kind_and_name
from kubetune.k8s.manifests.storage import cache_is_jobsets, shared_cache_spec
from kubetune.k8s.manifests.trainer import pod_template

REPLICATED_JOB = "node"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def one_job(
    name: str,
    job: Manifest,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Manifest:
    """An entry of `replicatedJobs`: one Job, with these labels and annotations."""
    metadata = given(labels=labels, annotations=annotations)
    return {"name": name, "replicas": 1, "template": {**given(metadata=metadata), "spec": job}}


def in_order(jobs: list[Manifest]) -> list[Manifest]:
    """Each entry begins once the one before it has ended well."""
    first, *others = jobs
    pairs = zip(jobs, others, strict=False)
    return [
        first,
        *(
            {**job, "dependsOn": [{"name": before["name"], "status": "Complete"}]}
            for before, job in pairs
        ),
    ]


def jobset_spec(
    spec: RunSpec, template: Manifest, before: list[Manifest], labels: dict[str, str]
) -> Manifest:
    """The spec of a JobSet whose last Job has one pod per node; a TrainingRuntime holds the same.

    `before` are the entries that come before it, `labels` those of the trainer's Job.
    """
    k = spec.kubernetes
    # The preparing Job would hold a domain of its own.
    alone = {EXCLUSIVE: k.jobset.exclusive} if k.jobset.exclusive else {}
    job = indexed_job(spec, template, gang=True)
    policy = jobset_failure_policy(
        k.max_restarts,
        deadline=k.max_runtime_seconds is not None,
        alone=k.jobset.restart == "trainer",
    )
    trainer = one_job(REPLICATED_JOB, job, labels, alone)
    body: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": policy,
        "replicatedJobs": in_order([*before, trainer]),
    }
    if cache_is_jobsets(spec):
        claim = {
            "metadata": {"name": "cache", "labels": spec.labels("storage")},
            "spec": shared_cache_spec(spec),
        }
        body["volumeClaimPolicies"] = [
            {"templates": [claim], "retentionPolicy": {"whenDeleted": "Delete"}}
        ]
        for job in body[
            "replicatedJobs"
        ]:  # which gives the volume of that name to the pods that mount it
            pod = job["template"]["spec"]["template"]["spec"]
            pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "cache"]
    return body if k.ttl_seconds is None else {**body, "ttlSecondsAfterFinished": k.ttl_seconds}


def replicated_templates(title: str, spec: Manifest) -> list[PodTemplate]:
    """Return the pod templates of a JobSet's spec."""
    templates = []
    for entry in spec["replicatedJobs"]:
        job = entry["template"]["spec"]
        pods = int(entry.get("replicas", 1) * job.get("parallelism", 1))
        templates.append(PodTemplate(f"{title} {entry['name']}", job["template"], pods))
    return templates


class JobSet(WorkloadKind):
    """A JobSet of the Job that prepares, where there is one, and the trainer's."""

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
        """Return PodGroup where there is one, and JobSet. Pod names resolve as `NAME-node-0-INDEX.NAME`."""
        variables = rendezvous(
            spec, f"{RUN_NAME}-{REPLICATED_JOB}-0-0.{RUN_NAME}", COMPLETION_INDEX
        )
        before = [one_job(PREPROCESS, one_after_the_other(spec))] if spec.prepares else []
        template = join(spec, pod_template(spec, rendezvous=variables))
        body = jobset_spec(spec, template, before, {})
        labels = spec.queue_labels()
        jobset = spec.manifest(
            self.resource.api_version, self.name, spec.name, TRAINER, more_labels=labels, spec=body
        )
        return [*pod_group(spec, template), jobset]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the template of each of its Jobs."""
        return replicated_templates(kind_and_name(obj), obj["spec"])

    def completions(self, workload: Manifest) -> list[int]:
        """Return the number of indexes of each of its Jobs."""
        jobs = [entry["template"]["spec"] for entry in workload["spec"]["replicatedJobs"]]
        return [int(job.get("completions", 1)) for job in jobs]

    def findings(self, spec: RunSpec) -> Iterator[Finding]:
        """Yield what a cache that goes with the run needs."""
        cache = spec.kubernetes.storage.cache
        is_shared = cache.size is not None and cache.access == "ReadWriteMany"
        if spec.kubernetes.jobset.cache_with_run and not is_shared:
            yield error(
                "kubernetes.jobset.cache_with_run",
                "is for one new claim of all pods; give storage.cache a size and access: ReadWriteMany",
            )


KIND = JobSet()
