"""One node's side of the gang: what it waits for, what a start is, and how one is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kubetune import errors
from kubetune.rundir.exit_status import ExitStatus

# Between two looks at what else may have happened: a request to stop, the end of the run, the time limit.
LOOK_SECONDS = 0.5

# Between two looks into the run directory, which may lie on a slow disk.
_DIRECTORY_SECONDS = 5.0
_LONGEST_REASON = 2000  # characters


class Absent(errors.LostPeer):
    """A node did not come in time."""


class Over(Exception):
    """The run's directory says that it is over, so nobody will come any more."""


class Stopping(Exception):
    """Somebody asked this process to stop while it waited for others."""


@dataclass(frozen=True)
class Loss:
    """Why a start cannot go on."""

    reason: str
    # True if that node only lost others itself. The cause is elsewhere, perhaps on this node, and will show.
    has_followed: bool = False

    def or_worse(self, other: Loss) -> Loss:
        """Return the one that is nearer to the cause, this one if they are alike."""
        return other if self.has_followed and not other.has_followed else self


@dataclass(frozen=True)
class Start:
    """What node 0 decides for one start of all nodes."""

    id: str  # another one for each start
    port: int  # of torch's store, on node 0


@dataclass
class Waiting:
    """How long an agent waits for the others, and what ends that early."""

    seconds: float
    is_stopping: Callable[[], object]
    is_over: Callable[[], bool]  # reads the run directory, so it is not asked each time
    _next: float = 0.0  # when it is asked again

    def look(self) -> None:
        """Raise Stopping or Over if there is nothing to wait for any more."""
        if self.is_stopping():
            raise Stopping
        if time.monotonic() >= self._next:
            if self.is_over():
                raise Over
            self._next = time.monotonic() + _DIRECTORY_SECONDS


class Link(Protocol):
    """This node's side of the gang."""

    def meet(self, waiting: Waiting) -> Start:
        """Wait until all nodes have come. Raise Absent, Over, Stopping, or EnvironmentFault."""

    def serve(self, seconds: float) -> Loss | None:
        """Handle what comes within `seconds`. Return why the start cannot go on, None while it can."""

    def leave(self, status: ExitStatus) -> None:
        """Tell the others how the start ended here, and part."""


def last_message(status: ExitStatus) -> dict[str, Any]:
    """Return the last message of a node."""
    has_followed = status.code == errors.LOST_PEER and errors.only_followed(
        status.code, status.error
    )
    reason = status.reason[:_LONGEST_REASON]
    return {"code": status.code, "reason": reason, "followed": has_followed}


def loss_by(title: str, message: dict[str, Any]) -> Loss:
    """Return what another node's last message means for this one."""
    reason = f"{title} ended with exit code {message['code']}: {message.get('reason')}"
    return Loss(reason, bool(message.get("followed")))
