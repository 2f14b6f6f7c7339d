"""kubeflow.org/v1 PyTorchJob as the training operator 1.9 runs it: one pod and one Service per replica.

A `schedulingPolicy` makes a PodGroup of Volcano, whose name the pods get with their scheduler. Not built: elastic policies,
and the init container that waits for the master's name.
"""

from __future__ import annotations

import copy

from standin.controllers.context import Context
from standin.controllers.scheduler import VOLCANO, into_group, make_group
from standin.state.objects import (
    Object,
    condition,
    name_of,
    namespace_of,
    phase,
    set_condition,
    terminating,
)

_PREFIX = "training.kubeflow.org/"
_PORT = 23456
_DEFAULT_BACKOFF_LIMIT = 6
_FIRST_RETRYABLE_CODE = 128


def reconcile(context: Context) -> None:
    for job in context.store.list("PyTorchJob"):
        if not terminating(job):
            _reconcile_job(context, job)


def _reconcile_job(context: Context, job: Object) -> None:
    spec, status = job["spec"], job.setdefault("status", {})
    run_policy = spec.get("runPolicy") or {}
    set_condition(
        status, "Created", "True", "PyTorchJobCreated", f"PyTorchJob {name_of(job)} is created."
    )
    if not _ended(job):
        _make_group(context, job)
    status["replicaStatuses"] = {}
    for role, replica in spec["pytorchReplicaSpecs"].items():
        phases = [
            _reconcile_replica(context, job, role, index)
            for index in range(replica.get("replicas", 1))
        ]
        counts = {"active": "Running", "succeeded": "Succeeded", "failed": "Failed"}
        status["replicaStatuses"][role] = {
            key: phases.count(value) for key, value in counts.items()
        }
    if not _ended(job):
        _report(job)
    if _ended(job):
        _clean_up(context, job, run_policy.get("cleanPodPolicy", "None"))
    context.store.touch(job)
    context.delete_after(job, run_policy.get("ttlSecondsAfterFinished"), _ended(job))


def _policy(job: Object) -> Object | None:
    """The job's policy for a PodGroup; None without one."""
    policy: Object | None = (job["spec"].get("runPolicy") or {}).get("schedulingPolicy")
    return policy


def _make_group(context: Context, job: Object) -> None:
    policy = _policy(job)
    if policy is None:
        return
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    count = sum(replica.get("replicas", 1) for replica in replicas)
    names = {
        "minResources": "minResources",
        "queue": "queue",
        "priorityClass": "priorityClassName",
    }
    spec = {ours: policy[theirs] for theirs, ours in names.items() if theirs in policy}
    make_group(context, job, {"minMember": policy.get("minAvailable", count), **spec})


def _ended(job: Object) -> Object | None:
    return condition(job, "Succeeded") or condition(job, "Failed")


def _reconcile_replica(context: Context, job: Object, role: str, index: int) -> str | None:
    """Keep one replica as it should be; its pod's phase, None when there is no pod."""
    name = f"{name_of(job)}-{role.lower()}-{index}"
    facts = {"job-name": name_of(job), "operator-name": "pytorchjob-controller"}
    facts |= {"replica-type": role.lower(), "replica-index": str(index)}
    facts |= {"job-role": "master"} if role == "Master" else {}
    metadata = {"name": name, "labels": {_PREFIX + key: value for key, value in facts.items()}}
    if not context.store.get("Service", namespace_of(job), name):
        ports = [{"name": "pytorchjob-port", "port": _PORT, "targetPort": _PORT}]
        spec = {"clusterIP": "None", "selector": metadata["labels"], "ports": ports}
        context.create(job, "Service", metadata, spec)
    pod = next((pod for pod in context.owned(job, "Pod") if name_of(pod) == name), None)
    suspended = (job["spec"].get("runPolicy") or {}).get("suspend")
    if suspended and not _ended(job):
        if pod and not terminating(pod):
            context.store.delete(pod)
    elif pod is None and not _ended(job):
        pod = _start_pod(context, job, role, index, metadata)
    elif pod and phase(pod) == "Failed" and not terminating(pod) and not _ended(job):
        _restart_or_fail(context, job, role, pod)
    return phase(pod) if pod else None


