"""Ask servers many things at a time, in threads, and take the answers as they come."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from kubetune import errors
from kubetune.base import logs
from kubetune.training.rollouts.servers.vllm_client import Refused, Server, ServerTrouble, Unknown

# Items that a rank has asked about at a time. A server makes batches of what it has been asked for.
_AT_A_TIME: Final = 64

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 5.0

# Beyond the time of an item, until its thread counts as stuck.
_GRACE_SECONDS: Final = 15.0


class Numbered(Protocol):
    """What servers are asked about."""

    @property
    def number(self) -> int:
        """Return what decides its server, the same for any number of ranks."""


Item = TypeVar("Item", bound=Numbered)
Answer = TypeVar("Answer")


class Calls(ABC, Generic[Item, Answer]):
    """What one rank asks servers, under way. The time of an item begins when a thread takes it up."""

    def __init__(self, servers: Sequence[Server], seconds: float, items: Sequence[Item]) -> None:
        """`seconds`: in which the answer to an item must have come."""
        self._servers = servers
        self._seconds = seconds
        self._todo = deque(enumerate(items))
        self._left = len(items)  # that `arrived` has not returned
        self._arrived: queue.Queue[tuple[Item, Answer] | errors.KubetuneError] = queue.Queue()
        self._cancelled = threading.Event()
        self._complained: set[str] = set()  # addresses of servers that were asked again
        # Items that a thread has taken up, and when, by their place.
        self._under_way: dict[int, tuple[Item, float]] = {}
        for _ in range(min(_AT_A_TIME, len(items))):
            # Nobody waits for these threads at the end of the process.
            threading.Thread(target=self._work, name="ask server", daemon=True).start()

    @abstractmethod
    def _ask(self, item: Item, server: Server, deadline: float) -> Answer:
        """Return what a server answers. Raise ServerTrouble or TimeoutError if it does not."""

    @abstractmethod
    def _missing(self, item: Item, server: Server) -> str:
        """Return in words that a server did not answer to an item: the beginning of an error."""

    # What to do about a server that did not answer.
    _ADVICE = "Start again when the server is well"

    def _fault(
        self, item: Item, server: Server, attempts: int, reason: str
    ) -> errors.EnvironmentFault:
        """Return the error for an item without an answer. `reason`: what the server did last."""
        times = "once" if attempts == 1 else f"{attempts} times"
        return errors.EnvironmentFault(
            f"{self._missing(item, server)} within {self._seconds:g} s, asked {times}: it {reason}. {self._ADVICE}"
        )

    def _remedied(self, server: Server, deadline: float) -> str:
        """Do what can be done about a server that knows nothing of the item; return what to add to a message."""
        return ""

    @property
    def is_done(self) -> bool:
        """True if all answers were taken."""
        return self._left == 0

    def arrived(self, seconds: float) -> list[tuple[Item, Answer]]:
        """Return the answers that have arrived: wait up to so many seconds for the first, and return none after that.

        Raise EnvironmentFault for a server that did not answer in time.
        """
        answered: list[tuple[Item, Answer]] = []
        while not self.is_done:
            # Only the first answer is waited for.
            timeout = 0.0
            if not answered:
                timeout = seconds
            try:
                item = self._arrived.get(timeout=timeout)
            except queue.Empty:
                self._require_threads_in_time()
                break
            if isinstance(item, errors.KubetuneError):
                # Answers before the error are returned first; the next call raises it.
                if answered:
                    self._arrived.put(item)
                    break
                raise item
            self._left -= 1
            answered.append(item)
        return answered

    def cancel(self) -> None:
        """Ask no more. Requests that are under way end by themselves, and their answers are dropped."""
        self._cancelled.set()

    def _work(self) -> None:
        while not self._cancelled.is_set():
            try:
                place, item = self._todo.popleft()
            except IndexError:
                return
            self._under_way[place] = (item, time.monotonic())
            try:
                self._arrived.put((item, self._answer(item)))
            except errors.KubetuneError as error:
                self._arrived.put(error)
            except Exception as error:  # a thread that dies would leave the others waiting
                self._arrived.put(self._fault(item, self._server_of(item), 1, repr(error)))
            del self._under_way[place]

    def _require_threads_in_time(self) -> None:
        """Raise EnvironmentFault for an item whose thread does not come back, such as from a name server."""
        latest = time.monotonic() - self._seconds - _GRACE_SECONDS
        for item, since in list(self._under_way.values()):
            if since < latest:
                raise self._fault(item, self._server_of(item), 1, "let the request hang")

    def _server_of(self, item: Item) -> Server:
        return self._servers[item.number % len(self._servers)]

    def _answer(self, item: Item) -> Answer:
        """Return the answer to an item; ask until it comes or the time is up. Raise EnvironmentFault then."""
        server = self._server_of(item)
        deadline = time.monotonic() + self._seconds
        pause = _FIRST_PAUSE_SECONDS
        attempts = 0
        reason = ""

        # With pauses of 0.25, 0.5, 1, 2, 4, 5, 5 … seconds.
        while True:
            attempts += 1
            try:
                return self._ask(item, server, deadline)
            except Refused as error:
                raise self._fault(item, server, attempts, str(error)) from None
            except Unknown as error:
                reason = str(error)
                reason += self._remedied(server, deadline)
            except ServerTrouble as error:
                reason = str(error)
            except TimeoutError as error:
                reason = reason or str(error)

            self._complain(server, reason)
            if self._cancelled.is_set() or time.monotonic() + pause >= deadline:
                raise self._fault(item, server, attempts, reason)
            self._cancelled.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _complain(self, server: Server, reason: str) -> None:
        """Log what a server did, the first time."""
        if server.url not in self._complained:
            self._complained.add(server.url)
            logs.DATA.warning("server %s is asked again, as it %s", server.url, reason)
