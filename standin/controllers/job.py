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

_JOB_NAME, _CONTROLLER_UID = "batch.kubernetes.io/job-name", "batch.kubernetes.io/controller-uid"
_TRACKING = "batch.kubernetes.io/job-tracking"  # the finalizer that keeps a pod until it is counted
_INDEX_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_INDEX_IGNORED_FAILURES = "batch.kubernetes.io/job-index-ignored-failure-count"
_LARGEST_BACKOFF_EXPONENT = 5


def reconcile(context: Context) -> None:
    jobs = {uid_of(job): job for job in context.store.list("Job") if not terminating(job)}
    for job in jobs.values():
        if job["spec"].get("managedBy") in (None, "kubernetes.io/job-controller"):
            _reconcile_job(context, job)
    for pod in context.store.list("Pod"):
        if not jobs.keys() & set(
            owner_uids(pod)
        ):  # its Job is gone: nobody else drops the finalizer
            _untrack(context, pod)


def _reconcile_job(context: Context, job: Object) -> None:
    spec, status = job["spec"], job.setdefault("status", {})
    if not _ended(job):
        _suspend_or_start(context, job)
    verdict = _count_ended_pods(context, job)
    if not _ended(job) and not condition(job, "FailureTarget"):
        verdict = verdict or _exceeded_limit(context, job)
        if verdict:
            set_condition(status, "FailureTarget", "True", *verdict)
    if not _ended(job):
        if target := condition(job, "FailureTarget"):
            _fail(context, job, target)
        elif not spec.get("suspend"):
            _complete_or_continue(context, job)
    pods = context.owned(job, "Pod")
    active = _active(pods)
    status.update(active=len(active), ready=sum(bool(condition(pod, "Ready")) for pod in active))
    status["terminating"] = sum(terminating(pod) and not finished(pod) for pod in pods)
    status["uncountedTerminatedPods"] = {}
    context.store.touch(job)
    context.delete_after(job, spec.get("ttlSecondsAfterFinished"), _ended(job))


def _ended(job: Object) -> Object | None:
    return condition(job, "Complete") or condition(job, "Failed")


def _active(pods: list[Object]) -> list[Object]:
    return [pod for pod in pods if not finished(pod) and not terminating(pod)]


def _untrack(context: Context, pod: Object) -> bool:
    """Release a pod from the Job's accounting; false when it was not tracked."""
    finalizers = pod["metadata"].get("finalizers", [])
    if _TRACKING not in finalizers:
        return False
    finalizers.remove(_TRACKING)
    context.store.touch(pod)
    return True


def _suspend_or_start(context: Context, job: Object) -> None:
    status = job["status"]
    if job["spec"].get("suspend"):
        for pod in context.owned(job, "Pod"):
            if not terminating(pod):
                context.store.delete(pod)
        if set_condition(status, "Suspended", "True", "JobSuspended", "Job suspended"):
            context.store.event(job, "Normal", "Suspended", "Job suspended")
            status.pop("startTime", None)
    elif "startTime" not in status:
        status["startTime"] = now()
        if find_condition(job, "Suspended"):
            set_condition(status, "Suspended", "False", "JobResumed", "Job resumed")


def _count_ended_pods(context: Context, job: Object) -> tuple[str, str] | None:
    """Account for every ended pod exactly once; (reason, message) when a failure policy fails the Job."""
    spec, status = job["spec"], job["status"]
    verdict = None
    for pod in context.owned(job, "Pod"):
        never_started = terminating(pod) and not pod["spec"].get("nodeName")
        if not (finished(pod) or never_started) or _TRACKING not in pod["metadata"].get(
            "finalizers", []
        ):
            continue
        if phase(pod) == "Succeeded":
            status["succeeded"] = status.get("succeeded", 0) + 1
            if spec.get("completionMode") == "Indexed":
                _add_index(status, "completedIndexes", _index(pod))
        elif not _ended(job) and not spec.get("suspend"):
            action, message = failure_action(spec.get("podFailurePolicy"), pod)
            if action == "FailJob":
                verdict = verdict or ("PodFailurePolicy", message)
            if action != "Ignore":
                status["failed"] = status.get("failed", 0) + 1
            if _by_index(job):
                _count_index(context, job, pod, action)
            elif action != "Ignore":
                _back_off(context, job, None, status["failed"])
        _untrack(context, pod)
    return verdict


