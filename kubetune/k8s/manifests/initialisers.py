"""Work before training, on CPU nodes: fetching the model and preparing the data, once for all pods.

A JobSet starts it as its first Job, and so does a TrainJob. For the other kinds it is a Job of its own that
`kubetune submit` waits for. Whoever applies manifests by other means has no such order, so there the trainer's pods do
the same in init containers: one at a time, and not again.
"""

from __future__ import annotations

from kubetune.config.schema.cluster import PreprocessConfig
from kubetune.k8s.manifests.environment import environment
from kubetune.k8s.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.k8s.manifests.spec import Manifest, RunSpec, given
from kubetune.k8s.manifests.storage import volume_mounts, volumes
from kubetune.k8s.run_names import CONFIG_FILE

PREPROCESS = "preprocess"
FETCH_MODEL = ("python", "-P", "-m", "kubetune.data.prepared.fetch_worker", CONFIG_FILE)
PREPARE_DATA = ("python", "-P", "-m", "kubetune", "data", "prepare", CONFIG_FILE)
RETRIES = 2


def steps(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """The commands that run before training, by what they get ready, in order."""
    k = spec.kubernetes
    found: dict[str, tuple[str, ...]] = {}
    if "model" in k.initialisers:
        found["model"] = FETCH_MODEL
    if k.preprocess or "data" in k.initialisers:
        found["data"] = (k.preprocess and k.preprocess.command) or PREPARE_DATA
    return found


def init_containers(spec: RunSpec) -> list[Manifest]:
    """Return containers of the trainer's pods that see to it that nothing is missing, for kinds that know no order."""
    compute = spec.config.compute
    size = cpu_resources(compute.cpu or 1, compute.memory) if compute.memory else {}
    commands = {"model": FETCH_MODEL, "data": PREPARE_DATA}
    return [
        _container(spec, f"{'fetch' if name == 'model' else 'prepare'}-{name}", command, size)
        for name, command in commands.items()
        if name in spec.kubernetes.initialisers
    ]


def _container(spec: RunSpec, name: str, command: tuple[str, ...], size: Manifest) -> Manifest:
    mounts = volume_mounts(spec)
    return container(
        spec, name, list(command), env=environment(spec), resources=size, volumeMounts=mounts
    )


def preparing_job(spec: RunSpec, names: dict[str, tuple[str, ...]]) -> Manifest:
    """The spec of a Job that runs some steps one after the other; `names` are those of the containers."""
    wanted = spec.kubernetes.preprocess or PreprocessConfig()
    size = cpu_resources(wanted.cpu, wanted.memory)
    *before, last = [_container(spec, name, command, size) for name, command in names.items()]
    pod: Manifest = {
        "restartPolicy": "Never",
        **pod_basics(spec),
        **given(initContainers=before),
        "containers": [last],
        "volumes": volumes(spec),
    }
    return {
        "backoffLimit": RETRIES,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]
        },
        "template": {"metadata": pod_metadata(spec, PREPROCESS), "spec": pod},
    }


def one_after_the_other(spec: RunSpec) -> Manifest:
    """The spec of a Job that does all steps in one pod."""
    *before, (_, last) = steps(spec).items()
    return preparing_job(
        spec, {f"fetch-{name}": command for name, command in before} | {PREPROCESS: last}
    )


def preprocess_name(spec: RunSpec) -> str:
    """Name of the Job that `submit` waits for."""
    return f"{spec.name}-{PREPROCESS}"


def preprocess_job(spec: RunSpec) -> list[Manifest]:
    """Return the Job before training, for the kinds that cannot hold one themselves."""
    if not spec.prepares:
        return []
    job = one_after_the_other(spec)
    if spec.kubernetes.ttl_seconds is not None:
        job["ttlSecondsAfterFinished"] = spec.kubernetes.ttl_seconds
    return [spec.manifest("batch/v1", "Job", preprocess_name(spec), PREPROCESS, spec=job)]
