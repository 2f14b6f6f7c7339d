"""One model at one address, asked in the API of OpenAI and in what vLLM, llama.cpp and Ollama add to it.

A question that the server does not take raises NotAnswered, and the check goes on without it. A server that breaks off,
or is silent until the time is up, ends the check with EnvironmentFault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubetune import errors
from kubetune.training.rollouts.servers.vllm_client import (
    Refused,
    Server,
    ServerTrouble,
    Unknown,
    cards_of,
)

_PAUSE_SECONDS: Final = 1.0
_GREEDY: Final = {"max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}
# llama.cpp returns as many log-probabilities as it is asked for; others, at most so many.
_ALL: Final = 1_000_000
_MOST_LIKELY: Final = 20
_T = TypeVar("_T")

# A JSON object of a request or an answer.
JsonValues = dict[str, Any]


class NotAnswered(Exception):
    """A question that this server does not take, with the reason."""


@dataclass(frozen=True)
class NextToken:
    """What a server says of a token."""

    log_probability: float
    is_exact: bool  # False: it is at most this, as the token is not among the likeliest


class Endpoint:
    """A server, the name of the model that is asked for, and the time that all questions may take."""

    def __init__(self, url: str, model: str, seconds: float) -> None:
        """`url`: with or without `/v1`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._server = Server(self.url)
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        # Known from the list of models.
        self.is_vllm = False
        self.is_llama_cpp = False

    def models(self) -> list[JsonValues]:
        """Return the models that the server lists. Wait for a server that is starting."""
        while True:
            try:
                reply = self._asked("/v1/models", None)
                break
            except ServerTrouble as error:
                # A key that is missing does not come by itself, nor does an address.
                is_final = isinstance(error, (Refused, Unknown))
                if is_final or time.monotonic() + _PAUSE_SECONDS >= self._deadline:
                    raise self._fault(error) from None
                time.sleep(_PAUSE_SECONDS)
        try:
            cards = cards_of(reply)
        except ServerTrouble as error:
            raise self._fault(error) from None
        owners = [card.get("owned_by") for card in cards]
        self.is_vllm = "vllm" in owners
        self.is_llama_cpp = "llamacpp" in owners
        return cards

    def ask(self, path: str, request: JsonValues | None, take: Callable[[JsonValues], _T]) -> _T:
        """Return what `take` makes of the answer. Raise NotAnswered if the server does not take the question."""
        if request is not None:
            request = {"model": self.model, **request}
        try:
            reply = self._asked(path, request)
        except (Refused, Unknown) as error:
            raise NotAnswered(str(error)) from None
        except ServerTrouble as error:
            raise self._fault(error) from None
        try:
            return take(reply)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise NotAnswered(f"answered {path} in another form ({error!r})") from None

    def conversation_ids(
        self, messages: Sequence[JsonValues], tools: Sequence[Any], **settings: Any
    ) -> list[int]:
        """Return the ids that the server makes of a conversation, up to where the next answer begins."""
        request = {"messages": list(messages), "add_generation_prompt": True, **settings}
        if tools:
            request["tools"] = list(tools)
        if not self.is_llama_cpp:
            return self.ask("/tokenize", request, _tokens)
        # It tokenises what its template writes, and adds BOS where the vocabulary says so.
        text = self.ask("/apply-template", request, lambda reply: str(reply["prompt"]))
        request = {"content": text, "add_special": True, "parse_special": True}
        return self.ask("/tokenize", request, _tokens)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids that the server makes of a text, without special tokens around it."""
        # The names of vLLM, and those of llama.cpp.
        request = {"prompt": text, "add_special_tokens": False}
        if self.is_llama_cpp:
            request = {"content": text, "add_special": False, "parse_special": True}
        return self.ask("/tokenize", request, _tokens)

    def log_probabilities(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first; NaN where the server has no number."""
        # vLLM takes the one, SGLang and others the other.
        settings: JsonValues = {"echo": True, "logprobs": 1}
        if self.is_vllm:
            settings = {"prompt_logprobs": 0}
        request = {**_GREEDY, "prompt": list(ids), **settings}
        return self.ask("/v1/completions", request, lambda reply: _of_prompt(reply, ids))

    def next_token(self, ids: Sequence[int]) -> NextToken:
        """Return what the server says of the last token after the others."""
        number = _ALL if self.is_llama_cpp else _MOST_LIKELY
        request = {**_GREEDY, "prompt": list(ids[:-1]), "logprobs": number}

        def take(reply: JsonValues) -> NextToken:
            likeliest = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return _next_token(likeliest, "id", ids[-1])

        return self.ask("/v1/completions", request, take)

    def next_token_of_text(self, prompt: str, token: bytes) -> NextToken:
        """Return what Ollama says of a token after a prompt."""
        # Ollama adds BOS. Limits of sampling would change the numbers.
        neutral = {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
        }
        request = {
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "logprobs": True,
            "top_logprobs": _MOST_LIKELY,
            "options": {"num_predict": 1, **neutral},
        }

        def take(reply: JsonValues) -> NextToken:
            return _next_token(reply["logprobs"][0]["top_logprobs"], "bytes", list(token))

        return self.ask("/api/generate", request, take)

    def completion(self, ids: Sequence[int], **settings: Any) -> tuple[str, str]:
        """Return the text that follows, and why it ends there."""

        def take(reply: JsonValues) -> tuple[str, str]:
            choice = reply["choices"][0]
            return str(choice["text"]), str(choice["finish_reason"])

        return self.ask("/v1/completions", {"prompt": list(ids), **settings}, take)

    def _asked(self, path: str, request: JsonValues | None) -> JsonValues:
        try:
            return self._server.ask(path, request, self._deadline)
        except TimeoutError:
            raise self._fault(f"did not answer {path}") from None

    def _fault(self, reason: object) -> errors.EnvironmentFault:
        hint = ""
        if "401" in str(reason) or "403" in str(reason):
            hint = ". Set the variable VLLM_API_KEY to the server's key"
        address = urlsplit(self.url)
        proxy = getproxies().get(address.scheme)
        if proxy and not proxy_bypass(address.hostname or ""):
            # Its address may hold a password.
            name = urlsplit(proxy).hostname
            hint += f". It was not asked by the environment's proxy {name}, which may be the only way to it"
        return errors.EnvironmentFault(
            f"{self.url} {reason}; it had {self._seconds:g} s (--timeout){hint}. Nothing was compared"
        )


def _tokens(reply: JsonValues) -> list[int]:
    return [int(token) for token in reply["tokens"]]


def _of_prompt(reply: JsonValues, ids: Sequence[int]) -> list[float]:
    """Return the numbers of a prompt: vLLM's `prompt_logprobs`, or those of an echo. The first is null."""
    choice = reply["choices"][0]
    by_token = choice.get("prompt_logprobs")
    if by_token is None:
        # After the prompt comes the token that was generated.
        values = choice["logprobs"]["token_logprobs"][: len(ids)]
    else:
        values = [None]
        for token, of_token in zip(ids[1:], by_token[1:], strict=True):
            values.append(of_token[str(token)]["logprob"])
    if len(values) != len(ids):
        raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens")
    return [float("nan") if value is None else float(value) for value in values[1:]]


def _next_token(likeliest: Sequence[JsonValues], key: str, token: object) -> NextToken:
    numbers = [float(candidate["logprob"]) for candidate in likeliest]
    for candidate, number in zip(likeliest, numbers, strict=True):
        if candidate[key] == token:
            return NextToken(number, is_exact=True)
    return NextToken(min(numbers), is_exact=False)
