"""Manifests made of the golden run files for tests, and questions to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.k8s.manifests import local_files, render
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.plan.plan import Plan, make_plan
from tests.golden.manifests import FOLDER

FULL = FOLDER / "full.yaml"
MINIMAL = FOLDER / "minimal.yaml"


def planned(*overrides: str, file: Path = FULL) -> tuple[Config, Plan]:
    """Return a golden run file with changes, and its plan."""
    config = load_config(file, overrides=overrides)
    return config, make_plan(config)


def made(kind: str, *overrides: str, file: Path = FULL) -> list[dict[str, Any]]:
    """Return its objects as one kind."""
    config, plan = planned(f"kubernetes.kind={kind}", *overrides, file=file)
    return render(config, plan, local_files(config))


def the(objects: list[dict[str, Any]], kind: str, name: str = "support-bot") -> dict[str, Any]:
    """Return the one object of a kind and name."""
    (match,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    return match


def trainer_pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the pod specs that train."""
    for obj in objects:
        for _, template in pod_templates(obj):
            if template["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer":
                yield template["spec"]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """Return a container's variables by name: the value, or where it comes from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in it that is neither a mapping nor a list."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value
