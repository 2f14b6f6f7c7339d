"""The headless Service that gives each training pod a DNS name for the rendezvous."""

from __future__ import annotations

from kubetune.k8s.manifests.spec import PORT, TRAINER, Manifest, RunSpec


def headless_service(spec: RunSpec) -> Manifest:
    """Return a Service without an address of its own: `POD.NAME` resolves to each pod of the trainer."""
    body = {
        "clusterIP": "None",
        # Pods are ready only after a rendezvous, and the rendezvous needs their names.
        "publishNotReadyAddresses": True,
        "selector": spec.selector(TRAINER),
        "ports": [{"name": "rendezvous", "protocol": "TCP", "port": PORT}],
    }
    return spec.manifest("v1", "Service", spec.name, TRAINER, spec=body)
