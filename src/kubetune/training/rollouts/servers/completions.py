"""The request for a group of answers, and the answers in what a server replies.

One request asks for all answers to a prompt, so that its server computes the prompt once. vLLM draws answer k of a
request with the seed `seed + k` (its v1/engine/parallel_sampling.py), so each answer has a seed of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kubetune.data.order import mixed_seed
from kubetune.training.rollouts.sampler import DrawnTokens
from kubetune.training.rollouts.servers.vllm_client import ServerTrouble

if TYPE_CHECKING:
    from kubetune.config.schema import GrpoConfig


def seed_of(seed: int, step: int, slot: int) -> int:
    """Return the seed of the first answer to a prompt, which leaves room for those of the others below 2^63."""
    return mixed_seed(seed, "served", step, slot) >> 1


def request_for(
    prompt: Sequence[int],
    adapter: str,
    seed: int,
    settings: GrpoConfig,
    eos_ids: Sequence[int],
) -> dict[str, Any]:
    """Return the body of a request for all answers to a prompt.

    Whatever is left out would be taken from the model's generation_config by the server, such as a repetition penalty.
    """
    return {
        "model": adapter,
        "prompt": list(prompt),
        "n": settings.num_generations,
        "seed": seed,
        "max_tokens": settings.max_completion_length,
        "min_tokens": 0,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(eos_ids),
        # The log-probability of each token that was drawn, and of no other.
        "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "stream": False,
    }


def answers_in(
    reply: dict[str, Any],
    prompt: Sequence[int],
    settings: GrpoConfig,
    eos_ids: Sequence[int],
    vocabulary: int,
) -> list[DrawnTokens]:
    """Return the answers of a reply in their order. Raise ServerTrouble for a reply that is not what was asked for."""
    choices = reply.get("choices")
    number = settings.num_generations
    if not isinstance(choices, list) or len(choices) != number:
        size = len(choices) if isinstance(choices, list) else "no"
        raise ServerTrouble(f"answered {size} choices; expected {number}")
    # vLLM answers in order; nothing says that it must.
    by_index = {}
    for choice in choices:
        if not isinstance(choice, dict):
            raise ServerTrouble("answered a choice that is no object")
        answered_prompt = choice.get("prompt_token_ids")
        if answered_prompt is not None and answered_prompt != list(prompt):
            raise ServerTrouble("answered another prompt")
        by_index[choice.get("index")] = _answer_in(choice, settings, eos_ids, vocabulary)
    if by_index.keys() != set(range(number)):
        raise ServerTrouble(
            f"answered choices {sorted(map(str, by_index))}; expected 0 to {number - 1}"
        )
    return [by_index[index] for index in range(number)]


def _answer_in(
    choice: dict[str, Any],
    settings: GrpoConfig,
    eos_ids: Sequence[int],
    vocabulary: int,
) -> DrawnTokens:
    """Return one answer. Raise ServerTrouble where its numbers do not fit each other, or the request."""
    ids = choice.get("token_ids")
    # Ids, not text: a text may be cut into other tokens than those that were drawn.
    if not isinstance(ids, list) or not ids:
        raise ServerTrouble("answered no token_ids; expected vLLM 0.11 or later")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ServerTrouble(f"answered the token {token!r}; expected 0 to {vocabulary - 1}")
    logps = _log_probabilities(choice, len(ids))
    reason = choice.get("finish_reason")
    longest = settings.max_completion_length
    if len(ids) > longest:
        raise ServerTrouble(f"answered {len(ids)} tokens; expected at most {longest}")
    # A server whose --max-model-len is too small ends answers early without a word.
    if reason == "length" and len(ids) < longest:
        raise ServerTrouble(
            f"cut an answer off after {len(ids)} tokens, and not after {longest}; its --max-model-len must hold prompt "
            "and answer"
        )
    if reason not in ("stop", "length"):
        raise ServerTrouble(f"ended an answer for the reason {reason!r}; expected stop or length")
    # -log p of what was drawn is on average the entropy of what it was drawn from, which servers do not report.
    entropies = [-logp for logp in logps if math.isfinite(logp)] or [math.nan]
    is_cut = reason == "length" and ids[-1] not in eos_ids
    return DrawnTokens(ids, logps, entropies, is_cut)


def _log_probabilities(choice: dict[str, Any], number: int) -> list[float]:
    """Return the log-probability of each token, NaN for those that the server has none of."""
    logprobs = choice.get("logprobs")
    of_tokens = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(of_tokens, list) or len(of_tokens) != number:
        size = len(of_tokens) if isinstance(of_tokens, list) else "no"
        raise ServerTrouble(f"answered {size} log-probabilities for {number} tokens")
    logps = []
    for logp in of_tokens:
        if logp is None:
            logps.append(math.nan)
        # Rounding may leave a little more than 0; what is far above is no log-probability.
        elif isinstance(logp, (int, float)) and not logp > 1e-3:
            logps.append(min(float(logp), 0.0) if math.isfinite(logp) else math.nan)
        else:
            raise ServerTrouble(f"answered the log-probability {logp!r}; expected at most 0")
    return logps
