"""Whether a server ends answers where training did, and draws them as the model's generation config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.served.endpoint import Endpoint, NotAnswered
from kubetune.result.served.points import ServedPoint

ENDS: Final = "end of answers"
DRAWS: Final = "sampling"

# What decides how tokens are drawn, with the values that change nothing.
_NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_DRAWN_TOKENS: Final = 24


def ends(
    endpoint: Endpoint, tokenizer: Tokenizer, eos_ids: Sequence[int], prompt: Sequence[int]
) -> ServedPoint:
    """Return whether the server stops at each token that ends an answer. `prompt`: any ids."""
    names = []
    passed_over = []
    for token in eos_ids:
        name = tokenizer.decode([token], skip_special_tokens=False)
        names.append(name)
        # The model is made to write it next, whatever it would write.
        settings = {"max_tokens": 4, "temperature": 0.0, "logit_bias": {str(token): 100.0}}
        _, reason = endpoint.completion(prompt, **settings)
        if reason != "stop":
            passed_over.append(name)
    if not passed_over:
        return ServedPoint(ENDS, "right", f"the server stops at {' and '.join(names)}")
    return ServedPoint(
        ENDS,
        "wrong",
        f"the server goes on behind {' and '.join(passed_over)}, with which training ended answers; serve the export's "
        "generation_config.json, or send stop_token_ids",
    )


def draws(endpoint: Endpoint, generation: Mapping[str, Any], prompt: Sequence[int]) -> ServedPoint:
    """Return whether the server draws by default as the export's generation config says."""
    wanted = {name: generation.get(name, neutral) for name, neutral in _NEUTRAL.items()}
    limits = [f"{name} {value:g}" for name, value in wanted.items() if value != _NEUTRAL[name]]
    shown = ", ".join(limits) or "no limits, at temperature 1"
    if endpoint.is_llama_cpp:
        difference = _difference_by_name(endpoint, wanted)
    else:
        difference = _difference_by_seed(endpoint, wanted, prompt)
    if difference:
        text = f"by default the server draws {difference}; the export says {shown}"
        return ServedPoint(DRAWS, "differs", text)
    return ServedPoint(DRAWS, "right", f"by default the server draws as the export says: {shown}")


def _difference_by_name(endpoint: Endpoint, wanted: Mapping[str, float]) -> str:
    """Return the settings of a llama.cpp that differ, which it tells."""
    defaults = endpoint.ask(
        "/props", None, lambda reply: reply["default_generation_settings"]["params"]
    )
    differing = []
    for name, value in wanted.items():
        served = float(defaults.get(name.replace("repetition", "repeat"), value))
        if abs(served - value) > 1e-3:
            differing.append(f"with {name} {served:.3g}")
    return " and ".join(differing)


def _difference_by_seed(
    endpoint: Endpoint, wanted: Mapping[str, float], prompt: Sequence[int]
) -> str:
    """Return how the server draws, "" if as wanted: the same seed gives the same text where the settings are the same."""
    seeded = {"seed": 7, "max_tokens": _DRAWN_TOKENS}
    by_default, _ = endpoint.completion(prompt, **seeded)
    if by_default == endpoint.completion(prompt, **seeded, **wanted)[0]:
        return ""
    if by_default != endpoint.completion(prompt, **seeded)[0]:
        raise NotAnswered("answers one seed in several ways")
    return "by settings of its own"
