"""Builders of the few manifests that the stand-in's own tests need."""

from __future__ import annotations

from typing import Any

from standin.state.objects import Object


def container(*argv: str, name: str = "main", **fields: Any) -> Object:
    """Return a container of a bare system; one word is a shell script."""
    command = ["sh", "-c", argv[0]] if len(argv) == 1 else list(argv)
    return {"name": name, "image": "busybox", "command": command, **fields}


def pod_spec(*argv: str, name: str = "main", restart: str = "Never", **fields: Any) -> Object:
    """Return a pod spec with one container; keys of the container go in `container`, the others in the spec."""
    container_fields = fields.pop("container", {})
    spec = {"restartPolicy": restart, "terminationGracePeriodSeconds": 5}
    return {**spec, "containers": [container(*argv, name=name, **container_fields)], **fields}


def pod(name: str, *argv: str, **fields: Any) -> Object:
    labels = {"app": name}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": pod_spec(*argv, **fields),
    }


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def headless_service(name: str, **selector: str) -> Object:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def job(name: str, template: Object, **spec: Any) -> Object:
    """Return an Indexed Job with one pod unless `spec` says more; `template` is the pod's spec."""
    defaults = {"completionMode": "Indexed", "completions": 1, "parallelism": 1}
    body = {**defaults, **spec, "template": {"spec": template}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": body}


def jobset(name: str, template: Object, failure_policy: Object, **job_spec: Any) -> Object:
    """Return a JobSet of one Job with two pods; `template` is the pod's spec."""
    spec = {
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
        "template": {"spec": template},
        **job_spec,
    }
    replicated = [{"name": "node", "replicas": 1, "template": {"spec": spec}}]
    body = {"failurePolicy": failure_policy, "replicatedJobs": replicated}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": body,
    }
