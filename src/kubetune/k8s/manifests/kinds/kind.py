"""What the rest of kubetune knows of a kind of Kubernetes object that runs the pods. Read `job` for an example.

A new kind is one file beside this one, with a class and `KIND = TheClass()`, and its name in `KindName` of
config/schema/cluster.py.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from kubetune.k8s.manifests.mistakes import Mistake
from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec
from kubetune.k8s.run_names import LONGEST_NAME

State = Literal["absent", "waiting", "running", "stopped", "done", "failed"]

# What the controller of Jobs says of a pod that its failure policy looked at.
_FAILED_POD = re.compile(
    r"for pod [^/\s]+/(?P<pod>\S+) failed with exit code (?P<code>\d+)"
    r"|Pod [^/\s]+/(?P<evicted>\S+) has condition DisruptionTarget"
)


class Resource(NamedTuple):
    """A kind of object at the API server."""

    name: str
    api_version: str
    plural: str

    @property
    def group(self) -> str:
        """Return the API group; empty for the core."""
        return self.api_version.rpartition("/")[0]


class PodTemplate(NamedTuple):
    """A pod template within an object: its name in messages, and how many pods are made of it."""

    title: str
    template: Manifest
    pods: int


class WorkloadKind(ABC):
    """A kind of object that runs the pods: how it is rendered, and what its status means."""

    resource: ClassVar[Resource]
    others: ClassVar[tuple[Resource, ...]] = ()  # objects of other kinds that it needs
    install: ClassVar[str | None] = None  # how a cluster gets it; None: every cluster has it
    container: ClassVar[str] = TRAINER  # the trainer's container, which some operators look for
    # Starts the trainer after what prepares; else `submit` does so.
    starts_in_order: ClassVar[bool] = False
    # Its controller fails a run that has started again too often.
    counts_restarts: ClassVar[bool] = True
    never_ends: ClassVar[bool] = False  # its pods stay when the run has ended
    is_suspended_by_kueue: ClassVar[bool] = True  # Kueue lets it go by its field `suspend`
    # An operator makes Volcano's PodGroup of its pods.
    is_grouped_by_operator: ClassVar[bool] = False
    jobset_keys: ClassVar[frozenset[str]] = frozenset()  # keys of kubernetes.jobset that it knows
    # Conditions of an object that has ended well.
    ended_well: ClassVar[tuple[str, ...]] = ("Complete",)
    failed_pod: ClassVar[re.Pattern[str]] = _FAILED_POD  # its controller's words about a failed pod
    # Label or annotation of a pod that holds the number of its node.
    node_label: ClassVar[str] = "batch.kubernetes.io/job-completion-index"
    # For kustomize: where objects keep pod templates, and labels outside of them, by their kind.
    template_paths: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    label_paths: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """Kind as Kubernetes writes it."""
        return self.resource.name

    @abstractmethod
    def render(self, spec: RunSpec) -> list[Manifest]:
        """Return the objects that make the pods, the workload last."""

    def workload(self, spec: RunSpec, body: Manifest) -> Manifest:
        """Return the workload with this `spec`, and the labels by which Kueue queues it."""
        return spec.manifest(
            self.resource.api_version,
            self.name,
            spec.name,
            TRAINER,
            more_labels=spec.queue_labels(),
            spec=body,
        )

    @abstractmethod
    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the pod templates of an object of this kind, or of one that it needs."""

    def rbac(self, spec: RunSpec) -> list[tuple[str, list[str]]]:
        """Return what people who operate a run change: API groups with their resources."""
        plurals = [self.resource.plural]
        plurals += [other.plural for other in self.others]
        rights = [(self.resource.group, plurals)]
        # The Job that prepares is an object beside the workload.
        if spec.prepares and not self.starts_in_order and self.resource.group != "batch":
            rights.append(("batch", ["jobs"]))
        return rights

    def longest_name(self, spec: RunSpec) -> int:
        """Return how many characters the run's name may have: pods' names are made of it."""
        return LONGEST_NAME

    def findings(self, spec: RunSpec) -> Iterator[Mistake]:
        """Yield what is wrong with, or unwise about, a run of this kind."""
        yield from ()

    def beside(self, spec: RunSpec) -> list[str]:
        """Return the names of Jobs beside the workload, whose pods start, stop and end with its pods."""
        return []

    def claims(self, spec: RunSpec) -> list[str]:
        """Return the names of claims that the workload makes, and takes with it when it is deleted."""
        return []

    def completions(self, workload: Manifest) -> list[int]:
        """Return the numbers of pods that a workload waits for the end of."""
        return []

    def suspends(self, workload: Mapping[str, Any]) -> bool:
        """True if a workload is asked to have no pods."""
        return bool(workload["spec"].get("suspend"))

    def suspension(self, nodes: int, *, suspend: bool) -> Manifest:
        """Return the patch that stops a workload (its pods get SIGTERM), or lets it go on with as many pods as nodes."""
        return {"spec": {"suspend": suspend}}

    def manager(self, workload: Mapping[str, Any]) -> str | None:
        """Return the controller that runs the workload in place of this cluster's own, such as MultiKueue's."""
        manager: str | None = workload["spec"].get("managedBy")
        return manager

    def state_of(self, workload: Mapping[str, Any]) -> tuple[State | None, str]:
        """Return how a workload ended, with its controller's words, or None while it has not ended."""
        # A good end goes first: a Job may have failed pods, and succeed all the same.
        conditions = (workload.get("status") or {}).get("conditions") or []
        for condition in conditions:
            if condition["status"] == "True" and condition["type"] in self.ended_well:
                return "done", str(condition.get("message") or "")
        for condition in conditions:
            if condition["status"] == "True" and condition["type"] == "Failed":
                message = f"{condition.get('reason', '')}: {condition.get('message', '')}"
                return "failed", message.strip(": ")
        return None, ""

    def node_of(self, pod: Mapping[str, Any]) -> int | None:
        """Return the node of the run that a pod of this kind is; None for pods of other kinds."""
        metadata = pod["metadata"]
        for mapping in (metadata.get("labels"), metadata.get("annotations")):
            if mapping and self.node_label in mapping:
                return int(mapping[self.node_label])
        return None
