"""What a vLLM server replies to a run of distillation, for a tiny model: /tokenize, and log-probabilities of a prompt.

The rules are those of vLLM 0.32, by file of its wheel:

    entrypoints/scale_out/factories.py       without --enable-scale-out every address of it answers 403, with a sentence
    entrypoints/scale_out/token_in_token_out/protocol.py, serving.py
                                             token_ids, sampling_params, stream; scores are refused with `stream`; they come
                                             as `prompt_token_id_logprobs`, a float32 .npy in base64
    sampling_params.py                       ids of [rows, k]: k no more than --max-logprobs (20), each within the
                                             vocabulary, short rows are filled up with -1, which scores -inf;
                                             prompt_logprob_start needs ids; prompt_logprobs no more than --max-logprobs
    v1/engine/input_processor.py             rows are exactly prompt_len - 1 - prompt_logprob_start
    renderers/base.py                        an id beyond the vocabulary is refused, and a prompt that leaves no room
    entrypoints/openai/completion/serving.py prompt_logprobs: null, then {id: {logprob, rank, decoded_token}} of the k
                                             likeliest tokens and of the token itself, -inf as -9999
    v1/worker/gpu/sample/prompt_logprob.py   log_softmax of the logits: no temperature reaches it
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Reply = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class Flags:
    """How a server was started."""

    max_logprobs: int = 20
    enable_scale_out: bool = False
    max_model_len: int = 512

    @classmethod
    def of(cls, words: str) -> Flags:
        """Read a command line."""
        flags = words.split()
        numbers = {}
        for name in ("max_logprobs", "max_model_len"):
            flag = f"--{name.replace('_', '-')}"
            if flag in flags:
                numbers[name] = int(flags[flags.index(flag) + 1])
        return cls(**numbers, enable_scale_out="--enable-scale-out" in flags)


def refused(message: str, status: int = 400) -> Reply:
    return status, {"error": {"message": message, "type": "BadRequestError", "code": status}}


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def _wrong_prompt(model: Any, ids: list[int], flags: Flags) -> str | None:
    width = model.config.vocab_size
    if max(ids) >= width:
        return f"Token id {max(ids)} is out of vocabulary"
    if len(ids) + 1 > flags.max_model_len:
        return f"This model's maximum context length is {flags.max_model_len} tokens."
    return None


def likeliest(model: Any, request: dict[str, Any], flags: Flags) -> Reply:
    """Reply to /v1/completions with `prompt_logprobs`."""
    ids = request["prompt"]
    number = request["prompt_logprobs"]
    if number > flags.max_logprobs:
        return refused(
            f"Requested prompt logprobs of {number}, which is greater than max allowed: {flags.max_logprobs}"
        )
    wrong = _wrong_prompt(model, ids, flags)
    if wrong is not None:
        return refused(wrong)
    logps = log_probabilities(model, ids)
    places: list[Any] = [None]
    for place, token in enumerate(ids[1:]):
        of_place = {}
        # The token itself comes first.
        for other in [token, *logps[place].topk(number).indices.tolist()]:
            logp = float(logps[place, other])
            rank = int((logps[place] > logp).sum()) + 1
            of_place[str(other)] = {"logprob": logp, "rank": rank, "decoded_token": "?"}
        places.append(of_place)
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "length",
        "prompt_logprobs": places,
        "prompt_token_ids": ids,
    }
    return 200, {"object": "text_completion", "choices": [choice]}


def scores(model: Any, request: dict[str, Any], flags: Flags) -> Reply:
    """Reply to /inference/v1/generate with `prompt_logprob_token_ids`."""
    if not flags.enable_scale_out:
        return refused(
            "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
            403,
        )
    ids = request["token_ids"]
    sampling = request["sampling_params"]
    asked = sampling["prompt_logprob_token_ids"]
    start = sampling.get("prompt_logprob_start") or 0
    if request.get("stream"):
        return refused("prompt_logprob_token_ids are not available when stream=true.")
    number = max(map(len, asked), default=0)
    width = model.config.vocab_size
    if not number:
        return refused(
            "prompt_logprob_token_ids must be a non-empty integer array of shape [num_rows, num_ids]."
        )
    if number > flags.max_logprobs:
        return refused(
            f"Requested {number} token ids per row in prompt_logprob_token_ids, which is greater than max allowed: "
            f"{flags.max_logprobs}. Set max_logprobs (--max-logprobs) to at least {number}."
        )
    filled = np.full((len(asked), number), -1, np.int64)
    for row, of_row in enumerate(asked):
        if not all(type(token) is int for token in of_row):
            return refused("prompt_logprob_token_ids must contain integer token ids.")
        filled[row, : len(of_row)] = of_row
    if filled.min() < -1 or filled.max() >= width:
        return refused(
            f"prompt_logprob_token_ids contain out-of-vocab token ids (-1 pads a row). Vocabulary size: {width}"
        )
    rows = max(len(ids) - 1 - start, 0)
    if len(asked) != rows:
        return refused(
            f"prompt_logprob_token_ids has {len(asked)} rows, but the prompt has {rows} scored rows (prompt_len - 1 - "
            "prompt_logprob_start)."
        )
    wrong = _wrong_prompt(model, ids, flags)
    if wrong is not None:
        return refused(wrong)
    logps = log_probabilities(model, ids)[start:-1].numpy()
    numbers = np.take_along_axis(logps, np.maximum(filled, 0), 1)
    numbers[filled < 0] = -np.inf
    return 200, {
        "prompt_token_id_logprobs": in_base64(numbers.astype(np.float32)),
        "prompt_token_ids": ids if request.get("return_token_ids") else None,
        "choices": [{"index": 0, "token_ids": [0], "finish_reason": "length"}],
    }


def in_base64(numbers: Any) -> str:
    content = io.BytesIO()
    np.save(content, numbers)
    return base64.b64encode(content.getvalue()).decode()


FAULTS = (
    "nan", "positive", "fewer places", "fewer tokens", "no numbers", "another prompt", "token beyond", "null",
)  # fmt: skip
"""What a server can do wrong with these replies, besides what `vllm_server.FAULTS` has of any."""


def spoil(body: dict[str, Any], fault: str) -> None:
    """Make a good reply wrong."""
    if "prompt_token_id_logprobs" in body:
        _spoil_scores(body, fault)
        return
    choice = body["choices"][0]
    places = choice["prompt_logprobs"]
    last = places[-1]
    first = next(iter(last))
    if fault == "nan":
        last[first]["logprob"] = float("nan")
    elif fault == "positive":
        last[first]["logprob"] = 0.5
    elif fault == "fewer places":
        places.pop()
    elif fault == "fewer tokens":
        places[-1] = {first: last[first]}
    elif fault == "no numbers":
        choice["prompt_logprobs"] = None
    elif fault == "another prompt":
        choice["prompt_token_ids"] = [1]
    elif fault == "token beyond":
        last["1000000"] = {"logprob": 0.0, "rank": 1}
    elif fault == "null":
        places[-1] = None


def _spoil_scores(body: dict[str, Any], fault: str) -> None:
    scores = np.load(io.BytesIO(base64.b64decode(body["prompt_token_id_logprobs"]))).copy()
    if fault == "nan":
        scores[-1, 0] = np.nan
    elif fault == "positive":
        scores[-1, 0] = 0.5
    elif fault == "fewer places":
        scores = scores[:-1]
    elif fault == "fewer tokens":
        scores = scores[:, :-1]
    elif fault == "token beyond":
        scores = scores.astype(np.int64)
    body["prompt_token_id_logprobs"] = in_base64(scores)
    if fault in ("no numbers", "null"):
        body["prompt_token_id_logprobs"] = None
    if fault == "another prompt":
        body["prompt_token_ids"] = [1]
