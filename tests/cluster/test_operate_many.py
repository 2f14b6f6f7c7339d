"""Runs of hundreds of pods: all are shown, the end is noticed at once, and looking on costs next to nothing."""

from __future__ import annotations

import itertools
import threading
import time

import httpx2
import pytest

from kubetune.k8s.api import informer
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.api.informer import Informer
from kubetune.k8s.cluster import log_follow
from kubetune.k8s.cluster.log_follow import LogFollower, Source
from kubetune.k8s.cluster.run_lookup import find_run
from tests.cluster.operation import Desk, slow

_numbers = itertools.count()


@pytest.mark.parametrize("nodes", [60, slow(300)])
def test_all_of_many_pods_are_followed_to_their_end(
    desk: Desk, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nodes < 300:
        monkeypatch.setattr(log_follow, "_LOOK_SECONDS", 1.5)
    desk.cluster.add_fake_node(f"fake-{next(_numbers)}")
    selector = {"type": "kwok"}
    desk.submit_script(
        "true", compute__nodes=nodes, kubernetes__spread="none", kubernetes__node_selector=selector
    )
    seen: set[int] = set()
    all_seen = threading.Event()
    looked = threading.Event()

    def note(source: Source, text: str) -> None:
        assert text.endswith(" is here")
        seen.add(source.node)
        if len(seen) == nodes:
            all_seen.set()

    with desk.at():
        client = Client()
        spec = find_run(client, "fit")
    answers: list[httpx2.Response] = []
    http = client._connection.http
    http.event_hooks = {
        **http.event_hooks,
        "response": [*http.event_hooks["response"], answers.append],
    }
    logs = LogFollower(client, spec, note, look=lambda watched, warnings: looked.set())
    following = threading.Thread(target=logs.follow, daemon=True)
    following.start()
    assert all_seen.wait(120), f"{len(seen)} of {nodes} pods were shown"
    looked.clear()
    assert looked.wait(30)  # what their start told is read
    before = sum(answer.num_bytes_downloaded for answer in answers)
    began = time.monotonic()
    for _ in range(2):
        looked.clear()
        assert looked.wait(30)
    spent = sum(answer.num_bytes_downloaded for answer in answers) - before
    seconds = time.monotonic() - began
    assert spent / seconds < 50_000, f"{spent} bytes in {seconds:.1f} s"
    desk.cluster.end_fake_pods()
    following.join(60)
    assert not following.is_alive()


def claims(watched: Informer) -> list[str]:
    return sorted(claim["metadata"]["name"] for claim in watched.objects())


def test_a_watch_goes_on_where_it_was_and_lists_anew_only_what_is_forgotten(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "_WATCH_SECONDS", 1)
    monkeypatch.setattr(informer, "_PAUSE_SECONDS", 0.05)
    changes: list[tuple[str, str]] = []

    def until(names: list[str]) -> None:
        deadline = time.monotonic() + 20
        while claims(watched) != names:
            assert watched.changed.wait(deadline - time.monotonic()), claims(watched)
            watched.changed.clear()

    def make(name: str) -> None:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        facts = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        desk.cluster.apply({**facts, "metadata": {"name": name}, "spec": spec})

    with desk.at():
        client = Client()
    kind = "PersistentVolumeClaim"
    with Informer(
        client, kind, on_change=lambda how, obj: changes.append((how, obj["metadata"]["name"]))
    ) as watched:
        until(["models"])
        desk.cluster.trouble("watch .*", cut="within", times=2)
        make("a")
        until(["a", "models"])
        make("b")
        until(["a", "b", "models"])
        assert desk.cluster.asked().count("list persistentvolumeclaims") == 1  # the first
        desk.cluster.trouble(
            "watch .*", code=410, message="too old resource version: 1 (99)", times=1
        )
        desk.cluster.delete(kind, "a")
        until(["b", "models"])
        # the watch that is open goes on for a second
        deadline = time.monotonic() + 20
        while desk.cluster.asked().count("list persistentvolumeclaims") < 2:
            assert time.monotonic() < deadline
            watched.changed.wait(0.1)
    named = [change for change in changes if change[1] in "ab" and change[0] != "MODIFIED"]
    assert named == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]


def test_what_is_refused_meanwhile_is_raised_where_it_is_asked_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "_WATCH_SECONDS", 1)
    with desk.at():
        client = Client()
    desk.cluster.trouble("watch .*", code=401, message="Unauthorized")
    with (
        Informer(client, "PersistentVolumeClaim") as watched,
        pytest.raises(Exception, match="log in again"),
    ):
        ask_at_each_change(watched)


def ask_at_each_change(watched: Informer) -> None:
    while watched.changed.wait(60):
        watched.changed.clear()
        watched.objects()
