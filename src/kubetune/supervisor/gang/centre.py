"""Node 0 of a gang: it listens, takes the others in, and tells all of them who is lost."""

from __future__ import annotations

import selectors
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.rundir import waits
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.gang.link import (
    LOOK_SECONDS,
    Absent,
    Loss,
    Start,
    Waiting,
    last_message,
    loss_by,
)
from kubetune.supervisor.gang.run_id import make_identity, shown_name
from kubetune.supervisor.gang.sockets import bound, listening
from kubetune.supervisor.gang.wire import Connection, Gone
from kubetune.supervisor.place import Place

# Time for a new connection to say who it is.
_HELLO_SECONDS = 10.0

# Connections that have not said who they are. One more, and the oldest goes, so that files of this process stay free.
MOST_STRANGERS = 200


class Centre:
    """Node 0, to which all others are connected."""

    def __init__(self, place: Place, run_dir: Path) -> None:
        self._place = place
        self._run_dir = run_dir
        self._run = run_dir.name
        self._id = make_identity(run_dir)
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._has_started = False
        self._loss: Loss | None = None
        try:
            listener = listening(place.master_port)
        except OSError as error:
            raise errors.EnvironmentFault(
                f"node 0 cannot listen at {place.master_addr}:{place.master_port}: "
                f"{error.strerror or error}. Set MASTER_PORT to a free port"
            ) from error
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        # Kept until the end of the start: the kernel gives the port to nobody else, and torch may listen there all the
        # same, as both sockets may share the address.
        self._reserved = bound(0)

    def _members(self) -> dict[int, Connection]:
        """Return the connections of nodes that have come, by node."""
        return {
            connection.node: connection
            for connection in self._connections
            if connection.node is not None
        }

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self._place.nodes)) - self._members().keys())

    def _missing_now(self) -> list[int]:
        missing = self._missing()
        if not missing:
            # One that has come may be gone again: what this process was too slow to hear is heard first.
            self.serve(0)
            missing = self._missing()
        return missing

    def meet(self, waiting: Waiting) -> Start:
        """Wait until all nodes have come, and let them start. Raise Absent naming those that have not come."""
        deadline = time.monotonic() + waiting.seconds
        with waits.noted(self._run_dir, 0) as note:
            fault_injection.reach("node.waits")
            while missing := self._missing_now():
                waiting.look()
                note(waits.nodes(missing))
                if time.monotonic() >= deadline:
                    explanation = self._explain(missing, waiting.seconds)
                    self._tell_all(absent=explanation)
                    raise Absent(explanation)
                self.serve(LOOK_SECONDS)

        fault_injection.reach("node.met")
        start = Start(uuid.uuid4().hex[:12], int(self._reserved.getsockname()[1]))
        self._has_started = True
        self._tell_all(start=start.id, port=start.port)
        return start

    def _explain(self, missing: list[int], seconds: float) -> str:
        place = self._place
        here = [f"node 0 on {socket.gethostname()}"]
        for _, connection in sorted(self._members().items()):
            here.append(connection.title)
        address = f"{place.master_addr}:{place.master_port}"
        names = waits.nodes(missing)
        return waits.never_came(names, f"{place.nodes} nodes", address, seconds, here)

    def serve(self, seconds: float) -> Loss | None:
        """Handle what comes within `seconds`. Return why the start cannot go on, None while it can."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            # What was heard before may have parted from this one.
            elif isinstance(key.fileobj, Connection) and key.fileobj in self._connections:
                self._hear(key.fileobj)

        # Something that connects and says nothing is none of ours.
        strangers = [connection for connection in self._connections if connection.node is None]
        for index, connection in enumerate(strangers):
            is_late = time.monotonic() - connection.since > _HELLO_SECONDS
            if is_late or index < len(strangers) - MOST_STRANGERS:
                self._part(connection)
        return self._loss

    def _accept(self) -> None:
        with suppress(OSError):  # it may be gone again already
            link, _ = self._listener.accept()
            connection = Connection(link)
            self._connections.append(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _part(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()

    def _hear(self, connection: Connection) -> None:
        try:
            messages = connection.receive()
        except Gone as gone:
            self._part(connection)
            if connection.node is None:
                return
            if not connection.has_ended_well and not connection.has_said_why:
                self._lose(Loss(f"{connection.title} {gone}"))
            self._tell_who_is_missing()
            return

        for message in messages:
            if connection.node is None:
                self._greet(connection, message)
            elif "code" in message:
                connection.has_ended_well = message["code"] == errors.OK
                if not connection.has_ended_well:
                    self._lose(loss_by(connection.title, message))
                    connection.has_said_why = True

    def _greet(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Take a node in, or refuse what does not belong here."""
        refusal = self._refusal(hello)
        if refusal:
            connection.send(refused=refusal)
            self._part(connection)
            return

        # The same node a second time: its process before this one has ended, whatever the network says of it.
        node: int = hello["node"]
        former = self._members().get(node)
        connection.host = shown_name(hello.get("host"))
        if self._has_started:
            connection.send(waits="node 0, which ends the start before this one")
            if former is None or not former.has_ended_well:
                self._lose(Loss(f"node {node} was started again, on {connection.host}"))
            return

        if former is not None:
            self._part(former)
        connection.node = node
        self._tell_who_is_missing()

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        """Return why what connects is no node of this run, None if it is one."""
        nodes = self._place.nodes
        node = hello.get("node")
        is_node = type(node) is int and 0 < node < nodes
        if hello.get("run") != self._run or hello.get("nodes") != nodes or not is_node:
            return (
                f"node 0 of {nodes} of the run {self._run} listens there; expected one of the run "
                f"{shown_name(hello.get('run'))} with {shown_name(hello.get('nodes'))} nodes. Set MASTER_PORT to another "
                "port, or compute.nodes to the same number for all"
            )
        if hello.get("id") != self._id:
            return (
                f"node 0 of the run {self._run} listens there, but its run directory is another one than this node's. Set "
                "MASTER_PORT to another port, or give all nodes the same shared run directory"
            )
        return None

    def _tell_who_is_missing(self) -> None:
        if not self._has_started:
            self._tell_all(waits=waits.nodes(self._missing()))

    def _tell_all(self, **message: Any) -> None:
        for connection in self._members().values():
            connection.send(**message)

    def _lose(self, loss: Loss) -> None:
        """End the start on all nodes."""
        if not self._has_started:
            return
        before = self._loss
        self._loss = loss if before is None else before.or_worse(loss)
        if self._loss != before:
            self._tell_all(lost=loss.reason, followed=loss.has_followed)

    def leave(self, status: ExitStatus) -> None:
        """Tell the others how the start ended here, and part."""
        if self._has_started:
            self._tell_all(**last_message(status))
        for connection in [*self._connections]:
            self._part(connection)
        self._selector.close()
        self._listener.close()
        self._reserved.close()
