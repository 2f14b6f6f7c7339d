"""NetworkPolicy of a run: its pods reach each other, and nobody else reaches them but Prometheus, where it reads metrics.

The rendezvous trusts whoever connects, as do the collectives on ports of their own choice, and TensorBoard has no login.
`kubetune port-forward` still works: it comes from the node, which a policy does not keep out. What the pods reach
(DNS, the hub, object stores) is not restricted.
"""

from __future__ import annotations

from kubetune.k8s.manifests.monitoring import container_ports
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec


def network_policy(spec: RunSpec) -> list[Manifest]:
    """Return the NetworkPolicy, unless the config does without. Networks that know no policies ignore it."""
    if not spec.kubernetes.network_policy:
        return []
    peers = {"podSelector": {"matchLabels": spec.every_pod()}}
    ingress: list[Manifest] = [{"from": [peers]}]
    for port in container_ports(spec):
        # Prometheus may be anywhere in the cluster, and what it reads is no secret.
        ingress.append({"ports": [{"protocol": "TCP", "port": port["containerPort"]}]})
    body = {**peers, "policyTypes": ["Ingress"], "ingress": ingress}
    return [spec.manifest("networking.k8s.io/v1", "NetworkPolicy", spec.name, "network", spec=body)]
