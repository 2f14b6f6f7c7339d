"""What runs before training: init containers that download and prepare, and a CPU-only job that prepares data."""

from __future__ import annotations

from kubetune.manifests.environment import environment
from kubetune.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.manifests.spec import CONFIG_FILE, Manifest, RunSpec, on_hub
from kubetune.manifests.storage import volume_mounts, volumes

PREPROCESS = "preprocess"
PREPARE = ("python", "-m", "kubetune", "data", "prepare", CONFIG_FILE)
# Other forms of the same weights, which training never reads.
NOT_NEEDED = ("*.pth", "*.gguf", "*.onnx", "original/*")


def _downloads(spec: RunSpec) -> dict[str, list[str]]:
    """Commands that fetch the model, and the tokenizer where it is another's, by the container's name."""
    model = spec.config.model
    wanted: dict[str, list[str]] = {}
    if on_hub(model.path):
        revision = ["--revision", model.revision] if model.revision else []
        left_out = [word for pattern in NOT_NEEDED for word in ("--exclude", pattern)]
        wanted["model"] = ["hf", "download", model.path, *revision, *left_out]
    if model.tokenizer and on_hub(model.tokenizer) and model.tokenizer != model.path:
        wanted["tokenizer"] = ["hf", "download", model.tokenizer, "--include", "*token*", "--include", "*.json"]
    return wanted


def init_containers(spec: RunSpec) -> list[Manifest]:
    """Containers that run to their end in each pod before the trainer starts, in order: model, tokenizer, data."""
    commands: dict[str, list[str]] = {}
    if "model" in spec.kubernetes.initialisers:
        commands |= _downloads(spec)
    if "data" in spec.kubernetes.initialisers:
        commands["data"] = list(PREPARE)
    compute = spec.config.compute
    size = cpu_resources(compute.cpu or 1, compute.memory) if compute.memory else {}
    return [
        container(
            spec,
            f"fetch-{name}",
            command,
            env=environment(spec),
            resources=size,
            volumeMounts=volume_mounts(spec),
        )
        for name, command in commands.items()
    ]


def preprocess_job(spec: RunSpec) -> list[Manifest]:
    """The Job that prepares data on CPU nodes, when the config asks for one.

    What it prepares lies on the outputs volume, where the trainer's pods find it: their caches are not yet there.
    """
    wanted = spec.kubernetes.preprocess
    if wanted is None:
        return []
    worker = container(
        spec,
        PREPROCESS,
        list(wanted.command or PREPARE),
        env=environment(spec),
        resources=cpu_resources(wanted.cpu, wanted.memory),
        volumeMounts=volume_mounts(spec),
    )
    pod = {"restartPolicy": "Never", **pod_basics(spec), "containers": [worker], "volumes": volumes(spec)}
    job = {
        "backoffLimit": 2,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]},
        "template": {"metadata": pod_metadata(spec, PREPROCESS), "spec": pod},
    }
    if spec.kubernetes.ttl_seconds is not None:
        job["ttlSecondsAfterFinished"] = spec.kubernetes.ttl_seconds
    return [spec.manifest("batch/v1", "Job", f"{spec.name}-{PREPROCESS}", PREPROCESS, spec=job)]
