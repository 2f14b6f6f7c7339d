"""vLLM on Kubernetes for what was trained: a Deployment with base and adapters or whole weights, a Service, a cache.

Pure, like `render`. Flags and variables are those of `vllm serve` (vLLM's documentation and source, 0.11 to 0.33).
The pod passes the restricted standard: vLLM's image runs as any user once its caches and HOME are somewhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.k8s.manifests.pod import container, pod_basics, pod_metadata
from kubetune.k8s.manifests.spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import outputs_volume
from kubetune.k8s.run_names import CACHE, OUTPUTS
from kubetune.result.publishing.serving import lora_words

SERVER = "server"
PORT = 8000
IMAGE = "vllm/vllm-openai:v0.33.0"
# What vLLM's `--max-lora-rank` takes; an adapter's own rank is rounded up to one of them.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
WAITING = "vllm:num_requests_waiting"
# A model of 70 B parameters takes the better part of an hour to download the first time.
START_SECONDS = 3600
PROBE_SECONDS = 10


@dataclass(frozen=True)
class Adapter:
    """An adapter by the name of its requests. `path`: in the pod, or a hub id; `base`: as provenance.json has it."""

    name: str
    path: str
    rank: int
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Serving:
    """Model to serve: under the names of `names`, and adapters on it; a reward model `scores`. Sizes are a pod's."""

    model: str
    names: tuple[str, ...]
    revision: str | None = None
    adapters: tuple[Adapter, ...] = ()
    scores: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    max_model_len: int | None = None
    gpus: int = 1
    cpu: int = 8
    memory: str = "64Gi"
    shm: str = "8Gi"
    cache_size: str = "200Gi"
    storage_class: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    waiting_requests: int = 4
    api_key_secret: str | None = None

    @property
    def most_replicas(self) -> int:
        """Pods there may be at once."""
        return max(self.replicas, self.max_replicas or 0)

    @property
    def uses_outputs(self) -> bool:
        """Anything that is served lies on the volume with the run directories."""
        return any(
            path.startswith(f"{OUTPUTS}/")
            for path in (self.model, *(each.path for each in self.adapters))
        )


def serve(spec: RunSpec, serving: Serving) -> list[Manifest]:
    """All objects, in the order in which they are to be applied. `spec` gives name, namespace and pod settings."""
    labels = spec.selector(SERVER)
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    deployment = {
        **({} if serving.max_replicas else {"replicas": serving.replicas}),
        # A second pod would wait for ever for the GPUs and the volume of the only one.
        "strategy": {"type": "Recreate"} if serving.most_replicas == 1 else rolling,
        "selector": {"matchLabels": labels},
        "template": {"metadata": pod_metadata(spec, SERVER), "spec": _pod(spec, serving)},
    }
    service = {
        "type": "ClusterIP",
        "selector": labels,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
    }
    claim: Manifest = {
        "accessModes": ["ReadWriteMany" if serving.most_replicas > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": serving.cache_size}},
        **({"storageClassName": serving.storage_class} if serving.storage_class else {}),
    }
    objects = [
        spec.manifest("v1", "PersistentVolumeClaim", f"{spec.name}-models", "storage", spec=claim),
        spec.manifest("apps/v1", "Deployment", spec.name, SERVER, spec=deployment),
        spec.manifest("v1", "Service", spec.name, SERVER, spec=service),
    ]
    if serving.max_replicas:
        objects.append(_autoscaler(spec, serving))
    return objects


def command(serving: Serving) -> list[str]:
    """The command line of the server."""
    words = ["vllm", "serve", serving.model, "--host=0.0.0.0", f"--port={PORT}"]
    words += ["--served-model-name", *serving.names]
    dtype, split = serving.dtype, serving.gpus if serving.gpus > 1 else None
    flags: dict[str, Any] = {
        "--revision": serving.revision,
        "--dtype": None if dtype == "auto" else dtype,
    }
    flags |= {"--max-model-len": serving.max_model_len, "--tensor-parallel-size": split}
    words += [f"{flag}={value}" for flag, value in flags.items() if value]
    if serving.scores:  # without an activation, which would make a probability of a reward
        words += ["--runner=pooling", f"--pooler-config={json.dumps({'use_activation': False})}"]
    if serving.trust_remote_code:
        words.append("--trust-remote-code")
    if serving.adapters:
        wanted = max(each.rank for each in serving.adapters)
        rank = next(known for known in LORA_RANKS if known >= wanted)
        words += [
            "--enable-lora",
            f"--max-loras={len(serving.adapters)}",
            f"--max-lora-rank={rank}",
        ]
        words += lora_words((each.name, each.path, each.base) for each in serving.adapters)
    return words


def _pod(spec: RunSpec, serving: Serving) -> Manifest:
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
        "containers": [{**server, "workingDir": "/tmp"}],
        "volumes": volumes,
    }


def _environment(kubernetes: KubernetesConfig, serving: Serving) -> list[Manifest]:
    """Caches on the claim, so that a restart downloads and compiles nothing again; HOME where it can be written."""
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
    secrets = {
        name: (ref.secret, ref.key or name)
        for name, ref in kubernetes.secrets.items()
        if name == "HF_TOKEN"
    }
    if serving.api_key_secret:
        secrets["VLLM_API_KEY"] = (serving.api_key_secret, "VLLM_API_KEY")
    sources: Manifest = {name: {"value": text} for name, text in plain.items()}
    for name, (secret, key) in secrets.items():
        sources[name] = {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    return [{"name": name, **source} for name, source in sources.items()]


def _autoscaler(spec: RunSpec, serving: Serving) -> Manifest:
    """More pods while requests wait. Needs the metric in the custom metrics API, such as by prometheus-adapter."""
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
    """The commands that try it out from this machine."""
    asked = serving.adapters[0].name if serving.adapters else serving.names[0]
    said = [{"role": role, "content": "Hello!"} for role in ("user", "assistant")]
    path, body = "v1/chat/completions", {"model": asked, "messages": said[:1], "max_tokens": 64}
    if serving.scores:
        path, body = "pooling", {"model": asked, "messages": said, "task": "classify"}
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if serving.api_key_secret else ""
    kubectl = f"kubectl -n {spec.kubernetes.namespace}"
    return (
        f"{kubectl} rollout status deployment/{spec.name} --timeout={START_SECONDS}s\n"
        f"{kubectl} port-forward service/{spec.name} {PORT}:80 &\n"
        f"curl --retry 5 --retry-connrefused http://localhost:{PORT}/{path} "
        f"-H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'\n"
    )
