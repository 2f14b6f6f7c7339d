"""`kubetune port-forward`: TensorBoard or JupyterLab of a run, on this machine's loopback. Nothing is exposed."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from typing import TYPE_CHECKING

from kubetune.cli.remote.run_on_cluster import add_run, find, kubectl
from kubetune.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.manifests.run_spec import RunSpec

# Variable of the pod of each server that asks for a token.
_TOKENS = {"jupyter": "JUPYTER_TOKEN", "ui": "KUBETUNE_UI_TOKEN"}
# By server: the kind to look for, what kubectl calls the kind, the usual port on this machine, the port in the pod
# or Service, and the line of a run file that turns the server on.
_SERVERS = {
    "tensorboard": ("Service", "svc", 6006, 80, "kubernetes.tensorboard: true"),
    "ui": ("Service", "svc", 8600, 80, "kubernetes.ui: true"),
    "jupyter": ("Pod", "pod", 8888, 8888, "kubernetes.jupyter: {}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    parser.add_argument("server", choices=tuple(_SERVERS))
    parser.add_argument(
        "--port", type=int, metavar="N", help="port on this machine (default 6006, 8600 and 8888)"
    )


def run(args: argparse.Namespace) -> int:
    """Forward until Ctrl-C, by kubectl. Raise ConfigError when the run has no such server, or it does not answer."""
    cluster, spec = find(args)
    kind, short, port, remote, key = _SERVERS[args.server]
    name = f"{spec.name}-{args.server}"
    if cluster.get(kind, name) is None:
        raise ConfigError(
            f"{spec.name} has no {args.server}; put `{key}` into the run file and submit it again"
        )
    _check_answers(cluster, spec, args.server)
    local = args.port or port
    query = _token(cluster, spec, args.server) if args.server in _TOKENS else ""
    print(f"kubetune: {args.server} at http://127.0.0.1:{local}/{query}, until Ctrl-C", flush=True)
    command = [
        kubectl(),
        "port-forward",
        "-n",
        cluster.namespace,
        f"{short}/{name}",
        f"{local}:{remote}",
    ]
    return subprocess.run(command, check=False).returncode


def _check_answers(cluster: Cluster, spec: RunSpec, server: str) -> None:
    """Raise EnvironmentFault, with the reason, where no pod of a server answers."""
    from kubetune.k8s.cluster import pods

    serving = cluster.list("Pod", spec.selector(server))
    reasons = [pods.why_beside(pod) for pod in serving]
    if not serving:
        raise EnvironmentFault(f"no pod of {server} exists yet; see kubetune events {spec.typed}")
    if all(reasons):
        raise EnvironmentFault(f"{server} does not answer: {reasons[-1]}")


def _token(cluster: Cluster, spec: RunSpec, server: str) -> str:
    """Return the query of the address that logs in; empty where the token is not known or must not be shown.

    The token is read from the pod, as people who run things here may have no right to read Secrets.
    """
    # A token that is not on a terminal may end up in a log.
    if not sys.stdout.isatty():
        return ""
    token = io.BytesIO()
    try:
        pods = [pod["metadata"]["name"] for pod in cluster.list("Pod", spec.selector(server))]
        if not pods:
            raise EnvironmentFault(f"no pod of {server} is there yet")
        cluster.exec(pods[0], server, ["printenv", _TOKENS[server]], stdout=token)
    except EnvironmentFault as error:
        print(
            f"kubetune: the address without its token, which is not known: {error}", file=sys.stderr
        )
        return ""
    return f"?token={token.getvalue().decode().strip()}"
