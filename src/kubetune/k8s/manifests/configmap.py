"""The ConfigMaps of a run: its config with paths as the pods see them, and small files of the user's machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kubetune.base.files import is_file_inside
from kubetune.base.yaml_text import dump
from kubetune.config import consent
from kubetune.config.schema import Config
from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec, source_paths
from kubetune.k8s.run_names import on_volume

# A ConfigMap ends at 1 MiB, and kubectl's client-side apply writes a second copy into an annotation.
MAX_CARRIED_BYTES = 256 * 1024


def local_files(config: Config) -> dict[str, str]:
    """Return the text of the local files that can travel with the manifests, by absolute path.

    These are data files, the chat template, the metrics and the rewards. This reads files, so `render` does not call
    it. Files that are not UTF-8, or that would make more than MAX_CARRIED_BYTES together, are left out, and lint names
    them.
    """
    names = [path for _, path in source_paths(config.sources)]
    if config.model.chat_template:
        names.append(config.model.chat_template)
    if config.evaluation.metrics:
        names.append(config.evaluation.metrics.file)
    for reward in config.rewards:
        if reward.file:
            names.append(reward.file)

    # Files are taken in the order of the config while they fit; a later, smaller one may still fit.
    files: dict[str, str] = {}
    bytes_left = MAX_CARRIED_BYTES
    for name in dict.fromkeys(names):
        path = Path(name)
        if not path.is_absolute() or not path.is_file():
            continue
        if config.kubernetes and on_volume(config.kubernetes, name):
            continue

        size = path.stat().st_size
        if size > bytes_left:
            continue
        try:
            files[name] = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        bytes_left -= size
    return files


def sent_from_outside(files: Iterable[str], folder: Path) -> list[consent.Effect]:
    """Return what it is to send those of the files that lie outside of a folder. `files`: the keys of `local_files`."""
    return [consent.of_sent_file(path) for path in files if not is_file_inside(path, folder)]


def prepared_data(spec: RunSpec) -> str:
    """Return the folder of the prepared data, which all pods see.

    A pod's own cache goes with the pod, and the next pod would prepare everything again.
    """
    return spec.config.data.cache or f"{spec.shared}/prepared"


def pod_config(spec: RunSpec) -> dict[str, Any]:
    """Return the config that the pods load: what the user gave, with the paths at which pods see files.

    Example: `train.jsonl` travels in a ConfigMap, and its source takes the first 100 rows.

        data.train[0].path   /home/me/train.jsonl#100   →   /etc/kubetune-data/0-train.jsonl#100
        output               runs/support-bot           →   /outputs/support-bot
    """
    config = spec.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    carried = spec.carried()

    # Sources keep their `#N`, which counts rows of the file.
    data = config["data"]
    evaluation = config.get("evaluation") or {}
    forget = evaluation.get("forget") or {}
    for sources in (data.get("train"), data.get("eval"), forget.get("data")):
        # data.eval may also be a share of the training data, which is no list.
        if isinstance(sources, list):
            for source in sources:
                path, mark, count = source["path"].partition("#")
                source["path"] = f"{carried.get(path, path)}{mark}{count}"

    # The chat template and the metrics are files of the user's machine too. A template's built-in name stays.
    metrics = evaluation.get("metrics")
    if metrics:
        metrics["file"] = carried.get(metrics["file"], metrics["file"])
    for reward in config.get("rewards") or ():
        if reward.get("file"):
            reward["file"] = carried.get(reward["file"], reward["file"])
    template = config["model"].get("chat_template")
    if template:
        config["model"]["chat_template"] = carried.get(template, template)

    # What pods must not guess from their own machine: the name, the number of GPUs, and the folders.
    data["cache"] = prepared_data(spec)
    compute = {**config.get("compute", {}), "gpus_per_node": spec.gpus}
    changes = {
        "name": spec.name,
        "compute": compute,
        "output": spec.run_dir,
    }
    return {"name": spec.name, **config, **changes}


def config_maps(spec: RunSpec) -> list[Manifest]:
    """Return the ConfigMap with the config as `run.yaml`, and one with the carried files where the run has some."""
    run_file = {"run.yaml": dump([pod_config(spec)])}
    maps = [spec.manifest("v1", "ConfigMap", spec.name, TRAINER, data=run_file)]

    if spec.files:
        files = {}
        for local_path, pod_path in spec.carried().items():
            # A ConfigMap's keys become the names of files in the folder where it is mounted.
            key = pod_path.rsplit("/", 1)[-1]
            files[key] = spec.files[local_path]
        maps.append(spec.manifest("v1", "ConfigMap", f"{spec.name}-data", TRAINER, data=files))
    return maps
