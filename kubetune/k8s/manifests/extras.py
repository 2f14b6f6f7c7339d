"""Extras beside a run: TensorBoard, the page of `kubetune ui`, and a pod with JupyterLab."""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.k8s.manifests.environment import environment
from kubetune.k8s.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.k8s.manifests.spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import outputs_volume, volume_mounts, volumes
from kubetune.k8s.run_names import OUTPUTS

TENSORBOARD = "tensorboard"
JUPYTER = "jupyter"
UI = "ui"


def tensorboard(spec: RunSpec) -> list[Manifest]:
    """Deployment and Service of TensorBoard over the outputs volume."""
    if not spec.kubernetes.tensorboard:
        return []
    return _deployed(
        spec,
        TENSORBOARD,
        ["tensorboard", f"--logdir={OUTPUTS}", "--host=0.0.0.0", "--port=6006"],
        6006,
    )


def ui(spec: RunSpec) -> list[Manifest]:
    """Deployment and Service of `kubetune ui` over the outputs volume; it asks for a token from a Secret."""
    if not spec.kubernetes.ui:
        return []
    secret, key = token_secret(spec, UI)
    token = {
        "name": "KUBETUNE_UI_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": secret, "key": key}},
    }
    command = ["python", "-m", "kubetune", "ui", OUTPUTS, "--host", "0.0.0.0", "--port", "8600"]
    return _deployed(spec, UI, command, 8600, "/healthz", token)


def _deployed(
    spec: RunSpec, what: str, command: Sequence[str], port: int, probe: str = "/", *more: Manifest
) -> list[Manifest]:
    """A server over the outputs volume, read-only; reached by port-forward, never exposed. `more`: variables."""
    name, selector = f"{spec.name}-{what}", spec.selector(what)
    server = container(
        spec,
        what,
        list(command),
        image=spec.kubernetes.tools_image,
        env=[{"name": "HOME", "value": "/tmp"}, *more],
        ports=[{"name": "http", "protocol": "TCP", "containerPort": port}],
        readinessProbe={"httpGet": {"path": probe, "port": "http"}},
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
        "template": {"metadata": pod_metadata(spec, what), "spec": pod},
    }
    service = {
        "type": "ClusterIP",
        "selector": selector,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
    }
    return [
        spec.manifest("apps/v1", "Deployment", name, what, spec=deployment),
        spec.manifest("v1", "Service", name, what, spec=service),
    ]


def token_secret(spec: RunSpec, server: str) -> tuple[str, str]:
    """Name and key of the Secret with the token of a server."""
    return f"{spec.name}-{server}", "token"


def token_servers(spec: RunSpec) -> list[str]:
    """Servers beside the run that ask for a token."""
    return [
        *([JUPYTER] if spec.kubernetes.jupyter is not None else []),
        *([UI] if spec.kubernetes.ui else []),
    ]


def jupyter(spec: RunSpec) -> list[Manifest]:
    """A pod with JupyterLab and all volumes of the run; it ends by itself, and asks for a token from a Secret."""
    wanted = spec.kubernetes.jupyter
    if wanted is None:
        return []
    secret, key = token_secret(spec, JUPYTER)
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
