"""batch/v1 Job: completions, parallelism, Indexed mode, podFailurePolicy, limits of failures, deadline, suspend, TTL.

Reasons and messages are those of pkg/controller/job. Not built: successPolicy.
"""

from __future__ import annotations

import asyncio
import copy

from standin.controllers.context import Context
from standin.state.objects import (
    COMPLETION_INDEX,
    Object,
    condition,
    container_statuses,
    containers_of,
    find_condition,
    finished,
    name_of,
    namespace_of,
    now,
    owner_uids,
    phase,
    seconds_since,
    set_condition,
    terminating,
    uid_of,
)

_JOB_NAME = "batch.kubernetes.io/job-name"
_CONTROLLER_UID = "batch.kubernetes.io/controller-uid"
# The finalizer that keeps a pod until it is counted.
_TRACKING = "batch.kubernetes.io/job-tracking"
_INDEX_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_INDEX_IGNORED_FAILURES = "batch.kubernetes.io/job-index-ignored-failure-count"
_LARGEST_BACKOFF_EXPONENT = 5

# Reason and message of a failure.
Verdict = tuple[str, str]


def reconcile(context: Context) -> None:
    """Bring all Jobs forward, and release pods whose Job is gone: nobody else drops their finalizer."""
    jobs = {uid_of(job): job for job in context.store.list("Job") if not terminating(job)}
    for job in jobs.values():
        if job["spec"].get("managedBy") in (None, "kubernetes.io/job-controller"):
            _reconcile_job(context, job)
    for pod in context.store.list("Pod"):
        if jobs.keys().isdisjoint(owner_uids(pod)):
            _untrack(context, pod)


def _reconcile_job(context: Context, job: Object) -> None:
    spec = job["spec"]
    status = job.setdefault("status", {})
    if not _ended(job):
        _suspend_or_start(context, job)
    # Pods are counted to the last, also of a Job that has ended.
    verdict = _count_ended_pods(context, job)
    if not _ended(job) and not condition(job, "FailureTarget"):
        verdict = verdict or _exceeded_limit(context, job)
        if verdict:
            set_condition(status, "FailureTarget", "True", *verdict)
    if not _ended(job):
        # Between this condition and Failed its other pods are ended.
        target = condition(job, "FailureTarget")
        if target:
            _fail(context, job, target)
        elif not spec.get("suspend"):
            _complete_or_continue(context, job)
    _report(context, job)
    context.store.touch(job)
    context.delete_after(job, spec.get("ttlSecondsAfterFinished"), _ended(job))


def _report(context: Context, job: Object) -> None:
    """Write down how many pods there are of each kind."""
    pods = context.owned(job, "Pod")
    active = _active(pods)
    job["status"].update(
        active=len(active),
        ready=sum(bool(condition(pod, "Ready")) for pod in active),
        terminating=sum(terminating(pod) and not finished(pod) for pod in pods),
        uncountedTerminatedPods={},
    )


def _ended(job: Object) -> Object | None:
    """Return the condition that ended a Job, None while it goes on."""
    return condition(job, "Complete") or condition(job, "Failed")


def _active(pods: list[Object]) -> list[Object]:
    return [pod for pod in pods if not finished(pod) and not terminating(pod)]


def _untrack(context: Context, pod: Object) -> None:
    """Release a pod from the Job's accounting."""
    finalizers = pod["metadata"].get("finalizers", [])
    if _TRACKING in finalizers:
        finalizers.remove(_TRACKING)
        context.store.touch(pod)


def _suspend_or_start(context: Context, job: Object) -> None:
    """Delete the pods of a Job that is to be suspended, or note when it began."""
    status = job["status"]
    if job["spec"].get("suspend"):
        for pod in context.owned(job, "Pod"):
            # One that has ended stays, as what was left of an earlier start.
            if not terminating(pod) and not finished(pod):
                context.delete_pod(job, pod)
        if set_condition(status, "Suspended", "True", "JobSuspended", "Job suspended"):
            context.store.event(job, "Normal", "Suspended", "Job suspended")
            status.pop("startTime", None)
    elif "startTime" not in status:
        status["startTime"] = now()
        if find_condition(job, "Suspended"):
            set_condition(status, "Suspended", "False", "JobResumed", "Job resumed")


def _count_ended_pods(context: Context, job: Object) -> Verdict | None:
    """Account for every ended pod exactly once; return the verdict when a failure policy fails the Job."""
    verdict = None
    for pod in context.owned(job, "Pod"):
        has_never_started = terminating(pod) and not pod["spec"].get("nodeName")
        is_counted = _TRACKING not in pod["metadata"].get("finalizers", [])
        if is_counted or not (finished(pod) or has_never_started):
            continue
        if phase(pod) == "Succeeded":
            _count_success(job, pod)
        # Pods of a suspended Job were ended by us.
        elif not _ended(job) and not job["spec"].get("suspend"):
            of_pod = _count_failure(context, job, pod)
            verdict = verdict or of_pod
        _untrack(context, pod)
    return verdict


