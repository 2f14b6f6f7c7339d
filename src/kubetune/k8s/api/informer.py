"""The objects of one kind, kept up to date by a single watch: however many they are, a change costs one message.

Not for asking once: that is `Cluster.list`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Self

from kubetune.k8s.api.api_errors import ApiError, Refused, Unreachable, may_pass
from kubetune.k8s.api.client import PATIENCE_SECONDS, Cluster, Object

# A watch that ends begins again where it ended, at the price of a request. Bookmarks keep its revision recent.
_WATCH_SECONDS = 20
_PAUSE_SECONDS = 0.5
_TRIES = 3
_GONE = 410


class Informer:
    """The objects of a kind with these labels and fields, from `with` on to its end.

    A thread calls `on_change` for each `ADDED`, `MODIFIED` and `DELETED`, and sets `changed` after it. `objects` raises
    what the server refuses. While the server is away, the last known objects are returned.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
        *,
        on_change: Callable[[str, Object], None] = lambda change, obj: None,
        changed: threading.Event | None = None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels
        self._fields = fields
        self._on_change = on_change
        self.changed = changed or threading.Event()
        self._known: dict[str, Object] = {}  # by uid
        self._revision = ""  # where the next watch begins; empty: list all objects first
        self._failures = 0  # since the last change
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: Exception | None = None  # what ended the thread

    def __enter__(self) -> Self:
        """List the objects and begin to watch. Raise ApiError as a list does."""
        self._list()
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        # The thread ends with the watch that is open now.
        self._over.set()

    def objects(self) -> list[Object]:
        """Return the objects as last known. Raise the error that ended the watch."""
        if self._error is not None:
            raise self._error
        with self._lock:
            return list(self._known.values())

    def get(self, name: str) -> Object | None:
        """Return the object of that name; None where the cluster has none."""
        for obj in self.objects():
            if obj["metadata"]["name"] == name:
                return obj
        return None

    # -- inside
    def _run(self) -> None:
        """Watch until the end, listing anew where a watch cannot go on."""
        try:
            while not self._over.is_set():
                try:
                    if self._revision:
                        self._watch()
                    else:
                        self._list()
                except ApiError as error:
                    self._over.wait(self._pause_after(error))
        # Raised by `objects`, in the thread that asks.
        except Exception as error:
            self._error = error
            self.changed.set()

    def _pause_after(self, error: ApiError) -> float:
        """Return how long to wait before the next try. Raise the error if no try can help."""
        pause = _PAUSE_SECONDS
        if isinstance(error, Unreachable):
            pause = max(pause, error.pause_seconds)
        elif isinstance(error, Refused):
            if error.code != _GONE and not may_pass(error):
                raise error
            # The server no longer knows what has changed since then.
            self._revision = ""
        self._failures += 1
        if self._failures % _TRIES == 0:
            # Some proxies let no watch through. Then a list now and then has to do.
            self._revision = ""
        return min(pause, PATIENCE_SECONDS)

    def _list(self) -> None:
        """Take all objects, and report what has changed since the last known ones."""
        objects, self._revision = self._cluster.list_with_revision(
            self._kind, self._labels, self._fields
        )
        current = {_uid(obj): obj for obj in objects}
        for uid, obj in list(self._known.items()):
            if uid not in current:
                self._take("DELETED", obj)
        for uid, obj in current.items():
            last = self._known.get(uid)
            if last is None:
                self._take("ADDED", obj)
            elif _revision(last) != _revision(obj):
                self._take("MODIFIED", obj)

    def _watch(self) -> None:
        """Take changes from the last revision on, until the server ends the watch."""
        changes = self._cluster.watch(
            self._kind,
            self._labels,
            fields=self._fields,
            since=self._revision,
            seconds=_WATCH_SECONDS,
        )
        for change, obj in changes:
            if self._over.is_set():
                return
            self._revision = _revision(obj)
            self._failures = 0
            if change != "BOOKMARK":
                self._take(change, obj)

    def _take(self, change: str, obj: Object) -> None:
        """Remember a change and report it."""
        with self._lock:
            if change == "DELETED":
                self._known.pop(_uid(obj), None)
            else:
                self._known[_uid(obj)] = obj
        self._on_change(change, obj)
        self.changed.set()


def _uid(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def _revision(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion") or "")
