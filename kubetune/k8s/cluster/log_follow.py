"""The logs of all pods of a run as one stream: from the start, through restarts of pods and absences of the API server.

Each start of each container is read by a thread of its own. A broken connection is taken up at the last line's time,
and what was shown already is skipped. Every line is kept in a folder, since the restarts of a JobSet or a PyTorchJob
delete the pods and their logs with them.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kubetune.base.files import explained_writes
from kubetune.base.logs import scrub
from kubetune.errors import USER, ConfigError, EnvironmentFault, KubetuneError
from kubetune.k8s.api.api_errors import ApiError, Refused, Unreachable, may_pass
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.informer import Informer
from kubetune.k8s.cluster import pods, preparation
from kubetune.k8s.cluster.preparation import cause_of_failure, find_pods
from kubetune.k8s.cluster.runs import final_status, read_progress, workload_kind
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.spec import COMPONENT, TRAINER, RunSpec

_LOOK_SECONDS, _GATHER_SECONDS = 5.0, 0.25
_PAUSE_SECONDS, _PASSING_SECONDS = 0.5, 0.05
_SILENT_SECONDS = 1.0
# How long a log that breaks off is asked for without a new line, once the run is over.
_PATIENCE_SECONDS = 60.0
# How long a log may break off before the user is told.
_PATIENT_SECONDS = 10.0
# How long a run is followed of which nobody says how it stands.
_ABSENCE_SECONDS = 600.0
_FRACTION = re.compile(r"(?:\.(\d+))?(Z|[+-]\d\d:\d\d)$")


@dataclass(frozen=True)
class Source:
    """One start of one container: `attempt` counts its restarts within the pod."""

    pod: str
    uid: str
    container: str
    attempt: int
    node: int
    is_trainer: bool
    """The main container of a trainer's pod, which needs no other mark than its node."""

    @property
    def file_name(self) -> str:
        """Name of the file that keeps its lines."""
        return f"{self.pod}.{self.uid[:8]}.{self.container}.{self.attempt}.log"


class UnreadableLog(Unreachable):
    """A run is over, and nobody gives the rest of one of its logs: its node has gone, say. All others were read."""


Emit = Callable[[Source, str], None]
Look = Callable[[Sequence[Object], Sequence[Object]], None]


def sources_of(pod: Object) -> Iterator[Source]:
    """The containers of a pod that have a log by now, in the order in which they run."""
    trainer, uid = pods.trainer_container(pod), str(pod["metadata"]["uid"])
    for status in pods.container_statuses(pod):
        if {"running", "terminated"} & (status.get("state") or {}).keys():
            name, attempt = str(status["name"]), int(status.get("restartCount", 0))
            is_trainer = name == trainer and pods.component_of(pod) == TRAINER
            yield Source(pods.name_of(pod), uid, name, attempt, pods.node_number(pod), is_trainer)


def _place(pod: Object) -> tuple[bool, int, str]:
    """Order of pods: those that prepare first; then by node, older ones first."""
    stamp = str(pod["metadata"].get("creationTimestamp", ""))
    return pods.component_of(pod) == TRAINER, pods.node_number(pod), stamp


class Position:
    """Point up to which a log was read, by the times of its lines, of which several may share one."""

    def __init__(self) -> None:
        self._stamp, self._count, self._skip = "", 0, 0
        self.lines = 0

    @property
    def since(self) -> str | None:
        """Time to go on reading from; servers know whole seconds only."""
        return _FRACTION.sub(r"\2", self._stamp) or None

    def reconnect(self) -> None:
        """The next lines begin again at `since`."""
        self._skip = self._count

    def is_new(self, stamp: str) -> bool:
        """Count the next line, of this time; false where it was seen before the connection broke."""
        if _padded(stamp) < _padded(self._stamp):
            return False
        if stamp != self._stamp:
            self._stamp, self._count, self._skip = stamp, 0, 0
        if self._skip:
            self._skip -= 1
            return False
        self._count += 1
        self.lines += 1
        return True


