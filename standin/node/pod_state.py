"""A pod as its containers and volumes know it: its folder, its status, and when it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Callable, Iterable
from typing import TypeVar

from standin.node.environment import Waiting
from standin.node.host import Host
from standin.state.objects import (
    Object,
    name_of,
    namespace_of,
    set_condition,
    terminating,
    uid_of,
)

T = TypeVar("T")

_RETRY_SECONDS = 0.2
_END_REASONS = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}


class PodState:
    """One pod on its node. `running` returns the pods that have not ended, this one too."""

    def __init__(self, host: Host, pod: Object, running: Callable[[], Iterable[PodState]]) -> None:
        self.host = host
        self.store = host.store
        self.running = running
        self.pod = pod
        self.spec = pod["spec"]
        self.namespace = namespace_of(pod)
        self.name = name_of(pod)
        self.folder = host.settings.state / "pods" / uid_of(pod)
        self.claims: set[str] = set()  # that it uses
        self.files: dict[str, str] = {}  # written into every container's root, by path
        self.stopping = asyncio.Event()
        self.sandbox: Process | None = None  # holds the pod's namespaces
        self.ip: str | None = None

    @property
    def sandbox_pid(self) -> int | None:
        """Return the process that holds the pod's namespaces; None if it has none."""
        if self.sandbox is None:
            return None
        return self.sandbox.pid

    def publish(self, phase: str | None = None) -> None:
        """Bring the pod's conditions (and phase) in line with its containers, and tell watchers."""
        status = self.pod["status"]
        if phase:
            status["phase"] = phase
        are_ready = all(entry["ready"] for entry in status["containerStatuses"])
        is_ready = are_ready and not terminating(self.pod)
        reason = "" if is_ready else "ContainersNotReady"
        reason = _END_REASONS.get(status["phase"], reason)
        inits = status.get("initContainerStatuses", [])
        set_condition(status, "PodReadyToStartContainers", str(self.ip is not None))
        set_condition(status, "Initialized", str(all(entry["ready"] for entry in inits)))
        set_condition(status, "ContainersReady", str(is_ready), reason)
        set_condition(status, "Ready", str(is_ready), reason)
        self.store.touch(self.pod)

    async def stopped_within(self, seconds: float) -> bool:
        """Wait; return True as soon as the pod is asked to stop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        return self.stopping.is_set()

    async def retry(
        self, action: Callable[[], T], event: str, status: Object | None = None
    ) -> T | None:
        """Call `action` until it raises Waiting no more; return None when the pod is stopped first."""
        while not self.stopping.is_set():
            try:
                return action()
            except Waiting as waiting:
                self.store.event(self.pod, "Warning", event, waiting.message)
                if status is not None:
                    facts = {"reason": waiting.reason, "message": waiting.message}
                    status["state"] = {"waiting": facts}
                    self.publish()
                await self.stopped_within(_RETRY_SECONDS)
        return None