def _by_index(job: Object) -> bool:
    return job["spec"].get("backoffLimitPerIndex") is not None


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][COMPLETION_INDEX])


def _count_index(context: Context, job: Object, pod: Object, action: str) -> None:
    """Account for a failed pod of an index, which fails when it has failed too often."""
    counts = {
        name: int(pod["metadata"]["annotations"].get(name, 0))
        for name in (_INDEX_FAILURES, _INDEX_IGNORED_FAILURES)
    }
    spent = counts[_INDEX_FAILURES] >= job["spec"]["backoffLimitPerIndex"]
    if action == "FailIndex" or (action == "Count" and spent):
        _add_index(job["status"], "failedIndexes", _index(pod))
    counts[_INDEX_IGNORED_FAILURES if action == "Ignore" else _INDEX_FAILURES] += 1
    context.index_failures[uid_of(job), _index(pod)] = {
        name: str(count) for name, count in counts.items()
    }
    _back_off(context, job, _index(pod), sum(counts.values()))


def _back_off(context: Context, job: Object, index: int | None, failures: int) -> None:
    delay = context.settings.job_backoff_seconds * 2 ** min(failures - 1, _LARGEST_BACKOFF_EXPONENT)
    context.not_before[uid_of(job), index] = asyncio.get_running_loop().time() + delay


def _may_start(context: Context, job: Object, index: int | None) -> bool:
    return asyncio.get_running_loop().time() >= context.not_before.get((uid_of(job), index), 0)


def failure_action(policy: Object | None, pod: Object) -> tuple[str, str]:
    """(action, message) of the first podFailurePolicy rule that matches a failed pod; `Count` when none does."""
    where = f"{namespace_of(pod)}/{name_of(pod)}"
    for index, rule in enumerate((policy or {}).get("rules", [])):
        action = rule["action"]
        if codes := rule.get("onExitCodes"):
            for entry in container_statuses(pod):
                code = entry["state"].get("terminated", {}).get("exitCode", 0)
                named = codes.get("containerName") in (None, entry["name"])
                if code and named and (code in codes["values"]) == (codes["operator"] == "In"):
                    what = f"Container {entry['name']} for pod {where} failed with exit code {code}"
                    return action, f"{what} matching {action} rule at index {index}"
        for wanted in rule.get("onPodConditions") or []:
            found = find_condition(pod, wanted["type"])
            if found and found["status"] == wanted.get("status", "True"):
                return (
                    action,
                    f"Pod {where} has condition {wanted['type']} matching {action} rule at index {index}",
                )
    return "Count", ""


def _exceeded_limit(context: Context, job: Object) -> tuple[str, str] | None:
    spec, status = job["spec"], job["status"]
    failures = status.get("failed", 0)
    if spec["template"]["spec"].get("restartPolicy") == "OnFailure":
        active = _active(context.owned(job, "Pod"))
        failures += sum(
            entry["restartCount"] for pod in active for entry in container_statuses(pod)
        )
    if failures > spec.get("backoffLimit", 6):
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    most = spec.get("maxFailedIndexes")
    failed, completed = _indexes(status, "failedIndexes"), _indexes(status, "completedIndexes")
    if most is not None and len(failed) > most:
        return (
            "MaxFailedIndexesExceeded",
            "Job has exceeded the specified maximal number of failed indexes",
        )
    if failed and len(failed | completed) >= spec["completions"]:
        return "FailedIndexes", "Job has failed indexes"
    limit = spec.get("activeDeadlineSeconds")
    if limit and "startTime" in status and seconds_since(status["startTime"]) >= limit:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    return None


