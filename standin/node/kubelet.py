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
    def __init__(self, store: Store, settings: Settings, faults: Faults) -> None:
        self.store, self.settings, self._faults = store, settings, faults
        self._workers: dict[str, PodWorker] = {}
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
        return self._workers.get(uid_of(pod))

    def alive(self) -> Iterator[PodWorker]:
        """Workers whose pod has not ended."""
        return (worker for worker in self._workers.values() if not worker.task.done())

    def free_address(self) -> str:
        """An address no pod has; not reused at once, so that a stale name leads nowhere."""
        taken = {worker.ip for worker in self.alive()}
        return next(address for address in self._addresses if address not in taken)

    def pull(self, image: str, policy: str | None = None) -> Image:
        """Image of that name; Waiting when it cannot be pulled, or has to be there and is not any more."""
        found = self.settings.image(image)
        if found is None or self._faults.image_is_broken(image):
            if policy == "Never":
                message = f'Container image "{image}" is not present with pull policy of Never'
                raise Waiting("ErrImageNeverPull", message)
            raise Waiting("ImagePullBackOff", f'Back-off pulling image "{image}"')
        return found

    def sync(self) -> None:
        """Start new pods, stop deleted ones, forget those that are gone."""
        live = {uid_of(pod): pod for pod in self.store.list("Pod")}
        for uid, pod in live.items():
            if is_fake(self.store, pod):
                play(self.store, pod)
            elif uid not in self._workers and pod["spec"].get("nodeName") and not finished(pod):
                self._workers[uid] = PodWorker(self, pod)
            if uid in self._workers and terminating(pod):
                self._workers[uid].stop(pod["metadata"]["deletionGracePeriodSeconds"])
        for uid in [uid for uid in self._workers if uid not in live]:
            self._workers[uid].stop(0)
            if self._workers[uid].task.done():
                shutil.rmtree(self._workers.pop(uid).folder, ignore_errors=True)
