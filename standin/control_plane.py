"""Starts the server as a process of its own, and ends it: what tests and `python -m standin` do it with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

CHECKOUT = Path(__file__).parents[1]
_NEEDED_PROGRAMS = ("ip", "nsenter", "setpriv")
_SYSTEM_PREFIXES = ("/usr", "/usr/local")


class Unavailable(Exception):
    """This machine cannot run the stand-in; the message says why."""


def default_images() -> dict[str, Any]:
    """Return `busybox`, a bare system, and `kubetune`, this checkout in the Python that runs this; `online` has the hub."""
    # Those of the system are in every container.
    folders = {str(CHECKOUT), sys.prefix, sys.base_prefix} - set(_SYSTEM_PREFIXES)
    trainer = {
        "path": str(Path(sys.executable).parent),
        "mounts": {folder: folder for folder in folders},
    }
    sources = os.pathsep.join((str(CHECKOUT / "src"), str(CHECKOUT)))
    env = {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    return {
        "busybox": {},
        "kubetune": {**trainer, "env": {**env, "HF_HUB_OFFLINE": "1"}},
        "online": {**trainer, "env": env},
    }


class ControlPlane:
    """One server process. It stops when told to, and when the process that started it dies."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        prefix: tuple[str, ...] = (),
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Start it, with options of standin/serve.py; `prefix` is put before its command (`setpriv …`).

        `images`: `{regular expression: {path, mounts, env, command}}`, left out: the default ones. Raise Unavailable.
        """
        self.why_loopback = ""
        missing = [name for name in _NEEDED_PROGRAMS if shutil.which(name) is None]
        # Without namespaces none of them is called.
        if missing and "--loopback" not in options:
            raise Unavailable(f"the stand-in cluster needs {', '.join(missing)}")
        self.state = folder / "state"
        self.server_log = folder / "server.log"
        images_file = folder / "images.json"
        if images is None:
            images = default_images()
        images_file.write_text(json.dumps(dict(images)))
        arguments = ("--state", str(self.state), "--images", str(images_file), *options)
        with self.server_log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "standin.serve", *arguments],
                cwd=CHECKOUT,
                # The offline guard of the tests would forbid the server to answer its pods.
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        first = self.process.stdout.readline().split()
        if first[:1] != ["ready"]:
            self.stop()
            raise Unavailable(self.server_log.read_text().strip().rpartition("\n")[2])
        self.url = first[1]

    def stop(self) -> None:
        """End the server, and with it every pod; its volumes stay in the folder."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
