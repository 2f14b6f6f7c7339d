"""StatefulSet with a headless Service: stable names and a cache that stays with each of them.

The weakest kind for training: it cannot end. The agent therefore stays after the run, so that the pods are not started
again and again, and deleting the StatefulSet is the way to free the nodes.
"""

from __future__ import annotations

from kubetune.base.signals import STAY
from kubetune.k8s.manifests.environment import POD_INDEX, RUN_NAME, rendezvous, value
from kubetune.k8s.manifests.kinds.gang import pod_group
from kubetune.k8s.manifests.kinds.services import headless_service
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec
from kubetune.k8s.manifests.storage import cache_claim_spec, cache_is_per_pod
from kubetune.k8s.manifests.trainer import pod_template


def workload(spec: RunSpec) -> list[Manifest]:
    """Service, PodGroup where there is one, and StatefulSet. Pod names resolve as `NAME-INDEX.NAME`."""
    variables = [
        *rendezvous(spec, f"{RUN_NAME}-0.{RUN_NAME}", POD_INDEX),
        value(STAY, 1),
    ]
    template = pod_template(
        spec, rendezvous=variables, restart_policy="Always", cache_from_template=True
    )
    body: Manifest = {
        "serviceName": spec.name,
        "replicas": spec.nodes,
        # In order, pod 1 would start once pod 0 is ready, and pod 0 waits for pod 1.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": spec.selector(TRAINER)},
        "template": template,
    }
    if cache_is_per_pod(spec):
        body["volumeClaimTemplates"] = [
            {
                "metadata": {"name": "cache", "labels": spec.labels("storage")},
                "spec": cache_claim_spec(spec),
            }
        ]
        body["persistentVolumeClaimRetentionPolicy"] = {
            "whenDeleted": "Delete",
            "whenScaled": "Retain",
        }
    labels = spec.queue_labels()
    return [
        headless_service(spec),
        *pod_group(spec, template),
        spec.manifest("apps/v1", "StatefulSet", spec.name, TRAINER, more_labels=labels, spec=body),
    ]
