"""A bounded queue in front of each tracker, and the thread that sends what is in it.

So a store that is down, slow or silent costs training nothing: numbers wait here, those that do not fit are counted,
and the end of a run waits for the rest only a few seconds. Not for how a tracker stores numbers (*_tracker.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kubetune.base.logs import family_logger, scrub

MOST_WAITING = 200_000  # numbers that may wait for a tracker: some hours of a run, some 50 MB
SECONDS_BETWEEN_SENDS = 5.0
# Seconds from the start of a run; only the end of a shorter run waits for any of it.
SECONDS_TO_BEGIN = 60.0
SECONDS_TO_SEND_THE_REST = 10.0
SECONDS_FOR_FILES = 120.0
_LONGEST_REASON = 300

_log = family_logger("TRACKING")


class Numbers(NamedTuple):
    """Numbers of one moment, in seconds since the epoch, after `step` completed steps."""

    step: int
    moment: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What trackers show of a run besides its numbers."""

    name: str
    run_dir: Path
    task: str
    method: str  # lora-r16-a32, or full
    model: str  # hub id or folder
    settings: dict[str, Any]  # the resolved config


class Sink(Protocol):
    """One tracker. All but its constructor is called in its thread, one call after the other."""

    def begin(self) -> None:
        """Begin the run in the tracker, or continue it."""
        ...

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Send numbers, which are kept nowhere else from now on."""
        ...

    def tell(self, name: str, text: str) -> None:
        """Attach a text to the run."""
        ...

    def load_of(self, load: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the machine's load under names that the tracker knows.

        Only MLflow has some: TensorBoard has no place for them, Trackio's page shows only system metrics that Trackio
        itself collects, and wandb looks at the machine itself.
        """
        return {}

    def closing(self, status: str) -> Iterable[tuple[float, Callable[[], object]]]:
        """Return the work that is left at the end, each with the seconds that it may take."""
        ...


@dataclass
class Lack:
    """Numbers that a tracker did not get."""

    numbers: int = 0
    first: int | None = None  # step of the first one that was not even kept
    last: int | None = None  # step of the last one

    def add(self, step: int, count: int) -> None:
        """Count so many more numbers of a step."""
        self.numbers += count
        self.first = self.first or step
        self.last = step


def reason_of(error: Exception) -> str:
    """Return the message of a store's library in one line: some of them quote whole pages."""
    lines = str(error).splitlines()
    reason = ""
    if lines:
        reason = lines[0]
    reason = reason or type(error).__name__
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON] + " …"
    return scrub(reason)


def curve(name: str) -> str:
    """Return a number's name for trackers that group by folders: `train/loss`, `eval/loss`."""
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"train/{name}"


class TrackerQueue:
    """The queue and the thread of one tracker. Nothing waits for it before `close`."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink = sink
        self._waiting: list[Numbers] = []
        self._count = 0  # numbers that wait
        self._in_flight = 0  # numbers that are being sent
        self._step = 0  # of the last numbers
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.dropped = Lack()
        self._lock = threading.Lock()

        # Unlike an executor's, this thread keeps no process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()
        # The first call of the thread opens the run in the store, which may take long.
        self._opened = time.monotonic()
        self._last_send = self._opened
        self._sending = self._submit(sink.begin)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers, and send what waits if it is time to. Raise the error of an earlier sending."""
        self._step = step
        self._keep(step, values)
        # A sending that is still under way is not waited for: what comes meanwhile goes with the next.
        seconds_since = time.monotonic() - self._last_send
        if self._sending.done() and seconds_since >= SECONDS_BETWEEN_SENDS:
            self._send()

    def note_load(self, load: Mapping[str, Any]) -> None:
        """Keep the machine's load, to be sent with the next numbers. Called by the thread that looks at it."""
        values = self._sink.load_of(load)
        if values:
            self._keep(self._step, values)

    def tell(self, name: str, text: str) -> None:
        """Attach a text to the run. A tracker that does not take it is warned of, and goes on."""

        def tell() -> None:
            try:
                self._sink.tell(name, text)
            except Exception as error:  # a store's own errors, of many kinds
                reason = reason_of(error)
                _log.warning("%s did not take a word; it goes without: %s", self._name, reason)

        self._submit(tell)

    def close(self, status: str) -> None:
        """Send the rest, and end. Raise TimeoutError if an answer takes too long."""
        # A run that must make way for others does not wait for a store that has not answered yet.
        seconds_to_begin = 0.0
        if status != "KILLED":
            seconds_to_begin = self._opened + SECONDS_TO_BEGIN - time.monotonic()
        wait_for(self._sending, max(seconds_to_begin, SECONDS_TO_SEND_THE_REST))

        # Then the numbers that wait, and what the tracker itself has to do at the end.
        self._send()
        wait_for(self._sending, SECONDS_TO_SEND_THE_REST)
        self._in_flight = 0
        for seconds, do in self._sink.closing(status):
            wait_for(self._submit(do), seconds)

    def abandon(self) -> int:
        """Return how many numbers were not sent, or are not known to be."""
        return self._count + self._in_flight

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:  # the machine's load comes from another thread
            if self._count + len(values) <= MOST_WAITING:
                self._waiting.append(Numbers(step, time.time(), values))
                self._count += len(values)
                return

        # Only the first of them is worth a line. The end of the run says how many there were.
        if not self.dropped.numbers:
            _log.warning(
                "%s takes too long: numbers are left out, and counted; training goes on", self._name
            )
        self.dropped.add(step, len(values))

    def _send(self) -> None:
        """Hand the numbers that wait to the thread. Raise the error of the sending before."""
        self._sending.result()

        # Until the thread is done with these numbers nobody knows whether the store has them.
        with self._lock:
            numbers = self._waiting
            self._waiting = []
            self._in_flight = self._count
            self._count = 0
        self._last_send = time.monotonic()
        if numbers:
            self._sending = self._submit(lambda: self._sink.send(numbers))

    def _submit(self, do: Callable[[], Any]) -> Future[Any]:
        """Have the thread do something after all that it was given before."""
        future: Future[Any] = Future()
        self._calls.put((future, do))
        return future

    def _work(self) -> None:
        """Do what is submitted, one after the other, until the process ends."""
        while True:
            future, do = self._calls.get()
            # The error of a call goes to whoever waits for it. The thread lives on for the next call.
            try:
                future.set_result(do())
            except BaseException as error:
                future.set_exception(error)


def wait_for(future: Future[Any], seconds: float) -> Any:
    """Return the result of a future. Raise TimeoutError, with a message, after `seconds`."""
    try:
        return future.result(seconds)
    except TimeoutError:
        # The call itself may have raised one, with a message of its own.
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.3g} s") from None
