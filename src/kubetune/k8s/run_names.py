"""The name of a run on a cluster, and the folders that its pods mount."""

from __future__ import annotations

import re

from kubetune.config.schema.cluster import KubernetesConfig

OUTPUTS = "/outputs"
CACHE = "/cache"
CONFIG_FOLDER = "/etc/kubetune"
CONFIG_FILE = f"{CONFIG_FOLDER}/run.yaml"
DATA_FOLDER = "/etc/kubetune-data"
DOCKER_FOLDER = "/etc/kubetune-docker"
# Kubernetes and operators append to it in names of pods, and the result has to fit a label of 63 characters.
LONGEST_NAME = 40


def run_name(name: str | None, model_path: str) -> str:
    """Return the run's name, or one made from the model's: a DNS label of at most 40 characters.

    Qwen/Qwen3-0.6B  →  qwen3-0-6b
    """
    if name:
        return name
    last = model_path.rstrip("/").rsplit("/", 1)[-1].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", last).strip("-")
    if not stem[:1].isalpha():
        stem = f"run-{stem}"
    return stem[:LONGEST_NAME].strip("-")


def name_beside(run: str, suffix: str) -> str:
    """Return the name of something that belongs to a run, such as the pods of `kubetune dev`: no longer than a run's."""
    return f"{run[: LONGEST_NAME - len(suffix)].rstrip('-')}{suffix}"


def on_volume(kubernetes: KubernetesConfig, path: str) -> bool:
    """True if a path is on a volume that the pods mount."""
    folders = [OUTPUTS, CACHE, CONFIG_FOLDER, DATA_FOLDER]
    folders += [mount.path.rstrip("/") for mount in kubernetes.mounts]
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