def _count_success(job: Object, pod: Object) -> None:
    status = job["status"]
    status["succeeded"] = status.get("succeeded", 0) + 1
    if job["spec"].get("completionMode") == "Indexed":
        _add_index(status, "completedIndexes", _index(pod))


def _count_failure(context: Context, job: Object, pod: Object) -> Verdict | None:
    """Account for a failed pod; return the verdict when a rule fails the Job."""
    status = job["status"]
    action, message = failure_action(job["spec"].get("podFailurePolicy"), pod)
    if action != "Ignore":
        status["failed"] = status.get("failed", 0) + 1
    if _has_limit_by_index(job):
        _count_index(context, job, pod, action)
    elif action != "Ignore":
        _back_off(context, job, None, status["failed"])
    if action == "FailJob":
        return "PodFailurePolicy", message
    return None


def _has_limit_by_index(job: Object) -> bool:
    return job["spec"].get("backoffLimitPerIndex") is not None


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][COMPLETION_INDEX])


def _count_index(context: Context, job: Object, pod: Object, action: str) -> None:
    """Account for a failed pod of an index, which fails when it has failed too often."""
    counts = {}
    for name in (_INDEX_FAILURES, _INDEX_IGNORED_FAILURES):
        counts[name] = int(pod["metadata"]["annotations"].get(name, 0))
    # The limit is of restarts: with 2 of them the third failure ends the index.
    is_spent = counts[_INDEX_FAILURES] >= job["spec"]["backoffLimitPerIndex"]
    if action == "Count" and is_spent:
        _add_index(job["status"], "failedIndexes", _index(pod))
    counts[_INDEX_IGNORED_FAILURES if action == "Ignore" else _INDEX_FAILURES] += 1
    # The next pod of the index carries them on.
    texts = {name: str(count) for name, count in counts.items()}
    context.index_failures[uid_of(job), _index(pod)] = texts
    _back_off(context, job, _index(pod), sum(counts.values()))


def _back_off(context: Context, job: Object, index: int | None, failures: int) -> None:
    """Let no new pod start for a while, which doubles with each failure."""
    delay = context.settings.job_backoff_seconds * 2 ** min(failures - 1, _LARGEST_BACKOFF_EXPONENT)
    context.not_before[uid_of(job), index] = asyncio.get_running_loop().time() + delay


def _may_start(context: Context, job: Object, index: int | None) -> bool:
    return asyncio.get_running_loop().time() >= context.not_before.get((uid_of(job), index), 0)


def failure_action(policy: Object | None, pod: Object) -> tuple[str, str]:
    """Return action and message of the first podFailurePolicy rule that fits a failed pod; `Count` when none does."""
    where = f"{namespace_of(pod)}/{name_of(pod)}"
    for index, rule in enumerate((policy or {}).get("rules", [])):
        action = rule["action"]
        fits = f"matching {action} rule at index {index}"
        for entry in container_statuses(pod):
            code = entry["state"].get("terminated", {}).get("exitCode", 0)
            if _fits_code(rule.get("onExitCodes"), entry["name"], code):
                return (
                    action,
                    f"Container {entry['name']} for pod {where} failed with exit code {code} {fits}",
                )
        for wanted in rule.get("onPodConditions") or []:
            entry = find_condition(pod, wanted["type"]) or {}
            if entry.get("status") == wanted.get("status", "True"):
                return action, f"Pod {where} has condition {wanted['type']} {fits}"
    return "Count", ""


def _fits_code(codes: Object | None, container: str, code: int) -> bool:
    """True if a container failed with one of the exit codes of a rule, or with none of them, as that says."""
    if not codes or not code:
        return False
    if codes.get("containerName") not in (None, container):
        return False
    return bool((code in codes["values"]) == (codes["operator"] == "In"))


def _exceeded_limit(context: Context, job: Object) -> Verdict | None:
    """Return why a Job has failed by one of its limits, None where it has not."""
    spec = job["spec"]
    status = job["status"]
    failures = status.get("failed", 0)
    # Restarts within a pod count as failures of the Job, too.
    if spec["template"]["spec"].get("restartPolicy") == "OnFailure":
        for pod in _active(context.owned(job, "Pod")):
            for entry in container_statuses(pod):
                failures += entry["restartCount"]
    if failures > spec.get("backoffLimit", 6):
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    most = spec.get("maxFailedIndexes")
    failed = _indexes(status, "failedIndexes")
    completed = _indexes(status, "completedIndexes")
    if most is not None and len(failed) > most:
        message = "Job has exceeded the specified maximal number of failed indexes"
        return "MaxFailedIndexesExceeded", message
    if failed and len(failed | completed) >= spec["completions"]:
        return "FailedIndexes", "Job has failed indexes"
    limit = spec.get("activeDeadlineSeconds")
    if limit and "startTime" in status and seconds_since(status["startTime"]) >= limit:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    return None


