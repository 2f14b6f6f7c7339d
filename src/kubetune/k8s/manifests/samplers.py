"""The pods with vLLM that draw the answers of `task: grpo`, beside the trainer's in one JobSet.

Both groups start, stop and end together: the JobSet has ended well when the trainer has, and its other pods go then. They
share the outputs volume, on which the trainer writes its adapters. Two nodes that train and two that draw:

    support-bot-node-0-0     support-bot-node-0-1       the trainer
    support-bot-sampler-0-0  support-bot-sampler-0-1    vLLM, asked at http://support-bot-sampler-0-1.support-bot:8000
"""

from __future__ import annotations

from kubetune.config.schema.cluster import SamplersConfig
from kubetune.k8s.manifests.environment import RUN_NAME, environment, value
from kubetune.k8s.manifests.pod import container, pod_basics, pod_metadata
from kubetune.k8s.manifests.spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import volume_mounts, volumes
from kubetune.k8s.run_names import CACHE

SAMPLER = "sampler"
SAMPLER_PORT = 8000

# The variable by which the trainer learns the addresses of the servers.
ADDRESSES = "KUBETUNE_SAMPLERS"

# What vLLM's `--max-lora-rank` takes; an adapter's own rank is rounded up to one of them.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

# Starts of a server after it ended; it asks for a GPU as long as the trainer does.
_MOST_STARTS = 100


def addresses(spec: RunSpec) -> list[Manifest]:
    """Return the variable with the addresses of the servers; none where the run has no such pods."""
    samplers = spec.kubernetes.samplers
    if samplers is None:
        return []
    urls = []
    for index in range(samplers.replicas):
        # The label of the run, so that a name which kustomize changes is followed.
        urls.append(f"http://{RUN_NAME}-{SAMPLER}-0-{index}.{RUN_NAME}:{SAMPLER_PORT}")
    return [value(ADDRESSES, " ".join(urls))]


def sampler_job(spec: RunSpec, samplers: SamplersConfig) -> Manifest:
    """Return the spec of the Job with one index for each server."""
    return {
        "completionMode": "Indexed",
        "completions": samplers.replicas,
        "parallelism": samplers.replicas,
        "backoffLimit": _MOST_STARTS,
        "template": {"metadata": pod_metadata(spec, SAMPLER), "spec": _pod(spec, samplers)},
    }


def command(spec: RunSpec, samplers: SamplersConfig) -> list[str]:
    """Return the command line of a server, which has to hold all adapters that the run loads."""
    config = spec.config
    model = config.model
    assert config.lora is not None, "the config's validators see to it"
    rank = next(rank for rank in _LORA_RANKS if rank >= config.lora.r)
    longest = config.data.max_length + config.grpo.max_completion_length
    words = ["vllm", "serve", model.path, "--host=0.0.0.0", f"--port={SAMPLER_PORT}"]
    words += ["--enable-lora", f"--max-lora-rank={rank}", "--max-loras=2"]
    words.append(f"--max-model-len={longest}")
    if model.revision:
        words.append(f"--revision={model.revision}")
    if model.dtype != "auto":
        words.append(f"--dtype={model.dtype}")
    if model.trust_remote_code:
        words.append("--trust-remote-code")
    if samplers.gpus > 1:
        words.append(f"--tensor-parallel-size={samplers.gpus}")
    if config.grpo.temperature != 1.0:
        # Without it log-probabilities would be those before the temperature.
        words.append("--logprobs-mode=processed_logprobs")
    return words


def _pod(spec: RunSpec, samplers: SamplersConfig) -> Manifest:
    """Return the spec of a pod with a server."""
    gpus = {}
    if samplers.gpus:
        gpus[spec.kubernetes.gpu_resource] = str(samplers.gpus)
    server = container(
        spec,
        SAMPLER,
        command(spec, samplers),
        image=samplers.image,
        env=_environment(spec),
        ports=[{"name": "http", "protocol": "TCP", "containerPort": SAMPLER_PORT}],
        readinessProbe={"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5},
        resources={
            "requests": {"cpu": str(samplers.cpu), "memory": samplers.memory, **gpus},
            "limits": {"memory": samplers.memory, **gpus},
        },
        volumeMounts=volume_mounts(spec),
    )
    return {
        # A server that ends is started again, and the trainer gives it the adapter again.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 30,
        **pod_basics(spec, gpus=samplers.gpus),
        "containers": [server],
        "volumes": volumes(spec),
    }


def _environment(spec: RunSpec) -> list[Manifest]:
    """Return the variables of a server."""
    variables = {entry["name"]: entry for entry in environment(spec)}
    ours = [
        value("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"),
        value("VLLM_CACHE_ROOT", f"{CACHE}/vllm"),
        value("VLLM_NO_USAGE_STATS", "1"),
    ]
    if spec.offline:
        ours.append(value("HF_HUB_OFFLINE", 1))
    for entry in ours:
        variables.setdefault(entry["name"], entry)
    return list(variables.values())