def _padded(stamp: str) -> str:
    """A time that compares as text: `.12Z` comes after `.119Z`."""
    found = _FRACTION.search(stamp)
    return f"{stamp[: found.start()]}.{found[1] or '':0<9}" if found else stamp


class Kept:
    """The copy of a log on this machine: each line once, however often it is followed and by however many at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._size = path, Position(), 0
        if path.exists():
            *whole, torn = path.read_bytes().split(b"\n")
            for line in whole:
                self._position.is_new(line.decode(errors="replace").partition(" ")[0])
            self._position.reconnect()
            self._size = path.stat().st_size - len(torn)
            os.truncate(path, self._size)

    def write(self, stamp: str, line: str) -> None:
        """Add a line, read from the start of the log on, unless it is there or somebody else adds them."""
        if not self._position.is_new(stamp):
            return
        with explained_writes(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if file.tell() == self._size:
                    self._size += file.write(f"{line}\n".encode())


class LogFollower:
    """The logs of the containers of a run, as they come.

    `wanted` chooses pods among those of `components`, `keep` is a folder for copies of all lines, and `look` is called
    every few seconds and when pods change, with all pods of the run and the namespace's warnings, for whoever wants to
    tell more than the logs do. `workload`, by kind and name, is whose end ends it; left out: what runs the trainer.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: RunSpec,
        emit: Emit,
        *,
        wanted: Callable[[Object], bool] = lambda pod: True,
        keep: Path | None = None,
        look: Look | None = None,
        components: Sequence[str] = (PREPROCESS, TRAINER),
        workload: tuple[str, str] | None = None,
    ) -> None:
        self._cluster, self._spec, self._emit, self._keep = cluster, spec, emit, keep
        self._components, self._chosen = components, wanted
        self._workload = workload or (workload_kind(spec), spec.name)
        # All pods of the run but those of other components, which are left out one by one.
        self._labels = {
            key: text for key, text in spec.selector(TRAINER).items() if key != COMPONENT
        }
        self._look_around = look
        self._threads: dict[Source, threading.Thread] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[Exception] = []
        self._pods: Informer | None = None
        self._seen: dict[str, Object] = {}
        self._stays, self._last_line = False, time.monotonic()
        self._over_since: float | None = None

    def _wanted(self, pod: Object) -> bool:
        return pods.component_of(pod) in self._components and self._chosen(pod)

    def read(self) -> None:
        """Emit what there is now, pod by pod in the order of their nodes and ages."""
        found = [pod for pod in self._cluster.list("Pod", self._labels) if self._wanted(pod)]
        for pod in sorted(found, key=_place):
            for source in sources_of(pod):
                self._read(source, follow=False)
        self._raise_error()

    def follow(self) -> None:
        """Emit everything from the start until the run has ended, was stopped or deleted, and all logs are read."""
        woken, is_over, answered = threading.Event(), False, time.monotonic()
        self._pods = Informer(
            self._cluster, "Pod", self._labels, on_change=self._begin, changed=woken
        )
        looking = self._look_around is not None
        warnings = (
            Informer(self._cluster, "Event", fields={"type": "Warning"})
            if looking
            else nullcontext()
        )
        with self._pods as there, warnings as told:
            try:
                while not is_over:
                    try:
                        if self._look_around is not None and told is not None:
                            self._look_around(self._told(there.objects()), told.objects())
                        is_over = self._is_over(there.objects())
                        answered = time.monotonic()
                    except ApiError as error:
                        if not may_pass(error) or time.monotonic() - answered > _ABSENCE_SECONDS:
                            raise
                        self._stop.wait(_PAUSE_SECONDS)
                    self._raise_error()
                    if not is_over:
                        woken.wait(_LOOK_SECONDS)
                        self._stop.wait(
                            _GATHER_SECONDS
                        )  # what changes together is looked at together
                        woken.clear()
                self._over_since = time.monotonic()
                self._read_out()
            finally:
                self._stop.set()

    def _told(self, there: Sequence[Object]) -> list[Object]:
        """The pods but those that have ended and whose last lines, with the reason, are still to come."""
        reading = {
            source.uid for source, thread in list(self._threads.items()) if thread.is_alive()
        }
        return [
            pod for pod in there if not (pods.has_ended(pod) and pod["metadata"]["uid"] in reading)
        ]

    def pods_seen(self) -> list[Object]:
        """The pods that were followed, each as it was last, though it may be gone."""
        return list(self._seen.values())

    def _begin(self, change: str, pod: Object) -> None:
        """Start readers for what has begun in a pod."""
        if self._wanted(pod):
            self._seen[str(pod["metadata"]["uid"])] = pod
        if change != "DELETED" and self._wanted(pod):
            for source in sources_of(pod):
                if source not in self._threads:
                    thread = threading.Thread(
                        target=self._read, args=(source,), kwargs={"follow": True}, daemon=True
                    )
                    self._threads[source] = thread
                    thread.start()

    def _read_out(self) -> None:
        """Wait until all logs are read, those of containers that stay, silent, until they have been so for a while."""
        for pod in self._cluster.list(
            "Pod", self._labels
        ):  # the end may have been heard of before the last beginning
            self._begin("ADDED", pod)
        while any(thread.is_alive() for thread in list(self._threads.values())):
            if self._stays and time.monotonic() - self._last_line > _SILENT_SECONDS:
                return
            time.sleep(_PASSING_SECONDS)
            self._raise_error()
        self._raise_error()

    def _is_over(self, there: Sequence[Object]) -> bool:
        found = [pod for pod in there if self._wanted(pod)]
        workload = self._cluster.get(*self._workload)
        state, reason = pods.state_of(workload, found)
        if state == "waiting" and reason:  # no pod will ever come here
            raise EnvironmentFault(f"{self._spec.name}: {reason}")
        going = [pod for pod in found if not pods.has_ended(pod)]
        if state == "absent" and self._workload[1] == self._spec.name:
            state, _ = preparation.standing(self._cluster, self._spec, state, found)
        never_ends = state == "running" and kind_of(self._spec.kubernetes.kind).never_ends
        if never_ends and final_status(workload, read_progress(self._cluster, self._spec, found)):
            self._stays, self._last_line = True, time.monotonic()
            return True
        return state in ("done", "failed") or (state in ("absent", "stopped") and not going)

    def _read(self, source: Source, *, follow: bool) -> None:
        """Emit the log of one start of a container, each line once, until no more can come.

        A log says of itself neither that it is complete nor why it stopped: connections are cut by proxies, by API
        servers that restart, and by nodes that go, and a cut looks like an end. So each pass over the log ends in one
        of three ways, and what comes next is decided by the pod's status, which the watch keeps:

        - **read to its end**: over if the container has ended; while it runs, kubelet merely closed the stream (it
          does when it rotates the file), and the next pass goes on at the time of the last line;
        - **cut off**, within a line that has no end, or its node is away (`Unreachable`): once more, from there. A last
          line without an end counts only once the container writes no more and says the same twice, or the pod is
          gone. Servers know whole seconds only, so a
          pass begins with lines seen already; `Position` skips as many as were seen of that time. While the run goes on
          there is no limit to it; once it is over, a log that gives no new line within `_PATIENCE_SECONDS` is an error;
        - **refused**: with 400 the container is still being created, or its log not open yet, so once more; with 404
          the pod has gone, and the rest of its log with it.

        A container that was restarted meanwhile has a new start, which `_begin` gives a thread of its own. What this
        one wrote at its end is then the *previous* log, read once more to its end; a 400 there says it is not kept.
        """
        position, previous = Position(), False
        stuck_since: float | None = None
        # The line in which the last pass that was answered ended.
        torn = ""
        try:
            kept = None if self._keep is None else Kept(self._keep / source.file_name)
            while True:
                position.reconnect()
                is_whole, lines = False, position.lines
                try:
                    last = self._pass_on(source, position, kept, follow=follow, previous=previous)
                    is_whole = not last or (last == torn and self._standing(source) != "running")
                    torn, stuck_since = last, None
                except Unreachable as error:
                    if stuck_since is None or position.lines > lines:
                        stuck_since = time.monotonic()
                    if not follow:
                        raise
                    if time.monotonic() - stuck_since > _PATIENT_SECONDS:
                        self._cluster.tell_once(f"{error}; asking again while the run goes on")
                    if self._is_hopeless(stuck_since):
                        told = f"the log of {source.pod} cannot be read to its end, though the run is over"
                        raise UnreadableLog(f"{told}: {error}") from None
                except Refused as error:
                    if error.code not in (400, 404):
                        raise
                    if error.code == 404 or previous:
                        break
                if not follow or (previous and is_whole) or self._stop.wait(_PAUSE_SECONDS):
                    break
                standing = self._standing(source)
                if standing == "gone" or (standing == "ended" and is_whole):
                    break
                previous = standing == "restarted"
            self._pass_line_on(source, position, kept, torn)
        except (
            KubetuneError,
            OSError,
        ) as error:  # an OSError: nobody reads what is emitted any more
            self._errors.append(error)

    def _is_hopeless(self, since: float) -> bool:
        """The run is over, and a log has given nothing since then for longer than is waited."""
        return (
            self._over_since is not None
            and time.monotonic() - max(since, self._over_since) > _PATIENCE_SECONDS
        )

    def _standing(self, source: Source) -> Literal["running", "ended", "restarted", "gone"]:
        """Standing of a start of a container, of which more can come or not; `ended` with its log still there."""
        assert self._pods is not None
        pod = self._pods.get(source.pod)
        if pod is None or pod["metadata"]["uid"] != source.uid:
            return "gone"
        status = pods.container_status(pod, source.container)
        if int(status.get("restartCount", 0)) != source.attempt:
            return "restarted"
        return "ended" if "terminated" in (status.get("state") or {}) else "running"

    def _pass_on(
        self, source: Source, position: Position, kept: Kept | None, *, follow: bool, previous: bool
    ) -> str:
        """Pass on the lines that are new. Return the last one where it has no end; it is not passed on."""
        lines = self._cluster.log(
            source.pod,
            source.container,
            since=position.since,
            follow=follow and not previous,
            previous=previous,
        )
        for line in lines:
            if not line.endswith("\n"):
                return line
            self._pass_line_on(source, position, kept, line.removesuffix("\n"))
            if self._stop.is_set():
                break
        return ""

    def _pass_line_on(
        self, source: Source, position: Position, kept: Kept | None, line: str
    ) -> None:
        """Emit and keep a line, without its end and its secrets, if it is new. One cut within its time tells nothing."""
        # Programs beside the agent, such as the command of `preprocess`, print what they like.
        stamp, space, text = scrub(line).partition(" ")
        if not space or not position.is_new(stamp):
            return
        with self._lock:
            if self._stop.is_set():
                return
            self._last_line = time.monotonic()
            self._emit(source, text)
            if kept is not None:
                kept.write(stamp, f"{stamp} {text}")

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors[0]


def follow_to_end(cluster: Cluster, follower: LogFollower) -> None:
    """Follow for the sake of how it ends: the user is told of a log that cannot be read, and that is no failure."""
    try:
        follower.follow()
    except UnreadableLog as error:
        cluster.tell_once(str(error))


def wait_for_job(cluster: Cluster, spec: RunSpec, emit: Emit, look: Look | None = None) -> None:
    """Follow the Job that prepares to its end. Raises ConfigError, EnvironmentFault with its cause when it failed."""
    name = preprocess_name(spec)
    follower = LogFollower(
        cluster, spec, emit, components=(PREPROCESS,), workload=("Job", name), look=look
    )
    follow_to_end(cluster, follower)
    state, reason = pods.state_of(cluster.get("Job", name), [])
    if state == "done":
        return
    found = find_pods(cluster, spec)
    cause = (found and cause_of_failure(cluster, found[-1])) or reason or "it was deleted"
    fault = ConfigError if found and pods.exit_code(found[-1]) == USER else EnvironmentFault
    raise fault(
        f"Job {name}, which fetches and prepares before training, has failed: {cause}. Training was not started."
    )
