"""A stand-in cluster to try things on by hand: `python -m tests.cluster FOLDER`, until Ctrl-C.

Images called `…/kubetune:…` stand for this checkout, in the Python that runs this. A claim CLAIM of namespace NAMESPACE
is the folder FOLDER/state/claims/NAMESPACE/CLAIM.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from tests.cluster.harness import ControlPlane, Unavailable


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for its volumes, its log and the kubeconfig")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        cluster = ControlPlane(folder)
    except Unavailable as reason:
        print(f"no namespaces for its pods ({reason}); they get loopback addresses")
        cluster = ControlPlane(folder, "--loopback")
    with cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export KUBECONFIG={cluster.state / 'kubeconfig'} in another terminal; Ctrl-C here ends it", flush=True)
        cluster.process.wait()


if __name__ == "__main__":
    main()
