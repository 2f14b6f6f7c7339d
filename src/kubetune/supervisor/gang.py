"""The agents of a run's nodes: they meet before a start, stay connected while it goes on, and notice who is lost.

    node 0                      node 1
    listens    ←── hello ────   {"run": "fit", "id": "5e0a…", "node": 1, "nodes": 3, "host": "fit-1"}
               ─── waits ──→    {"waits": "node 2"}                      whenever that changes
               ─── go ─────→    {"start": "9f3c2a…", "port": 41234}      once all have come
               ←── end ────→    {"code": 145, "reason": "…"}             how the start ended on that node
               ─── lost ───→    {"lost": "node 2 on fit-2 …"}

Each message is one line of JSON. While the ranks train nothing is sent, and the kernel alone watches the connection: it
answers for a process that is slow, stopped or swapped out, and it no longer answers if the machine or its network is
gone. So a slow node is never taken for a lost one.

Until `go` nothing is lost with a connection: whoever waits connects again. After it a lost connection, or a node that
comes a second time, ends the start on all nodes. Not for ranks, which meet on a board (distributed/rendezvous).

Whatever else connects (a port scanner, a health check, a node of another run) is parted from and changes nothing: only
who has read the run's id in its directory belongs to it. The id tells runs apart. It is no password.
"""

from __future__ import annotations

import errno
import json
import math
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.base.humanize import visible
from kubetune.rundir import waits
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.place import Place

# A machine that answers nothing for so long is lost. Changed by tests alone.
SILENT_SECONDS = 40.0

# After another node is lost: time for the ranks of this one to notice it and to end by themselves.
_LOSS_SECONDS = 10.0

# Between two looks at what else may have happened: a request to stop, the end of the run, the time limit.
_LOOK_SECONDS = 0.5

# Between two looks into the run directory, which may lie on a slow disk.
_DIRECTORY_SECONDS = 5.0

# Time for an address to answer at all, and for a new connection to say who it is.
_CONNECT_SECONDS = 2.0
_HELLO_SECONDS = 10.0

# A refusal counts once it has lasted for so long: the address may still lead to a pod that was there before, and what
# node 0 has written may arrive late on a shared disk. Changed by tests alone.
REFUSED_SECONDS = 120.0

# Connections that have not said who they are. One more, and the oldest goes, so that files of this process stay free.
_MOST_STRANGERS = 200

# Node 0 gives up first, so that all nodes end with its message.
_MARGIN_SECONDS = 5.0

_LONGEST_MESSAGE = 1 << 16  # bytes
_LONGEST_REASON = 2000  # characters
_LONGEST_NAME = 253  # characters of a host
_IDENTITY = Path("logs", "gang.id")
_OF_MACHINE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Absent(errors.LostPeer):
    """A node did not come in time."""


class Over(Exception):
    """The run's directory says that it is over, so nobody will come any more."""


class Stopping(Exception):
    """Somebody asked this process to stop while it waited for others."""


class _Gone(Exception):
    """The other side of a connection is gone, and why."""


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


