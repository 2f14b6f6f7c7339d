"""jobset.x-k8s.io/v1alpha2 JobSet with BlockingRecreate restarts: all old Jobs and pods go before new ones come."""

from __future__ import annotations

import copy
import hashlib
import re

from standin.api.webhooks import jobset_claim
from standin.controllers.context import Context
from standin.state.objects import (
    Object,
    condition,
    find_condition,
    labels_of,
    name_of,
    namespace_of,
    set_condition,
    terminating,
    uid_of,
)

_PREFIX = "jobset.sigs.k8s.io/"
_ATTEMPT = _PREFIX + "restart-attempt"
_REPLICATED_JOB = _PREFIX + "replicatedjob-name"


def reconcile(context: Context) -> None:
    """Bring all JobSets forward."""
    for jobset in context.store.list("JobSet"):
        if not terminating(jobset):
            _reconcile_jobset(context, jobset)


def _reconcile_jobset(context: Context, jobset: Object) -> None:
    status = jobset.setdefault("status", {})
    status.setdefault("restarts", 0)
    status.setdefault("restartsCountTowardsMax", 0)
    _create_service(context, jobset)
    if not _ended(jobset):
        _create_claims(context, jobset)
        _bring_forward(context, jobset)
        _report_suspension(jobset)
    _report_jobs(jobset, context.owned(jobset, "Job"))
    context.store.touch(jobset)
    ttl_seconds = jobset["spec"].get("ttlSecondsAfterFinished")
    context.delete_after(jobset, ttl_seconds, _ended(jobset))


def _bring_forward(context: Context, jobset: Object) -> None:
    """Delete the Jobs of earlier starts; once they are gone, create those of this one, or see how they ended."""
    jobs = context.owned(jobset, "Job")
    current = []
    for job in jobs:
        if int(labels_of(job)[_ATTEMPT]) == jobset["status"]["restarts"]:
            current.append(job)
        elif not terminating(job):
            # It is there until its pods have gone.
            context.store.delete(job, propagation="Foreground")
    for job in current:
        if condition(job, "Failed"):
            _apply_failure_policy(context, jobset, job)
            return
    if len(jobs) == len(current):
        _create_jobs(context, jobset, current)
        _finish(context, jobset, current)


def _ended(jobset: Object) -> Object | None:
    """Return the condition that ended a JobSet, None while it goes on."""
    return condition(jobset, "Completed") or condition(jobset, "Failed")


def _subdomain(jobset: Object) -> str:
    return str((jobset["spec"].get("network") or {}).get("subdomain", name_of(jobset)))


def _create_service(context: Context, jobset: Object) -> None:
    """Create the headless Service by which pods know each other's names, unless it exists or is not wanted."""
    network = jobset["spec"].get("network") or {}
    name = _subdomain(jobset)
    if not network.get("enableDNSHostnames", True):
        return
    if context.store.get("Service", namespace_of(jobset), name):
        return
    spec = {
        "clusterIP": "None",
        "selector": {_PREFIX + "jobset-name": name_of(jobset)},
        "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
    }
    context.create(jobset, "Service", {"name": name}, spec)


def _templates_of_claims(jobset: Object) -> list[tuple[Object, bool]]:
    """Return the templates of claims, and whether those go with the JobSet."""
    templates = []
    for policy in jobset["spec"].get("volumeClaimPolicies", []):
        retention = (policy.get("retentionPolicy") or {}).get("whenDeleted", "Delete")
        for template in policy["templates"]:
            templates.append((template, retention == "Delete"))
    return templates


def _create_claims(context: Context, jobset: Object) -> None:
    """Create the claims that are missing."""
    for template, goes in _templates_of_claims(jobset):
        name = jobset_claim(jobset, template)
        if context.store.get("PersistentVolumeClaim", namespace_of(jobset), name):
            continue
        labels = {**labels_of(template), _PREFIX + "jobset-name": name_of(jobset)}
        metadata: Object = {"name": name, "labels": labels}
        if not goes:
            metadata["ownerReferences"] = []
        context.create(jobset, "PersistentVolumeClaim", metadata, template["spec"])


