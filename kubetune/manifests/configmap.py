"""The ConfigMaps of a run: its config with paths as the pods see them, and small data files of the user's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.config.schema import Config
from kubetune.manifests.spec import CACHE, OUTPUTS, TRAINER, Manifest, RunSpec, source_paths
from kubetune.manifests.text import dump

# A ConfigMap ends at 1 MiB, and kubectl's client-side apply writes a second copy into an annotation.
MAX_CARRIED_BYTES = 256 * 1024


def local_files(config: Config) -> dict[str, str]:
    """The text of the local data files that are small enough to travel with the manifests, by absolute path.

    This reads files, so `render` does not call it. Files that are not UTF-8, or that would make more than
    MAX_CARRIED_BYTES together, are left out; lint names them.
    """
    found: dict[str, str] = {}
    room = MAX_CARRIED_BYTES
    for _, source in source_paths(config):
        path = Path(source.partition("#")[0])
        if not path.is_absolute() or not path.is_file() or str(path) in found or path.stat().st_size > room:
            continue
        try:
            found[str(path)] = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        room -= path.stat().st_size
    return found


def prepared_data(spec: RunSpec) -> str:
    """Folder of the prepared data: on the outputs volume when another pod prepares it, else in the pod's own cache."""
    return spec.config.data.cache or (f"{OUTPUTS}/prepared" if spec.kubernetes.preprocess else f"{CACHE}/prepared")


def _data_section(spec: RunSpec, given: dict[str, Any]) -> dict[str, Any]:
    """The `data` section with carried files where the pods see them."""
    carried = spec.carried()

    def moved(source: dict[str, Any]) -> dict[str, Any]:
        path, mark, count = source["path"].partition("#")
        return {**source, "path": f"{carried.get(path, path)}{mark}{count}"}

    sources = {
        name: [moved(source) for source in given[name]]
        for name in ("train", "eval")
        if isinstance(given.get(name), list)
    }
    return {**given, **sources, "cache": prepared_data(spec)}


def pod_config(spec: RunSpec) -> dict[str, Any]:
    """The config that the pods load: what the user gave, with the places where pods find and leave things."""
    given = spec.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    places = {
        "name": spec.name,
        "data": _data_section(spec, given["data"]),
        "compute": {**given.get("compute", {}), "gpus_per_node": spec.gpus},
        "output": spec.run_dir,
    }
    return {"name": spec.name} | given | places


def config_maps(spec: RunSpec) -> list[Manifest]:
    """The ConfigMap with the config as `run.yaml`, and one with the carried files where there are any."""
    maps = {spec.name: {"run.yaml": dump([pod_config(spec)])}}
    if spec.files:
        maps[f"{spec.name}-data"] = {seen.rsplit("/", 1)[-1]: spec.files[path] for path, seen in spec.carried().items()}
    return [spec.manifest("v1", "ConfigMap", name, TRAINER, data=data) for name, data in maps.items()]
