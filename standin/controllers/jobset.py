"""jobset.x-k8s.io/v1alpha2 JobSet with BlockingRecreate restarts: all old Jobs and pods go before new ones come."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable

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
_ATTEMPT, _REPLICATED_JOB = _PREFIX + "restart-attempt", _PREFIX + "replicatedjob-name"


def reconcile(context: Context) -> None:
    for jobset in context.store.list("JobSet"):
        if not terminating(jobset):
            _reconcile_jobset(context, jobset)


def _reconcile_jobset(context: Context, jobset: Object) -> None:
    spec, status = jobset["spec"], jobset.setdefault("status", {})
    status.setdefault("restarts", 0)
    status.setdefault("restartsCountTowardsMax", 0)
    _create_service(context, jobset)
    if not _ended(jobset):
        jobs = context.owned(jobset, "Job")
        current = [job for job in jobs if int(labels_of(job)[_ATTEMPT]) == status["restarts"]]
        for job in jobs:
            if job not in current and not terminating(job):
                context.store.delete(job, propagation="Foreground")
        failed = next((job for job in current if condition(job, "Failed")), None)
        if failed:
            _apply_failure_policy(context, jobset, failed)
        elif len(jobs) == len(current):
            _create_jobs(context, jobset, current)
            _finish(jobset, current)
        _report_suspension(jobset)
    _report_jobs(jobset, context.owned(jobset, "Job"))
    context.store.touch(jobset)
    context.delete_after(jobset, spec.get("ttlSecondsAfterFinished"), _ended(jobset))


def _ended(jobset: Object) -> Object | None:
    return condition(jobset, "Completed") or condition(jobset, "Failed")


def _subdomain(jobset: Object) -> str:
    return str((jobset["spec"].get("network") or {}).get("subdomain", name_of(jobset)))


def _create_service(context: Context, jobset: Object) -> None:
    network, name = jobset["spec"].get("network") or {}, _subdomain(jobset)
    if not network.get("enableDNSHostnames", True) or context.store.get(
        "Service", namespace_of(jobset), name
    ):
        return
    spec = {
        "clusterIP": "None",
        "selector": {_PREFIX + "jobset-name": name_of(jobset)},
        "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
    }
    context.create(jobset, "Service", {"name": name}, spec)


def _create_jobs(context: Context, jobset: Object, current: list[Object]) -> None:
    suspend = jobset["spec"].get("suspend", False)
    existing = {name_of(job): job for job in current}
    for replicated in jobset["spec"]["replicatedJobs"]:
        if not _may_begin(replicated, current):
            continue
        for index in range(replicated.get("replicas", 1)):
            job = existing.get(f"{name_of(jobset)}-{replicated['name']}-{index}")
            if job is None:
                _create_job(context, jobset, replicated, index)
            elif job["spec"].get("suspend", False) != suspend:
                job["spec"]["suspend"] = suspend
                context.store.touch(job)


def _may_begin(replicated: Object, current: list[Object]) -> bool:
    """All that it depends on has completed, or is ready where that is enough."""
    for wanted in replicated.get("dependsOn", []):
        before = [job for job in current if labels_of(job)[_REPLICATED_JOB] == wanted["name"]]
        test = _is_ready if wanted["status"] == "Ready" else _is_complete
        if not before or not all(map(test, before)):
            return False
    return True


def _is_complete(job: Object) -> bool:
    return condition(job, "Complete") is not None


def _is_ready(job: Object) -> bool:
    status = job.get("status", {})
    return bool(
        status.get("ready", 0) + status.get("succeeded", 0) >= job["spec"].get("parallelism", 1)
    )


def _create_job(context: Context, jobset: Object, replicated: Object, index: int) -> None:
    name = f"{name_of(jobset)}-{replicated['name']}-{index}"
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
    pod_meta = spec["template"].setdefault("metadata", {})
    spec["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    spec["template"]["spec"]["subdomain"] = _subdomain(jobset)
    own = template.get("metadata", {})
    metadata: Object = {"name": name}
    for field in ("labels", "annotations"):
        pod_meta[field] = {**pod_meta.get(field, {}), **labels}
        metadata[field] = {**own.get(field, {}), **labels}
    context.create(jobset, "Job", metadata, spec)


def _finish(jobset: Object, current: list[Object]) -> None:
    wanted = sum(replicated.get("replicas", 1) for replicated in jobset["spec"]["replicatedJobs"])
    if len(current) == wanted and all(condition(job, "Complete") for job in current):
        set_condition(
            jobset["status"],
            "Completed",
            "True",
            "AllJobsCompleted",
            "jobset completed successfully",
        )
        jobset["status"]["terminalState"] = "Completed"


def _report_suspension(jobset: Object) -> None:
    if jobset["spec"].get("suspend"):
        set_condition(jobset["status"], "Suspended", "True", "SuspendedJobs", "jobset is suspended")
    elif find_condition(jobset, "Suspended"):
        set_condition(jobset["status"], "Suspended", "False", "ResumeJobs", "jobset is resumed")


def _apply_failure_policy(context: Context, jobset: Object, job: Object) -> None:
    status, policy = jobset["status"], jobset["spec"].get("failurePolicy")
    rule = _matching_rule(policy or {}, job)
    action = rule["action"] if rule else "RestartJobSet" if policy else "FailJobSet"
    first = f"(first failed job: {name_of(job)})"
    counted = status["restartsCountTowardsMax"]
    exhausted = action == "RestartJobSet" and counted >= (policy or {}).get("maxRestarts", 0)
    if action != "FailJobSet" and not exhausted:
        status["restarts"] += 1
        status["restartsCountTowardsMax"] += action == "RestartJobSet"
        message = f"applying {action} failure policy action {first}"
        context.store.event(jobset, "Warning", f"{action}FailurePolicyAction", message)
        return
    if exhausted:
        reason, message = (
            "ReachedMaxRestarts",
            f"jobset failed due to reaching max number of restarts {first}",
        )
    elif rule:
        reason, message = (
            "FailJobSetFailurePolicyAction",
            f"applying FailJobSet failure policy action {first}",
        )
    else:
        reason, message = "FailedJobs", f"jobset failed due to one or more job failures {first}"
    set_condition(status, "Failed", "True", reason, message)
    status["terminalState"] = "Failed"
    for other in context.owned(jobset, "Job"):
        if other is not job and not terminating(other):
            context.store.delete(other)
    context.store.event(jobset, "Warning", reason, message)


def _matching_rule(policy: Object, job: Object) -> Object | None:
    """The first rule that fits a failed Job; an empty list in a rule means any."""
    failed = condition(job, "Failed") or {}
    replicated = labels_of(job)[_REPLICATED_JOB]
    for rule in policy.get("rules", []):
        reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
        targets = rule.get("targetReplicatedJobs")
        if (
            (not reasons or failed["reason"] in reasons)
            and (not patterns or any(re.search(pattern, failed["message"]) for pattern in patterns))
            and (not targets or replicated in targets)
        ):
            return rule  # type: ignore[no-any-return]
    return None


def _report_jobs(jobset: Object, jobs: list[Object]) -> None:
    def count(name: str, test: Callable[[Object], object]) -> int:
        return sum(bool(test(job)) for job in jobs if labels_of(job)[_REPLICATED_JOB] == name)

    jobset["status"]["replicatedJobsStatus"] = [
        {
            "name": name,
            "ready": count(name, _is_ready),
            "succeeded": count(name, lambda job: condition(job, "Complete")),
            "failed": count(name, lambda job: condition(job, "Failed")),
            "active": count(name, lambda job: job.get("status", {}).get("active", 0) > 0),
            "suspended": count(name, lambda job: job["spec"].get("suspend")),
        }
        for name in (replicated["name"] for replicated in jobset["spec"]["replicatedJobs"])
    ]
