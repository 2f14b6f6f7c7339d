"""The headless Services that give each pod of a group a DNS name."""

from __future__ import annotations

from kubetune.k8s.manifests.run_spec import PORT, TRAINER, Manifest, RunSpec


def rendezvous_service(spec: RunSpec) -> Manifest:
    """Return the Service of the trainer's pods, which find each other by name."""
    return headless_service(spec, spec.name, TRAINER, "rendezvous", PORT)


def headless_service(
    spec: RunSpec, name: str, component: str, port_name: str, port: int
) -> Manifest:
    """Return a Service without an address of its own: `POD.NAME` resolves to each pod of the component."""
    body = {
        "clusterIP": "None",
        # Pods are ready only after a rendezvous, and the rendezvous needs their names.
        "publishNotReadyAddresses": True,
        "selector": spec.selector(component),
        "ports": [{"name": port_name, "protocol": "TCP", "port": port}],
    }
    return spec.manifest("v1", "Service", name, component, spec=body)
