"""trainer.kubeflow.org/v1alpha1 TrainJob: a runtime's template and the job's own settings become a JobSet.

As the Kubeflow trainer 2.2 and later do it (integer numProcPerNode). Not built: runtimePatches.
"""

from __future__ import annotations

import copy

from standin.controllers.context import Context
from standin.controllers.scheduler import into_group, make_group
from standin.state.objects import (
    COMPLETION_INDEX,
    Object,
    condition,
    find_condition,
    labels_of,
    name_of,
    namespace_of,
    quantity,
    set_condition,
    terminating,
)

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_INITIALIZERS = {"dataset-initializer": "dataset", "model-initializer": "model"}
_MASTER_PORT = "29500"
_QUEUE = "scheduling.volcano.sh/queue-name"


def reconcile(context: Context) -> None:
    """Bring all TrainJobs forward."""
    for job in context.store.list("TrainJob"):
        if not terminating(job):
            _reconcile_job(context, job)


def _reconcile_job(context: Context, job: Object) -> None:
    job.setdefault("status", {})
    jobset = context.store.get("JobSet", namespace_of(job), name_of(job))
    if jobset is None and not condition(job, "Complete") and not condition(job, "Failed"):
        jobset = _create_jobset(context, job)
    if jobset is not None:
        _follow(context, job, jobset)
    context.store.touch(job)


def _follow(context: Context, job: Object, jobset: Object) -> None:
    """Suspend or resume the JobSet as the job is, and say of the job what the JobSet says of itself."""
    status = job["status"]
    suspend = bool(job["spec"].get("suspend"))
    if jobset["spec"].get("suspend", False) != suspend:
        jobset["spec"]["suspend"] = suspend
        context.store.touch(jobset)
    status["jobsStatus"] = jobset.get("status", {}).get("replicatedJobsStatus", [])
    for kind_of_jobset, kind in (("Completed", "Complete"), ("Failed", "Failed")):
        ended = condition(jobset, kind_of_jobset)
        if ended:
            set_condition(status, kind, "True", ended["reason"], ended["message"])
    # One that was never suspended has no such condition.
    if suspend or find_condition(job, "Suspended"):
        reason = "Suspended" if suspend else "Resumed"
        set_condition(status, "Suspended", str(suspend), reason, f"TrainJob is {reason.lower()}")


def _create_jobset(context: Context, job: Object) -> Object | None:
    """Create the JobSet of a job, once its runtime is there."""
    reference = job["spec"]["runtimeRef"]
    kind = reference.get("kind", "ClusterTrainingRuntime")
    runtime = context.store.get(kind, namespace_of(job), reference["name"])
    if runtime is None:
        text = f'TrainJob resources reconciliation failed: {kind}.trainer.kubeflow.org "{reference["name"]}" not found'
        context.store.event(job, "Warning", "TrainJobResourcesCreationFailed", text)
        return None
    spec = _jobset_spec(job, runtime)
    # The runtime's policy asks for a PodGroup of Volcano.
    if "volcano" in (runtime["spec"].get("podGroupPolicy") or {}):
        for replicated in spec["replicatedJobs"]:
            into_group(replicated["template"]["spec"]["template"], name_of(job))
        _make_group(context, job, runtime, spec)
    return context.create(job, "JobSet", {"name": name_of(job), "labels": labels_of(job)}, spec)


def _jobset_spec(job: Object, runtime: Object) -> Object:
    """Return the runtime's template with the job's own settings."""
    spec: Object = copy.deepcopy(runtime["spec"]["template"]["spec"])
    for replicated in spec["replicatedJobs"]:
        replicated.setdefault("replicas", 1)
        step = replicated["template"].get("metadata", {}).get("labels", {}).get(_STEP)
        if step == "trainer":
            _fill_trainer(job, runtime, replicated)
        elif step in _INITIALIZERS:
            _fill_initializer(job, replicated, step)
    spec["suspend"] = bool(job["spec"].get("suspend"))
    return spec


def _make_group(context: Context, job: Object, runtime: Object, jobset: Object) -> None:
    """Make the group of all pods, initializers' too, which the Trainer counts as well."""
    pods = 0
    for replicated in jobset["replicatedJobs"]:
        pods += replicated["replicas"] * replicated["template"]["spec"].get("parallelism", 1)
    spec: Object = {"minMember": pods}
    annotations = runtime["spec"]["template"].get("metadata", {}).get("annotations", {})
    if _QUEUE in annotations:
        spec["queue"] = annotations[_QUEUE]
    make_group(context, job, spec)


def _by_name(*lists: list[Object]) -> dict[str, Object]:
    """Return variables by name; of several with one name the last counts."""
    variables = {}
    for entries in lists:
        for entry in entries:
            variables[entry["name"]] = entry
    return variables


def _fill_initializer(job: Object, replicated: Object, step: str) -> None:
    """Tell an initializer where to fetch from, as the TrainJob says."""
    wanted = (job["spec"].get("initializer") or {}).get(_INITIALIZERS[step])
    if wanted is None:
        return
    uri = []
    if "storageUri" in wanted:
        uri.append({"name": "STORAGE_URI", "value": wanted["storageUri"]})
    for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
        if container["name"] == step:
            env = _by_name(container.get("env", []), uri, wanted.get("env", []))
            container["env"] = list(env.values())


def _fill_trainer(job: Object, runtime: Object, replicated: Object) -> None:
    """Put the TrainJob's trainer section, and torch's rendezvous, into the trainer's replicated job."""
    trainer = job["spec"].get("trainer") or {}
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    spec = replicated["template"]["spec"]
    spec.update(parallelism=nodes, completions=nodes)
    container = _trainer_container(spec)
    for key in ("image", "command", "args"):
        if key in trainer:
            container[key] = trainer[key]
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    # The job's own variables replace those of the runtime, and the rendezvous replaces both.
    env = _by_name(container.get("env", []), trainer.get("env", []))
    if "torch" in policy:
        name = name_of(job)
        rendezvous = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(_processes_per_node(trainer, container)),
            "PET_MASTER_ADDR": f"{name}-{replicated['name']}-0-0.{name}",
            "PET_MASTER_PORT": _MASTER_PORT,
        }
        for variable, value in rendezvous.items():
            env[variable] = {"name": variable, "value": value}
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
        env["PET_NODE_RANK"] = {"name": "PET_NODE_RANK", "valueFrom": source}
    container["env"] = list(env.values())


def _trainer_container(spec: Object) -> Object:
    """Return the container that trains, by its name."""
    for container in spec["template"]["spec"]["containers"]:
        if container["name"] == "node":
            trainer: Object = container
            return trainer
    raise KeyError("node")


def _processes_per_node(trainer: Object, container: Object) -> int:
    """Return numProcPerNode, or else the number of GPUs, or else (a known trap) of CPUs."""
    if trainer.get("numProcPerNode"):
        return int(trainer["numProcPerNode"])
    resources = container.get("resources", {})
    amounts = {**resources.get("requests", {}), **resources.get("limits", {})}
    gpus = int(quantity(amounts.get("nvidia.com/gpu", 0)))
    cpus = int(quantity(amounts.get("cpu", 1)))
    return gpus or max(1, cpus)
