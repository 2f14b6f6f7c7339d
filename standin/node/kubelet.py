"""The kubelet of all nodes: a worker for every scheduled pod."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

from standin.faults import Faults
from standin.node.dns import DnsServer
from standin.node.fake import is_fake, play
from standin.node.host import Host
from standin.node.network import GATEWAY, create_bridge
from standin.node.pod import PodWorker
from standin.settings import Settings
from standin.state.objects import Object, finished, terminating, uid_of
from standin.state.store import Store

_DNS_PORT = 53


class Kubelet:
    """The kubelets of all nodes."""

    def __init__(self, store: Store, settings: Settings, faults: Faults) -> None:
        self.store = store
        self._host = Host(store, settings, faults)
        self._faults = faults
        self._workers: dict[str, PodWorker] = {}  # by uid of the pod

    async def start(self) -> None:
        """Set up bridge and DNS; called inside the server's private namespaces."""
        if self._host.settings.loopback:
            return
        await create_bridge()
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(
            lambda: DnsServer(self.store), local_addr=(GATEWAY, _DNS_PORT)
        )

    def worker(self, pod: Object) -> PodWorker | None:
        """Return the worker of a pod, None if it has none yet."""
        return self._workers.get(uid_of(pod))

    def _running(self) -> Iterator[PodWorker]:
        """Yield the workers of pods that have not ended."""
        for worker in self._workers.values():
            if not worker.task.done():
                yield worker

    def sync(self) -> None:
        """Start new pods, stop deleted ones, forget those that are gone."""
        live = {uid_of(pod): pod for pod in self.store.list("Pod")}
        for uid, pod in live.items():
            if is_fake(self.store, pod):
                play(self.store, pod)
            elif uid not in self._workers and pod["spec"].get("nodeName") and not finished(pod):
                self._workers[uid] = PodWorker(self._host, pod, self._running)
            if uid in self._workers:
                self._serve(self._workers[uid], pod)
        for uid, worker in list(self._workers.items()):
            if uid not in live:
                worker.stop(0)
                if worker.task.done():
                    del self._workers[uid]
                    shutil.rmtree(worker.folder, ignore_errors=True)

    def _serve(self, worker: PodWorker, pod: Object) -> None:
        """Hear of a pod and end it if it is deleted, unless its host is cut off."""
        if self._faults.holds(self.store, pod):
            worker.lose_contact()
            return
        worker.regain_contact()
        # Each time, since a second deletion may shorten the grace period.
        if terminating(pod):
            worker.stop(pod["metadata"]["deletionGracePeriodSeconds"])
