"""Fetch images before a server starts: `python -m kubetune.base.registry.image_fetch_worker FOLDER NAME=oci://…`.

Each lies in the store of images, where a restart finds it, and FOLDER/NAME is a link to it. The exit code is one of
errors.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kubetune.base.pod_worker import exit_code_of
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


def main(argv: Sequence[str]) -> int:
    """Fetch. Return the exit code."""
    folder, *words = argv
    return exit_code_of(lambda: fetch_all(Path(folder), words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
