"""Writes the schema files beside it: Kubernetes' own and the custom kinds', trimmed to what this project renders.

    pip install kubernetes-validate pyyaml
    python standin/schemas/generate.py kubernetes 1.29 1.37       # from the kubernetes-validate package
    python standin/schemas/generate.py custom FOLDER_OF_CRDS      # CustomResourceDefinitions as YAML files

Descriptions and status go, unknown keys become errors, and subtrees that occur often (every custom kind holds whole
pod templates) are kept once. Run it when a new Kubernetes or operator release is to be supported; no test runs it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DEFINITIONS = "/api/_definitions.json#/$defs/"
CORE_KINDS = {
    "v1/ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "v1/Event": "io.k8s.api.core.v1.Event",
    "v1/Namespace": "io.k8s.api.core.v1.Namespace",
    "v1/Node": "io.k8s.api.core.v1.Node",
    "v1/PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "v1/Pod": "io.k8s.api.core.v1.Pod",
    "v1/Secret": "io.k8s.api.core.v1.Secret",
    "v1/Service": "io.k8s.api.core.v1.Service",
    "v1/ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
    "apps/v1/Deployment": "io.k8s.api.apps.v1.Deployment",
    "apps/v1/StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "autoscaling/v2/HorizontalPodAutoscaler": "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
    "batch/v1/Job": "io.k8s.api.batch.v1.Job",
    "networking.k8s.io/v1/NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "rbac.authorization.k8s.io/v1/Role": "io.k8s.api.rbac.v1.Role",
    "rbac.authorization.k8s.io/v1/RoleBinding": "io.k8s.api.rbac.v1.RoleBinding",
}
DROPPED = {"description", "$schema", "$id", "default", "example"}


def trimmed(schema: Any, *, names: bool = False) -> Any:
    """Return a schema without prose; `names`: the keys of this mapping are field names, so none is dropped."""
    if isinstance(schema, list):
        return [trimmed(item) for item in schema]
    if isinstance(schema, str):
        return schema.replace(DEFINITIONS, "#/$defs/")
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if names or not is_dropped(key):
            kept[key] = trimmed(value, names=not names and key == "properties")
    return kept


def is_dropped(key: str) -> bool:
    """True for a key of a schema that says nothing about what is allowed."""
    return key in DROPPED or key.startswith("x-")


def references(schema: Any) -> set[str]:
    """Return the names of the definitions a schema points at."""
    names = set()
    if isinstance(schema, list):
        for item in schema:
            names |= references(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            names.add(schema["$ref"].removeprefix("#/$defs/"))
        for value in schema.values():
            names |= references(value)
    return names


def core(version: str) -> dict[str, Any]:
    """Return the schemas of Kubernetes' own kinds at one minor version, by `apiVersion/kind`."""
    import kubernetes_validate

    package = Path(str(kubernetes_validate.__file__)).parent
    source = package / "kubernetes-json-schema" / f"v{version}.0-local-strict" / "_definitions.json"
    everything = json.loads(source.read_text())["$defs"]
    definitions: dict[str, Any] = {}
    # The younger ones are not in older releases.
    kinds = {kind: name for kind, name in CORE_KINDS.items() if name in everything}
    wanted = set(kinds.values())
    while wanted:
        name = wanted.pop()
        definitions[name] = trimmed(everything[name])
        if name in CORE_KINDS.values() and "status" in definitions[name]["properties"]:
            definitions[name]["properties"]["status"] = {"type": ["object", "null"]}
        wanted |= references(definitions[name]) - definitions.keys()
    return {
        "kinds": {kind: {"$ref": f"#/$defs/{name}"} for kind, name in kinds.items()},
        "$defs": definitions,
    }


def strict(schema: Any, *, names: bool = False) -> Any:
    """Return a CRD's OpenAPI schema as JSON Schema: unknown keys are errors, int-or-string is understood, CEL is not.

    Metadata of the templates inside a CRD is written there as a bare object and so stays open, as on a server.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict_schema = {}
    for key, value in schema.items():
        if names or not is_dropped(key):
            strict_schema[key] = strict(value, names=not names and key == "properties")
    if names:
        return strict_schema
    if "properties" in strict_schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict_schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict_schema.pop("type", None)
    return strict_schema


def children(node: Any) -> list[Any]:
    """Return the parts of a mapping or a list."""
    if isinstance(node, dict):
        return list(node.values())
    if isinstance(node, list):
        return node
    return []


def shared(kinds: dict[str, Any], least: int = 400) -> dict[str, Any]:
    """Return the same schemas with every subtree of at least `least` characters that occurs twice moved into `$defs`."""
    counts: Counter[str] = Counter()

    def count(node: Any) -> None:
        for child in children(node):
            text = json.dumps(child, sort_keys=True)
            if isinstance(child, dict) and "type" in child and len(text) >= least:
                counts[text] += 1
                # What is in it was counted the first time.
                if counts[text] > 1:
                    continue
            count(child)

    count(kinds)
    texts = sorted(text for text, number in counts.items() if number > 1)
    names = {text: f"s{index}" for index, text in enumerate(texts)}

    def replace(node: Any, *, top: bool = False) -> Any:
        if isinstance(node, list):
            return [replace(item) for item in node]
        if not isinstance(node, dict):
            return node
        name = names.get(json.dumps(node, sort_keys=True))
        # A definition is not replaced by a reference to itself.
        if name and not top:
            return {"$ref": f"#/$defs/{name}"}
        return {key: replace(value) for key, value in node.items()}

    definitions = {name: replace(json.loads(text), top=True) for text, name in names.items()}
    return {"kinds": replace(kinds), "$defs": definitions}


def custom(folder: Path) -> dict[str, Any]:
    """Return the schemas of the custom kinds in a folder of CRDs, by `apiVersion/kind`, in the version that is stored."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    kinds: dict[str, Any] = {}
    for path in sorted(folder.glob("*.yaml")):
        for crd in filter(None, yaml.load_all(path.read_text(), loader)):
            spec = crd["spec"]
            for version in spec["versions"]:
                if not version["storage"]:
                    continue
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["status"] = {"type": "object"}
                kinds[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema
    return shared(kinds)


def main(what: str, *rest: str) -> None:
    """Write `kubernetes-VERSION.json` for each version, or `custom.json`."""
    schemas_by_name = {}
    if what == "kubernetes":
        for version in rest:
            schemas_by_name[f"kubernetes-{version}"] = core(version)
    else:
        schemas_by_name["custom"] = custom(Path(rest[0]))
    for name, schemas in schemas_by_name.items():
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(schemas, sort_keys=True, separators=(",", ":")) + "\n")
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
