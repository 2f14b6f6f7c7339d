"""Extras beside a run: TensorBoard, the page of `kubetune ui`, and a pod with JupyterLab."""

from __future__ import annotations

from kubetune.k8s.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.k8s.manifests.pod_environment import environment, secret_value
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import outputs_volume, volume_mounts, volumes
from kubetune.k8s.run_names import OUTPUTS

TENSORBOARD = "tensorboard"
JUPYTER = "jupyter"
UI = "ui"


def tensorboard(spec: RunSpec) -> list[Manifest]:
    """Return Deployment and Service of TensorBoard over the outputs volume."""
    if not spec.kubernetes.tensorboard:
        return []
    command = ["tensorboard", f"--logdir={OUTPUTS}", "--host=0.0.0.0", "--port=6006"]
    return _server(spec, TENSORBOARD, command, 6006, probe="/", variables=[])


def ui(spec: RunSpec) -> list[Manifest]:
    """Return Deployment and Service of `kubetune ui` over the outputs volume. It asks for a token from a Secret."""
    if not spec.kubernetes.ui:
        return []
    command = ["python", "-m", "kubetune", "ui", OUTPUTS, "--host", "0.0.0.0", "--port", "8600"]
    token = secret_value("KUBETUNE_UI_TOKEN", *token_secret(spec, UI))
    return _server(spec, UI, command, 8600, probe="/healthz", variables=[token])


def _server(
    spec: RunSpec,
    component: str,
    command: list[str],
    port: int,
    *,
    probe: str,
    variables: list[Manifest],
) -> list[Manifest]:
    """Return a server that reads the outputs volume. It is reached by port-forward, never exposed."""

    # Port-forward reaches a Service's pods only by their labels, so Deployment and Service share the selector.
    name = f"{spec.name}-{component}"
    selector = spec.selector(component)
    server = container(
        spec,
        component,
        command,
        image=spec.kubernetes.tools_image,
        env=[{"name": "HOME", "value": "/tmp"}, *variables],
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
    # Recreate: two pods at once would need the outputs volume on two nodes, which a block volume refuses.
    deployment = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector},
        "template": {"metadata": pod_metadata(spec, component), "spec": pod},
    }

    service = {
        "type": "ClusterIP",
        "selector": selector,
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
    }

    return [
        spec.manifest("apps/v1", "Deployment", name, component, spec=deployment),
        spec.manifest("v1", "Service", name, component, spec=service),
    ]


def token_secret(spec: RunSpec, server: str) -> tuple[str, str]:
    """Return name and key of the Secret with the token of a server."""
    return f"{spec.name}-{server}", "token"


def token_servers(spec: RunSpec) -> list[str]:
    """Return the servers beside the run that ask for a token."""
    servers = []
    if spec.kubernetes.jupyter is not None:
        servers.append(JUPYTER)
    if spec.kubernetes.ui:
        servers.append(UI)
    return servers


def server_components(spec: RunSpec) -> list[str]:
    """Return the components of the servers beside the run."""
    servers = token_servers(spec)
    if spec.kubernetes.tensorboard:
        servers.append(TENSORBOARD)
    return servers


def jupyter(spec: RunSpec) -> list[Manifest]:
    """Return a pod with JupyterLab and all volumes of the run. It ends by itself, and asks for a token from a Secret."""
    lab = spec.kubernetes.jupyter
    if lab is None:
        return []

    # GPUs cannot be overcommitted: Kubernetes wants the same number as request and as limit.
    size = cpu_resources(lab.cpu, lab.memory)
    if lab.gpus:
        for amounts in size.values():
            amounts[spec.kubernetes.gpu_resource] = str(lab.gpus)

    # JupyterLab reads its token from this variable, so no command line shows it.
    token = secret_value("JUPYTER_TOKEN", *token_secret(spec, JUPYTER))
    server = container(
        spec,
        JUPYTER,
        ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser"],
        image=lab.image or spec.kubernetes.tools_image,
        env=[*environment(spec), token],
        ports=[{"name": "http", "protocol": "TCP", "containerPort": 8888}],
        resources=size,
        volumeMounts=volume_mounts(spec),
    )

    pod = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": lab.hours * 3600,
        **pod_basics(spec, gpus=lab.gpus),
        # The API server looks up a bare pod's account at once, so a dry run would fail on the run's own, which is not
        # made yet.
        "serviceAccountName": spec.kubernetes.service_account or "default",
        "containers": [server],
        "volumes": volumes(spec),
    }
    return [spec.manifest("v1", "Pod", f"{spec.name}-{JUPYTER}", JUPYTER, spec=pod)]
