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
    """A schema without prose; `names` says that the keys of this mapping are field names, so none is dropped."""
    if isinstance(schema, list):
        return [trimmed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema.replace(DEFINITIONS, "#/$defs/") if isinstance(schema, str) else schema
    if names:
        return {k: trimmed(v) for k, v in schema.items()}
    kept = {k: v for k, v in schema.items() if k not in DROPPED and not k.startswith("x-")}
    return {k: trimmed(v, names=k == "properties") for k, v in kept.items()}


def references(schema: Any) -> set[str]:
    """Names of the definitions a schema points at."""
    if isinstance(schema, list):
        return set().union(*map(references, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    own = (
        {schema["$ref"].removeprefix("#/$defs/")} if isinstance(schema.get("$ref"), str) else set()
    )
    return own.union(*(references(v) for v in schema.values())) if schema else own


def core(version: str) -> dict[str, Any]:
    """Schemas of Kubernetes' own kinds at one minor version, by `apiVersion/kind`."""
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
    """A CRD's OpenAPI schema as JSON Schema: unknown keys are errors, int-or-string is understood, CEL is not.

    Metadata of the templates inside a CRD is written there as a bare object and so stays open, as on a server.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {k: strict(v) for k, v in schema.items()}
    kept = {k: v for k, v in schema.items() if k not in DROPPED and not k.startswith("x-")}
    out = {k: strict(v, names=k == "properties") for k, v in kept.items()}
    if "properties" in out and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
    return out


def shared(kinds: dict[str, Any], least: int = 400) -> dict[str, Any]:
    """The same schemas with every subtree of at least `least` characters that occurs twice moved into `$defs`."""
    seen: Counter[str] = Counter()

    def count(node: Any) -> None:
        for child in (
            node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        ):
            text = json.dumps(child, sort_keys=True)
            if isinstance(child, dict) and "type" in child and len(text) >= least:
                seen[text] += 1
                if seen[text] > 1:
                    continue
            count(child)

    count(kinds)
    names = {text: f"s{i}" for i, text in enumerate(sorted(t for t, n in seen.items() if n > 1))}

    def replace(node: Any, *, top: bool = False) -> Any:
        if isinstance(node, list):
            return [replace(item) for item in node]
        if not isinstance(node, dict):
            return node
        name = None if top else names.get(json.dumps(node, sort_keys=True))
        return {"$ref": f"#/$defs/{name}"} if name else {k: replace(v) for k, v in node.items()}

    definitions = {name: replace(json.loads(text), top=True) for text, name in names.items()}
    return {"kinds": replace(kinds), "$defs": definitions}


def custom(folder: Path) -> dict[str, Any]:
    """Schemas of the namespaced custom kinds in a folder of CRDs, by `apiVersion/kind`."""
    import yaml

    kinds: dict[str, Any] = {}
    for path in sorted(folder.glob("*.yaml")):
        for crd in filter(
            None, yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        ):
            spec = crd["spec"]
            for version in spec["versions"] if spec["scope"] == "Namespaced" else ():
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["status"] = {"type": "object"}
                kinds[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema
    return shared(kinds)


def main(what: str, *rest: str) -> None:
    """Write `kubernetes-VERSION.json` for each version, or `custom.json`."""
    made = (
        {f"kubernetes-{v}": core(v) for v in rest}
        if what == "kubernetes"
        else {"custom": custom(Path(rest[0]))}
    )
    for name, schemas in made.items():
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(schemas, sort_keys=True, separators=(",", ":")) + "\n")
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
