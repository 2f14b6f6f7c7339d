"""One server process: `python -m standin.serve --state DIR --images FILE`, which control_plane.py starts.

Prints `ready URL`, then serves until its stdin is closed. The listening socket is taken in the caller's network; then
the server leaves for namespaces of its own, unless `--loopback` says that pods are to have none.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path

import yaml

from standin.api import access
from standin.node import runtime
from standin.schemas import NEWEST, OLDEST
from standin.server import serve
from standin.settings import Settings, load_images


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="standin", description="A stand-in Kubernetes control plane for tests."
    )
    parser.add_argument(
        "--state", type=Path, required=True, help="folder for volumes, logs and the kubeconfig"
    )
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        help="{regular expression: {path, mounts, env, command}}",
    )
    parser.add_argument("--kubernetes-version", choices=(OLDEST, NEWEST), default=NEWEST)
    parser.add_argument(
        "--loopback", action="store_true", help="no namespaces: pods at loopback addresses"
    )
    parser.add_argument("--nodes", type=int, default=Settings.nodes)
    parser.add_argument(
        "--gpus", type=int, default=Settings.gpus, help="nvidia.com/gpu on each node"
    )
    return parser.parse_args()


def _free_port() -> int:
    # A port that is bound by number can be listened on again after an outage; one that bind(0) chose cannot.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _write_kubeconfig(path: Path, url: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "standin",
        "clusters": [{"name": "standin", "cluster": {"server": url}}],
        "contexts": [
            {
                "name": "standin",
                "context": {"cluster": "standin", "user": "admin", "namespace": "default"},
            }
        ],
        "users": [{"name": "admin", "user": {"token": access.ADMIN}}],
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))


def _enter_namespaces() -> None:
    """Leave for a private network and private mounts; become root of a user namespace first where that is needed."""
    if os.geteuid() != 0:
        user, group = os.geteuid(), os.getegid()
        runtime.unshare(runtime.NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    runtime.unshare(runtime.NEWNET | runtime.NEWNS)
    runtime.mount(None, "/", None, runtime.REC | runtime.PRIVATE)


def main() -> None:
    options = _arguments()
    state = options.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        state=state,
        images=load_images(options.images),
        kubernetes_version=options.kubernetes_version,
        loopback=options.loopback,
        nodes=options.nodes,
        gpus=options.gpus,
    )
    listener = socket.create_server(("127.0.0.1", _free_port()))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    _write_kubeconfig(state / "kubeconfig", url)
    try:
        if not options.loopback:
            _enter_namespaces()
    except OSError as error:
        sys.exit(f"standin: this machine permits no namespaces here: {error}")
    if not os.access(sys.executable, os.X_OK):
        sys.exit(f"standin: this user may not run {sys.executable}, which starts every container")
    asyncio.run(serve(settings, listener, url))


if __name__ == "__main__":
    main()
