"""Things that every controller has at hand, and the making of the objects they own."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from standin.api.rules import admit_pod
from standin.faults import Faults
from standin.settings import Settings
from standin.state.errors import ApiError
from standin.state.objects import (
    Object,
    name_of,
    namespace_of,
    owner_reference,
    seconds_since,
    terminating,
)
from standin.state.resources import BY_KIND
from standin.state.store import Store


@dataclass
class Context:
    """The cluster, and what controllers remember of it."""

    store: Store
    settings: Settings
    faults: Faults
    # Loop time of the next new pod by Job uid and, with a limit by index, index.
    not_before: dict[tuple[str, int | None], float] = field(default_factory=dict)
    # Namespace and name of each claim that was ever given its folder.
    bound: set[tuple[str, str]] = field(default_factory=set)
    # Annotations of the next pod of a Job's index: how often it has failed.
    index_failures: dict[tuple[str, int], Object] = field(default_factory=dict)

    def owned(self, owner: Object, kind: str) -> list[Object]:
        """Return the objects of a kind that belong to an owner."""
        return self.store.list(kind, namespace_of(owner), owner)

    def create(
        self, owner: Object, kind: str, metadata: Object, spec: Object, version: str | None = None
    ) -> Object | None:
        """Create a dependent; a refusal becomes a FailedCreate event, as real controllers do it.

        `version`: its API version, where the kind has several.
        """
        meta = {
            "namespace": namespace_of(owner),
            "ownerReferences": [owner_reference(owner)],
            **metadata,
        }
        version = version or BY_KIND[kind].api_version
        body = {"apiVersion": version, "kind": kind, "metadata": meta, "spec": copy.deepcopy(spec)}
        try:
            self.faults.check_creation(body)
            if kind == "Pod":
                admit_pod(self.store, body)
            return self.store.create(body)
        except ApiError as error:
            self.store.event(owner, "Warning", "FailedCreate", f"Error creating: {error.message}")
            return None

    def create_pod(
        self, owner: Object, template: Object, metadata: Object, **spec: Any
    ) -> Object | None:
        """Create a pod from a template; `metadata` and `spec` add to what the template says."""
        merged = dict(metadata)
        for field_name in ("labels", "annotations"):
            of_template = template.get("metadata", {}).get(field_name, {})
            merged[field_name] = {**of_template, **metadata.get(field_name, {})}
        return self.create(owner, "Pod", merged, {**template["spec"], **spec})

    def delete_pod(
        self, owner: Object, pod: Object, text: str = "", reason: str = "SuccessfulDelete"
    ) -> None:
        """Delete a pod of an owner, with the event that real controllers leave."""
        self.store.delete(pod)
        self.store.event(owner, "Normal", reason, text or f"Deleted pod: {name_of(pod)}")

    def delete_after(self, obj: Object, ttl_seconds: int | None, ended: Object | None) -> None:
        """Delete an object some time after the condition that ended it."""
        if ttl_seconds is None or ended is None or terminating(obj):
            return
        if seconds_since(ended["lastTransitionTime"]) >= ttl_seconds:
            self.store.delete(obj)
