"""Agents of several nodes meet, stay connected, and learn who is lost: the real sockets, a thread for each node."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.rundir import waits
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.gang import spoke, wire
from kubetune.supervisor.gang.centre import MOST_STRANGERS, Centre
from kubetune.supervisor.gang.link import Absent, Link, Loss, Over, Start, Stopping, Waiting
from kubetune.supervisor.gang.peer_watch import link_of
from kubetune.supervisor.gang.spoke import Spoke
from kubetune.supervisor.place import Place
from tests.ranks import free_port, started, wait_all, wait_until

SECONDS = 30.0
DONE = ExitStatus(errors.OK, "done")
FAILED = ExitStatus(errors.USER, "data.jsonl:3 is no JSON", error="DataError")
FOLLOWED = ExitStatus(errors.LOST_PEER, "lost another rank", error="LostPeer")


class Nodes:
    """Nodes of one run in threads of this process."""

    def __init__(self, run_dir: Path, size: int) -> None:
        (run_dir / "logs").mkdir(parents=True)
        self.run_dir = run_dir
        self.size = size
        self.port = free_port()
        self.is_stopping = threading.Event()
        self.is_over = threading.Event()
        self._links: list[Link] = []
        self._pool = ThreadPoolExecutor(8)

    def link(self, node: int, run_dir: Path | None = None) -> Link:
        place = Place(self.size, 1, node, "127.0.0.1", self.port)
        link = link_of(place, run_dir or self.run_dir)
        self._links.append(link)
        return link

    def meet(self, link: Link, seconds: float = SECONDS) -> Future[Start]:
        waiting = Waiting(seconds, self.is_stopping.is_set, self.is_over.is_set)
        return self._pool.submit(link.meet, waiting)

    def met(self) -> list[Link]:
        """Return the links of all nodes, which have met."""
        links = [self.link(node) for node in range(self.size)]
        starts = {future.result(SECONDS) for future in [self.meet(link) for link in links]}
        assert len(starts) == 1
        return links

    def close(self) -> None:
        self.is_stopping.set()
        self._pool.shutdown()
        for link in self._links:
            link.leave(DONE)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    made: list[Nodes] = []

    def make(size: int) -> Nodes:
        made.append(Nodes(tmp_path / "fit", size))
        return made[-1]

    yield make
    for each in made:
        each.close()


def loss_of(link: Link) -> Loss:
    """Return what a node loses; wait for it."""
    losses: list[Loss] = []

    def has_lost() -> bool:
        loss = link.serve(0.1)
        losses.extend([loss] if loss else [])
        return bool(losses)

    wait_until(has_lost, SECONDS)
    return losses[-1]


def kill(link: Link) -> None:
    """End a node as the kernel does when its agent is killed: all its sockets close, and nothing is sent."""
    if isinstance(link, Centre):
        for connection in link._connections:
            connection.close()
        link._listener.close()
        link._reserved.close()
    elif isinstance(link, Spoke):
        link._part()


def test_all_nodes_get_the_same_start_and_each_start_another_id(
    nodes: Callable[[int], Nodes],
) -> None:
    run = nodes(3)
    links = [run.link(node) for node in range(3)]
    first = {future.result(SECONDS) for future in [run.meet(link) for link in links]}
    for link in links:
        link.leave(FOLLOWED)
    second = {future.result(SECONDS) for future in [run.meet(run.link(node)) for node in range(3)]}
    assert len(first) == len(second) == 1
    assert first.pop().id != second.pop().id
    assert waits.read(run.run_dir) is None


def test_who_waits_for_whom_is_in_the_run_directory(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(3)
    waiting = [run.meet(run.link(0)), run.meet(run.link(2))]
    wait_until(lambda: "node 0 has waited for node 1 for" in (waits.read(run.run_dir) or ""))
    waiting.append(run.meet(run.link(1)))
    assert len({future.result(SECONDS) for future in waiting}) == 1


def be_node(run_dir: str, port: int, node: int, size: int) -> int:
    """Be the agent of a node until the start has begun; leaves its id."""
    link = link_of(Place(size, 1, node, "127.0.0.1", port), Path(run_dir))
    start = link.meet(Waiting(SECONDS, lambda: False, lambda: False))
    (Path(run_dir) / f"start-{node}").write_text(start.id)
    link.leave(DONE)
    return errors.OK


def test_a_node_that_is_killed_while_it_waits_costs_no_start(tmp_path: Path) -> None:
    """Neither one that has come, nor node 0, at which the others wait."""
    (tmp_path / "logs").mkdir()
    port = free_port()

    def node(number: int) -> AbstractContextManager[list[ForkServerProcess]]:
        return started(be_node, 1, str(tmp_path), port, number, 3)

    def wait_for_note(words: str) -> None:
        wait_until(lambda: f"node 0 has waited for {words} for" in (waits.read(tmp_path) or ""))

    with node(1) as waiting:
        with node(0):
            wait_for_note("node 2")
            with node(2):
                pass  # killed, whether it has come or not
            wait_for_note("node 2")
        with node(0) as first, node(2) as second:
            assert wait_all([*waiting, *first, *second]) == [0, 0, 0]
    assert len({(tmp_path / f"start-{number}").read_text() for number in range(3)}) == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_node_is_named_on_all_others(nodes: Callable[[int], Nodes], lost: int) -> None:
    links = nodes(3).met()
    kill(links[lost])
    others = [link for node, link in enumerate(links) if node != lost]
    reasons = {loss_of(link).reason for link in others}
    assert len(reasons) == 1
    reason = reasons.pop()
    assert reason.startswith(f"node {lost} on ")
    assert reason.endswith(" is gone: its agent was killed, or its pod was deleted")


def test_a_node_that_comes_again_ends_the_older_start(nodes: Callable[[int], Nodes]) -> None:
    """Though the connection of its process before is still there, as where its machine has lost power."""
    run = nodes(3)
    links = run.met()
    again = run.meet(run.link(1))
    assert "node 1 was started again, on" in loss_of(links[0]).reason
    assert "node 1 was started again, on" in loss_of(links[2]).reason
    assert not again.done()
    for link in (links[0], links[2]):
        link.leave(FOLLOWED)
    starts = [again, run.meet(run.link(0)), run.meet(run.link(2))]
    assert len({future.result(SECONDS) for future in starts}) == 1


def test_a_node_that_ends_well_is_no_loss(nodes: Callable[[int], Nodes]) -> None:
    links = nodes(3).met()
    links[1].leave(DONE)
    assert links[0].serve(0.5) is None
    links[0].leave(DONE)
    assert links[2].serve(0.5) is None
    assert links[2].serve(0.5) is None


def test_how_a_node_ended_is_told_and_its_cause_counts_more_than_who_followed(
    nodes: Callable[[int], Nodes],
) -> None:
    links = nodes(3).met()
    links[2].leave(FOLLOWED)
    first = loss_of(links[0])
    assert first.has_followed
    assert first.reason.startswith("node 2 on ")
    links[1].leave(FAILED)
    wait_until(lambda: not loss_of(links[0]).has_followed)
    assert loss_of(links[0]).reason.endswith("ended with exit code 2: data.jsonl:3 is no JSON")


STRANGERS = {
    "a health check": b"GET /healthz HTTP/1.1\r\n\r\n",
    "brackets without end": b"[" * 60_000 + b"\n",
    "bytes that are no text": b"\xff\xfe\x00\n",
    "half a message": b'{"run": "fit", ',
    "a message that is too long": b"x" * 300_000,
    "a message that is no object": b"17\n",
    "a node of a run with that name": b'{"run": "fit", "id": "other", "nodes": 2, "node": 1}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_changes_nothing(nodes: Callable[[int], Nodes], sent: bytes) -> None:
    """Neither while nodes wait, nor after they have met, whether it stays or goes."""
    run = nodes(2)
    centre = run.link(0)
    address = ("127.0.0.1", run.port)

    def tell() -> socket.socket:
        stranger = socket.create_connection(address)
        stranger.settimeout(SECONDS)
        with suppress(OSError):  # it may be parted from before it has sent all
            stranger.sendall(sent)
        return stranger

    with tell(), tell() as goes:
        starts = [run.meet(centre)]
        goes.close()
        starts.append(run.meet(run.link(1)))
        assert len({start.result(SECONDS) for start in starts}) == 1
        with tell(), tell() as goes_later:
            for _ in range(10):
                assert centre.serve(0.05) is None
            goes_later.close()
            for _ in range(10):
                assert centre.serve(0.05) is None


@pytest.mark.parametrize("node", ["true", '"1"', "1.0", "0", "2", "-1", "null", "[1]", "NaN"])
def test_a_number_that_is_no_node_is_refused(nodes: Callable[[int], Nodes], node: str) -> None:
    run = nodes(2)
    centre = run.link(0)
    identity = (run.run_dir / "logs" / "gang.id").read_text()
    with socket.create_connection(("127.0.0.1", run.port)) as stranger:
        stranger.sendall(
            b'{"run": "fit", "id": "%s", "nodes": 2, "node": %s}\n'
            % (identity.encode(), node.encode())
        )
        stranger.setblocking(False)
        assert b"refused" in answer(centre, stranger)


def answer(centre: Link, stranger: socket.socket) -> bytes:
    """Let node 0 work until it says something to a stranger, or parts from it (returns no bytes)."""
    heard: list[bytes] = []

    def has_answered() -> bool:
        centre.serve(0.05)
        with suppress(BlockingIOError):
            heard.append(stranger.recv(1 << 16))
        return bool(heard)

    wait_until(has_answered, SECONDS)
    return heard[0]


def test_many_silent_connections_do_not_keep_a_node_out(nodes: Callable[[int], Nodes]) -> None:
    """The oldest are parted from, so that files of node 0's process stay free."""
    run = nodes(2)
    centre = run.link(0)
    with ExitStack() as strangers:
        oldest = strangers.enter_context(socket.create_connection(("127.0.0.1", run.port)))
        oldest.setblocking(False)
        for _ in range(MOST_STRANGERS):
            strangers.enter_context(socket.create_connection(("127.0.0.1", run.port)))
            centre.serve(0)
        assert answer(centre, oldest) == b""
        starts = [run.meet(centre), run.meet(run.link(1))]
        assert len({start.result(SECONDS) for start in starts}) == 1


