"""The other nodes, watched while the ranks of this one run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kubetune.supervisor.gang.centre import Centre
from kubetune.supervisor.gang.link import LOOK_SECONDS, Link, Loss
from kubetune.supervisor.gang.spoke import Spoke
from kubetune.supervisor.place import Place

# After another node is lost: time for the ranks of this one to notice it and to end by themselves.
_LOSS_SECONDS = 10.0


def link_of(place: Place, run_dir: Path) -> Link:
    """Return this node's side of the gang. Raise EnvironmentFault if node 0 cannot listen."""
    return Spoke(place, run_dir) if place.node else Centre(place, run_dir)


class PeerWatch:
    """Watches the other nodes in a thread while this one's ranks run, and ends them if another node is lost."""

    def __init__(
        self,
        link: Link,
        *,
        is_busy: Callable[[], bool],
        kill: Callable[[], None],
        grace_seconds: float,
    ) -> None:
        """`is_busy()`: a rank still does something that needs no other node. `kill()` ends the ranks.

        `grace_seconds`: how long torchrun may take to end them where one has died.
        """
        self.loss: Loss | None = None
        self.has_killed = False
        self._link = link
        self._is_busy = is_busy
        self._kill = kill
        self._grace_seconds = grace_seconds
        self._left = threading.Event()  # the ranks have ended
        self._thread = threading.Thread(target=self._watch, name="gang", daemon=True)

    def __enter__(self) -> PeerWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline = math.inf
        while not self._left.is_set():
            loss = self._link.serve(LOOK_SECONDS)
            now = time.monotonic()
            if loss is not None and loss != self.loss:
                self.loss = loss
                # First the ranks may notice it themselves, and end with a reason of their own.
                patience = _LOSS_SECONDS
                if loss.has_followed:
                    patience += self._grace_seconds
                deadline = min(deadline, now + patience)
            if now >= deadline and not self._is_busy():
                self.has_killed = True
                self._kill()
                return
