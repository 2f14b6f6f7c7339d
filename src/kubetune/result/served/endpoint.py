"""One model at one address, asked in the API of OpenAI and in what vLLM, llama.cpp and Ollama add to it.

A question that the server does not take raises NotAnswered, and the check goes on without it. A server that breaks off,
or is silent until the time is up, ends the check with EnvironmentFault.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from kubetune import errors
from kubetune.training.rollouts.servers.vllm_client import (
    Failed,
    NotApi,
    Refused,
    Server,
    ServerTrouble,
    Unknown,
    cards_of,
)

_PAUSE_SECONDS: Final = 1.0
# What a server says again to the same question: a key that is missing does not come by itself, nor does an address.
_LASTING: Final = (Refused, Unknown, NotApi, Failed)
# What becomes right by being asked again is asked so often.
_TRIES: Final = 3
# Who owns the models of a server, as it says itself.
LLAMA_CPP: Final = "llamacpp"
OLLAMA: Final = "library"
_GREEDY: Final = {"max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}
# Log-probabilities of a place that all servers return.
_MOST_LIKELY: Final = 20
# Characters of an answer that are shown.
_SHOWN: Final = 150
# Numbers that a token may have.
_IDS: Final = range(2**31)
# What decides how tokens are drawn, with the values that change nothing.
NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_T = TypeVar("_T")
# The log-probability of a token, and the least that the server tells: a token that is not among the likeliest has that.
Bound = tuple[float, float]

# A JSON object of a request or an answer.
JsonValues = dict[str, Any]


class NotAnswered(Exception):
    """A question that this server does not take, with the reason."""


class Endpoint:
    """A server, the name of the model that is asked for, and the time that all questions may take."""

    def __init__(self, url: str, model: str, seconds: float) -> None:
        """Ask which models there are. Wait for a server that is starting. `url`: with or without `/v1`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._server = Server(self.url)
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        try:
            cards = cards_of(self._asked("/v1/models", None, tries=math.inf))
        except ServerTrouble as error:
            raise errors.EnvironmentFault(f"{self.url} {error}. Nothing was compared") from None
        self.cards = {str(card["id"]): card for card in cards}

    def is_of(self, owner: str) -> bool:
        """True if the server says that its models are of this program."""
        return any(card.get("owned_by") == owner for card in self.cards.values())

    @property
    def base(self) -> str | None:
        """The name of the base that the adapter is on, None for another model."""
        parent = str(self.cards[self.model].get("parent"))
        return parent if parent in self.cards else None

    @property
    def context(self) -> int | None:
        """The most tokens of a prompt and its answer, None if the server does not say."""
        # vLLM says it of the base of an adapter.
        card = self.cards[self.base or self.model]
        length = card.get("max_model_len")
        if isinstance(card.get("meta"), dict):  # llama.cpp has it there
            length = card["meta"].get("n_ctx")
        return length if isinstance(length, int) else None

    def ask(self, path: str, request: JsonValues | None, take: Callable[[JsonValues], _T]) -> _T:
        """Return what `take` makes of the answer. Raise NotAnswered if the server does not take the question."""
        if request is not None:
            request = {"model": self.model, **request}
        try:
            reply = self._asked(path, request)
        except ServerTrouble as error:
            raise NotAnswered(str(error)) from None
        try:
            return take(reply)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            shown = json.dumps(reply)[:_SHOWN]
            raise NotAnswered(f"answered {path} in a form that is not known: {shown}") from None

    def conversation_ids(
        self, messages: Sequence[JsonValues], tools: Sequence[Any], **settings: Any
    ) -> list[int]:
        """Return the ids that the server makes of a conversation, up to where the next answer begins."""
        request = {"messages": list(messages), "add_generation_prompt": True, **settings}
        if tools:
            request["tools"] = list(tools)
        if not self.is_of(LLAMA_CPP):
            return self.ask("/tokenize", request, _tokens)
        # It tokenises what its template writes, and adds BOS where the vocabulary says so.
        text = self.ask("/apply-template", request, lambda reply: str(reply["prompt"]))
        return self.text_ids(text, special=True)

    def text_ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids that the server makes of a text; with `special` also those that it puts around texts."""
        of_vllm = {"prompt": text, "add_special_tokens": special}
        of_llama_cpp = {"content": text, "add_special": special, "parse_special": True}
        return self.ask("/tokenize", of_vllm | of_llama_cpp, _tokens)

    def log_probabilities(self, ids: Sequence[int], model: str | None = None) -> list[float]:
        """Return the log-probability of each token but the first; NaN where the server has no number.

        `model`: the name of another model of the server.
        """

        def take(reply: JsonValues) -> list[float]:
            # After the prompt comes the token that was generated.
            values = reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
            if len(values) != len(ids) - 1:
                raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens")
            return [_number(value) for value in values]

        request = {**_GREEDY, "prompt": list(ids), "echo": True, "logprobs": 1}
        request["model"] = model or self.model
        try:
            return self.ask("/v1/completions", request, take)
        except NotAnswered as error:
            # A server in Python cannot write NaN as JSON, and says so in place of an answer.
            if "Out of range float" in str(error):
                return [math.nan] * (len(ids) - 1)
            raise

    def next_token(self, ids: Sequence[int]) -> Bound:
        """Return what the server says of the last token after the others."""

        def take(reply: JsonValues) -> Bound:
            likeliest = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return _bound(likeliest, "id", ids[-1])

        request = {**_GREEDY, "prompt": list(ids[:-1]), "logprobs": _MOST_LIKELY}
        return self.ask("/v1/completions", request, take)

    def next_token_of_text(self, prompt: str, token: str) -> Bound:
        """Return what Ollama says of a token after a prompt."""

        def take(reply: JsonValues) -> Bound:
            return _bound(reply["logprobs"][0]["top_logprobs"], "bytes", list(token.encode()))

        # Ollama adds BOS. Limits of sampling would change the numbers.
        options = {"num_predict": 1, **NEUTRAL, "repeat_penalty": 1.0}
        request = {"prompt": prompt, "raw": True, "stream": False, "options": options}
        numbers = {"logprobs": True, "top_logprobs": _MOST_LIKELY}
        return self.ask("/api/generate", request | numbers, take)

    def completion(self, ids: Sequence[int], **settings: Any) -> tuple[str, str]:
        """Return the text that follows, and why it ends there."""

        def take(reply: JsonValues) -> tuple[str, str]:
            choice = reply["choices"][0]
            return str(choice["text"]), str(choice["finish_reason"])

        return self.ask("/v1/completions", {"prompt": list(ids), **settings}, take)

    def _asked(self, path: str, request: JsonValues | None, tries: float = _TRIES) -> JsonValues:
        """Return the answer. Raise ServerTrouble for one that stays, EnvironmentFault where none comes."""
        while True:
            try:
                return self._server.ask(path, request, self._deadline)
            except _LASTING:
                raise
            except TimeoutError:
                reason = f"did not answer {path}, and the time is up"
            except ServerTrouble as error:
                reason = str(error)
            tries -= 1
            is_late = time.monotonic() + _PAUSE_SECONDS >= self._deadline
            if tries <= 0 or is_late:
                break
            time.sleep(_PAUSE_SECONDS)
        text = f"{self.url} {reason}"
        if is_late:
            text += f"; it had {self._seconds:g} s (--timeout)"
        if urlsplit(self.url).scheme in getproxies():
            text += ". The proxy of the environment was not asked, which may be the only way to it"
        raise errors.EnvironmentFault(f"{text}. Nothing was proved")


def _tokens(reply: JsonValues) -> list[int]:
    tokens = []
    for token in reply["tokens"]:
        if not isinstance(token, int) or token not in _IDS:
            raise ValueError(f"{token} is no id")
        tokens.append(token)
    return tokens


def _number(value: float | None) -> float:
    """Return a log-probability; servers in C++ write null for NaN."""
    return math.nan if value is None else float(value)


def _bound(likeliest: Sequence[JsonValues], key: str, token: object) -> Bound:
    numbers = [_number(candidate["logprob"]) for candidate in likeliest]
    for candidate, number in zip(likeliest, numbers, strict=True):
        if candidate[key] == token:
            return number, -math.inf
    return min(numbers), min(numbers)
