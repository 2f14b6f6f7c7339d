"""The ConfigMaps of a run: its config with paths as the pods see them, and small files of the user's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.base.yaml_text import dump
from kubetune.config.schema import Config
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, source_paths
from kubetune.k8s.run_names import on_volume

# A ConfigMap ends at 1 MiB, and kubectl's client-side apply writes a second copy into an annotation.
MAX_CARRIED_BYTES = 256 * 1024


def local_files(config: Config) -> dict[str, str]:
    """The text of the local data files, chat template and metrics that can travel with the manifests, by absolute path.

    This reads files, so `render` does not call it. Files that are not UTF-8, or that would make more than
    MAX_CARRIED_BYTES together, are left out; lint names them.
    """
    found: dict[str, str] = {}
    room = MAX_CARRIED_BYTES
    own = config.evaluation.metrics.file if config.evaluation.metrics else ""
    for name in (
        *(path for _, path in source_paths(config)),
        config.model.chat_template or "",
        own,
    ):
        path = Path(name)
        if (
            name in found
            or not path.is_absolute()
            or (config.kubernetes and on_volume(config.kubernetes, name))
        ):
            continue
        if not path.is_file() or path.stat().st_size > room:
            continue
        try:
            found[name] = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        room -= path.stat().st_size
    return found


def prepared_data(spec: RunSpec) -> str:
    """Folder of the prepared data: where all pods see it, and find it again when they are started anew.

    A pod's own cache goes with the pod, and the next one would prepare everything again.
    """
    return spec.config.data.cache or f"{spec.shared}/prepared"


def _moved(source: dict[str, Any], carried: dict[str, str]) -> dict[str, Any]:
    """A data source whose file, if it is a carried one, lies where the pods see it."""
    path, mark, count = source["path"].partition("#")
    return {**source, "path": f"{carried.get(path, path)}{mark}{count}"}


def pod_config(spec: RunSpec) -> dict[str, Any]:
    """The config that the pods load: what the user gave, with the places where pods find and leave things."""
    given = spec.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    carried, data, model = spec.carried(), given["data"], given["model"]
    for name in ("train", "eval"):
        if isinstance(data.get(name), list):
            data[name] = [_moved(source, carried) for source in data[name]]
    evaluation = given.get("evaluation") or {}
    if forget := evaluation.get("forget"):
        forget["data"] = [_moved(source, carried) for source in forget["data"]]
    if own := evaluation.get("metrics"):
        own["file"] = carried.get(own["file"], own["file"])
    if template := model.get("chat_template"):
        model["chat_template"] = carried.get(template, template)
    places = {
        "name": spec.name,
        "data": {**data, "cache": prepared_data(spec)},
        "compute": {**given.get("compute", {}), "gpus_per_node": spec.gpus},
        "output": spec.run_dir,
    }
    return {"name": spec.name} | given | places


def config_maps(spec: RunSpec) -> list[Manifest]:
    """The ConfigMap with the config as `run.yaml`, and one with the carried files where there are any."""
    maps = {spec.name: {"run.yaml": dump([pod_config(spec)])}}
    if spec.files:
        maps[f"{spec.name}-data"] = {
            seen.rsplit("/", 1)[-1]: spec.files[path] for path, seen in spec.carried().items()
        }
    return [
        spec.manifest("v1", "ConfigMap", name, TRAINER, data=data) for name, data in maps.items()
    ]
