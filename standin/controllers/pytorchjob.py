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
# Exit codes from here on are signals'.
_FIRST_RETRYABLE_CODE = 128
_COUNTS = {"active": "Running", "succeeded": "Succeeded", "failed": "Failed"}


def reconcile(context: Context) -> None:
    """Bring all PyTorchJobs forward."""
    for job in context.store.list("PyTorchJob"):
        if not terminating(job):
            _reconcile_job(context, job)


def _reconcile_job(context: Context, job: Object) -> None:
    status = job.setdefault("status", {})
    message = f"PyTorchJob {name_of(job)} is created."
    set_condition(status, "Created", "True", "PyTorchJobCreated", message)
    if not _ended(job):
        _make_group(context, job)
    status["replicaStatuses"] = {}
    for role, replica in job["spec"]["pytorchReplicaSpecs"].items():
        phases = []
        for index in range(replica.get("replicas", 1)):
            phases.append(_reconcile_replica(context, job, role, index))
        counts = {key: phases.count(value) for key, value in _COUNTS.items()}
        status["replicaStatuses"][role] = counts
    if not _ended(job):
        _report(job)
    if _ended(job):
        _clean_up(context, job, _run_policy(job).get("cleanPodPolicy", "None"))
    context.store.touch(job)
    context.delete_after(job, _run_policy(job).get("ttlSecondsAfterFinished"), _ended(job))


def _run_policy(job: Object) -> Object:
    return job["spec"].get("runPolicy") or {}


def _make_group(context: Context, job: Object) -> None:
    """Make the PodGroup of a job with a policy for one."""
    policy = _run_policy(job).get("schedulingPolicy")
    if policy is None:
        return
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    count = sum(replica.get("replicas", 1) for replica in replicas)
    spec = {"minMember": policy.get("minAvailable", count)}
    names = {
        "minResources": "minResources",
        "queue": "queue",
        "priorityClass": "priorityClassName",
    }
    for name_in_policy, name_in_group in names.items():
        if name_in_policy in policy:
            spec[name_in_group] = policy[name_in_policy]
    make_group(context, job, spec)


def _ended(job: Object) -> Object | None:
    """Return the condition that ended a job, None while it goes on."""
    return condition(job, "Succeeded") or condition(job, "Failed")


def _reconcile_replica(context: Context, job: Object, role: str, index: int) -> str | None:
    """Keep one replica as it should be; return its pod's phase, None when there is no pod."""
    name = f"{name_of(job)}-{role.lower()}-{index}"
    metadata = {"name": name, "labels": _labels(job, role, index)}
    # Pods find each other by Services of their own, and not by host names.
    if not context.store.get("Service", namespace_of(job), name):
        ports = [{"name": "pytorchjob-port", "port": _PORT, "targetPort": _PORT}]
        spec = {"clusterIP": "None", "selector": metadata["labels"], "ports": ports}
        context.create(job, "Service", metadata, spec)
    pod = None
    for candidate in context.owned(job, "Pod"):
        if name_of(candidate) == name:
            pod = candidate
    if not _ended(job):
        if _run_policy(job).get("suspend"):
            if pod and not terminating(pod):
                context.delete_pod(job, pod, reason="SuccessfulDeletePod")
        elif pod is None:
            pod = _start_pod(context, job, role, index, metadata)
        elif phase(pod) == "Failed" and not terminating(pod):
            _restart_or_fail(context, job, role, pod)
    return phase(pod) if pod else None


def _labels(job: Object, role: str, index: int) -> dict[str, str]:
    labels = {
        _PREFIX + "job-name": name_of(job),
        _PREFIX + "operator-name": "pytorchjob-controller",
        _PREFIX + "replica-type": role.lower(),
        _PREFIX + "replica-index": str(index),
    }
    if role == "Master":
        labels[_PREFIX + "job-role"] = "master"
    return labels


