"""Pods of fake nodes (label `type: kwok`): states without processes, by the hundred."""

from __future__ import annotations

from standin.state.objects import Object, finished, labels_of, now, set_condition, terminating
from standin.state.store import Store

LABELS = {"type": "kwok"}


def is_fake(store: Store, pod: Object) -> bool:
    """A pod was put onto a fake node."""
    node = store.get("Node", "", pod["spec"].get("nodeName") or "")
    return node is not None and LABELS.items() <= labels_of(node).items()


def play(store: Store, pod: Object) -> None:
    """Let a pod run, or go where it is to be deleted."""
    if terminating(pod):
        end(store, pod, 143)
        store.delete(pod, grace_seconds=0)
    elif pod["status"].get("phase") == "Pending":
        _say(store, pod, "Running", {"running": {"startedAt": now()}})


def end(store: Store, pod: Object, code: int) -> None:
    """Let a pod end."""
    if not finished(pod):
        reason = "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason, "startedAt": now(), "finishedAt": now()}
        _say(store, pod, "Failed" if code else "Succeeded", {"terminated": terminated})


def _say(store: Store, pod: Object, phase: str, state: Object) -> None:
    runs = phase == "Running"
    facts = {"ready": runs, "started": runs, "restartCount": 0, "state": state, "lastState": {}}
    statuses = [
        {"name": spec["name"], "image": spec["image"], **facts}
        for spec in pod["spec"]["containers"]
    ]
    pod["status"].update(phase=phase, containerStatuses=statuses, podIP="10.255.255.1")
    set_condition(pod["status"], "Ready", str(runs))
    store.touch(pod)
