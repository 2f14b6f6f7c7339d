"""Follows the logs of all pods of a run as one stream, through restarts of pods and absences of the API server.

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
from contextlib import ExitStack, contextmanager
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
from kubetune.k8s.cluster.asking_pods import read_progress
from kubetune.k8s.cluster.cluster_runs import final_status
from kubetune.k8s.cluster.preparation import cause_of_failure, find_pods
from kubetune.k8s.cluster.run_lookup import workload_kind
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.run_spec import TRAINER, RunSpec
from kubetune.k8s.manifests.samplers import SAMPLER

# How long it takes at most until the state of a run is looked at again.
_LOOK_SECONDS = 5.0
# Changes within so long are looked at together.
_GATHER_SECONDS = 0.25
_PAUSE_SECONDS = 0.5
_PASSING_SECONDS = 0.05
# How long a log of a pod that stays has to be silent until all of it counts as read.
_SILENT_SECONDS = 1.0
# How long a log that breaks off is asked for without a new line, once the run is over.
_PATIENCE_SECONDS = 60.0
# How long a log may break off before a message says so.
_PATIENT_SECONDS = 10.0
# How long is waited until the logs of containers that run are open.
_OPEN_SECONDS = 15.0
# How long a run is followed whose state nobody reports.
_ABSENCE_SECONDS = 600.0
_FRACTION = re.compile(r"(?:\.(\d+))?(Z|[+-]\d\d:\d\d)$")


@dataclass(frozen=True)
class Source:
    """One start of one container."""

    pod: str
    uid: str  # of the pod: a StatefulSet gives the next pod the same name
    container: str
    attempt: int  # number of restarts within the pod before this start
    node: int
    component: str  # of the pod
    # the main container of a trainer's or a server's pod, which needs no other mark than its number
    is_main: bool

    @property
    def file_name(self) -> str:
        """Return the name of the file that keeps its lines."""
        return f"{self.pod}.{self.uid[:8]}.{self.container}.{self.attempt}.log"


class UnreadableLog(Unreachable):
    """A run is over, and nobody gives the rest of one of its logs: its node has gone, say. All others were read."""


# emit(source, line)
Emit = Callable[[Source, str], None]
# look(pods of the run, warnings of the namespace)
Look = Callable[[Sequence[Object], Sequence[Object]], None]
ContainerState = Literal["running", "ended", "restarted", "gone"]


def sources_of(pod: Object) -> Iterator[Source]:
    """Yield the containers of a pod that have a log by now, in the order in which they run."""
    main = pods.trainer_container(pod)
    component = pods.component_of(pod)
    for status in pods.container_statuses(pod):
        state = status.get("state") or {}
        if "running" in state or "terminated" in state:
            container = str(status["name"])
            yield Source(
                pod=pods.name_of(pod),
                uid=str(pod["metadata"]["uid"]),
                container=container,
                attempt=int(status.get("restartCount", 0)),
                node=pods.node_number(pod),
                component=component,
                is_main=container == main and component in (TRAINER, SAMPLER),
            )


def _order(pod: Object) -> tuple[bool, int, str]:
    """Return what pods are sorted by: those that prepare come first; then by node, older ones first."""
    stamp = str(pod["metadata"].get("creationTimestamp", ""))
    return pods.component_of(pod) == TRAINER, pods.node_number(pod), stamp


class Position:
    """Up to where a log was read, by the times of its lines, of which several may share one.

    API servers can be asked for lines since a whole second, so a new connection begins with lines seen already:

        read so far      10.1 a    10.7 b    10.7 c      the last time is 10.7, with two lines
        since 10         10.1 a    10.7 b    10.7 c    10.7 d
                         older     skipped   skipped   new
    """

    def __init__(self) -> None:
        self._stamp = ""  # time of the last line
        self._count = 0  # lines of that time
        self._skip = 0  # lines of that time that come again
        self.lines = 0  # lines in all

    @property
    def since(self) -> str | None:
        """Return the time to go on reading from, in whole seconds; None before any line."""
        return _FRACTION.sub(r"\2", self._stamp) or None

    def reconnect(self) -> None:
        """Expect the next lines to begin again at `since`."""
        self._skip = self._count

    def is_new(self, stamp: str) -> bool:
        """Count the next line, of this time, and return True; False where it was seen before."""
        if _padded(stamp) < _padded(self._stamp):
            return False
        if stamp != self._stamp:
            self._stamp = stamp
            self._count = 0
            self._skip = 0
        if self._skip:
            self._skip -= 1
            return False
        self._count += 1
        self.lines += 1
        return True


def _padded(stamp: str) -> str:
    """Return a time that compares as text: `.12Z` comes after `.119Z`, as `.120000000` and `.119000000`."""
    match = _FRACTION.search(stamp)
    if match is None:
        return stamp
    return f"{stamp[: match.start()]}.{match[1] or '':0<9}"


class LogCopy:
    """The copy of a log on this machine: each line once, however often and by however many it is followed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = Position()
        self._size = 0  # bytes of whole lines, which only this copy adds to
        if path.exists():
            *whole, torn = path.read_bytes().split(b"\n")
            for line in whole:
                self._position.is_new(line.decode(errors="replace").partition(" ")[0])
            self._position.reconnect()
            # A line without an end was cut off as its follower was killed. It will come again.
            self._size = path.stat().st_size - len(torn)
            os.truncate(path, self._size)

    def write(self, stamp: str, line: str) -> None:
        """Add a line, read from the start of the log on, unless it is there or somebody else adds them."""
        if not self._position.is_new(stamp):
            return
        with explained_writes(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                # Longer than we left it: another follower writes the same lines.
                if file.tell() == self._size:
                    self._size += file.write(f"{line}\n".encode())


class LogFollower:
    """The logs of the containers of a run, as they come.

    `wanted` chooses pods among those of `components`, `keep` is a folder for copies of all lines, and `look` is called
    every few seconds and when pods change, with all pods of the run and the namespace's warnings, for whoever wants to
    show more than the logs do. `check` gets all pods as often, and may raise what ends the following. `workload`, by
    kind and name, is whose end ends it; left out: what runs the trainer.
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
        check: Callable[[Sequence[Object]], None] = lambda all_pods: None,
        components: Sequence[str] = (PREPROCESS, TRAINER),
        workload: tuple[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self._spec = spec
        self._emit = emit
        self._chosen = wanted
        self._keep = keep
        self._look_around = look
        self._check = check
        self._components = components
        self._workload = workload or (workload_kind(spec), spec.name)
        # All pods of the run; those of other components are left out one by one.
        self._labels = spec.every_pod()
        self._pods: Informer | None = None
        self._warnings: Informer | None = None
        self._woken = threading.Event()  # something has changed
        self._pods_seen: dict[str, Object] = {}  # by uid
        self._readers = _Readers(self._read_log)
        self._lock = threading.Lock()  # for one line at a time
        self.stopped = threading.Event()
        self.over_since: float | None = None  # time at which the run was seen to be over
        self._stays = False  # the run is over, and its containers stay
        self._last_line = time.monotonic()  # time of the last line, of any log

    def read(self) -> None:
        """Emit what is there now, pod by pod in the order of their nodes and ages."""
        chosen = [pod for pod in self.cluster.list("Pod", self._labels) if self._wanted(pod)]
        for pod in sorted(chosen, key=_order):
            for source in sources_of(pod):
                self._readers.read(source, follow=False)
        self._readers.raise_error()

    def follow(self) -> None:
        """Emit everything from the start until the run has ended, was stopped or deleted, and all logs are read."""
        with self.opened():
            self.read_to_end()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Read all logs while the block runs, which begins once those of running containers are open.

        What pods print from then on is heard, however soon they are gone. For who makes them end.
        """
        # Readers ask for pods from the first change on, which comes as the informer begins.
        self._pods = Informer(
            self.cluster, "Pod", self._labels, on_change=self._begin, changed=self._woken
        )
        with ExitStack() as informers:
            informers.enter_context(self._pods)
            if self._look_around is not None:
                self._warnings = Informer(self.cluster, "Event", fields={"type": "Warning"})
                informers.enter_context(self._warnings)
            try:
                self._readers.wait_until_open()
                yield
            finally:
                self.stopped.set()

    def read_to_end(self) -> None:
        """Wait until the run has ended, was stopped or deleted, and all logs are read. For `opened`."""
        assert self._pods is not None
        self._wait_for_end(self._pods, self._warnings, self._woken)
        self.over_since = time.monotonic()
        if SAMPLER in self._components:
            # Servers may wait for another start of the run, and so outlive it.
            self._stays = True
            self._last_line = time.monotonic()
        self._read_out()

    def pods_seen(self) -> list[Object]:
        """Return the pods that were followed, each as it was last, though it may be gone."""
        return list(self._pods_seen.values())

    def container_state(self, source: Source) -> ContainerState:
        """Return the state of a container's start: whether more lines can come; `ended` still has its log."""
        assert self._pods is not None
        pod = self._pods.get(source.pod)
        if pod is None or pod["metadata"]["uid"] != source.uid:
            return "gone"
        status = pods.container_status(pod, source.container)
        if int(status.get("restartCount", 0)) != source.attempt:
            return "restarted"
        if "terminated" in (status.get("state") or {}):
            return "ended"
        return "running"

    def emit(self, source: Source, stamp: str, text: str, copy: LogCopy | None) -> None:
        """Emit and keep a line. After the end of `follow` none is."""
        with self._lock:
            if self.stopped.is_set():
                return
            self._last_line = time.monotonic()
            self._emit(source, text)
            if copy is not None:
                copy.write(stamp, f"{stamp} {text}")

    def _wanted(self, pod: Object) -> bool:
        """True if the logs of a pod are followed."""
        return pods.component_of(pod) in self._components and self._chosen(pod)

    def _wait_for_end(
        self, all_pods: Informer, warnings: Informer | None, woken: threading.Event
    ) -> None:
        """Look at the run again and again until it is over."""
        answered = time.monotonic()
        while True:
            is_over = False
            try:
                if self._look_around is not None and warnings is not None:
                    pods_left = self._readers.without_last_words(all_pods.objects())
                    self._look_around(pods_left, warnings.objects())
                self._check(all_pods.objects())
                is_over = self._is_over(all_pods.objects())
                answered = time.monotonic()
            except ApiError as error:
                # API servers restart, and networks go for a while.
                if not may_pass(error) or time.monotonic() - answered > _ABSENCE_SECONDS:
                    raise
                self.stopped.wait(_PAUSE_SECONDS)
            self._readers.raise_error()
            if is_over:
                return
            woken.wait(_LOOK_SECONDS)
            self.stopped.wait(_GATHER_SECONDS)
            woken.clear()

    def _begin(self, change: str, pod: Object) -> None:
        """Start readers for what has begun in a pod."""
        if not self._wanted(pod):
            return
        self._pods_seen[str(pod["metadata"]["uid"])] = pod
        if change == "DELETED":
            return
        for source in sources_of(pod):
            self._readers.start(source)

    def _read_out(self) -> None:
        """Wait until all logs are read, those of containers that stay until they have been silent for a while."""
        # The end may have been heard of before the last beginning.
        for pod in self.cluster.list("Pod", self._labels):
            self._begin("ADDED", pod)
        while self._readers.are_reading():
            if self._stays and time.monotonic() - self._last_line > _SILENT_SECONDS:
                return
            time.sleep(_PASSING_SECONDS)
            self._readers.raise_error()
        self._readers.raise_error()

    def _is_over(self, all_pods: Sequence[Object]) -> bool:
        """True if no more pods come. Raise EnvironmentFault where none ever will, though the run waits for them."""
        chosen = [pod for pod in all_pods if self._wanted(pod)]
        workload = self.cluster.get(*self._workload)
        state, reason = pods.state_of(workload, chosen)
        # Only a queue that gives the run to another cluster says a reason here.
        if state == "waiting" and reason:
            raise EnvironmentFault(f"{self._spec.name}: {reason}")
        if state == "absent" and self._workload[1] == self._spec.name:
            state, _ = preparation.state_before_training(self.cluster, self._spec, state, chosen)
        if state in ("done", "failed"):
            return True
        if state in ("absent", "stopped"):
            return all(pods.has_ended(pod) for pod in chosen)
        # The pods of a StatefulSet stay, so only the run directory says that the run has ended.
        if state == "running" and kind_of(self._spec.kubernetes.kind).never_ends:
            progress = read_progress(self.cluster, self._spec, chosen)
            if final_status(workload, progress):
                self._stays = True
                self._last_line = time.monotonic()
                return True
        return False

    def _read_log(self, source: Source, is_open: threading.Event, follow: bool) -> None:
        """Read one log to its end; with `follow` until no more lines can come."""
        copy = None
        if self._keep is not None:
            copy = LogCopy(self._keep / source.file_name)
        LogReader(self, source, copy, follow=follow, is_open=is_open).read()


class _Readers:
    """The threads that read logs, one for each start of a container. Their errors are kept until they are asked for."""

    def __init__(self, read_log: Callable[[Source, threading.Event, bool], None]) -> None:
        # Of a log, an event to set once it is open, and whether to follow it.
        self._read_log = read_log
        self._threads: dict[Source, threading.Thread] = {}
        self._open: dict[Source, threading.Event] = {}
        self._errors: list[Exception] = []

    def start(self, source: Source) -> None:
        """Have a thread read a log from its start, unless one does."""
        if source in self._threads:
            return
        self._open[source] = threading.Event()
        # Daemons: a log that gives nothing more must not hold up the end of the program.
        self._threads[source] = threading.Thread(
            target=self.read, args=(source,), kwargs={"follow": True}, daemon=True
        )
        self._threads[source].start()

    def read(self, source: Source, *, follow: bool) -> None:
        """Read a log in this thread."""
        try:
            self._read_log(source, self._open.setdefault(source, threading.Event()), follow)
        # An OSError: nobody reads any more what is emitted.
        except (KubetuneError, OSError) as error:
            self._errors.append(error)

    def wait_until_open(self) -> None:
        """Wait until each log was given or refused, `_OPEN_SECONDS` at most."""
        deadline = time.monotonic() + _OPEN_SECONDS
        for is_open in list(self._open.values()):
            is_open.wait(max(0.0, deadline - time.monotonic()))

    def are_reading(self) -> bool:
        """True while some log may give more."""
        return any(thread.is_alive() for thread in list(self._threads.values()))

    def raise_error(self) -> None:
        """Raise the first error of a log, if there is one."""
        if self._errors:
            raise self._errors[0]

    def without_last_words(self, all_pods: Sequence[Object]) -> list[Object]:
        """Return the pods but those that have ended and whose last lines, with the reason, are still to come."""
        uids_read = set()
        for source, thread in list(self._threads.items()):
            if thread.is_alive():
                uids_read.add(source.uid)
        rest = []
        for pod in all_pods:
            if not pods.has_ended(pod) or pod["metadata"]["uid"] not in uids_read:
                rest.append(pod)
        return rest


class LogReader:
    """Reads the log of one start of a container, each line once, until no more can come.

    A log does not say whether it is complete, nor why it stopped: connections are cut by proxies, by API servers that
    restart, and by nodes that go, and a cut looks like an end. So each pass over the log ends in one of three ways,
    and what comes next is decided by the pod's status, which the watch keeps:

    - **read to its end**: over if the container has ended; while it runs, kubelet merely closed the stream (it does
      when it rotates the file), and the next pass goes on at the time of the last line;
    - **cut off**, within a line that has no end, or its node is away (`Unreachable`): once more, from there. A last
      line without an end counts only once the container writes no more and says the same twice, or the pod is gone.
      While the run goes on there is no limit to it; once it is over, a log that gives no new line within
      `_PATIENCE_SECONDS` is an error;
    - **refused**: with 400 the container is still being created, or its log not open yet, so once more; with 404
      the pod has gone, and the rest of its log with it, if the watch agrees. A server that has just started says so too.

    A container that was restarted meanwhile has a new start, which is read by another reader. What this one wrote at
    its end is then the *previous* log, read once more to its end; a 400 at that says it is not kept.
    """

    def __init__(
        self,
        follower: LogFollower,
        source: Source,
        copy: LogCopy | None,
        *,
        follow: bool,
        is_open: threading.Event,
    ) -> None:
        self._follower = follower
        self._source = source
        self._copy = copy
        self._follow = follow
        self._is_open = is_open  # set once the server has given the log, or an error
        self._position = Position()
        self._previous = False  # the container was restarted, so its log is the previous one
        self._torn = ""  # the line without an end in which the last pass that was answered stopped
        self._stuck_since: float | None = None

    def read(self) -> None:
        """Emit all lines. Raise UnreadableLog where the rest of them cannot be had."""
        while self._pass() or self._is_running():
            pass
        self._emit(self._torn)

    def _is_running(self) -> bool:
        """True if more lines can come, whatever the last pass was told."""
        if not self._follow or self._follower.stopped.wait(_PASSING_SECONDS):
            return False
        return self._follower.container_state(self._source) == "running"

    def _pass(self) -> bool:
        """Read from the last line on; return True if another pass has to follow."""
        self._position.reconnect()
        lines = self._position.lines
        is_whole = False
        try:
            last = self._emit_new_lines()
            is_whole = not last or (
                last == self._torn and self._follower.container_state(self._source) != "running"
            )
            self._torn = last
            self._stuck_since = None
        except Unreachable as error:
            if not self._follow:
                raise
            if self._stuck_since is None or self._position.lines > lines:
                self._stuck_since = time.monotonic()
            self._bear(error, self._stuck_since)
        except Refused as error:
            if error.code not in (400, 404):
                raise
            if self._previous or (error.code == 404 and not self._follow):
                return False
        finally:
            self._is_open.set()
        if not self._follow or (self._previous and is_whole):
            return False
        if self._follower.stopped.wait(_PAUSE_SECONDS):
            return False
        state = self._follower.container_state(self._source)
        if state == "gone" or (state == "ended" and is_whole):
            return False
        self._previous = state == "restarted"
        return True

    def _bear(self, error: Unreachable, stuck_since: float) -> None:
        """Tell the user of a log that gives nothing for long. Raise UnreadableLog where there is no hope."""
        now = time.monotonic()
        if now - stuck_since > _PATIENT_SECONDS:
            self._follower.cluster.tell_once(f"{error}; asking again while the run goes on")
        over_since = self._follower.over_since
        if over_since is not None and now - max(stuck_since, over_since) > _PATIENCE_SECONDS:
            problem = (
                f"the log of {self._source.pod} cannot be read to its end, though the run is over"
            )
            raise UnreadableLog(f"{problem}: {error}") from None

    def _emit_new_lines(self) -> str:
        """Emit the lines that are new. Return the last one where it has no end; it is not emitted."""
        lines = self._follower.cluster.log(
            self._source.pod,
            self._source.container,
            since=self._position.since,
            follow=self._follow and not self._previous,
            previous=self._previous,
            # Who follows asks again by itself.
            waits_for_node=not self._follow,
            on_open=self._is_open.set,
        )
        for line in lines:
            if not line.endswith("\n"):
                return line
            self._emit(line.removesuffix("\n"))
            if self._follower.stopped.is_set():
                break
        return ""

    def _emit(self, line: str) -> None:
        """Emit a line without its time and its secrets, if it is new. One that was cut within its time says nothing."""
        # Programs beside the agent, such as the command of `preprocess`, print what they like.
        stamp, space, text = scrub(line).partition(" ")
        if space and self._position.is_new(stamp):
            self._follower.emit(self._source, stamp, text, self._copy)


def follow_to_end(cluster: Cluster, follower: LogFollower) -> None:
    """Follow to learn how the run ends. A log that cannot be read gives a message, and is no failure."""
    try:
        follower.follow()
    except UnreadableLog as error:
        cluster.tell_once(str(error))


def wait_for_job(cluster: Cluster, spec: RunSpec, emit: Emit, look: Look | None = None) -> None:
    """Follow the Job that prepares to its end. Raise ConfigError or EnvironmentFault with its cause when it failed."""
    name = preprocess_name(spec)
    follower = LogFollower(
        cluster, spec, emit, components=(PREPROCESS,), workload=("Job", name), look=look
    )
    follow_to_end(cluster, follower)
    state, reason = pods.state_of(cluster.get("Job", name), [])
    if state == "done":
        return
    preparing = find_pods(cluster, spec)
    cause = ""
    fault: type[KubetuneError] = EnvironmentFault
    if preparing:
        cause = cause_of_failure(cluster, preparing[-1])
        # The data or the config is wrong, so the exit code here is the same as there.
        if pods.exit_code(preparing[-1]) == USER:
            fault = ConfigError
    cause = cause or reason or "it was deleted"
    raise fault(
        f"Job {name}, which fetches and prepares before training, has failed: {cause}. Training was not started."
    )
