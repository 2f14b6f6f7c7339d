"""What is asked of a server about a row, and what its reply says of each label.

`support` decides how, since vLLM has two ways. A row "A B c d e" of which c and d are trained, with k = 2:

    teacher_k    POST /v1/completions          prompt A B c d, prompt_logprobs: 2
                 prompt_logprobs: [null, {of B}, {"c": …, "x": …}, {"y": …, "z": …, "d": …}]     2 each, or 3 with d itself
    student_k    POST /inference/v1/generate   token_ids A B c d, prompt_logprob_start: 1,
                                               prompt_logprob_token_ids: [[c, x], [d, y]]
                 prompt_token_id_logprobs: [2, 2] float32, as .npy in base64

Both answer at a temperature of 1, whatever is asked for.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune.batching.whole_rows import WholeRow
from kubetune.training.rollouts.servers.vllm_client import ServerTrouble

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/inference/v1/generate"

# The least that 1 - Σ p can be told from 0, where each log p has the digits of fp32.
_LEAST_REST: Final = 2.0**-23
# What a log-probability may be above 0, by rounding.
_ROUNDING: Final = 1e-3


def likeliest_request(model: str, row: WholeRow, number: int) -> dict[str, Any]:
    """Return the request for the likeliest tokens at each place of a row."""
    return {
        "model": model,
        "prompt": row.ids,
        "prompt_logprobs": number,
        "max_tokens": 1,
        "temperature": 0.0,
        "n": 1,
        "add_special_tokens": False,
        "return_token_ids": True,
        "stream": False,
    }


def likeliest_in(reply: dict[str, Any], row: WholeRow, number: int, width: int) -> NDArray[Any]:
    """Return the numbers of a row's labels, fp32 `[labels, 2 number + 1]`. Raise ServerTrouble if a reply lacks some.

    `width`: of the vocabulary.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ServerTrouble("answered no choice, or several; expected 1")
    choice = choices[0]
    _require_same_prompt(choice, row)
    of_places = choice.get("prompt_logprobs")
    if not isinstance(of_places, list) or len(of_places) != len(row.ids):
        size = len(of_places) if isinstance(of_places, list) else "no"
        raise ServerTrouble(f"answered {size} prompt_logprobs for {len(row.ids)} tokens")
    ids = np.empty((len(row.places), number), np.int32)
    logps = np.empty((len(row.places), number))
    for line, place in enumerate(row.places):
        likeliest = _likeliest(of_places[place + 1], number)
        ids[line] = [token for token, _ in likeliest]
        logps[line] = [logp for _, logp in likeliest]
    if ids.size and not 0 <= ids.min() <= ids.max() < width:
        raise ServerTrouble(f"answered the token {ids.max()}; expected 0 to {width - 1}")
    return _numbers(ids, logps)


def _likeliest(of_place: Any, number: int) -> list[tuple[int, float]]:
    """Return tokens and log-probabilities in falling order. The token itself comes too where it is not among them."""
    if not isinstance(of_place, dict):
        raise ServerTrouble(f"answered {of_place!r} for a token; expected log-probabilities")
    pairs = []
    for token, entry in of_place.items():
        logp = entry.get("logprob") if isinstance(entry, dict) else None
        if not token.isdecimal() or not isinstance(logp, (int, float)):
            raise ServerTrouble(f"answered the log-probability {logp!r} of the token {token[:20]}")
        pairs.append((int(token), float(logp)))
    if len(pairs) < number:
        raise ServerTrouble(f"answered {len(pairs)} tokens for a place; expected {number}")
    pairs.sort(key=lambda pair: -pair[1])
    return pairs[:number]


def scoring_request(model: str, row: WholeRow, ids: NDArray[Any]) -> dict[str, Any]:
    """Return the request for tokens `[labels, k]` at the places of a row."""
    first = row.places[0]
    # Nothing is asked of the places between the labels of two answers.
    of_places: list[list[int]] = [[] for _ in range(first, len(row.ids) - 1)]
    for place, of_label in zip(row.places, ids.tolist(), strict=True):
        of_places[place - first] = of_label
    return {
        "model": model,
        "token_ids": row.ids,
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0.0,
            "detokenize": False,
            "prompt_logprob_start": first,
            "prompt_logprob_token_ids": of_places,
        },
        "return_token_ids": True,
        "stream": False,
    }


def scores_in(reply: dict[str, Any], row: WholeRow, ids: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers of a row's labels, fp32 `[labels, 2 k + 1]`. Raise ServerTrouble if a reply lacks some."""
    _require_same_prompt(reply, row)
    text = reply.get("prompt_token_id_logprobs")
    try:
        content = io.BytesIO(base64.b64decode(text or "", validate=True))
        scores = np.load(content, allow_pickle=False)
    except (ValueError, TypeError, EOFError, OSError, binascii.Error) as error:
        raise ServerTrouble(f"answered no prompt_token_id_logprobs ({error})") from None
    expected = (len(row.ids) - 1 - row.places[0], ids.shape[1])
    if scores.shape != expected or scores.dtype.kind != "f":
        raise ServerTrouble(
            f"answered {scores.dtype} {list(scores.shape)} for prompt_token_id_logprobs; expected floats {list(expected)}"
        )
    logps = scores[np.array(row.places) - row.places[0]]
    return _numbers(ids.astype(np.int32), logps.astype(np.float64))


def _require_same_prompt(answer: dict[str, Any], row: WholeRow) -> None:
    prompt = answer.get("prompt_token_ids")
    if prompt is not None and prompt != row.ids:
        raise ServerTrouble("answered another prompt")


def _numbers(ids: NDArray[Any], logps: NDArray[Any]) -> NDArray[Any]:
    """Return ids, log-probabilities and the rest in the form of `kept_numbers`. Raise ServerTrouble for wrong ones."""
    # Also false for NaN.
    is_right = (logps <= _ROUNDING) & np.isfinite(logps)
    if not is_right.all():
        wrong = logps[~is_right][0]
        raise ServerTrouble(
            f"answered the log-probability {wrong:g}; expected numbers of at most 0"
        )
    rest = np.log(np.maximum(1 - np.exp(logps).sum(1), _LEAST_REST))
    as_floats = np.ascontiguousarray(ids).view(np.float32)
    return np.concatenate([as_floats, logps, rest[:, None]], 1, dtype=np.float32)