class Connection:
    """A connection between two agents."""

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._text = b""
        self.node: int | None = None  # of the other side, once it has said so
        self.host = ""
        self.has_ended_well = False
        self.has_said_why = False  # it ended, and not well
        self.has_spoken = False
        self.since = time.monotonic()
        _let_kernel_watch(link)
        link.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send one message. One that cannot be sent is dropped: reading then says why."""
        with suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come. Raise _Gone if the other side is gone, or is none of ours."""
        try:
            data = self._socket.recv(_LONGEST_MESSAGE)
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno in _OF_MACHINE:
                silence = f"has not answered for {SILENT_SECONDS:g} s"
                raise _Gone(f"{silence}: its machine or its network is gone") from error
            data = b""
        if not data:
            if not self.has_spoken:
                raise _Gone(
                    "closes connections without an answer: another program listens there, or another version of kubetune"
                )
            raise _Gone("is gone: its agent was killed, or its pod was deleted")

        *lines, self._text = (self._text + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # brackets without end
                message = None
            if not isinstance(message, dict):
                raise _Gone("is no agent of kubetune")
            messages.append(message)
        self.has_spoken = self.has_spoken or bool(messages)
        if len(self._text) > _LONGEST_MESSAGE:
            raise _Gone("is no agent of kubetune")
        return messages

    def close(self) -> None:
        """End the connection. What was sent still arrives."""
        self._socket.close()

    @property
    def title(self) -> str:
        """Return the name of the node on the other side, for messages."""
        return f"node {self.node} on {self.host}"


def _let_kernel_watch(link: socket.socket) -> None:
    """Let the kernel break the connection if the other machine answers nothing for SILENT_SECONDS."""
    options = {
        # Asks after a quarter of the time, and then seven times.
        "TCP_KEEPIDLE": max(1, int(SILENT_SECONDS / 4)),
        "TCP_KEEPINTVL": max(1, int(SILENT_SECONDS / 8)),
        "TCP_KEEPCNT": 6,
        # The same for data that nobody acknowledges. In milliseconds.
        "TCP_USER_TIMEOUT": int(SILENT_SECONDS * 1000),
        "TCP_NODELAY": 1,
    }
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        # Other systems than Linux lack some of them.
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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


class _Lookup:
    """Looks the address of a host up, beside what waits for it.

    While no name server answers, the system's resolver takes up to a minute, in which this process would hear no request
    to stop.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._addresses: list[Any] = []
        self._error: Exception | None = None
        # A daemon: nobody waits for it at the end.
        self._thread = threading.Thread(target=self._look_up, name="look up", daemon=True)
        self._thread.start()

    def _look_up(self) -> None:
        try:
            self._addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._error = error

    def result(self, seconds: float) -> list[Any] | None:
        """Return the addresses, None if there is no answer within `seconds`. Raise OSError or UnicodeError."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._addresses


class Link(Protocol):
    """This node's side of the gang."""

    def meet(self, waiting: Waiting) -> Start:
        """Wait until all nodes have come. Raise Absent, Over, Stopping, or EnvironmentFault."""

    def serve(self, seconds: float) -> Loss | None:
        """Handle what comes within `seconds`. Return why the start cannot go on, None while it can."""

    def leave(self, status: ExitStatus) -> None:
        """Tell the others how the start ended here, and part."""


class Centre:
    """Node 0, to which all others are connected."""

    def __init__(self, place: Place, run_dir: Path) -> None:
        self._place = place
        self._run_dir = run_dir
        self._run = run_dir.name
        self._id = _make_identity(run_dir)
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._has_started = False
        self._loss: Loss | None = None
        try:
            listener = _listen(place.master_port)
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
        self._reserved = _bound(0)

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
                self.serve(_LOOK_SECONDS)

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
            if is_late or index < len(strangers) - _MOST_STRANGERS:
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
        except _Gone as gone:
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
                    self._lose(_ended(connection.title, message))
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
        connection.host = _name(hello.get("host"))
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
                f"{_name(hello.get('run'))} with {_name(hello.get('nodes'))} nodes. Set MASTER_PORT to another port, or "
                "compute.nodes to the same number for all"
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
            self._tell_all(**_end(status))
        for connection in [*self._connections]:
            self._part(connection)
        self._selector.close()
        self._listener.close()
        self._reserved.close()


class Spoke:
    """Any other node, which is connected to node 0."""

    def __init__(self, place: Place, run_dir: Path) -> None:
        self._place = place
        self._run_dir = run_dir
        self._connection: Connection | None = None
        self._lookup: _Lookup | None = None  # that goes on
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
            messages = self._received(_LOOK_SECONDS)
            if not self._connection.has_spoken:
                # Node 0 answers at once. This may be what has the address of its former pod now.
                if time.monotonic() - self._connection.since > SILENT_SECONDS:
                    raise _Gone("takes connections and does not answer")
                return None
            for message in messages:
                start = self._hear_before_start(message)
                if start is not None:
                    return start
        except _Gone as gone:
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
            raise _Gone(f"refuses this node: {reason}")
        self._refused_since = None
        if "absent" in message:
            raise Absent(str(message["absent"]))
        if "waits" in message:
            self._waits_for = str(message["waits"])
        if "start" in message:
            port = message.get("port")
            if type(port) is not int:
                raise _Gone("is no agent of kubetune")
            return Start(str(message["start"]), port)
        return None

    def _retry_later(self, reason: str) -> None:
        """Part, and wait a little, so that nothing is connected to again and again without a pause."""
        self._part()
        self._reason = reason
        self._waits_for = ""
        time.sleep(_LOOK_SECONDS)

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
            id=_read_identity(self._run_dir),
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
            self._lookup = _Lookup(place.master_addr, place.master_port)
        lookup = self._lookup
        try:
            addresses = lookup.result(_LOOK_SECONDS)
        except (OSError, UnicodeError):
            self._lookup = None
            raise
        if addresses is None:
            self._reason = f"no name server has answered where {place.master_addr} is"
            return None
        self._lookup = None
        return _connected([address for *_, address in addresses], place.master_addr)

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
        except _Gone as gone:
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
                self._lose(_ended(title, message))
        return self._loss

    def _lose(self, loss: Loss) -> None:
        self._loss = loss if self._loss is None else self._loss.or_worse(loss)

    def leave(self, status: ExitStatus) -> None:
        """Tell node 0 how the start ended here, and part."""
        if self._connection is not None:
            self._connection.send(**_end(status))
        self._part()


def _connected(addresses: Sequence[Any], name: str) -> socket.socket:
    """Return a socket that is connected to the first address that takes connections. Raise OSError if none does."""
    problem = OSError(f"{name} has no address")
    for address in addresses:
        try:
            return socket.create_connection(address[:2], _CONNECT_SECONDS)
        except OSError as error:
            problem = error
    raise problem


def link_of(place: Place, run_dir: Path) -> Link:
    """Return this node's side of the gang. Raise EnvironmentFault if node 0 cannot listen."""
    return Spoke(place, run_dir) if place.node else Centre(place, run_dir)


class Watch:
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

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline = math.inf
        while not self._left.is_set():
            loss = self._link.serve(_LOOK_SECONDS)
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


def _name(value: object) -> str:
    """Return what another process says it is called, for messages."""
    return visible(str(value)[:_LONGEST_NAME], keep="")


def _read_identity(run_dir: Path) -> str:
    """Return the id of the run, "" while node 0 has not written it."""
    try:
        with files.open_inside(run_dir / _IDENTITY) as file:
            return file.read(_LONGEST_NAME).decode(errors="replace")
    except (OSError, errors.KubetuneError):
        return ""


def _make_identity(run_dir: Path) -> str:
    """Return the id of the run, which its first start makes."""
    identity = _read_identity(run_dir)
    if not identity:
        identity = uuid.uuid4().hex
        files.write_atomic(run_dir / _IDENTITY, identity)
    return identity


def _end(status: ExitStatus) -> dict[str, Any]:
    """Return the last message of a node."""
    has_followed = status.code == errors.LOST_PEER and errors.only_followed(
        status.code, status.error
    )
    reason = status.reason[:_LONGEST_REASON]
    return {"code": status.code, "reason": reason, "followed": has_followed}


def _ended(title: str, message: dict[str, Any]) -> Loss:
    """Return what another node's last message means for this one."""
    reason = f"{title} ended with exit code {message['code']}: {message.get('reason')}"
    return Loss(reason, bool(message.get("followed")))


def _listen(port: int) -> socket.socket:
    listener = _bound(port)
    try:
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _bound(port: int) -> socket.socket:
    """Return a socket that has this port of all addresses, any free one for 0."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both:
            link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        link.bind(("", port))
    except OSError:
        link.close()
        raise
    return link
