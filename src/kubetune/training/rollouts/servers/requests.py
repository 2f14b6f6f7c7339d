"""Ask servers for the answers to many prompts at a time, in threads, and take the answers as they come."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kubetune import errors
from kubetune.base import logs
from kubetune.training.rollouts.sampler import DrawnTokens
from kubetune.training.rollouts.servers.completions import answers_in, request_for, seed_of
from kubetune.training.rollouts.servers.vllm_client import Refused, Server, ServerTrouble, Unknown

if TYPE_CHECKING:
    from kubetune.config.schema import GrpoConfig
    from kubetune.training.rollouts.model_answers import Slot
    from kubetune.training.rollouts.servers.adapters import Adapter

# Prompts that a rank has asked for at a time. A server makes batches of what it has been asked for.
_AT_A_TIME: Final = 64

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 5.0

# Beyond the time of a prompt, until its thread counts as stuck.
_GRACE_SECONDS: Final = 15.0


@dataclass(frozen=True)
class Asking:
    """What is the same for all prompts of a run."""

    servers: Sequence[Server]
    settings: GrpoConfig
    eos_ids: Sequence[int]
    vocabulary: int  # of the model
    seed: int
    rank: int
    seconds: float  # in which the answers to a prompt must have come


class Requests:
    """The prompts of a step that one rank asks for. The time of a prompt begins when a thread takes it up."""

    def __init__(self, asking: Asking, step: int, adapter: Adapter, slots: Sequence[Slot]) -> None:
        """`step`: the first that learns from the answers. The adapter is loaded on all servers."""
        self._asking = asking
        self._step = step
        self._adapter = adapter
        self._todo = deque(slots)
        self._left = len(slots)  # that `arrived` has not returned
        self._arrived: queue.Queue[tuple[Slot, list[DrawnTokens]] | errors.KubetuneError]
        self._arrived = queue.Queue()
        self._cancelled = threading.Event()
        self._complained: set[str] = set()  # addresses of servers that were asked again
        # Prompts that a thread has taken up, and when, by their number.
        self._under_way: dict[int, tuple[Slot, float]] = {}
        for _ in range(min(_AT_A_TIME, len(slots))):
            # Nobody waits for these threads at the end of the process.
            threading.Thread(target=self._work, name="ask server", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """True if all answers were taken."""
        return self._left == 0

    def arrived(self, seconds: float) -> list[tuple[Slot, list[DrawnTokens]]]:
        """Return the answers that have arrived: wait up to so many seconds for the first, and return none after that.

        Raise EnvironmentFault for a server that did not answer in time.
        """
        answered: list[tuple[Slot, list[DrawnTokens]]] = []
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
                slot = self._todo.popleft()
            except IndexError:
                return
            self._under_way[slot.number] = (slot, time.monotonic())
            try:
                self._arrived.put((slot, self._answers(slot)))
            except errors.KubetuneError as error:
                self._arrived.put(error)
            except Exception as error:  # a thread that dies would leave the others waiting
                self._arrived.put(self._fault(slot, self._server_of(slot), 1, repr(error)))
            del self._under_way[slot.number]

    def _require_threads_in_time(self) -> None:
        """Raise EnvironmentFault for a prompt whose thread does not come back, such as from a name server."""
        latest = time.monotonic() - self._asking.seconds - _GRACE_SECONDS
        for slot, since in list(self._under_way.values()):
            if since < latest:
                raise self._fault(slot, self._server_of(slot), 1, "let the request hang")

    def _server_of(self, slot: Slot) -> Server:
        """Return the server that a prompt goes to, the same for any number of ranks."""
        return self._asking.servers[slot.number % len(self._asking.servers)]

    def _answers(self, slot: Slot) -> list[DrawnTokens]:
        """Return the answers to a prompt; ask until they come or the time is up. Raise EnvironmentFault then."""
        asking = self._asking
        server = self._server_of(slot)
        seed = seed_of(asking.seed, self._step, slot.number)
        request = request_for(slot.ids, self._adapter.name, seed, asking.settings, asking.eos_ids)
        deadline = time.monotonic() + asking.seconds
        pause = _FIRST_PAUSE_SECONDS
        attempts = 0
        reason = ""

        # With pauses of 0.25, 0.5, 1, 2, 4, 5, 5 … seconds.
        while True:
            attempts += 1
            try:
                reply = server.complete(request, deadline)
                return answers_in(
                    reply,
                    slot.ids,
                    asking.settings,
                    asking.eos_ids,
                    asking.vocabulary,
                )
            except Refused as error:
                raise self._fault(slot, server, attempts, str(error)) from None
            except Unknown as error:
                reason = str(error)
                # A server that was restarted, or had too many adapters, has lost this one.
                reason += self._loaded_again(server, deadline)
            except ServerTrouble as error:
                reason = str(error)
            except TimeoutError as error:
                reason = reason or str(error)

            self._complain(server, reason)
            if self._cancelled.is_set() or time.monotonic() + pause >= deadline:
                raise self._fault(slot, server, attempts, reason)
            self._cancelled.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _loaded_again(self, server: Server, deadline: float) -> str:
        """Load the adapter once more; return why that failed, to be added to a message."""
        try:
            server.load(self._adapter.name, self._adapter.folder, deadline)
        except (ServerTrouble, TimeoutError) as error:
            return f", and does not load it again: {error}"
        return ""

    def _complain(self, server: Server, reason: str) -> None:
        """Log what a server did, the first time in a step."""
        if server.url not in self._complained:
            self._complained.add(server.url)
            logs.DATA.warning("server %s is asked again, as it %s", server.url, reason)

    def _fault(
        self,
        slot: Slot,
        server: Server,
        attempts: int,
        reason: str,
    ) -> errors.EnvironmentFault:
        times = "once" if attempts == 1 else f"{attempts} times"
        return errors.EnvironmentFault(
            f"generation: rank {self._asking.rank}: server {server.url} did not answer prompt {slot.number} (row "
            f"{slot.row}) of step {self._step} within {self._asking.seconds:g} s, asked {times}: it {reason}. Start "
            "again when the server is well: answers that came are kept"
        )
