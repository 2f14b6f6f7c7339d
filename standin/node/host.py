"""The machine under all nodes: its store, settings, images and addresses."""

from __future__ import annotations

import itertools
from collections.abc import Container

from standin.faults import Faults
from standin.node.environment import Waiting
from standin.node.loopback import Addresses
from standin.node.network import pod_addresses
from standin.settings import Image, Settings
from standin.state.store import Store


class Host:
    """The machine that stands for all nodes."""

    def __init__(self, store: Store, settings: Settings, faults: Faults) -> None:
        self.store = store
        self.settings = settings
        self.loopback = Addresses()
        self._faults = faults
        self._addresses = itertools.cycle(pod_addresses())

    def free_address(self, taken: Container[str | None]) -> str:
        """Return an address no pod has; not reused at once, so that a stale name leads nowhere."""
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