def hello(run: Nodes) -> bytes:
    identity = (run.run_dir / "logs" / "gang.id").read_text()
    message = {"run": "fit", "id": identity, "nodes": run.size, "node": 1, "host": "former"}
    return json.dumps(message).encode() + b"\n"


def test_a_node_that_came_and_went_while_node_0_was_slow_is_waited_for(
    nodes: Callable[[int], Nodes],
) -> None:
    run = nodes(2)
    centre = run.link(0)
    with socket.create_connection(("127.0.0.1", run.port)) as former:
        former.sendall(hello(run))
    starts = [run.meet(centre), run.meet(run.link(1))]
    assert len({start.result(SECONDS) for start in starts}) == 1
    assert centre.serve(0.5) is None


def test_a_node_may_come_again_in_the_moment_in_which_its_former_process_is_heard_to_end(
    nodes: Callable[[int], Nodes],
) -> None:
    run = nodes(3)
    centre = run.link(0)
    address = ("127.0.0.1", run.port)
    with socket.create_connection(address) as former, socket.create_connection(address) as again:
        former.sendall(hello(run))
        former.setblocking(False)
        assert b"waits" in answer(centre, former)
        # Both are heard of in one look, the new process first.
        centre.serve(0)
        again.sendall(hello(run))
        former.close()
        again.setblocking(False)
        assert b"waits" in answer(centre, again)


