"""What a cluster accepts: tried before anything is made, and taken back where it is refused after all.

A dry run makes nothing, so an object that refers to another of the same submission is refused in one as long as that is
not there. Such an object is tried again once it is, and then for some seconds, since those who check it learn of new
objects some moments later:

    TrainingRuntime fit   dry run: accepted
    TrainJob fit          dry run: "TrainingRuntime fit not found"
    TrainingRuntime fit   applied
    TrainJob fit          dry run: accepted, or refused, and then TrainingRuntime fit is removed again
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kubetune.errors import KubetuneError
from kubetune.k8s.api.api_errors import ApiError, MissingRight, NoNamespace, Refused, Unreachable
from kubetune.k8s.api.client import Cluster, say
from kubetune.k8s.manifests.run_spec import Manifest, kind_and_name

# How long those who check an object may not know of another that was just made.
_LEARNING_SECONDS = 15.0
_PAUSE_SECONDS = 0.25
# Field of a pod that names an object by its name alone, and the kind of that object.
_ACCOUNT = ("serviceAccountName", "ServiceAccount")


def referred(obj: Manifest, objects: Sequence[Manifest]) -> list[Manifest]:
    """Return those of the objects that the API server or a webhook may look up when it is given `obj`.

    These are references with kind and name, such as `roleRef` and `runtimeRef`, and the account of a bare pod.
    """
    names = set(_references(obj))
    if obj["kind"] == "Pod":
        field, kind = _ACCOUNT
        names.add((kind, str(obj["spec"].get(field))))
    return [other for other in objects if other is not obj and _key(other) in names]


def _references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each reference in an object, however deep."""
    if isinstance(value, dict):
        match value:
            case {"kind": str(kind), "name": str(name)}:
                yield kind, name
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _key(obj: Manifest) -> tuple[str, str]:
    return obj["kind"], obj["metadata"]["name"]


class Admission:
    """The objects of one submission on their way into a cluster."""

    def __init__(self, cluster: Cluster, objects: Sequence[Manifest]) -> None:
        self._cluster = cluster
        self._objects = objects
        # Tried in vain, since what they refer to is not there yet.
        self._waiting: list[Manifest] = []
        self._absent: set[tuple[str, str]] = set()  # what the cluster would make anew
        self._made: list[tuple[str, str]] = []  # in this order

    @property
    def unchecked(self) -> list[str]:
        """Return the objects that can be tried only once others exist: `TrainJob fit`."""
        return [kind_and_name(obj) for obj in self._waiting]

    def try_all(self, objects: Sequence[Manifest]) -> tuple[list[MissingRight], list[str]]:
        """Try objects in a dry run; return missing rights, and what else is wrong with them. Raise NoNamespace."""
        rights: list[MissingRight] = []
        problems: list[str] = []
        # All are tried, so that the user learns of all problems at once.
        for obj in objects:
            try:
                if self._cluster.apply(obj, dry_run=True):
                    self._absent.add(_key(obj))
            except NoNamespace:
                raise
            except MissingRight as error:
                rights.append(error)
            except Refused as error:
                if self._lacks_reference(obj, error):
                    self._waiting.append(obj)
                    self._absent.add(_key(obj))
                else:
                    problems.append(str(error))
        return rights, problems

    def try_waiting(self) -> None:
        """Apply what the rest refers to, then try the rest. Raise Refused where it is refused for good."""
        for obj in self._waiting:
            for other in referred(obj, self._objects):
                self.apply(other)
            self._apply(obj, dry_run=True)
        self._waiting.clear()

    def apply(self, obj: Manifest) -> None:
        """Apply an object, and remember it where it is new."""
        key = _key(obj)
        # Before it is sent: a command that is interrupted does not learn what became of its request.
        if key in self._absent:
            self._absent.discard(key)
            self._made.append(key)
        self._apply(obj)

    def create(self, obj: Manifest) -> None:
        """Create an object. Raise Refused with code 409 where it exists."""
        self._cluster.create(obj)
        self._made.append(_key(obj))

    def keep(self) -> None:
        """Keep all that was made so far, whatever comes."""
        self._made.clear()

    @contextmanager
    def taking_back(self, hint: str) -> Iterator[None]:
        """Remove what was made where the block fails. `hint` says what to do where that cannot be done."""
        try:
            yield
        except Unreachable:
            if self._made:
                say(f"{self._titles(self._made)} may have been made; {hint}")
            raise
        except (KubetuneError, KeyboardInterrupt):
            self._take_back(hint)
            raise

    def _take_back(self, hint: str) -> None:
        """Remove what was made, the last first, and say so."""
        removed = []
        left = []
        for kind, name in reversed(self._made):
            try:
                if self._cluster.delete(kind, name):
                    removed.append((kind, name))
            except ApiError as error:
                left.append((kind, name))
                say(str(error))
        self._made.clear()
        if removed:
            say(f"removed again: {self._titles(removed)}")
        if left:
            say(f"could not be removed again: {self._titles(left)}; {hint}")

    def _titles(self, keys: Sequence[tuple[str, str]]) -> str:
        return ", ".join(f"{kind} {name}" for kind, name in keys)

    def _apply(self, obj: Manifest, *, dry_run: bool = False) -> None:
        """Apply an object; again for some seconds while it is refused for an object that was just made."""
        deadline = time.monotonic() + _LEARNING_SECONDS
        while True:
            try:
                self._cluster.apply(obj, dry_run=dry_run)
            except Refused as error:
                if not self._lacks_reference(obj, error) or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_PAUSE_SECONDS)

    def _lacks_reference(self, obj: Manifest, error: Refused) -> bool:
        """True if an object is refused since another one of this submission, to which it refers, is not found."""
        # The words around differ: 'TrainingRuntime.trainer.kubeflow.org "fit" not found', "runtime 'fit' not found".
        for other in referred(obj, self._objects):
            name = other["metadata"]["name"]
            if any(f"{quote}{name}{quote} not found" in error.words for quote in "\"'"):
                return True
        return False
