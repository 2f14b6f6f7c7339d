"""StatefulSet with a headless Service: stable names and a cache that stays with each of them.

The weakest kind for training: it cannot end. The agent therefore stays after the run, so that the pods are not started
again and again. Only deleting the StatefulSet frees the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kubetune.base.signals import STAY
from kubetune.k8s.manifests.initialisers import init_containers
from kubetune.k8s.manifests.kinds.gang_scheduling import Members, join, pod_group
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.kinds.services import rendezvous_service
from kubetune.k8s.manifests.mistakes import Mistake, advice, error
from kubetune.k8s.manifests.pod_environment import POD_INDEX, RUN_NAME, rendezvous, value
from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec, kind_and_name
from kubetune.k8s.manifests.storage import cache_claim_spec, cache_is_per_pod
from kubetune.k8s.manifests.trainer import pod_template


class StatefulSet(WorkloadKind):
    """A StatefulSet, whose pods are started again however they end."""

    resource = Resource("StatefulSet", "apps/v1", "statefulsets")
    never_ends = True
    counts_restarts = False
    is_suspended_by_kueue = False
    node_label = "apps.kubernetes.io/pod-index"
    template_paths: ClassVar = {"StatefulSet": ("spec/template",)}
    label_paths = ("spec/selector/matchLabels", "spec/volumeClaimTemplates/metadata/labels")

    def render(self, spec: RunSpec) -> list[Manifest]:
        """Return Service, PodGroup where the run needs it, and StatefulSet. Pod names resolve as `NAME-INDEX.NAME`."""
        variables = rendezvous(spec, f"{RUN_NAME}-0.{RUN_NAME}", POD_INDEX)
        variables.append(value(STAY, 1))
        template = pod_template(
            spec,
            rendezvous=variables,
            restart_policy="Always",
            cache_from_template=True,
            init_containers=init_containers(spec),
        )
        template = join(spec, template)

        body: Manifest = {
            "serviceName": spec.name,
            "replicas": spec.nodes,
            # In order, pod 1 would start once pod 0 is ready, and pod 0 waits for pod 1.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": spec.selector(TRAINER)},
            "template": template,
        }

        # A pod that is made again gets the claim that it had, with its downloads.
        if cache_is_per_pod(spec):
            # What a run leaves is on the outputs volume, so the caches go with the StatefulSet.
            claim = {
                "metadata": {"name": "cache", "labels": spec.labels("storage")},
                "spec": cache_claim_spec(spec),
            }
            body["volumeClaimTemplates"] = [claim]
            body["persistentVolumeClaimRetentionPolicy"] = {
                "whenDeleted": "Delete",
                "whenScaled": "Retain",
            }
        return [
            rendezvous_service(spec),
            *pod_group(spec, [Members(template, spec.nodes)]),
            self.workload(spec, body),
        ]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the only template."""
        pods = int(obj["spec"].get("replicas", 1))
        return [PodTemplate(kind_and_name(obj), obj["spec"]["template"], pods)]

    def findings(self, spec: RunSpec) -> Iterator[Mistake]:
        """Yield advice about a workload that never ends."""
        yield advice(
            "kubernetes.kind",
            "a StatefulSet never ends: delete it when the run is done, or use job",
        )
        if spec.kubernetes.max_runtime_seconds is not None:
            yield error(
                "kubernetes.max_runtime_seconds",
                "a StatefulSet cannot end a run; use job, or leave it out",
            )

    def suspends(self, workload: Mapping[str, Any]) -> bool:
        """True if it is asked to have no replicas."""
        return bool(workload["spec"].get("replicas") == 0)

    def suspension(self, nodes: int, *, suspend: bool) -> Manifest:
        """Return the patch of its replicas."""
        replicas = nodes
        if suspend:
            replicas = 0
        return {"spec": {"replicas": replicas}}


KIND = StatefulSet()
