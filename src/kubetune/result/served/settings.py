"""Whether a server ends answers where training did, and draws them as the model's generation config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.served.endpoint import Endpoint, NotAnswered
from kubetune.result.served.finding import Finding

# What decides how tokens are drawn, with the values that change nothing.
NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# Names of llama.cpp for the same.
_OF_LLAMA_CPP: Final = {"repetition_penalty": "repeat_penalty"}
_DRAWN_TOKENS: Final = 24


def ends(
    endpoint: Endpoint, tokenizer: Tokenizer, eos_ids: Sequence[int], ids: Sequence[int]
) -> Finding:
    """Return whether the server stops at each token that ends an answer. `ids`: of any prompt."""
    goes_on = []
    for token in eos_ids:
        # The model is made to write it next, whatever it would write.
        settings = {"max_tokens": 4, "temperature": 0.0, "logit_bias": {str(token): 100.0}}
        try:
            _, reason = endpoint.completion(ids, **settings)
        except NotAnswered as error:
            return Finding("end of answers", "unknown", f"the server cannot be asked: it {error}")
        if reason != "stop":
            goes_on.append(tokenizer.decode([token], skip_special_tokens=False))
    if goes_on:
        text = (
            f"the server goes on behind {' and '.join(goes_on)}, with which training ended answers; serve the export's "
            "generation_config.json, or send stop_token_ids"
        )
        return Finding("end of answers", "wrong", text)
    names = [tokenizer.decode([token], skip_special_tokens=False) for token in eos_ids]
    return Finding("end of answers", "right", f"the server stops at {' and '.join(names)}")


def draws(endpoint: Endpoint, generation: Mapping[str, Any], ids: Sequence[int]) -> Finding:
    """Return whether the server draws by default as the export's generation config says."""
    wanted = {name: generation.get(name, value) for name, value in NEUTRAL.items()}
    shown = ", ".join(
        f"{name} {value:g}" for name, value in wanted.items() if value != NEUTRAL[name]
    )
    shown = shown or "no limits, at temperature 1"
    try:
        if endpoint.is_llama_cpp:
            differing = _told_otherwise(endpoint, wanted)
        else:
            differing = _drawn_otherwise(endpoint, wanted, ids)
    except NotAnswered as error:
        return Finding("sampling", "unknown", f"the server cannot be asked: it {error}")
    if differing:
        return Finding(
            "sampling",
            "differs",
            f"by default the server draws {differing}; the export says {shown}",
        )
    return Finding("sampling", "right", f"by default the server draws as the export says: {shown}")


def _told_otherwise(endpoint: Endpoint, wanted: Mapping[str, float]) -> str:
    """Return the settings of a llama.cpp that differ."""
    defaults = endpoint.properties()["default_generation_settings"]["params"]
    differing = []
    for name, value in wanted.items():
        served = float(defaults.get(_OF_LLAMA_CPP.get(name, name), value))
        if abs(served - value) > 1e-3:
            differing.append(f"with {name} {served:.3g}")
    return " and ".join(differing)


def _drawn_otherwise(endpoint: Endpoint, wanted: Mapping[str, float], ids: Sequence[int]) -> str:
    """Return how the server draws, "" if as wanted: the same seed gives the same text where the settings are the same."""
    seeded = {"seed": 7, "max_tokens": _DRAWN_TOKENS}
    by_default, _ = endpoint.completion(ids, **seeded)
    if by_default == endpoint.completion(ids, **seeded, **wanted)[0]:
        return ""
    if by_default == endpoint.completion(ids, **seeded, **NEUTRAL)[0]:
        return "without limits, at temperature 1"
    if by_default != endpoint.completion(ids, **seeded)[0]:
        raise NotAnswered("answers one seed in several ways")
    return "by settings of its own"
