"""Ask servers at the start whether they are the teacher of a run: a model of the same tokens that answers what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune import errors
from kubetune.batching.whole_rows import WholeRow
from kubetune.scoring.rewards.named_models import other_tokens
from kubetune.training.reference import teacher_wire
from kubetune.training.reference.served_teacher import asked, collected
from kubetune.training.rollouts.servers.calls import Calls
from kubetune.training.rollouts.servers.vllm_client import Refused, Server, Unknown

if TYPE_CHECKING:
    from kubetune.config.schema import DistillConfig
    from kubetune.data.text.tokenizer import Tokenizer

KEY: Final = "distill.teacher"
# Tokens that a server's weights are told by, and by how much log-probabilities differ on other hardware at most.
_PROBED: Final = 9
_ALIKE: Final = 0.2
# Entries of the vocabulary that a server is compared by.
_COMPARED_TOKENS: Final = 500


@dataclass(frozen=True)
class NumberedServer:
    """A server, by its number."""

    number: int


@dataclass(frozen=True)
class Met:
    """What is known of a server."""

    model: str  # as it calls it
    most_tokens: int  # that it reads
    probe: list[float]  # log-probabilities, by which its weights are told from others
    tokens: int | None  # of the vocabulary that are compared; None: all


class Meetings(Calls[NumberedServer, Met]):
    """Each server is asked once whether it is a teacher of this model."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: DistillConfig,
        number: int,
        width: int,
        longest: int,
        tokenizer: Tokenizer,
    ) -> None:
        """`number`: of tokens at each label. `width`: of the vocabulary. `longest`: tokens of the longest row."""
        self._settings = settings
        self._number = number
        self._width = width
        self._longest = longest
        self._tokenizer = tokenizer
        self._text = vocabulary_text(tokenizer)
        self._ids = tokenizer.backend.encode(self._text, add_special_tokens=False).ids
        super().__init__(
            servers, settings.timeout_seconds, [NumberedServer(at) for at in range(len(servers))]
        )

    def _ask(self, item: NumberedServer, server: Server, deadline: float) -> Met:
        try:
            card = server.card(deadline)
            model = str(card["id"])
            most = card.get("max_model_len")
            # A server draws a token too.
            if isinstance(most, int) and self._longest >= most:
                raise errors.ConfigError(
                    f"{KEY}: {model} on {server.url} reads {most - 1:,} tokens, and rows have up to {self._longest:,}; "
                    f"start it with --max-model-len {self._longest + 1}, or lower data.max_length"
                )
            tokenized = server.ask(
                "/tokenize",
                {"model": model, "prompt": self._text, "add_special_tokens": False},
                deadline,
            )
            if tokenized.get("tokens") != self._ids:
                raise other_tokens(KEY, f"{model} on {server.url}", model, self._tokenizer.name)
            tokens = self._compared(server, model, deadline)
            # In the way that any server knows.
            row = WholeRow(0, self._ids[:_PROBED], list(range(_PROBED - 1)))
            numbers = asked(server, model, row, None, 1, self._width, deadline)
            probe = numbers[:, 1].tolist()
        except (Refused, Unknown) as error:
            # An address that is not known may come yet, but for the newer of both ways.
            if isinstance(error, Unknown) and teacher_wire.GENERATE not in str(error):
                raise
            raise errors.ConfigError(
                f"{KEY}: server {server.url} {str(error).rstrip('.')}. {self._needed()}"
            ) from None
        return Met(model, self._longest if most is None else most - 1, probe, tokens)

    def _compared(self, server: Server, model: str, deadline: float) -> int | None:
        """Return how many tokens of the vocabulary are compared, None for all: see teacher._compared_tokens.

        Raise ConfigError or ModelError for another vocabulary, and Refused for what else the run would ask in vain.
        """
        last = self._width - 1
        is_as_wide = self._knows(server, model, last, deadline)
        if is_as_wide and not self._knows(server, model, last + 1, deadline):
            return None
        ids = self._tokenizer.vocab_size
        more_or_fewer = "more" if is_as_wide else "fewer"
        words = (
            f"{KEY}: the teacher {model} on {server.url} gives {more_or_fewer} than the {self._width:,} probabilities of "
            f"the model {self._tokenizer.name} for each token"
        )
        if self._width < ids or not self._knows(server, model, ids - 1, deadline):
            raise errors.ModelError(f"{words}; expected a teacher of the same vocabulary")
        if self._settings.rest == "tail":
            raise errors.ConfigError(
                f"{words}, so a tail holds what the model has not; expected `rest: renormalise`"
            )
        return ids

    def _knows(self, server: Server, model: str, token: int, deadline: float) -> bool:
        """True if a server answers for a token. Raise Refused if it refuses something else than the token."""
        row = WholeRow(0, [token, 0], [0])
        ids = None
        if self._settings.support == "student_k":
            row = WholeRow(0, [0, 0], [0])
            others = [other for other in range(self._number) if other != token]
            ids = np.array([[token, *others[: self._number - 1]]])
        try:
            asked(server, model, row, ids, self._number, self._width, deadline)
        except Refused as error:
            # "Token id 384 is out of vocabulary", or "contain out-of-vocab token ids"
            if "vocab" not in str(error):
                raise
            return False
        return True

    def _needed(self) -> str:
        """Return what a server of this run needs."""
        needed = f"It needs --max-logprobs {self._number}"
        if self._settings.support == "student_k":
            needed += ", --enable-scale-out and vLLM 0.32, or take `support: teacher_k`"
        return needed

    def _missing(self, item: NumberedServer, server: Server) -> str:
        return f"{KEY}: server {server.url} did not answer"


def vocabulary_text(tokenizer: Tokenizer) -> str:
    """Return a text of tokens from all over a vocabulary, with all those that were added to it."""
    backend = tokenizer.backend
    added = sorted(backend.get_added_tokens_decoder().items())
    words = [str(token) for _, token in added[:_COMPARED_TOKENS]]
    size = backend.get_vocab_size()
    for token in range(0, size, max(1, size // _COMPARED_TOKENS)):
        words.append(backend.decode([token], skip_special_tokens=False))
    return " ".join(words)


def alike(logps: Any, others: Any) -> bool:
    """True if log-probabilities can be those of the same weights."""
    return bool(np.abs(np.asarray(logps) - np.asarray(others)).max(initial=0.0) <= _ALIKE)


def meet(
    servers: Sequence[Server],
    settings: DistillConfig,
    number: int,
    width: int,
    longest: int,
    tokenizer: Tokenizer,
) -> Met:
    """Return what is known of all servers: they have the same model, and read what the shortest-sighted of them reads.

    Raise ConfigError, ModelError or EnvironmentFault for servers that cannot teach this model.
    """
    meetings = Meetings(servers, settings, number, width, longest, tokenizer)
    of_places = {place.number: met for place, met in collected(meetings)}
    first = of_places[0]
    for place, met in of_places.items():
        if met.model != first.model or not alike(met.probe, first.probe):
            raise errors.ConfigError(
                f"{KEY}: {first.model} on {servers[0].url} and {met.model} on {servers[place].url} have other names or say "
                "other things; expected one teacher"
            )
    return replace(first, most_tokens=min(met.most_tokens for met in of_places.values()))
