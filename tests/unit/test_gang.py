"""Agents of several nodes meet, stay connected, and learn who is lost: the real sockets, a thread for each node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.rundir import waits
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor import gang
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
        self._links: list[gang.Link] = []
        self._pool = ThreadPoolExecutor(8)

    def link(self, node: int, run_dir: Path | None = None) -> gang.Link:
        place = Place(self.size, 1, node, "127.0.0.1", self.port)
        link = gang.link_of(place, run_dir or self.run_dir)
        self._links.append(link)
        return link

    def meet(self, link: gang.Link, seconds: float = SECONDS) -> Future[gang.Start]:
        waiting = gang.Waiting(seconds, self.is_stopping.is_set, self.is_over.is_set)
        return self._pool.submit(link.meet, waiting)

    def met(self) -> list[gang.Link]:
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


def loss_of(link: gang.Link) -> gang.Loss:
    """Return what a node loses; wait for it."""
    losses: list[gang.Loss] = []

    def has_lost() -> bool:
        loss = link.serve(0.1)
        losses.extend([loss] if loss else [])
        return bool(losses)

    wait_until(has_lost, SECONDS)
    return losses[-1]


def kill(link: gang.Link) -> None:
    """End a node as the kernel does when its agent is killed: all its sockets close, and nothing is sent."""
    if isinstance(link, gang.Centre):
        for connection in link._connections:
            connection.close()
        link._listener.close()
        link._reserved.close()
    elif isinstance(link, gang.Spoke):
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
    link = gang.link_of(Place(size, 1, node, "127.0.0.1", port), Path(run_dir))
    start = link.meet(gang.Waiting(SECONDS, lambda: False, lambda: False))
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


def test_who_does_not_belong_to_the_run_is_refused_and_disturbs_nobody(
    nodes: Callable[[int], Nodes], tmp_path: Path
) -> None:
    run = nodes(2)
    links = run.met()
    other = tmp_path / "other"
    (other / "logs").mkdir(parents=True)
    stranger = run.meet(run.link(1, other))
    with socket.create_connection(("127.0.0.1", run.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: links[0].serve(0.1) is None and stranger.done())
    with pytest.raises(errors.EnvironmentFault, match="of the run fit listens there"):
        stranger.result()
    assert links[0].serve(0.1) is None
    assert links[1].serve(0.1) is None


def test_a_run_that_is_over_meanwhile_is_not_waited_for(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(2)
    run.is_over.set()
    for node in range(2):
        with pytest.raises(gang.Over):
            run.meet(run.link(node)).result(SECONDS)


def test_a_request_to_stop_ends_the_waiting(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(2)
    waiting = run.meet(run.link(1))
    run.is_stopping.set()
    with pytest.raises(gang.Stopping):
        waiting.result(SECONDS)


def test_all_who_came_end_with_the_name_of_who_did_not(nodes: Callable[[int], Nodes]) -> None:
    run = nodes(3)
    came = [run.meet(run.link(node), seconds=1) for node in (0, 2)]
    for future in came:
        with pytest.raises(gang.Absent, match="node 1 never came: 3 nodes were to meet at"):
            future.result(SECONDS)
