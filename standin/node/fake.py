"""Pods of fake nodes (label `type: kwok`): states without processes, by the hundred."""

from __future__ import annotations

from standin.state.objects import Object, finished, labels_of, now, set_condition, terminating
from standin.state.store import Store

LABELS = {"type": "kwok"}
_ADDRESS = "10.255.255.1"
_TERMINATED = 143


def is_fake(store: Store, pod: Object) -> bool:
    """True if a pod was put onto a fake node."""
    node = store.get("Node", "", pod["spec"].get("nodeName") or "")
    return node is not None and LABELS.items() <= labels_of(node).items()


def play(store: Store, pod: Object) -> None:
    """Let a pod run, or go where it is to be deleted."""
    if terminating(pod):
        end(store, pod, _TERMINATED)
        store.delete(pod, grace_seconds=0)
    elif pod["status"].get("phase") == "Pending":
        _set_state(store, pod, "Running", {"running": {"startedAt": now()}})


def end(store: Store, pod: Object, code: int) -> None:
    """Let a pod end with an exit code."""
    if finished(pod):
        return
    phase = "Succeeded"
    reason = "Completed"
    if code:
        phase = "Failed"
        reason = "Error"
    terminated = {"exitCode": code, "reason": reason, "startedAt": now(), "finishedAt": now()}
    _set_state(store, pod, phase, {"terminated": terminated})


def _set_state(store: Store, pod: Object, phase: str, state: Object) -> None:
    """Say of a pod and all of its containers that they are in a state."""
    is_running = phase == "Running"
    statuses = []
    for spec in pod["spec"]["containers"]:
        statuses.append(
            {
                "name": spec["name"],
                "image": spec["image"],
                "ready": is_running,
                "started": is_running,
                "restartCount": 0,
                "state": state,
                "lastState": {},
            }
        )
    pod["status"].update(phase=phase, containerStatuses=statuses, podIP=_ADDRESS)
    set_condition(pod["status"], "Ready", str(is_running))
    store.touch(pod)
