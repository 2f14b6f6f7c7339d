"""Work before training, on CPU nodes: fetching the model and preparing the data, once for all pods.

A JobSet starts it as its first Job, and so does a TrainJob. For the other kinds it is a Job of its own that
`kubetune submit` waits for. Whoever applies manifests by other means has no such order, so the trainer's pods do the
same work in init containers, one pod at a time, and find it done.
"""

from __future__ import annotations

from collections.abc import Mapping

from kubetune.config.schema.compute import PreprocessConfig
from kubetune.errors import USER
from kubetune.k8s.manifests.kinds.failure_policy import on_exit_codes
from kubetune.k8s.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.k8s.manifests.pod_environment import environment
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, non_empty
from kubetune.k8s.manifests.storage import volume_mounts, volumes
from kubetune.k8s.run_names import CONFIG_FILE

PREPROCESS = "preprocess"
FETCH_MODEL = ("python", "-P", "-m", "kubetune.data.prepared.fetch_worker", CONFIG_FILE)
PREPARE_DATA = ("python", "-P", "-m", "kubetune", "data", "prepare", CONFIG_FILE)
RETRIES = 2
# CPU cores and memory. All data that travels with the manifests is less than half a MiB.
_LARGE = (8, "32Gi")
_SMALL = (2, "4Gi")

Command = tuple[str, ...]


def steps(spec: RunSpec) -> dict[str, Command]:
    """Return the commands that run before training, in order, by what they prepare: `model` or `data`."""
    # Data is tokenized with the model's tokenizer, so the model is fetched first.
    k = spec.kubernetes
    commands: dict[str, Command] = {}
    if "model" in k.initialisers:
        commands["model"] = FETCH_MODEL
    if k.preprocess and k.preprocess.command:
        commands["data"] = k.preprocess.command
    elif k.preprocess or "data" in k.initialisers:
        commands["data"] = PREPARE_DATA
    return commands


def init_containers(spec: RunSpec) -> list[Manifest]:
    """Return containers of the trainer's pods that prepare what is missing, for kinds that know no order."""
    # A pod's size is the larger of its init containers and its containers, so they take what the trainer has.
    compute = spec.compute
    size = {}
    if compute.memory:
        size = cpu_resources(compute.cpu or 1, compute.memory)

    containers = []
    if "model" in spec.kubernetes.initialisers:
        containers.append(_container(spec, "fetch-model", FETCH_MODEL, size))
    if "data" in spec.kubernetes.initialisers:
        containers.append(_container(spec, "prepare-data", PREPARE_DATA, size))
    return containers


def _container(spec: RunSpec, name: str, command: Command, size: Manifest) -> Manifest:
    return container(
        spec,
        name,
        list(command),
        env=environment(spec),
        resources=size,
        volumeMounts=volume_mounts(spec),
    )


def preparing_job(spec: RunSpec, commands: Mapping[str, Command]) -> Manifest:
    """Return the spec of a Job that runs commands one after the other, each in a container of its name."""
    size = _size(spec)
    containers = []
    for name, command in commands.items():
        containers.append(_container(spec, name, command, size))

    pod: Manifest = {
        "restartPolicy": "Never",
        **pod_basics(spec),
        # Init containers run in order; the last command is the container that they wait for.
        **non_empty(initContainers=containers[:-1]),
        "containers": containers[-1:],
        "volumes": volumes(spec),
    }

    # A mistake in the config stays one however often the Job tries: exit code 2 ends it at once.
    return {
        "backoffLimit": RETRIES,
        "podFailurePolicy": {"rules": [on_exit_codes("FailJob", [USER])]},
        "template": {"metadata": pod_metadata(spec, PREPROCESS), "spec": pod},
    }


def _size(spec: RunSpec) -> Manifest:
    """Return the resources of a container that prepares: what the user asks for, else little for little data."""
    preprocess = spec.kubernetes.preprocess or PreprocessConfig()
    cpu, memory = _LARGE
    if preprocess.command is None and spec.carries_all_data:
        cpu, memory = _SMALL
    return cpu_resources(preprocess.cpu or cpu, preprocess.memory or memory)


def preparing_job_of_all_steps(spec: RunSpec) -> Manifest:
    """Return the spec of a Job that does all steps in one pod. Its last container is called `preprocess`."""
    *earlier, (_, last_command) = steps(spec).items()
    commands = {f"fetch-{name}": command for name, command in earlier}
    commands[PREPROCESS] = last_command
    return preparing_job(spec, commands)


def preprocess_name(spec: RunSpec) -> str:
    """Return the name of the Job that `submit` waits for."""
    return f"{spec.name}-{PREPROCESS}"


def preprocess_job(spec: RunSpec) -> list[Manifest]:
    """Return the Job before training, for the kinds that cannot hold one themselves."""
    if not spec.prepares:
        return []
    job = preparing_job_of_all_steps(spec)
    if spec.kubernetes.ttl_seconds is not None:
        job["ttlSecondsAfterFinished"] = spec.kubernetes.ttl_seconds
    return [spec.manifest("batch/v1", "Job", preprocess_name(spec), PREPROCESS, spec=job)]
