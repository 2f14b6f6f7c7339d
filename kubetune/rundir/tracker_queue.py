"""Way of numbers to a tracker: a thread for each, and a queue with a bound before it.

A store that is down, slow or silent costs training nothing: numbers wait here, what does not fit is counted, and at the
end it is waited for no longer than a few seconds. Not for what a tracker makes of them (*_tracker.py).
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

MOST_WAITING = 200_000
"""Numbers that may wait for a tracker: some hours of a run, and some 50 MB."""
SECONDS_BETWEEN_SENDS = 5.0
SECONDS_TO_BEGIN = 60.0
"""Time from the start of a run; only the end of a run that is shorter waits for any of it."""
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
    """What trackers know of a run besides its numbers."""

    name: str
    run_dir: Path
    task: str
    method: str  # lora-r16-a32, or full
    model: str  # hub id or folder
    settings: dict[str, Any]  # the resolved config


class Sink(Protocol):
    """A tracker's own side: all but its constructor is called in its thread, one thing after the other."""

    def begin(self) -> None:
        """Begin its run, or go on with it."""
        ...

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Send numbers; they are no longer kept here."""
        ...

    def tell(self, name: str, text: str) -> None:
        """Leave a word on the run."""
        ...

    def load_of(self, load: Mapping[str, Any]) -> Mapping[str, float]:
        """Numbers of a look at the machine, under names that the tracker knows.

        None: TensorBoard has no place for them, Trackio's page has system metrics of its own making only, and wandb
        looks at the machine itself.
        """
        return {}

    def closing(self, status: str) -> Iterable[tuple[float, Callable[[], object]]]:
        """Work that is left at the end, each with the seconds that it may take."""
        ...


@dataclass
class Lack:
    """Numbers that a tracker did not get, and the first and last step of those that were not even kept."""

    numbers: int = 0
    first: int | None = None
    last: int | None = None

    def add(self, step: int, count: int) -> None:
        """Count so many more, of a step."""
        self.numbers += count
        self.first, self.last = self.first or step, step


def said_by(error: Exception) -> str:
    """Words of a store's library, in a line: some of them quote whole pages."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return scrub(said if len(said) <= _LONGEST_REASON else said[:_LONGEST_REASON] + " …")


def curve(name: str) -> str:
    """A number's name where trackers group by folders: `train/loss`, `eval/loss`."""
    group = "eval" if name.startswith("eval_") else "train"
    return f"{group}/{name.removeprefix('eval_')}"


class TrackerQueue:
    """The way to one tracker, which begins at once and is waited for by nobody before `close`."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._waiting: list[Numbers] = []
        self._count = self._in_flight = self._step = 0
        self._wanted: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.dropped, self._lock = Lack(), threading.Lock()
        # Unlike an executor's, this thread keeps no process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()
        self._opened = self._last_send = time.monotonic()
        self._sending = self._submit(sink.begin)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers to be sent; send what waits where it is time to. Raises what an earlier sending met with."""
        self._step = step
        self._keep(step, values)
        if self._sending.done() and time.monotonic() - self._last_send >= SECONDS_BETWEEN_SENDS:
            self._send()

    def note_load(self, load: Mapping[str, Any]) -> None:
        """Keep the machine's load to be sent with the next numbers; in the thread that looks at the machine."""
        if values := self._sink.load_of(load):
            self._keep(self._step, values)

    def tell(self, name: str, text: str) -> None:
        """Pass on a word; that it is not taken is told, and ends nothing."""

        def tell() -> None:
            try:
                self._sink.tell(name, text)
            except Exception as error:  # a store's own errors, of many kinds
                _log.warning(
                    "%s did not take a word; it goes without: %s", self._name, said_by(error)
                )

        self._submit(tell)

    def close(self, status: str) -> None:
        """Send the rest, and end. Raises TimeoutError where an answer takes too long."""
        left = 0.0 if status == "KILLED" else self._opened + SECONDS_TO_BEGIN - time.monotonic()
        wait_for(self._sending, max(left, SECONDS_TO_SEND_THE_REST))
        self._send()
        wait_for(self._sending, SECONDS_TO_SEND_THE_REST)
        self._in_flight = 0
        for seconds, do in self._sink.closing(status):
            wait_for(self._submit(do), seconds)

    def abandon(self) -> int:
        """Count of numbers that were not sent, or are not known to be."""
        return self._count + self._in_flight

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:  # the machine's load comes from another thread
            if self._count + len(values) <= MOST_WAITING:
                self._waiting.append(Numbers(step, time.time(), values))
                self._count += len(values)
                return
        if not self.dropped.numbers:
            _log.warning(
                "%s takes too long: numbers are left out, and counted; training goes on", self._name
            )
        self.dropped.add(step, len(values))

    def _send(self) -> None:
        self._sending.result()
        with self._lock:
            numbers, self._waiting = self._waiting, []
            self._in_flight, self._count = self._count, 0
        self._last_send = time.monotonic()
        if numbers:
            self._sending = self._submit(lambda: self._sink.send(numbers))

    def _submit(self, do: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._wanted.put((future, do))
        return future

    def _work(self) -> None:
        while True:
            future, do = self._wanted.get()
            try:
                future.set_result(do())
            except BaseException as error:
                future.set_exception(error)


def wait_for(future: Future[Any], seconds: float) -> Any:
    """The result of a future. Raises TimeoutError, in words, after `seconds`."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.3g} s") from None
