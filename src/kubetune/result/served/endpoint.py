"""One model at one address, asked in the API of OpenAI and in what vLLM adds to it.

A question that the server does not take raises NotAnswered, and the check goes on without it. A server that breaks off,
or is silent until the time is up, ends the check with EnvironmentFault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kubetune import errors
from kubetune.training.rollouts.servers.vllm_client import Refused, Server, ServerTrouble, Unknown

_PAUSE_SECONDS: Final = 1.0
_T = TypeVar("_T")

# A JSON object of a request or an answer.
JsonValues = dict[str, Any]


class NotAnswered(Exception):
    """A question that this server does not take, with the reason."""


class Endpoint:
    """A server, the name of the model that is asked for, and the time that all questions may take."""

    def __init__(self, url: str, model: str, seconds: float) -> None:
        """`url`: with or without `/v1`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._server = Server(self.url)
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def models(self) -> list[JsonValues]:
        """Return the models that the server lists. Wait for a server that is starting."""
        while True:
            try:
                listed = self._asked("/v1/models", None)["data"]
                return [{**model, "id": str(model["id"])} for model in listed]
            except ServerTrouble as error:
                # A key that is missing does not come by itself, nor does an address.
                is_final = isinstance(error, (Refused, Unknown))
                if is_final or time.monotonic() + _PAUSE_SECONDS >= self._deadline:
                    raise self._fault(error) from None
                time.sleep(_PAUSE_SECONDS)
            except (KeyError, TypeError) as error:
                raise self._fault(f"lists no models at /v1/models ({error!r})") from None

    def ask(self, path: str, request: JsonValues, take: Callable[[JsonValues], _T]) -> _T:
        """Return what `take` makes of the answer. Raise NotAnswered if the server does not take the question."""
        try:
            reply = self._asked(path, {"model": self.model, **request})
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
        request: JsonValues = {
            "messages": list(messages),
            "add_generation_prompt": True,
            **settings,
        }
        if tools:
            request["tools"] = list(tools)
        return self.ask("/tokenize", request, _tokens)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids that the server makes of a text, without special tokens around it."""
        return self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}, _tokens)

    def log_probabilities(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first; NaN where the server has no number."""
        request = {
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }
        return self.ask("/v1/completions", request, lambda reply: _of_prompt(reply, ids))

    def _asked(self, path: str, request: JsonValues | None) -> JsonValues:
        try:
            return self._server.ask(path, request, self._deadline)
        except TimeoutError:
            raise self._fault(f"did not answer {path}") from None

    def _fault(self, reason: object) -> errors.EnvironmentFault:
        hint = ""
        if "401" in str(reason) or "403" in str(reason):
            hint = ". Set the variable VLLM_API_KEY to the server's key"
        return errors.EnvironmentFault(
            f"{self.url} {reason}; it had {self._seconds:g} s (--timeout){hint}. Nothing was compared"
        )


def _tokens(reply: JsonValues) -> list[int]:
    return [int(token) for token in reply["tokens"]]


def _of_prompt(reply: JsonValues, ids: Sequence[int]) -> list[float]:
    """Return the numbers of vLLM's `prompt_logprobs`: of each token an object by id, of the first one null."""
    by_token = reply["choices"][0]["prompt_logprobs"]
    if len(by_token) != len(ids):
        raise ValueError(f"{len(by_token)} log-probabilities for {len(ids)} tokens")
    values = []
    for token, of_token in zip(ids[1:], by_token[1:], strict=True):
        value = of_token[str(token)]["logprob"]
        values.append(float("nan") if value is None else float(value))
    return values
