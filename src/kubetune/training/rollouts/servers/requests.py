"""Ask servers for the answers to many prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kubetune.training.rollouts.sampler import DrawnTokens
from kubetune.training.rollouts.servers.calls import Calls
from kubetune.training.rollouts.servers.completions import answers_in, request_for, seed_of
from kubetune.training.rollouts.servers.vllm_client import Server, ServerTrouble

if TYPE_CHECKING:
    from kubetune.config.schema import GrpoConfig
    from kubetune.training.rollouts.model_answers import Slot
    from kubetune.training.rollouts.servers.adapters import Adapter


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


class Requests(Calls["Slot", list[DrawnTokens]]):
    """The prompts of a step that one rank asks for."""

    def __init__(self, asking: Asking, step: int, adapter: Adapter, slots: Sequence[Slot]) -> None:
        """`step`: the first that learns from the answers. The adapter is loaded on all servers."""
        self._asking = asking
        self._step = step
        self._adapter = adapter
        # Last, since it begins to ask.
        super().__init__(asking.servers, asking.seconds, slots)

    def _ask(self, item: Slot, server: Server, deadline: float) -> list[DrawnTokens]:
        asking = self._asking
        seed = seed_of(asking.seed, self._step, item.number)
        request = request_for(item.ids, self._adapter.name, seed, asking.settings, asking.eos_ids)
        reply = server.complete(request, deadline)
        return answers_in(reply, item.ids, asking.settings, asking.eos_ids, asking.vocabulary)

    def _remedied(self, server: Server, deadline: float) -> str:
        """Load the adapter once more: a server that was restarted, or had too many adapters, has lost it."""
        try:
            server.load(self._adapter.name, self._adapter.folder, deadline)
        except (ServerTrouble, TimeoutError) as error:
            return f", and does not load it again: {error}"
        return ""

    _ADVICE = "Start again when the server is well: answers that came are kept"

    def _missing(self, item: Slot, server: Server) -> str:
        return (
            f"generation: rank {self._asking.rank}: server {server.url} did not answer prompt {item.number} (row "
            f"{item.row}) of step {self._step}"
        )