def _start_pod(
    context: Context, job: Object, role: str, index: int, metadata: Object
) -> Object | None:
    """Create the pod of a replica, with torch's rendezvous in its variables."""
    replica = job["spec"]["pytorchReplicaSpecs"][role]
    template = copy.deepcopy(replica["template"])
    rendezvous = _rendezvous(job, role, index)
    for container in template["spec"]["containers"]:
        env = container.setdefault("env", [])
        # The user's own come first.
        names = {entry["name"] for entry in env}
        for name, value in rendezvous.items():
            if name not in names:
                env.append({"name": name, "value": value})
    if _run_policy(job).get("schedulingPolicy") is not None:
        template["spec"].setdefault("schedulerName", VOLCANO)
        into_group(template, name_of(job))
    # By exit code: the operator restarts, and not the kubelet.
    policy = replica.get("restartPolicy", "OnFailure")
    if policy == "ExitCode":
        policy = "Never"
    return context.create_pod(job, template, metadata, restartPolicy=policy)


def _rendezvous(job: Object, role: str, index: int) -> dict[str, str]:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    rank = index
    # The master is rank 0.
    if role == "Worker" and "Master" in replicas:
        rank += 1
    nodes = sum(replica.get("replicas", 1) for replica in replicas.values())
    processes = str(job["spec"].get("nprocPerNode", "1"))
    world_size = nodes
    if processes.isdigit():
        world_size *= int(processes)
    master = f"{name_of(job)}-master-0"
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": str(_PORT),
        "PET_MASTER_PORT": str(_PORT),
        "MASTER_ADDR": master,
        "PET_MASTER_ADDR": master,
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "PET_NPROC_PER_NODE": processes,
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": str(nodes),
    }


def _restart_or_fail(context: Context, job: Object, role: str, pod: Object) -> None:
    """Restart a replica that a signal has ended; else fail the job. A limit of 0 alone is kept: pods are not counted."""
    status = job["status"]
    name = name_of(job)
    limit = _run_policy(job).get("backoffLimit", _DEFAULT_BACKOFF_LIMIT)
    is_by_code = job["spec"]["pytorchReplicaSpecs"][role].get("restartPolicy") == "ExitCode"
    code = _exit_code(pod)
    if is_by_code:
        message = f"Pod: {namespace_of(pod)}.{name_of(pod)} exited with code {code}"
        context.store.event(job, "Normal", "ExitedWithCode", message)
    if is_by_code and code >= _FIRST_RETRYABLE_CODE and limit > 0:
        message = f"PyTorchJob {name} is restarting because {role} replica(s) failed."
        set_condition(status, "Restarting", "True", "PyTorchJobRestarting", message)
        context.delete_pod(job, pod, reason="SuccessfulDeletePod")
    else:
        message = f'job "{name}" is failing because "{role}" replica(s) failed.'
        set_condition(status, "Failed", "True", "PyTorchJobFailed", message)


def _exit_code(pod: Object) -> int:
    """Return the exit code of the container that trains."""
    for entry in pod["status"]["containerStatuses"]:
        if entry["name"] == "pytorch":
            return int(entry["state"].get("terminated", {}).get("exitCode", 0))
    raise KeyError("pytorch")


def _report(job: Object) -> None:
    """Write down how the job stands: the master's end is the job's end."""
    status = job["status"]
    name = name_of(job)
    master = status["replicaStatuses"].get("Master", {})
    if master.get("succeeded"):
        message = f"PyTorchJob {name} is successfully completed."
        set_condition(status, "Succeeded", "True", "PyTorchJobSucceeded", message)
        set_condition(status, "Running", "False", "PyTorchJobSucceeded")
    elif master.get("active"):
        message = f"PyTorchJob {name} is running."
        set_condition(status, "Running", "True", "PyTorchJobRunning", message)
        set_condition(status, "Restarting", "False", "PyTorchJobRunning")


def _clean_up(context: Context, job: Object, policy: str) -> None:
    """Delete the pods that go with the job's end."""
    if policy == "None":
        return
    for pod in context.owned(job, "Pod"):
        if not terminating(pod) and (policy == "All" or phase(pod) == "Running"):
            context.delete_pod(job, pod, reason="SuccessfulDeletePod")
