"""Any node of a gang but node 0: it connects to node 0 until that lets it start, and hears from it who is lost."""

from __future__ import annotations

import selectors
import socket
import time
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.rundir import waits
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.gang import wire
from kubetune.supervisor.gang.link import (
    LOOK_SECONDS,
    Absent,
    Loss,
    Start,
    Waiting,
    last_message,
    loss_by,
)
from kubetune.supervisor.gang.run_id import read_identity
from kubetune.supervisor.gang.sockets import Lookup, connected
from kubetune.supervisor.gang.wire import Connection, Gone
from kubetune.supervisor.place import Place

# A refusal counts once it has lasted for so long: the address may still lead to a pod that was there before, and what
# node 0 has written may arrive late on a shared disk. Changed by tests alone.
REFUSED_SECONDS = 120.0

# Node 0 gives up first, so that all nodes end with its message.
_MARGIN_SECONDS = 5.0


class Spoke:
    """Any other node, which is connected to node 0."""

    def __init__(self, place: Place, run_dir: Path) -> None:
        self._place = place
        self._run_dir = run_dir
        self._connection: Connection | None = None
        self._lookup: Lookup | None = None  # that goes on
        self._reason = ""  # why node 0 was not reached, for messages
        self._waits_for = ""  # whom node 0 waits for, as it says
        self._loss: Loss | None = None
        self._is_released = False  # node 0 has ended well
        self._refused_since: float | None = None

    def meet(self, waiting: Waiting) -> Start:
        """Wait until node 0 says that all have come. Raise Absent if it does not, or names others that do not come."""
        place = self._place
        began = time.monotonic()
        with waits.noted(self._run_dir, place.node) as note:
            fault_injection.reach("node.waits")
            while True:
                waiting.look()
                note(self._waits_for or self._waits_without_word())
                seconds = waiting.seconds
                if self._waits_for:
                    seconds += (
                        _MARGIN_SECONDS  # node 0 has answered, and says itself who does not come
                    )
                if time.monotonic() - began >= seconds:
                    raise Absent(self._not_met(waiting.seconds))
                start = self._try_to_meet()
                if start is not None:
                    fault_injection.reach("node.met")
                    return start

    def _waits_without_word(self) -> str:
        """Return what this node waits for while node 0 has not said whom it waits for."""
        if self._lookup is None:
            return "node 0"
        return f"a name server to say where node 0 is ({self._place.master_addr})"

    def _not_met(self, seconds: float) -> str:
        here = f"node {self._place.node} on {socket.gethostname()}"
        address = f"{self._place.master_addr}:{self._place.master_port}"
        if self._waits_for:
            return f"{here} waited for {self._waits_for} for {seconds:g} s"
        return waits.not_found(here, "node 0", address, seconds, self._reason)

    def _try_to_meet(self) -> Start | None:
        """Connect, or hear what node 0 says. Return the start, None while there is none."""
        if self._connection is None:
            self._connect()
            return None
        try:
            messages = self._received(LOOK_SECONDS)
            if not self._connection.has_spoken:
                # Node 0 answers at once. This may be what has the address of its former pod now.
                if time.monotonic() - self._connection.since > wire.SILENT_SECONDS:
                    raise Gone("takes connections and does not answer")
                return None
            for message in messages:
                start = self._hear_before_start(message)
                if start is not None:
                    return start
        except Gone as gone:
            # Node 0 itself is started again now, so this node waits for the next one.
            self._retry_later(f"it {gone}")
        return None

    def _hear_before_start(self, message: dict[str, Any]) -> Start | None:
        """Handle a message of node 0 while this node waits. Return the start, None while there is none."""
        if "refused" in message:
            reason = str(message["refused"])
            now = time.monotonic()
            if self._refused_since is None:
                self._refused_since = now
                print(
                    f"kubetune: node 0 refuses this node, which tries again for {REFUSED_SECONDS:g} s: {reason}",
                    flush=True,
                )
            if now - self._refused_since >= REFUSED_SECONDS:
                raise errors.EnvironmentFault(reason)
            raise Gone(f"refuses this node: {reason}")
        self._refused_since = None
        if "absent" in message:
            raise Absent(str(message["absent"]))
        if "waits" in message:
            self._waits_for = str(message["waits"])
        if "start" in message:
            port = message.get("port")
            if type(port) is not int:
                raise Gone("is no agent of kubetune")
            return Start(str(message["start"]), port)
        return None

    def _retry_later(self, reason: str) -> None:
        """Part, and wait a little, so that nothing is connected to again and again without a pause."""
        self._part()
        self._reason = reason
        self._waits_for = ""
        time.sleep(LOOK_SECONDS)

    def _connect(self) -> None:
        place = self._place
        try:
            link = self._reach_node_0()
        except OSError as error:
            self._retry_later(error.strerror or str(error))
            return
        except UnicodeError as error:
            raise errors.ConfigError(f"MASTER_ADDR is {place.master_addr!r}: {error}") from error
        if link is None:
            return
        if link.getsockname() == link.getpeername():
            # Nobody listens: the kernel gave this socket the port that it connects to.
            link.close()
            self._retry_later("Connection refused")
            return
        self._connection = Connection(link)
        self._connection.node = 0
        self._connection.host = place.master_addr
        self._connection.send(
            run=self._run_dir.name,
            id=read_identity(self._run_dir),
            node=place.node,
            nodes=place.nodes,
            host=socket.gethostname(),
        )
        self._reason = waits.SILENT

    def _reach_node_0(self) -> socket.socket | None:
        """Return a socket that is connected to node 0, None while its name is being looked up. Raise OSError."""
        place = self._place
        # The name may lead elsewhere by now, so it is looked up each time.
        if self._lookup is None:
            self._lookup = Lookup(place.master_addr, place.master_port)
        lookup = self._lookup
        try:
            addresses = lookup.result(LOOK_SECONDS)
        except (OSError, UnicodeError):
            self._lookup = None
            raise
        if addresses is None:
            self._reason = f"no name server has answered where {place.master_addr} is"
            return None
        self._lookup = None
        return connected([address for *_, address in addresses], place.master_addr)

    def _received(self, seconds: float) -> list[dict[str, Any]]:
        assert self._connection is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(seconds):
                return []
        return self._connection.receive()

    def _part(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def serve(self, seconds: float) -> Loss | None:
        """Handle what comes within `seconds`. Return why the start cannot go on, None while it can."""
        if self._connection is None:
            time.sleep(seconds)
            return self._loss
        title = self._connection.title
        try:
            messages = self._received(seconds)
        except Gone as gone:
            self._part()
            if not self._is_released:
                self._lose(Loss(f"{title} {gone}"))
            return self._loss

        for message in messages:
            if "lost" in message:
                self._lose(Loss(str(message["lost"]), bool(message.get("followed"))))
            elif message.get("code") == errors.OK:
                self._is_released = True
            elif "code" in message:
                # Node 0 says no more after its last message.
                self._is_released = True
                self._lose(loss_by(title, message))
        return self._loss

    def _lose(self, loss: Loss) -> None:
        self._loss = loss if self._loss is None else self._loss.or_worse(loss)

    def leave(self, status: ExitStatus) -> None:
        """Tell node 0 how the start ended here, and part."""
        if self._connection is not None:
            self._connection.send(**last_message(status))
        self._part()
