"""Carries out the faults that tests ask for: those in force (faults.py), and those that happen to pods and nodes."""

from __future__ import annotations

from standin.faults import Faults, cut_host, drain
from standin.node.fake import end, is_fake
from standin.node.kubelet import Kubelet
from standin.state.objects import Object, set_condition
from standin.state.store import Store


def _kill_pod(store: Store, kubelet: Kubelet, namespace: str, pod: str, reason: str) -> None:
    """Kill all containers of a pod, as the kernel does."""
    obj = store.get("Pod", namespace, pod)
    worker = kubelet.worker(obj) if obj else None
    if worker is None or not worker.kill(reason):
        raise KeyError(f"there is no running pod {namespace}/{pod}")


def inject(faults: Faults, store: Store, kubelet: Kubelet, name: str, body: Object) -> None:
    """Carry out one request; KeyError or TypeError when there is no such fault, pod or node, or no such argument."""
    match name:
        case "kill-pod":
            _kill_pod(store, kubelet, **body)
        case "drain":
            drain(store, body["node"])
        case "end-fakes":
            for pod in store.list("Pod", body["namespace"]):
                if is_fake(store, pod):
                    end(store, pod, body["code"])
        case "never-schedule":
            faults.never_schedule(**body)
        case "leave-unbound":
            faults.leave_unbound(**body)
        case "leave-kubelet":
            faults.leave_kubelet(**body)
        case "cut-host":
            cut_host(store, faults, body["node"], evicts=body.get("evicts", True))
        case "restart-kubelet":
            faults.restart_kubelet(**body)
        case "lag-behind":
            faults.lag_behind(**body)
        case "break-image":
            faults.break_image(**body)
        case "uninstall":
            faults.uninstall(**body)
        case "refuse":
            faults.refuse(**body)
        case "trouble":
            faults.trouble(**body)
        case "clear":
            faults.clear()
            for node in store.list("Node"):
                node["spec"].pop("unschedulable", None)
                node["spec"].pop("taints", None)
                set_condition(node["status"], "Ready", "True", "KubeletReady")
                store.touch(node)
        case _:
            raise KeyError(f"there is no fault {name}")
    store.changed.set()
