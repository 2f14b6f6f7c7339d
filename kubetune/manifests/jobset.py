"""JobSet (jobset.x-k8s.io/v1alpha2): restarts all pods together when one fails, and makes the headless Service."""

from __future__ import annotations

from kubetune.manifests.environment import COMPLETION_INDEX, rendezvous
from kubetune.manifests.failure import jobset_failure_policy
from kubetune.manifests.job import indexed_job
from kubetune.manifests.spec import TRAINER, Manifest, RunSpec
from kubetune.manifests.trainer import pod_template

REPLICATED_JOB = "node"


def jobset_spec(spec: RunSpec, template: Manifest, *, job_labels: dict[str, str] | None = None) -> Manifest:
    """The spec of a JobSet of one Job with one pod per node; a TrainingRuntime holds the same."""
    k = spec.kubernetes
    job_template: Manifest = {"spec": indexed_job(spec, template, gang=True)}
    if job_labels:
        job_template = {"metadata": {"labels": job_labels}, **job_template}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": jobset_failure_policy(k.max_restarts, deadline=k.max_runtime_seconds is not None),
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": job_template}],
    }


def workload(spec: RunSpec) -> list[Manifest]:
    """The JobSet. Pod names resolve as `NAME-node-0-INDEX.NAME`."""
    variables = rendezvous(spec, f"{spec.name}-{REPLICATED_JOB}-0-0.{spec.name}", COMPLETION_INDEX)
    body = jobset_spec(spec, pod_template(spec, rendezvous=variables))
    if spec.kubernetes.ttl_seconds is not None:
        body["ttlSecondsAfterFinished"] = spec.kubernetes.ttl_seconds
    labels = spec.queue_labels()
    return [spec.manifest("jobset.x-k8s.io/v1alpha2", "JobSet", spec.name, TRAINER, more_labels=labels, spec=body)]
