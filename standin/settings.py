"""Settings of one run of the server, and the meaning of image names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from standin.schemas import NEWEST


@dataclass(frozen=True)
class Image:
    """A container image: the machine's own root file system with a few things added."""

    path: str = ""  # folder put in front of PATH
    # Folder here → folder in the container, read-only.
    mounts: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)  # the entry point


@dataclass(frozen=True)
class Settings:
    """Options of one server."""

    state: Path
    images: dict[str, Image]
    kubernetes_version: str = NEWEST
    loopback: bool = False  # pods without namespaces: see loopback.py
    nodes: int = 2
    gpus: int = 8  # of each node
    # Far shorter than the 10 s of a real cluster.
    job_backoff_seconds: float = 0.3
    crash_backoff_seconds: float = 0.3
    bookmark_seconds: float = 5.0

    def image(self, name: str) -> Image | None:
        """Return the first image whose pattern is found in the name; None where nothing could be pulled."""
        for pattern, image in self.images.items():
            if re.search(pattern, name):
                return image
        return None


def load_images(file: Path) -> dict[str, Image]:
    """Read `{regular expression: {path, mounts, env, command}}` from YAML or JSON."""
    entries = yaml.safe_load(file.read_text())
    return {pattern: Image(**fields) for pattern, fields in entries.items()}
