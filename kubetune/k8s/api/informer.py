"""The objects of one kind as they are now, kept so by a single watch: however many there are, a change costs a change.

Not for asking once: that is `Cluster.list`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from kubetune.k8s.api.api_errors import ApiError, Refused, Unreachable
from kubetune.k8s.api.client import PATIENCE_SECONDS, Cluster, Object

# A watch begins again where it ended, at the price of a request; bookmarks see to it that it can.
_WATCH_SECONDS = 20
_PAUSE_SECONDS = 0.5
_TRIES = 3
_GONE = 410


class Informer:
    """The objects of a kind with these labels and fields, from `with` on to its end.

    `on_change` is told of each `ADDED`, `MODIFIED` and `DELETED` by a thread of its own; `changed` is set after it.
    What the server refuses is raised by `objects`; while it is away, what was last known stands.
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
        self._cluster, self._kind, self._labels, self._fields = cluster, kind, labels, fields
        self._on_change, self.changed = on_change, changed or threading.Event()
        self._known: dict[str, Object] = {}
        self._revision, self._failures = "", 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        """Begin with what there is. Raises ApiError as a list does."""
        self._take_all()
        threading.Thread(target=self._keep_up, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()  # the thread ends with the watch that is open now

    def objects(self) -> list[Object]:
        """The objects that there are now. Raises the error that ended the watch."""
        if self._error is not None:
            raise self._error
        with self._lock:
            return list(self._known.values())

    def get(self, name: str) -> Object | None:
        """The object of that name; None where there is none."""
        return next((obj for obj in self.objects() if obj["metadata"]["name"] == name), None)

    # -- inside
    def _keep_up(self) -> None:
        try:
            while not self._over.is_set():
                try:
                    if self._revision:
                        self._watch()
                    else:
                        self._take_all()
                except ApiError as error:
                    if isinstance(error, Refused):
                        if error.code != _GONE and error.code < 500:
                            raise
                        # The server no longer knows what has changed since then.
                        self._revision = ""
                    self._failures += 1
                    if self._failures % _TRIES == 0:
                        self._revision = (
                            ""  # some proxies let no watch through: asking now and then has to do
                        )
                    asked = error.pause_seconds if isinstance(error, Unreachable) else 0.0
                    self._over.wait(min(max(_PAUSE_SECONDS, asked), PATIENCE_SECONDS))
        except Exception as error:  # told to whoever asks for the objects
            self._error = error
            self.changed.set()

    def _take_all(self) -> None:
        found, self._revision = self._cluster.list_with_revision(
            self._kind, self._labels, self._fields
        )
        there = {_uid(obj) for obj in found}
        for obj in [obj for uid, obj in self._known.items() if uid not in there]:
            self._take("DELETED", obj)
        for obj in found:
            before = self._known.get(_uid(obj))
            if before is None or before["metadata"].get("resourceVersion") != obj["metadata"].get(
                "resourceVersion"
            ):
                self._take("ADDED" if before is None else "MODIFIED", obj)

    def _watch(self) -> None:
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
            self._revision, self._failures = str(obj["metadata"]["resourceVersion"]), 0
            if change != "BOOKMARK":
                self._take(change, obj)

    def _take(self, change: str, obj: Object) -> None:
        with self._lock:
            if change == "DELETED":
                self._known.pop(_uid(obj), None)
            else:
                self._known[_uid(obj)] = obj
        self._on_change(change, obj)
        self.changed.set()


def _uid(obj: Object) -> str:
    return str(obj["metadata"]["uid"])