def _fail(context: Context, job: Object, target: Object) -> None:
    """Terminate the pods that still run; say Failed only when none does."""
    for pod in _active(context.owned(job, "Pod")):
        context.store.delete(pod)
    if all(finished(pod) for pod in context.owned(job, "Pod")):
        set_condition(job["status"], "Failed", "True", target["reason"], target["message"])
        context.store.event(job, "Warning", target["reason"], target["message"])


def _complete_or_continue(context: Context, job: Object) -> None:
    spec, status = job["spec"], job["status"]
    pods, wanted = context.owned(job, "Pod"), spec.get("completions")
    succeeded = status.get("succeeded", 0)
    reached = bool(succeeded and not _active(pods)) if wanted is None else succeeded >= wanted
    if reached:
        message = "Reached expected number of succeeded pods"
        for kind in ("SuccessCriteriaMet", "Complete"):
            set_condition(status, kind, "True", "CompletionsReached", message)
        status["completionTime"] = now()
        context.store.event(job, "Normal", "Completed", "Job completed")
    elif _may_start(context, job, None):
        only_failed = (
            spec.get("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "")
            == "Failed"
        )
        blocking = [pod for pod in pods if not finished(pod)] if only_failed else _active(pods)
        _start_pods(context, job, blocking)


def _start_pods(context: Context, job: Object, blocking: list[Object]) -> None:
    """Create the missing pods; those in `blocking` keep their place."""
    spec, status = job["spec"], job["status"]
    wanted, parallelism = spec.get("completions"), spec.get("parallelism", 1)
    count = parallelism if wanted is None else min(parallelism, wanted - status.get("succeeded", 0))
    missing = max(0, count - len(blocking))
    if spec.get("completionMode") != "Indexed":
        for _ in range(missing):
            _start_pod(context, job, None)
        return
    taken = {_index(pod) for pod in blocking}
    taken |= _indexes(status, "completedIndexes") | _indexes(status, "failedIndexes")
    for index in [index for index in range(wanted) if index not in taken][:missing]:
        if _may_start(context, job, index):
            _start_pod(context, job, index)


def _start_pod(context: Context, job: Object, index: int | None) -> None:
    template, name = copy.deepcopy(job["spec"]["template"]), name_of(job)
    labels = {
        _JOB_NAME: name,
        "job-name": name,
        _CONTROLLER_UID: uid_of(job),
        "controller-uid": uid_of(job),
    }
    metadata: Object = {"generateName": f"{name}-", "finalizers": [_TRACKING], "labels": labels}
    extra = {}
    if index is not None:
        metadata["generateName"] = f"{name}-{index}-"
        failures = (
            context.index_failures.get((uid_of(job), index), {_INDEX_FAILURES: "0"})
            if _by_index(job)
            else {}
        )
        metadata["annotations"] = {COMPLETION_INDEX: str(index), **failures}
        labels[COMPLETION_INDEX] = str(index)
        extra["hostname"] = f"{name}-{index}"
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
        for container in containers_of(template["spec"]):
            container.setdefault("env", []).append(
                {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}
            )
    pod = context.create_pod(job, template, metadata, **extra)
    if pod:
        context.store.event(job, "Normal", "SuccessfulCreate", f"Created pod: {name_of(pod)}")


# -- completedIndexes and failedIndexes, the text form `0,2-4`
def _indexes(status: Object, field: str) -> set[int]:
    out: set[int] = set()
    for part in filter(None, status.get(field, "").split(",")):
        first, _, last = part.partition("-")
        out |= set(range(int(first), int(last or first) + 1))
    return out


def _add_index(status: Object, field: str, index: int) -> None:
    spans: list[list[int]] = []
    for number in sorted(_indexes(status, field) | {index}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}{',' if b == a + 1 else '-'}{b}" for a, b in spans]
    status[field] = ",".join(texts)
