"""A stand-in cluster to try things on by hand: `python -m standin FOLDER`, until Ctrl-C. README.md says more."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import yaml

from standin.control_plane import ControlPlane, Unavailable, default_images
from standin.schemas import NEWEST, OLDEST
from standin.settings import Settings


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m standin", description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="for its volumes, its log and the kubeconfig"
    )
    parser.add_argument(
        "--images", type=Path, metavar="FILE", help="more images: {regular expression: {path, …}}"
    )
    parser.add_argument("--kubernetes-version", choices=(OLDEST, NEWEST), default=NEWEST)
    parser.add_argument("--nodes", type=int, default=Settings.nodes, metavar="N")
    parser.add_argument(
        "--gpus", type=int, default=Settings.gpus, metavar="N", help="nvidia.com/gpu on each node"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="pods without namespaces, at loopback addresses"
    )
    return parser.parse_args()


def main() -> None:
    """Run one until it ends, or Ctrl-C; where no namespaces are permitted, with pods at loopback addresses."""
    chosen = _arguments()
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # The first pattern that is found in an image's name counts, so the user's come first.
    images = {}
    if chosen.images:
        images.update(yaml.safe_load(chosen.images.read_text()))
    images.update(default_images())
    options = ["--kubernetes-version", chosen.kubernetes_version]
    options += ["--nodes", str(chosen.nodes), "--gpus", str(chosen.gpus)]
    if chosen.loopback:
        options.append("--loopback")
    try:
        cluster = ControlPlane(folder, *options, images=images)
    except Unavailable as reason:
        if chosen.loopback:
            sys.exit(f"standin: {reason}")
        print(f"no namespaces for its pods ({reason}); they get loopback addresses")
        cluster = ControlPlane(folder, *options, "--loopback", images=images)
    with cluster, contextlib.suppress(KeyboardInterrupt):
        print(
            f"export KUBECONFIG={cluster.state / 'kubeconfig'} in another terminal; Ctrl-C here ends it",
            flush=True,
        )
        cluster.process.wait()


if __name__ == "__main__":
    main()
