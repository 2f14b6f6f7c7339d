"""A Job beside a server, which asks it whether it is the model: it fails if the server is another one, or never answers."""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.errors import ConfigError
from kubetune.k8s.manifests.pod import container, cpu_resources, pod_basics, pod_metadata
from kubetune.k8s.manifests.pod_environment import secret_value, value
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import outputs_volume
from kubetune.k8s.run_names import OUTPUTS, name_beside
from kubetune.plugins.serving import kserve
from kubetune.plugins.serving.manifests import PORT, START_SECONDS, ServerSettings
from kubetune.plugins.serving.served_targets import ServedTarget

CHECK = "check"
_CERTIFICATES = "/certificates"
# Beyond which KServe shortens names, as a Service has at most 63 characters.
_LONGEST_NAME = 63 - len(kserve.CERTIFICATE)
# Beyond the time that the server has to start.
_ASKING_SECONDS = 600


def checking_job(
    spec: RunSpec,
    settings: ServerSettings,
    targets: Sequence[ServedTarget],
    image: str,
    kind: str | None,
) -> Manifest:
    """Return the Job. `image`: with kubetune. `kind`: of KServe's object, None for a Deployment.

    Raise ConfigError for targets of which no volume has what their run keeps, and for a name that KServe would shorten.
    """
    for target in targets:
        if target.run is None or not target.path.startswith(f"{OUTPUTS}/"):
            raise ConfigError(
                f"--check-image: {target.name} is no run directory, which keeps what a server is compared with; leave it "
                "out, and check from where the run directory is. Nothing was written."
            )
    words = [f"{target.name}={target.path}" for target in targets]
    seconds = START_SECONDS + _ASKING_SECONDS
    command = [
        *("python", "-P", "-m", "kubetune", "serve", *words),
        f"--check={_address(spec, kind)}",
        f"--timeout={seconds}",
    ]
    body = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": seconds + _ASKING_SECONDS,
        "template": {
            "metadata": pod_metadata(spec, CHECK),
            "spec": _pod(spec, command, image, settings.api_key_secret, kind),
        },
    }
    return spec.manifest("batch/v1", "Job", name_beside(spec.name, f"-{CHECK}"), CHECK, spec=body)


def _pod(
    spec: RunSpec, command: list[str], image: str, key_secret: str | None, kind: str | None
) -> Manifest:
    """Return the spec of the pod."""
    # An export is only read, and what the tokenizer keeps for later lies in HOME.
    env = [value("HOME", "/tmp"), value("USER", CHECK)]
    mounts: list[Manifest] = [
        {"name": "outputs", "mountPath": OUTPUTS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[Manifest] = [outputs_volume(spec), {"name": "tmp", "emptyDir": {}}]
    if key_secret:
        env.append(secret_value("VLLM_API_KEY", key_secret, "VLLM_API_KEY"))
    if kind == kserve.LLM:
        # KServe signs it itself. Its key lies in the same Secret, and stays there.
        items = [{"key": "tls.crt", "path": "tls.crt"}]
        secret = {"secretName": f"{spec.name}{kserve.CERTIFICATE}", "items": items}
        env.append(value("SSL_CERT_FILE", f"{_CERTIFICATES}/tls.crt"))
        mounts.append({"name": "certificates", "mountPath": _CERTIFICATES, "readOnly": True})
        volumes.append({"name": "certificates", "secret": secret})
    asking = container(
        spec,
        CHECK,
        command,
        image=image,
        env=env,
        resources=cpu_resources(1, "2Gi"),
        volumeMounts=mounts,
    )
    return {
        **pod_basics(spec),
        "serviceAccountName": spec.kubernetes.service_account or "default",
        "restartPolicy": "Never",
        "containers": [{**asking, "workingDir": "/tmp"}],
        "volumes": volumes,
    }


def _address(spec: RunSpec, kind: str | None) -> str:
    """Return the server's address within the cluster. Raise ConfigError if KServe would shorten it."""
    namespace = spec.kubernetes.namespace
    if kind == kserve.INFERENCE:
        return f"http://{spec.name}-predictor.{namespace}.svc/openai"
    if kind is None:
        return f"http://{spec.name}.{namespace}.svc"
    if len(spec.name) > _LONGEST_NAME:
        raise ConfigError(
            f"--check-image: KServe shortens the names of what it makes for {spec.name}; give --name at most "
            f"{_LONGEST_NAME} characters. Nothing was written."
        )
    return f"https://{spec.name}{kserve.WORKLOAD}.{namespace}.svc:{PORT}"
