"""trainer.kubeflow.org/v1alpha1 TrainJob: a runtime's template and the job's own settings become a JobSet.

As the Kubeflow trainer 2.2 and later do it (runtimePatches, integer numProcPerNode).
"""

from __future__ import annotations

import copy

from standin.api.merge import strategic
from standin.controllers.context import Context
from standin.controllers.scheduler import into_group, make_group
from standin.state.objects import (
    COMPLETION_INDEX,
    Object,
    condition,
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
    for job in context.store.list("TrainJob"):
        if not terminating(job):
            _reconcile_job(context, job)


def _reconcile_job(context: Context, job: Object) -> None:
    status, suspend = job.setdefault("status", {}), bool(job["spec"].get("suspend"))
    jobset = context.store.get("JobSet", namespace_of(job), name_of(job))
    if jobset is None and not condition(job, "Complete") and not condition(job, "Failed"):
        jobset = _create_jobset(context, job)
    if jobset is not None:
        if jobset["spec"].get("suspend", False) != suspend:
            jobset["spec"]["suspend"] = suspend
            context.store.touch(jobset)
        status["jobsStatus"] = jobset.get("status", {}).get("replicatedJobsStatus", [])
        for theirs, ours in (("Completed", "Complete"), ("Failed", "Failed")):
            if ended := condition(jobset, theirs):
                set_condition(status, ours, "True", ended["reason"], ended["message"])
        reason = "Suspended" if suspend else "Resumed"
        set_condition(status, "Suspended", str(suspend), reason, f"TrainJob is {reason.lower()}")
    context.store.touch(job)


def _create_jobset(context: Context, job: Object) -> Object | None:
    reference = job["spec"]["runtimeRef"]
    kind = reference.get("kind", "ClusterTrainingRuntime")
    runtime = context.store.get(kind, namespace_of(job), reference["name"])
    if runtime is None:
        message = f"referenced {kind} {reference['name']} not found"
        set_condition(job["status"], "Failed", "True", "TrainingRuntimeNotSupported", message)
        return None
    spec = _jobset_spec(job, runtime)
    if _is_gang(runtime):
        _make_group(context, job, runtime, spec)
    return context.create(job, "JobSet", {"name": name_of(job), "labels": labels_of(job)}, spec)


def _jobset_spec(job: Object, runtime: Object) -> Object:
    spec: Object = copy.deepcopy(runtime["spec"]["template"]["spec"])
    for patch in job["spec"].get("runtimePatches", []):
        template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        spec = strategic(spec, template.get("spec") or {})
    for replicated in spec["replicatedJobs"]:
        replicated.setdefault("replicas", 1)
        step = replicated["template"].get("metadata", {}).get("labels", {}).get(_STEP)
        if step == "trainer":
            _fill_trainer(job, runtime, replicated)
        elif step in _INITIALIZERS:
            _fill_initializer(job, replicated, step)
    spec["suspend"] = bool(job["spec"].get("suspend"))
    if _is_gang(runtime):
        for replicated in spec["replicatedJobs"]:
            into_group(replicated["template"]["spec"]["template"], name_of(job))
    return spec


def _is_gang(runtime: Object) -> bool:
    """True if the runtime's policy asks for a PodGroup of Volcano."""
    return "volcano" in (runtime["spec"].get("podGroupPolicy") or {})


def _make_group(context: Context, job: Object, runtime: Object, jobset: Object) -> None:
    """The group of all pods, initializers' too, which the Trainer counts as well."""
    jobs = [
        one["template"]["spec"] for one in jobset["replicatedJobs"] for _ in range(one["replicas"])
    ]
    spec: Object = {"minMember": sum(one.get("parallelism", 1) for one in jobs)}
    annotations = runtime["spec"]["template"].get("metadata", {}).get("annotations", {})
    if _QUEUE in annotations:
        spec["queue"] = annotations[_QUEUE]
    make_group(context, job, spec)


def _fill_initializer(job: Object, replicated: Object, step: str) -> None:
    """Tell an initializer where to fetch from, as the TrainJob says."""
    wanted = (job["spec"].get("initializer") or {}).get(_INITIALIZERS[step])
    for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
        if wanted is not None and container["name"] == step:
            uri = (
                [{"name": "STORAGE_URI", "value": wanted["storageUri"]}]
                if "storageUri" in wanted
                else []
            )
            env = {
                entry["name"]: entry
                for entry in [*container.get("env", []), *uri, *wanted.get("env", [])]
            }
            container["env"] = list(env.values())


def _fill_trainer(job: Object, runtime: Object, replicated: Object) -> None:
    """Put the TrainJob's trainer section, and torch's rendezvous, into the trainer's replicated job."""
    trainer, policy = job["spec"].get("trainer") or {}, runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    spec = replicated["template"]["spec"]
    spec.update(parallelism=nodes, completions=nodes)
    container = next(
        entry for entry in spec["template"]["spec"]["containers"] if entry["name"] == "node"
    )
    container.update({key: trainer[key] for key in ("image", "command", "args") if key in trainer})
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    env = {entry["name"]: entry for entry in [*container.get("env", []), *trainer.get("env", [])]}
    if "torch" in policy:
        name = name_of(job)
        rendezvous = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(_processes_per_node(trainer, container)),
            "PET_MASTER_ADDR": f"{name}-{replicated['name']}-0-0.{name}",
            "PET_MASTER_PORT": _MASTER_PORT,
        }
        env |= {key: {"name": key, "value": value} for key, value in rendezvous.items()}
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
        env["PET_NODE_RANK"] = {"name": "PET_NODE_RANK", "valueFrom": source}
    container["env"] = list(env.values())


def _processes_per_node(trainer: Object, container: Object) -> int:
    """numProcPerNode, or else the GPUs, or else (a known trap) the CPUs."""
    if trainer.get("numProcPerNode"):
        return int(trainer["numProcPerNode"])
    resources = container.get("resources", {})
    amounts = {**resources.get("requests", {}), **resources.get("limits", {})}
    return int(quantity(amounts.get("nvidia.com/gpu", 0))) or max(
        1, int(quantity(amounts.get("cpu", 1)))
    )