def _add_volumes(jobset: Object, pod: Object) -> None:
    """Give pods a volume of each claim that one of their containers mounts."""
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    mounted = {mount["name"] for one in containers for mount in one.get("volumeMounts", [])}
    for template, _ in _templates_of_claims(jobset):
        if name_of(template) in mounted:
            source = {"claimName": jobset_claim(jobset, template)}
            volume = {"name": name_of(template), "persistentVolumeClaim": source}
            pod.setdefault("volumes", []).append(volume)


def _create_jobs(context: Context, jobset: Object, current: list[Object]) -> None:
    """Create the Jobs that are missing and may begin; suspend or resume the others as the JobSet is."""
    suspend = jobset["spec"].get("suspend", False)
    existing = {name_of(job): job for job in current}
    for replicated in jobset["spec"]["replicatedJobs"]:
        if not _may_begin(replicated, current):
            continue
        for index in range(replicated.get("replicas", 1)):
            job = existing.get(_job_name(jobset, replicated, index))
            if job is None:
                _create_job(context, jobset, replicated, index)
            elif job["spec"].get("suspend", False) != suspend:
                job["spec"]["suspend"] = suspend
                context.store.touch(job)


def _job_name(jobset: Object, replicated: Object, index: int) -> str:
    return f"{name_of(jobset)}-{replicated['name']}-{index}"


def _may_begin(replicated: Object, current: list[Object]) -> bool:
    """True if all that it depends on has completed, or is ready where that is enough."""
    for wanted in replicated.get("dependsOn", []):
        before = [job for job in current if labels_of(job)[_REPLICATED_JOB] == wanted["name"]]
        test = _is_ready if wanted["status"] == "Ready" else _is_complete
        if not before or not all(map(test, before)):
            return False
    return True


def _is_complete(job: Object) -> bool:
    return condition(job, "Complete") is not None


def _has_failed(job: Object) -> bool:
    return condition(job, "Failed") is not None


def _is_ready(job: Object) -> bool:
    status = job.get("status", {})
    pods = status.get("ready", 0) + status.get("succeeded", 0)
    return bool(pods >= job["spec"].get("parallelism", 1))


def _is_active(job: Object) -> bool:
    return bool(job.get("status", {}).get("active", 0) > 0)


