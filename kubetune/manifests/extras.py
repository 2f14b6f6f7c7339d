"""Extras beside a run: TensorBoard, and a pod with JupyterLab."""

from __future__ import annotations

from kubetune.manifests.environment import environment
from kubetune.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.manifests.spec import OUTPUTS, Manifest, RunSpec
from kubetune.manifests.storage import outputs_volume, volume_mounts, volumes

TENSORBOARD = "tensorboard"
JUPYTER = "jupyter"


def tensorboard(spec: RunSpec) -> list[Manifest]:
    """Deployment and Service over the outputs volume, read-only; reached by port-forward, never exposed."""
    if not spec.kubernetes.tensorboard:
        return []
    name, selector = f"{spec.name}-{TENSORBOARD}", spec.selector(TENSORBOARD)
    server = container(
        spec,
        TENSORBOARD,
        ["tensorboard", f"--logdir={OUTPUTS}", "--host=0.0.0.0", "--port=6006"],
        image=spec.kubernetes.tools_image,
        env=[{"name": "HOME", "value": "/tmp"}],
        ports=[{"name": "http", "protocol": "TCP", "containerPort": 6006}],
        readinessProbe={"httpGet": {"path": "/", "port": "http"}},
        resources={"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        volumeMounts=[
            {"name": "outputs", "mountPath": OUTPUTS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    )
    pod = {
        **pod_basics(spec),
        "containers": [server],
        "volumes": [outputs_volume(spec), {"name": "tmp", "emptyDir": {}}],
    }
    deployment = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector},
        "template": {"metadata": pod_metadata(spec, TENSORBOARD), "spec": pod},
    }
    service = {
        "type": "ClusterIP",
        "selector": selector,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
    }
    return [
        spec.manifest("apps/v1", "Deployment", name, TENSORBOARD, spec=deployment),
        spec.manifest("v1", "Service", name, TENSORBOARD, spec=service),
    ]


def jupyter_secret(spec: RunSpec) -> tuple[str, str]:
    """Name and key of the Secret with the token of JupyterLab."""
    return f"{spec.name}-{JUPYTER}", "token"


def jupyter(spec: RunSpec) -> list[Manifest]:
    """A pod with JupyterLab and all volumes of the run; it ends by itself, and asks for a token from a Secret."""
    wanted = spec.kubernetes.jupyter
    if wanted is None:
        return []
    secret, key = jupyter_secret(spec)
    token = {"name": "JUPYTER_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    size = cpu_resources(wanted.cpu, wanted.memory)
    if wanted.gpus:
        gpus = {spec.kubernetes.gpu_resource: str(wanted.gpus)}
        size = {"requests": {**size["requests"], **gpus}, "limits": {**size["limits"], **gpus}}
    server = container(
        spec,
        JUPYTER,
        ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser"],
        image=wanted.image or spec.kubernetes.tools_image,
        env=[*environment(spec), token],
        ports=[{"name": "http", "protocol": "TCP", "containerPort": 8888}],
        resources=size,
        volumeMounts=volume_mounts(spec),
    )
    pod = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": wanted.hours * 3600,
        **pod_basics(spec, gpus=wanted.gpus),
        # Servers look a bare pod's account up at once, so that a dry run would fail on one that is only being made.
        "serviceAccountName": spec.kubernetes.service_account or "default",
        "containers": [server],
        "volumes": volumes(spec),
    }
    return [spec.manifest("v1", "Pod", f"{spec.name}-{JUPYTER}", JUPYTER, spec=pod)]
