"""Strict schemas of Kubernetes and of the custom kinds, for tests: a key that a server would not know is an error.

`kubernetes-1.29.json` and `kubernetes-1.37.json` are the oldest and the newest supported release; `custom.json` holds
JobSet v0.12, Kubeflow Trainer v2.3, PyTorchJob v1.9 and the queues of Kueue v0.19. `generate.py` makes them. They come
from the Kubernetes, JobSet, Kueue and Kubeflow projects (Apache-2.0). `by_hand.json` is: the fields of Volcano's PodGroup,
of the Prometheus operator's PodMonitor and PrometheusRule, and of KServe's InferenceService and LLMInferenceService (v0.20)
those that are set here.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

# A grammar of addresses, which jsonschema takes where it is installed: it is compiled for a second, and never used.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

from jsonschema import Draft202012Validator  # noqa: E402

OLDEST, NEWEST = "1.29", "1.37"


@cache
def _load(name: str) -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    return schemas


@cache
def validator(api_version: str, kind: str, version: str = NEWEST) -> Draft202012Validator | None:
    """Return the validator of `api_version/kind` at a Kubernetes minor version, or None for a kind not kept here."""
    for name in (f"kubernetes-{version}", "custom", "by_hand"):
        schemas = _load(name)
        schema = schemas["kinds"].get(f"{api_version}/{kind}")
        if schema:
            return Draft202012Validator({**schema, "$defs": schemas["$defs"]})
    return None


def problems(obj: dict[str, Any], version: str = NEWEST) -> list[str]:
    """Return the problems for which a strict server would refuse one object, each as `path: message`."""
    schema = validator(obj["apiVersion"], obj["kind"], version)
    if schema is None:
        return [f"{obj['apiVersion']}/{obj['kind']}: no schema is kept for this kind"]
    return [f"{error.json_path}: {error.message[:300]}" for error in schema.iter_errors(obj)]
