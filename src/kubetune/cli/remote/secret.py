"""`kubetune secret set HF_TOKEN`: put a secret of this machine into the cluster. Its value is never shown."""

from __future__ import annotations

import argparse
import base64
import getpass
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.cli.remote.run_on_cluster import add_namespace
from kubetune.errors import OK, ConfigError
from kubetune.library.cluster_connection import open_cluster

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("action", choices=["set"])
    parser.add_argument(
        "variable", metavar="NAME", help="variable to take the value from, such as HF_TOKEN"
    )
    parser.add_argument(
        "run_file", nargs="?", type=Path, help="run file that says which Secret and namespace"
    )
    parser.add_argument(
        "--env-file",
        type=Path,
        default=Path(".env"),
        help="read before the environment (default .env)",
    )
    parser.add_argument(
        "--secret", metavar="NAME", help="name of the Secret; default: the run file's, or hf-token"
    )
    add_namespace(parser)


def run(args: argparse.Namespace) -> int:
    """Set one key of a Secret; its other keys stay. Raise ConfigError when there is no value to be found."""
    if not _VARIABLE.fullmatch(args.variable):
        # Somebody may have typed the secret itself, so it is not repeated.
        raise ConfigError(
            "NAME must be the name of an environment variable, such as HF_TOKEN; never give the value"
        )

    # HF_TOKEN is the key HF_TOKEN of the Secret hf-token, unless the run file or --secret names another.
    name = args.variable.lower().replace("_", "-")
    key = args.variable
    namespace = args.namespace
    if args.run_file is not None:
        from kubetune.config.load import load_config

        kubernetes = load_config(args.run_file, environ={}).kubernetes
        if kubernetes is not None:
            namespace = namespace or kubernetes.namespace
            reference = kubernetes.secrets.get(args.variable)
            if reference is not None:
                name = reference.secret
                key = reference.key or key
    if args.secret:
        name = args.secret

    value = find_value(args.variable, args.env_file)
    # Messages are cleaned of the secrets of the environment: now of this one too.
    os.environ[args.variable] = value
    cluster = open_cluster(namespace)
    _store(cluster, name, key, value)
    print(f"kubetune: Secret {name} in namespace {cluster.namespace} holds {key} now")
    return OK


def _store(cluster: Cluster, name: str, key: str, value: str) -> None:
    """Set a key of a Secret, which is created if it does not exist."""
    from kubetune.k8s.api.api_errors import Refused
    from kubetune.k8s.manifests.run_spec import MANAGED_BY

    encoded = base64.b64encode(value.encode()).decode()
    data = {"data": {key: encoded}}
    try:
        cluster.merge("Secret", name, data)
    except Refused as error:
        # 404: there is no such Secret yet.
        if error.code != 404:
            raise
        labels = {MANAGED_BY: "kubetune"}
        metadata = {"name": name, "namespace": cluster.namespace, "labels": labels}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
        cluster.create(secret | data)


def find_value(variable: str, env_file: Path) -> str:
    """Return the value from `.env`, the environment, or an unseen prompt. Raise ConfigError without one."""
    value = read_env_file(env_file).get(variable) or os.environ.get(variable, "")
    if not value and sys.stdin.isatty():
        value = getpass.getpass(f"{variable} (not shown): ")
    if not value.strip():
        raise ConfigError(
            f"{variable} is neither in {env_file} nor in the environment; write {variable}=… into {env_file} (and keep "
            "it out of git), or export it. Nothing was changed."
        )
    return value.strip()


def read_env_file(path: Path) -> dict[str, str]:
    """Return the `NAME=value` lines of a file, as a shell reads them; nothing without the file."""
    if not path.is_file():
        return {}
    values = {}
    for line in path.read_text("utf-8").splitlines():
        # export HF_TOKEN="hf_…"  # read only
        text, equals, value = line.strip().removeprefix("export ").partition("=")
        name = text.strip()
        if equals and _VARIABLE.fullmatch(name):
            values[name] = _unquoted(value.strip())
    return values


def _unquoted(value: str) -> str:
    """Return a value without its quotes, or without the comment after it."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if is_quoted:
        return value[1:-1]
    return value.partition(" #")[0].strip()
