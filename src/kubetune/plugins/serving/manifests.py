"""vLLM on Kubernetes for what was trained: a Deployment with base and adapters or whole weights, a Service, a cache.

Pure, like `render`. Flags and variables are those of `vllm serve` (vLLM's documentation and source, 0.11 to 0.33).
The pod passes the restricted standard: vLLM's image runs as any user once its caches and HOME are somewhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kubetune.base.registry.address import STORE, Address
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.vllm import lora_rank, options
from kubetune.k8s.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.k8s.manifests.pod_environment import secret_value, value
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, non_empty
from kubetune.k8s.manifests.storage import (
    image_volume,
    login_mount,
    login_volume,
    outputs_volume,
)
from kubetune.k8s.run_names import CACHE, DOCKER_FOLDER, OUTPUTS
from kubetune.result.forms.programs import lora_words

SERVER = "server"
# Where the pods have images of a registry as folders, by the names that requests ask for.
IMAGES = "/models"
PORT = 8000
IMAGE = "vllm/vllm-openai:v0.33.0"
WAITING = "vllm:num_requests_waiting"
# A model of 70 B parameters takes the better part of an hour to download the first time.
START_SECONDS = 3600
PROBE_SECONDS = 10


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter to serve."""

    name: str  # that requests ask for
    path: str  # in the pod, or a hub id
    rank: int
    # Its base model, as provenance.json has it.
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedImage:
    """An image of a registry with a model or an adapter."""

    name: str  # of its folder below IMAGES
    address: Address


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server that the user chooses."""

    image: str | None = None  # of the server; None: vLLM's, or KServe's
    # Image with kubetune, which fetches images with weights; None: Kubernetes mounts them.
    fetch_image: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None  # tokens
    # of each pod
    gpus: int = 1
    cpu: int = 8
    memory: str = "64Gi"
    shm: str = "8Gi"
    # of the claim for downloads
    cache_size: str = "200Gi"
    storage_class: str | None = None
    replicas: int = 1
    max_replicas: int | None = None  # with an autoscaler
    waiting_requests: int = 4  # of a pod, at which the autoscaler adds another one
    api_key_secret: str | None = None


@dataclass(frozen=True, kw_only=True)
class Serving(ServerSettings):
    """A model to serve, and adapters on it."""

    model: str  # path in the pod, or a hub id
    names: tuple[str, ...]  # that requests ask for
    revision: str | None = None
    adapters: tuple[ServedAdapter, ...] = ()
    images: tuple[ServedImage, ...] = ()  # that hold some of them
    scores: bool = False  # a reward model
    trust_remote_code: bool = False

    @property
    def most_replicas(self) -> int:
        """Return how many pods there may be at once."""
        return max(self.replicas, self.max_replicas or 0)

    @property
    def lora_rank(self) -> int:
        """Return the rank that vLLM takes for the highest of the adapters."""
        return lora_rank(max(adapter.rank for adapter in self.adapters))

    def lora_options(self) -> list[str]:
        """Return the options of vLLM by which it holds all the adapters at once."""
        return options(enable_lora=True, max_loras=len(self.adapters), max_lora_rank=self.lora_rank)

    @property
    def uses_outputs(self) -> bool:
        """True if anything that is served lies on the volume with the run directories."""
        paths = [self.model]
        paths += [adapter.path for adapter in self.adapters]
        return any(path.startswith(f"{OUTPUTS}/") for path in paths)


def serve(spec: RunSpec, serving: Serving) -> list[Manifest]:
    """Return all objects, in the order in which to apply them. `spec` gives name, namespace and pod settings."""
    labels = spec.selector(SERVER)
    service = {
        "type": "ClusterIP",
        "selector": labels,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
    }
    # A claim for one pod, or for several on as many nodes.
    access = "ReadWriteOnce"
    if serving.most_replicas > 1:
        access = "ReadWriteMany"
    claim: Manifest = {
        "accessModes": [access],
        "resources": {"requests": {"storage": serving.cache_size}},
        **non_empty(storageClassName=serving.storage_class),
    }
    deployment = _deployment(spec, serving, labels)
    objects = [
        spec.manifest("v1", "PersistentVolumeClaim", f"{spec.name}-models", "storage", spec=claim),
        spec.manifest("apps/v1", "Deployment", spec.name, SERVER, spec=deployment),
        spec.manifest("v1", "Service", spec.name, SERVER, spec=service),
    ]
    if serving.max_replicas:
        objects.append(_autoscaler(spec, serving))
    return objects


def _deployment(spec: RunSpec, serving: Serving, labels: dict[str, str]) -> Manifest:
    """Return the spec of the Deployment."""
    deployment: Manifest = {}
    # With an autoscaler the number is its own: to apply the file again must not set it back.
    if not serving.max_replicas:
        deployment["replicas"] = serving.replicas
    # A new pod beside the old ones would wait for ever for their GPUs and volume, so an old one goes first.
    deployment["strategy"] = {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    if serving.most_replicas == 1:
        deployment["strategy"] = {"type": "Recreate"}
    deployment["selector"] = {"matchLabels": labels}
    deployment["template"] = {
        "metadata": pod_metadata(spec, SERVER),
        "spec": _pod(spec, serving),
    }
    return deployment


def command(serving: Serving) -> list[str]:
    """Return the command line of the server."""
    words = ["vllm", "serve", serving.model, "--host=0.0.0.0", f"--port={PORT}"]
    words += ["--served-model-name", *serving.names]
    words += options(
        revision=serving.revision,
        dtype=serving.dtype,
        max_model_len=serving.max_model_len,
        tensor_parallel_size=serving.gpus,
    )
    if serving.scores:
        # By default vLLM applies a sigmoid, which would turn the reward into a probability.
        words += options(runner="pooling", pooler_config=json.dumps({"use_activation": False}))
    words += options(trust_remote_code=serving.trust_remote_code)
    if serving.adapters:
        words += serving.lora_options()
        words += lora_words(
            (adapter.name, adapter.path, adapter.base) for adapter in serving.adapters
        )
    return words


def _pod(spec: RunSpec, serving: Serving) -> Manifest:
    """Return the spec of a pod with the server."""
    gpus = {spec.kubernetes.gpu_resource: str(serving.gpus)}
    health = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    mounts: list[Manifest] = [
        {"name": "models", "mountPath": CACHE},
        {"name": "dshm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[Manifest] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": f"{spec.name}-models"}},
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": serving.shm}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if serving.uses_outputs:
        mounts.append({"name": "outputs", "mountPath": OUTPUTS, "readOnly": True})
        volumes.append(outputs_volume(spec))
    fetching: list[Manifest] = []
    if serving.images and serving.fetch_image:
        fetching.append(_fetching(spec, serving))
        mounts.append({"name": "images", "mountPath": IMAGES, "readOnly": True})
        volumes.append({"name": "images", "emptyDir": {}})
        for secret in spec.kubernetes.image_pull_secrets[:1]:
            volumes.append(login_volume(secret))
    elif serving.images:
        for index, image in enumerate(serving.images):
            name = f"image-{index}"
            mounts.append({"name": name, "mountPath": f"{IMAGES}/{image.name}", "readOnly": True})
            volumes.append(image_volume(name, image.address))
    server = container(
        spec,
        SERVER,
        command(serving),
        env=_environment(spec.kubernetes, serving),
        ports=[{"name": "http", "protocol": "TCP", "containerPort": PORT}],
        startupProbe={
            **health,
            "periodSeconds": PROBE_SECONDS,
            "failureThreshold": START_SECONDS // PROBE_SECONDS,
        },
        readinessProbe={**health, "periodSeconds": PROBE_SECONDS},
        livenessProbe={**health, "periodSeconds": 3 * PROBE_SECONDS, "failureThreshold": 6},
        resources={
            "requests": {"cpu": str(serving.cpu), "memory": serving.memory, **gpus},
            "limits": {"memory": serving.memory, **gpus},
        },
        volumeMounts=mounts,
    )
    return {
        **pod_basics(spec, gpus=serving.gpus),
        # The account of the run went with the run; this pod has no rights in the cluster either way.
        "serviceAccountName": spec.kubernetes.service_account or "default",
        "terminationGracePeriodSeconds": 60,
        **non_empty(initContainers=fetching),
        "containers": [{**server, "workingDir": "/tmp"}],
        "volumes": volumes,
    }


def _fetching(spec: RunSpec, serving: Serving) -> Manifest:
    """Return the container that fetches images to the claim before the server starts, and links them below IMAGES."""
    words = [f"{image.name}={image.address}" for image in serving.images]
    mounts: list[Manifest] = [
        {"name": "models", "mountPath": CACHE},
        {"name": "images", "mountPath": IMAGES},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    env = [value("HOME", "/tmp"), value("USER", SERVER), value(STORE, f"{CACHE}/images")]
    if spec.kubernetes.image_pull_secrets:
        env.append(value("DOCKER_CONFIG", DOCKER_FOLDER))
        mounts.append(login_mount())
    fetching = container(
        spec,
        "fetch",
        ["python", "-P", "-m", "kubetune.base.registry.image_fetch_worker", IMAGES, *words],
        image=serving.fetch_image,
        env=env,
        resources=cpu_resources(1, "2Gi"),
        volumeMounts=mounts,
    )
    return {**fetching, "workingDir": "/tmp"}


def _environment(kubernetes: KubernetesConfig, serving: Serving) -> list[Manifest]:
    """Return the variables of the server."""
    entries: list[Manifest] = []
    # Caches lie on the claim, so that a restart downloads and compiles nothing again; HOME where it can be written.
    plain = {
        "HF_HOME": f"{CACHE}/huggingface",
        "VLLM_CACHE_ROOT": f"{CACHE}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
        "TRITON_CACHE_DIR": f"{CACHE}/triton",
        "HOME": "/tmp",
        # A user id without an entry in /etc/passwd has no name, and torch asks for one.
        "USER": SERVER,
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, text in plain.items():
        entries.append({"name": name, "value": text})
    token = kubernetes.secrets.get("HF_TOKEN")
    if token is not None:
        entries.append(secret_value("HF_TOKEN", token.secret, token.key or "HF_TOKEN"))
    if serving.api_key_secret:
        entries.append(secret_value("VLLM_API_KEY", serving.api_key_secret, "VLLM_API_KEY"))
    return entries


def _autoscaler(spec: RunSpec, serving: Serving) -> Manifest:
    """Return an autoscaler that adds pods while requests wait.

    It needs the metric in the custom metrics API, such as by prometheus-adapter.
    """
    waiting = {
        "type": "Pods",
        "pods": {
            "metric": {"name": WAITING},
            "target": {"type": "AverageValue", "averageValue": str(serving.waiting_requests)},
        },
    }
    body = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name},
        "minReplicas": serving.replicas,
        "maxReplicas": serving.max_replicas,
        "metrics": [waiting],
        # Loading a model takes minutes, so a pod is not given up at the first quiet moment.
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
    }
    return spec.manifest("autoscaling/v2", "HorizontalPodAutoscaler", spec.name, SERVER, spec=body)


def trial(spec: RunSpec, serving: Serving) -> str:
    """Return the commands that try it out from this machine."""
    model = serving.names[0]
    if serving.adapters:
        model = serving.adapters[0].name
    question = {"role": "user", "content": "Hello!"}
    path = "v1/chat/completions"
    body: dict[str, Any] = {"model": model, "messages": [question], "max_tokens": 64}
    if serving.scores:
        # A reward is that of an answer.
        answer = {"role": "assistant", "content": "Hello!"}
        path = "pooling"
        body = {"model": model, "messages": [question, answer], "task": "classify"}
    key = ""
    if serving.api_key_secret:
        key = ' -H "Authorization: Bearer $VLLM_API_KEY"'
    kubectl = f"kubectl -n {spec.kubernetes.namespace}"
    return (
        f"{kubectl} rollout status deployment/{spec.name} --timeout={START_SECONDS}s\n"
        f"{kubectl} port-forward service/{spec.name} {PORT}:80 &\n"
        f"curl --retry 5 --retry-connrefused http://localhost:{PORT}/{path} "
        f"-H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'\n"
    )
