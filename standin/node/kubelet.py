"""The kubelet of all nodes: a worker for every scheduled pod."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator

from standin.faults import Faults
from standin.node.dns import DnsServer
from standin.node.environment import Waiting
from standin.node.fake import is_fake, play
from standin.node.loopback import Addresses
from standin.node.network import GATEWAY, create_bridge, pod_addresses
from standin.node.pod import PodWorker
from standin.settings import Image, Settings
from standin.state.objects import Object, finished, terminating, uid_of
from standin.state.store import Store

_DNS_PORT = 53


class Kubelet:
    """The kubelets of all nodes."""

    def __init__(self, store: Store, settings: Settings, faults: Faults) -> None:
        self.store = store
        self.settings = settings
        self._faults = faults
        self._workers: dict[str, PodWorker] = {}  # by uid of the pod
        self._addresses = itertools.cycle(pod_addresses())
        self.loopback = Addresses()

    async def start(self) -> None:
        """Set up bridge and DNS; called inside the server's private namespaces."""
        if self.settings.loopback:
            return
        await create_bridge()
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(
            lambda: DnsServer(self.store), local_addr=(GATEWAY, _DNS_PORT)
        )

    def worker(self, pod: Object) -> PodWorker | None:
        """Return the worker of a pod, None where it has none yet."""
        return self._workers.get(uid_of(pod))

    def alive(self) -> Iterator[PodWorker]:
        """Yield the workers whose pod has not ended."""
        for worker in self._workers.values():
            if not worker.task.done():
                yield worker

    def free_address(self) -> str:
        """Return an address no pod has; not reused at once, so that a stale name leads nowhere."""
        taken = {worker.ip for worker in self.alive()}
        return next(address for address in self._addresses if address not in taken)

    def pull(self, image: str, policy: str | None = None) -> Image:
        """Return the image of a name; Waiting when it cannot be pulled, or is not on the node and must be."""
        settings = self.settings.image(image)
        if settings is not None and not self._faults.image_is_broken(image):
            return settings
        if policy == "Never":
            message = f'Container image "{image}" is not present with pull policy of Never'
            raise Waiting("ErrImageNeverPull", message)
        raise Waiting("ImagePullBackOff", f'Back-off pulling image "{image}"')

    def sync(self) -> None:
        """Start new pods, stop deleted ones, forget those that are gone."""
        live = {uid_of(pod): pod for pod in self.store.list("Pod")}
        for uid, pod in live.items():
            if is_fake(self.store, pod):
                play(self.store, pod)
            elif uid not in self._workers and pod["spec"].get("nodeName") and not finished(pod):
                self._workers[uid] = PodWorker(self, pod)
            if uid in self._workers:
                self._serve(self._workers[uid], pod)
        for uid, worker in list(self._workers.items()):
            if uid not in live:
                worker.stop(0)
                if worker.task.done():
                    del self._workers[uid]
                    shutil.rmtree(worker.folder, ignore_errors=True)

    def _serve(self, worker: PodWorker, pod: Object) -> None:
        """Hear of a pod and end it where it is deleted, unless its host is cut off."""
        if self._faults.holds(self.store, pod):
            worker.lose_contact()
            return
        worker.regain_contact()
        # Each time, since a second deletion may shorten the grace period.
        if terminating(pod):
            worker.stop(pod["metadata"]["deletionGracePeriodSeconds"])