def _start_pod(
    context: Context, job: Object, role: str, index: int, metadata: Object
) -> Object | None:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    rank = index + (role == "Worker" and "Master" in replicas)
    world = sum(replica.get("replicas", 1) for replica in replicas.values())
    processes = str(job["spec"].get("nprocPerNode", "1"))
    master = f"{name_of(job)}-master-0"
    injected = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": str(_PORT),
        "PET_MASTER_PORT": str(_PORT),
        "MASTER_ADDR": master,
        "PET_MASTER_ADDR": master,
        "WORLD_SIZE": str(world * (int(processes) if processes.isdigit() else 1)),
        "RANK": str(rank),
        "PET_NPROC_PER_NODE": processes,
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": str(world),
    }
    template = copy.deepcopy(replicas[role]["template"])
    for container in template["spec"]["containers"]:
        env = container.setdefault("env", [])
        own = {entry["name"] for entry in env}
        env += [{"name": key, "value": value} for key, value in injected.items() if key not in own]
    if _policy(job) is not None:
        template["spec"].setdefault("schedulerName", VOLCANO)
        into_group(template, name_of(job))
    policy = replicas[role].get("restartPolicy", "OnFailure")
    return context.create_pod(
        job, template, metadata, restartPolicy="Never" if policy == "ExitCode" else policy
    )


def _restart_or_fail(context: Context, job: Object, role: str, pod: Object) -> None:
    status, name = job["status"], name_of(job)
    limit = (job["spec"].get("runPolicy") or {}).get("backoffLimit", _DEFAULT_BACKOFF_LIMIT)
    policy = job["spec"]["pytorchReplicaSpecs"][role].get("restartPolicy")
    entry = next(
        entry for entry in pod["status"]["containerStatuses"] if entry["name"] == "pytorch"
    )
    code = entry["state"].get("terminated", {}).get("exitCode", 0)
    if policy == "ExitCode":
        where = f"{namespace_of(pod)}.{name_of(pod)}"
        context.store.event(
            job, "Normal", "ExitedWithCode", f"Pod: {where} exited with code {code}"
        )
    # not a field of the real status: the operator counts in memory
    if policy == "ExitCode" and code >= _FIRST_RETRYABLE_CODE and status.get("restarts", 0) < limit:
        status["restarts"] = status.get("restarts", 0) + 1
        message = f"PyTorchJob {name} is restarting because {role} replica(s) failed."
        set_condition(status, "Restarting", "True", "PyTorchJobRestarting", message)
        context.store.delete(pod)
    else:
        message = f'job "{name}" is failing because "{role}" replica(s) failed.'
        set_condition(status, "Failed", "True", "PyTorchJobFailed", message)


def _report(job: Object) -> None:
    """The master's end is the job's end."""
    status, name = job["status"], name_of(job)
    master = status["replicaStatuses"].get("Master", {})
    if master.get("succeeded"):
        message = f"PyTorchJob {name} is successfully completed."
        set_condition(status, "Succeeded", "True", "PyTorchJobSucceeded", message)
        set_condition(status, "Running", "False", "PyTorchJobSucceeded")
    elif master.get("active"):
        set_condition(
            status, "Running", "True", "PyTorchJobRunning", f"PyTorchJob {name} is running."
        )
        set_condition(status, "Restarting", "False", "PyTorchJobRunning")


def _clean_up(context: Context, job: Object, policy: str) -> None:
    if policy == "None":
        return
    for pod in context.owned(job, "Pod"):
        if not terminating(pod) and (policy == "All" or phase(pod) == "Running"):
            context.store.delete(pod)
