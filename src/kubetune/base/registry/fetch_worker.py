"""Fetch images before a server starts: `python -m kubetune.base.registry.fetch_worker FOLDER NAME=oci://…`.

Each lies in the store of images, where a restart finds it, and FOLDER/NAME is a link to it. The exit code is one of
errors.py.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kubetune import errors
from kubetune.base import faults
from kubetune.base.registry import pull


def fetch_all(folder: Path, words: Sequence[str]) -> None:
    """Fetch what `NAME=ADDRESS` words name, and link it. Raise KubetuneError for what cannot be had."""
    for word in words:
        name, _, address = word.partition("=")
        image = pull.fetch(address)
        link = folder / name
        # A container that is started again finds the link of its first start.
        link.unlink(missing_ok=True)
        link.symlink_to(image)
        print(f"kubetune: {address} is in {image}", flush=True)


def _leave(number: int, frame: object) -> None:
    sys.exit(errors.PREEMPTED)


def main(argv: Sequence[str]) -> int:
    """Fetch. Return the exit code."""
    # The first process of a container ignores signals that it does not handle.
    signal.signal(signal.SIGTERM, _leave)
    folder, *words = argv
    try:
        fetch_all(Path(folder), words)
    except Exception as error:
        fault = faults.known(error)
        if fault is None:
            raise
        print(f"kubetune: {fault}", file=sys.stderr)
        return fault.exit_code
    return errors.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