def _create_job(context: Context, jobset: Object, replicated: Object, index: int) -> None:
    """Create a Job of a replicated job."""
    name = _job_name(jobset, replicated, index)
    # By these the JobSet, its Service and programs in the pods know which is which.
    facts = {
        "jobset-name": name_of(jobset),
        "jobset-uid": uid_of(jobset),
        "replicatedjob-name": replicated["name"],
        "replicatedjob-replicas": replicated.get("replicas", 1),
        "job-index": index,
        "job-key": hashlib.sha1(f"{namespace_of(jobset)}/{name}".encode()).hexdigest(),
        "restart-attempt": jobset["status"]["restarts"],
    }
    labels = {_PREFIX + key: str(value) for key, value in facts.items()}
    template = copy.deepcopy(replicated["template"])
    spec = template["spec"]
    spec.setdefault("completionMode", "Indexed")
    spec.setdefault("completions", spec.get("parallelism", 1))
    spec["suspend"] = jobset["spec"].get("suspend", False)
    spec["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    spec["template"]["spec"]["subdomain"] = _subdomain(jobset)
    _add_volumes(jobset, spec["template"]["spec"])
    # Both the Job and its pods get these, as labels and as annotations.
    pod_metadata = spec["template"].setdefault("metadata", {})
    job_metadata: Object = {"name": name}
    for field in ("labels", "annotations"):
        pod_metadata[field] = {**pod_metadata.get(field, {}), **labels}
        job_metadata[field] = {**template.get("metadata", {}).get(field, {}), **labels}
    context.create(jobset, "Job", job_metadata, spec)


def _finish(context: Context, jobset: Object, current: list[Object]) -> None:
    """Say Completed when all Jobs have, or those that `successPolicy` names; then delete the others."""
    policy = jobset["spec"].get("successPolicy") or {}
    names = policy.get("targetReplicatedJobs") or []
    wanted = 0
    for replicated in jobset["spec"]["replicatedJobs"]:
        if not names or replicated["name"] in names:
            wanted += replicated.get("replicas", 1)
    counted = [job for job in current if not names or labels_of(job)[_REPLICATED_JOB] in names]
    if len(counted) == wanted and all(map(_is_complete, counted)):
        for job in current:
            if not _is_complete(job) and not terminating(job):
                context.store.delete(job)
        message = "jobset completed successfully"
        set_condition(jobset["status"], "Completed", "True", "AllJobsCompleted", message)
        jobset["status"]["terminalState"] = "Completed"


def _report_suspension(jobset: Object) -> None:
    if jobset["spec"].get("suspend"):
        set_condition(jobset["status"], "Suspended", "True", "SuspendedJobs", "jobset is suspended")
    elif find_condition(jobset, "Suspended"):
        set_condition(jobset["status"], "Suspended", "False", "ResumeJobs", "jobset is resumed")


def _apply_failure_policy(context: Context, jobset: Object, job: Object) -> None:
    """Begin anew, or fail, as the policy says of a Job that has failed."""
    status = jobset["status"]
    policy = jobset["spec"].get("failurePolicy")
    rule = _matching_rule(policy or {}, job)
    if rule:
        action = rule["action"]
    else:
        action = "RestartJobSet" if policy else "FailJobSet"
    first = f"(first failed job: {name_of(job)})"
    most = (policy or {}).get("maxRestarts", 0)
    # Restarts of another action are not counted.
    is_exhausted = action == "RestartJobSet" and status["restartsCountTowardsMax"] >= most
    if action != "FailJobSet" and not is_exhausted:
        status["restarts"] += 1
        status["restartsCountTowardsMax"] += action == "RestartJobSet"
        message = f"applying {action} failure policy action {first}"
        context.store.event(jobset, "Warning", f"{action}FailurePolicyAction", message)
        return
    if is_exhausted:
        reason = "ReachedMaxRestarts"
        message = f"jobset failed due to reaching max number of restarts {first}"
    elif rule:
        reason = "FailJobSetFailurePolicyAction"
        message = f"applying FailJobSet failure policy action {first}"
    else:
        reason = "FailedJobs"
        message = f"jobset failed due to one or more job failures {first}"
    set_condition(status, "Failed", "True", reason, message)
    status["terminalState"] = "Failed"
    for other in context.owned(jobset, "Job"):
        if other is not job and not terminating(other):
            context.store.delete(other)
    context.store.event(jobset, "Warning", reason, message)


def _matching_rule(policy: Object, job: Object) -> Object | None:
    """Return the first rule that fits a failed Job."""
    for rule in policy.get("rules", []):
        if _fits(rule, job):
            match: Object = rule
            return match
    return None


def _fits(rule: Object, job: Object) -> bool:
    """True if a rule fits a failed Job; an empty list in a rule means any."""
    failed = condition(job, "Failed") or {}
    reasons = rule.get("onJobFailureReasons")
    if reasons and failed["reason"] not in reasons:
        return False
    patterns = rule.get("onJobFailureMessagePatterns")
    return not patterns or any(re.search(pattern, failed["message"]) for pattern in patterns)


def _report_jobs(jobset: Object, jobs: list[Object]) -> None:
    """Write down how many Jobs of each replicated job are in which state."""
    entries = []
    for replicated in jobset["spec"]["replicatedJobs"]:
        name = replicated["name"]
        of_name = [job for job in jobs if labels_of(job)[_REPLICATED_JOB] == name]
        entries.append(
            {
                "name": name,
                "ready": sum(map(_is_ready, of_name)),
                "succeeded": sum(map(_is_complete, of_name)),
                "failed": sum(map(_has_failed, of_name)),
                "active": sum(map(_is_active, of_name)),
                "suspended": sum(bool(job["spec"].get("suspend")) for job in of_name),
            }
        )
    jobset["status"]["replicatedJobsStatus"] = entries