def _fail(context: Context, job: Object, target: Object) -> None:
    """Terminate the pods that still run; say Failed only when none does."""
    for pod in _active(context.owned(job, "Pod")):
        context.delete_pod(job, pod)
    if all(finished(pod) for pod in context.owned(job, "Pod")):
        set_condition(job["status"], "Failed", "True", target["reason"], target["message"])
        context.store.event(job, "Warning", target["reason"], target["message"])


def _complete_or_continue(context: Context, job: Object) -> None:
    """Say Complete when enough pods have succeeded; else start those that are missing."""
    spec = job["spec"]
    status = job["status"]
    pods = context.owned(job, "Pod")
    wanted = spec.get("completions")
    succeeded = status.get("succeeded", 0)
    # Without a number of completions one success is enough, once all pods have ended.
    if wanted is None:
        is_reached = bool(succeeded) and not _active(pods)
    else:
        is_reached = succeeded >= wanted
    if is_reached:
        message = "Reached expected number of succeeded pods"
        for kind in ("SuccessCriteriaMet", "Complete"):
            set_condition(status, kind, "True", "CompletionsReached", message)
        status["completionTime"] = now()
        context.store.event(job, "Normal", "Completed", "Job completed")
    elif _may_start(context, job, None):
        _start_pods(context, job, _blocking(spec, pods))


def _blocking(spec: Object, pods: list[Object]) -> list[Object]:
    """Return the pods that keep their place: until they have failed, or, by the policy, until they terminate."""
    default = "Failed" if spec.get("podFailurePolicy") else ""
    if spec.get("podReplacementPolicy", default) == "Failed":
        return [pod for pod in pods if not finished(pod)]
    return _active(pods)


def _start_pods(context: Context, job: Object, blocking: list[Object]) -> None:
    """Create the missing pods; those in `blocking` keep their place."""
    spec = job["spec"]
    status = job["status"]
    wanted = spec.get("completions")
    count = spec.get("parallelism", 1)
    if wanted is not None:
        count = min(count, wanted - status.get("succeeded", 0))
    missing = max(0, count - len(blocking))
    if spec.get("completionMode") != "Indexed":
        for _ in range(missing):
            _start_pod(context, job, None)
        return
    taken = {_index(pod) for pod in blocking}
    taken |= _indexes(status, "completedIndexes") | _indexes(status, "failedIndexes")
    # The lowest free indexes come first.
    free = [index for index in range(wanted) if index not in taken]
    for index in free[:missing]:
        if _may_start(context, job, index):
            _start_pod(context, job, index)


def _start_pod(context: Context, job: Object, index: int | None) -> None:
    """Create a pod, of an index in Indexed mode."""
    template = copy.deepcopy(job["spec"]["template"])
    name = name_of(job)
    uid = uid_of(job)
    labels = {_JOB_NAME: name, "job-name": name, _CONTROLLER_UID: uid, "controller-uid": uid}
    metadata: Object = {"generateName": f"{name}-", "finalizers": [_TRACKING], "labels": labels}
    extra = {}
    if index is not None:
        metadata["generateName"] = f"{name}-{index}-"
        metadata["annotations"] = {COMPLETION_INDEX: str(index)}
        if _has_limit_by_index(job):
            failures = context.index_failures.get((uid, index), {_INDEX_FAILURES: "0"})
            metadata["annotations"].update(failures)
        labels[COMPLETION_INDEX] = str(index)
        extra["hostname"] = f"{name}-{index}"
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
        variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}
        for container in containers_of(template["spec"]):
            container.setdefault("env", []).append(variable)
    pod = context.create_pod(job, template, metadata, **extra)
    if pod:
        context.store.event(job, "Normal", "SuccessfulCreate", f"Created pod: {name_of(pod)}")


# -- completedIndexes and failedIndexes: 0, 2, 3 and 4 are the text `0,2-4`
def _indexes(status: Object, field: str) -> set[int]:
    """Return the indexes in a text."""
    indexes: set[int] = set()
    for part in filter(None, status.get(field, "").split(",")):
        first, _, last = part.partition("-")
        indexes.update(range(int(first), int(last or first) + 1))
    return indexes


def _add_index(status: Object, field: str, index: int) -> None:
    """Add an index to a text."""
    spans: list[list[int]] = []
    for number in sorted(_indexes(status, field) | {index}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = []
    for first, last in spans:
        if first == last:
            texts.append(str(first))
        # Two neighbours are no span: `0,1`.
        elif last == first + 1:
            texts.append(f"{first},{last}")
        else:
            texts.append(f"{first}-{last}")
    status[field] = ",".join(texts)