WRONG_ANSWERS = {
    "closes at once": b"",
    "another program": b"SSH-2.0-OpenSSH_9.2\r\n",
    "brackets without end": b"[" * 60_000 + b"\n",
    "a start without a port": b'{"start": "1"}\n',
    "node 0 of a run that had this address": b'{"refused": "node 0 of another run listens there"}\n',
    "says nothing": None,
}


@pytest.mark.parametrize("answered", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_an_address_that_leads_elsewhere_at_first_is_asked_again(
    nodes: Callable[[int], Nodes], answered: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the name of node 0 still leads to its former pod. Nor is it asked without a pause."""
    # Node 0 itself is heard in time, however busy the machine is.
    if answered is None:
        monkeypatch.setattr(wire, "SILENT_SECONDS", 3.0)
    run = nodes(2)
    with ExitStack() as connections:
        with socket.create_server(("127.0.0.1", run.port)) as elsewhere:
            elsewhere.settimeout(SECONDS)
            start = run.meet(run.link(1))
            for _ in range(2):
                connection, _ = elsewhere.accept()
                connections.enter_context(connection)
                connection.settimeout(SECONDS)
                assert b'"node": 1' in connection.recv(1 << 16)
                if answered is not None:
                    connection.sendall(answered)
                    connection.close()
        of_centre = run.meet(run.link(0))
        assert start.result(SECONDS) == of_centre.result(SECONDS)


def test_a_program_that_closes_each_connection_is_not_asked_without_a_pause(
    nodes: Callable[[int], Nodes],
) -> None:
    run = nodes(2)
    asked = 0
    with socket.create_server(("127.0.0.1", run.port)) as elsewhere:
        elsewhere.settimeout(0.1)
        absent = run.meet(run.link(1), seconds=2)
        while not absent.done():
            with suppress(TimeoutError):
                elsewhere.accept()[0].close()
                asked += 1
    with pytest.raises(Absent, match="it closes connections without an answer"):
        absent.result()
    assert 1 <= asked <= 6


def test_a_refusal_that_lasts_ends_the_waiting(
    nodes: Callable[[int], Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoke, "REFUSED_SECONDS", 0.0)
    run = nodes(2)
    links = run.met()
    other = tmp_path / "other"
    same_name = tmp_path / "elsewhere" / "fit"
    for folder, found in ((other, "of the run fit listens there"), (same_name, "is another one")):
        (folder / "logs").mkdir(parents=True)
        stranger = run.meet(run.link(1, folder))
        for _ in range(600):
            assert links[0].serve(0.05) is None
            if stranger.done():
                break
        with pytest.raises(errors.EnvironmentFault, match=found):
            stranger.result()
    assert links[1].serve(0.1) is None


def test_an_address_that_is_no_name_is_said_at_once(tmp_path: Path) -> None:
    link = link_of(Place(2, 1, 1, "node..0", free_port()), tmp_path)
    with pytest.raises(errors.ConfigError, match=r"MASTER_ADDR is 'node\.\.0'"):
        link.meet(Waiting(SECONDS, lambda: False, lambda: False))


def test_a_run_that_is_over_meanwhile_is_not_waited_for(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(2)
    run.is_over.set()
    for node in range(2):
        with pytest.raises(Over):
            run.meet(run.link(node)).result(SECONDS)


def test_a_request_to_stop_ends_the_waiting(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(2)
    waiting = run.meet(run.link(1))
    run.is_stopping.set()
    with pytest.raises(Stopping):
        waiting.result(SECONDS)


def test_a_name_server_that_does_not_answer_holds_nobody(
    nodes: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's resolver asks each of its servers for each of its domains, which takes up to a minute."""
    answers = threading.Event()
    look_up = socket.getaddrinfo

    def wait_and_look_up(*words: Any, **options: Any) -> list[Any]:
        answers.wait(SECONDS)
        return look_up(*words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", wait_and_look_up)
    run = nodes(2)
    waiting = run.meet(run.link(1))
    centre = run.meet(run.link(0))
    # Node 0 waits for node 1, which says why it does not come.
    words = "node 1 has waited for a name server to say where node 0 is (127.0.0.1) for"
    wait_until(lambda: words in (waits.read(run.run_dir) or ""))
    answers.set()
    assert waiting.result(SECONDS) == centre.result(SECONDS)

    answers.clear()
    waiting = run.meet(run.link(1))
    wait_until(lambda: words in (waits.read(run.run_dir) or ""))
    run.is_stopping.set()
    with pytest.raises(Stopping):
        waiting.result(SECONDS / 2)
    answers.set()


def test_all_who_came_end_with_the_name_of_who_did_not(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(3)
    came = [run.meet(run.link(node), seconds=1) for node in (0, 2)]
    for future in came:
        with pytest.raises(Absent, match="node 1 never came: 3 nodes were to meet at"):
            future.result(SECONDS)
