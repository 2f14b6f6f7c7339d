"""Whether a server ends answers where training did, draws them as the export says, and takes rows of that length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.result.served.endpoint import LLAMA_CPP, NEUTRAL, Endpoint, NotAnswered
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.points import ServedPoint

_DRAWN_TOKENS: Final = 24


def ends(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return whether the server stops at each token that ends an answer."""
    names = {}
    for token in known.eos_ids:
        # The model is made to write it next, whatever it would write.
        bias = {str(token): 100.0}
        _, reason = endpoint.completion(
            known.prompt_ids, max_tokens=4, temperature=0.0, logit_bias=bias
        )
        names[known.tokenizer.decode([token], skip_special_tokens=False)] = reason
    passed_over = [name for name, reason in names.items() if reason != "stop"]
    if not passed_over:
        return ServedPoint("right", f"the server stops at {' and '.join(names)}")
    text = (
        f"the server goes on behind {' and '.join(passed_over)}, with which training ended answers; serve the export's "
        "generation_config.json, or send stop_token_ids"
    )
    return ServedPoint("wrong", text)


def draws(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return whether the server draws by default as the export's generation config says."""
    wanted = {}
    for name, neutral in NEUTRAL.items():
        value = known.generation.get(name)
        wanted[name] = neutral if value is None else value
    limits = [f"{name} {value:g}" for name, value in wanted.items() if value != NEUTRAL[name]]
    shown = ", ".join(limits) or "no limits, at temperature 1"
    if endpoint.is_of(LLAMA_CPP):
        others = _told(endpoint, wanted)
    else:
        others = _drawn(endpoint, known, wanted)
    if not others:
        return ServedPoint("right", f"by default the server draws as the export says: {shown}")
    text = f"the server has its own default of {' and '.join(others)}; the export says {shown}"
    return ServedPoint("differs", text)


def _told(endpoint: Endpoint, wanted: Mapping[str, float]) -> list[str]:
    """Return the settings that have another default, of a server that tells them."""

    def take(reply: Mapping[str, Any]) -> list[str]:
        settings = reply["default_generation_settings"]["params"]
        others = []
        for name, value in wanted.items():
            served = settings.get(name.replace("repetition", "repeat"), value)
            if abs(served - value) > 1e-3:
                others.append(f"{name} ({served:.3g})")
        return others

    return endpoint.ask("/props", None, take)


def _drawn(endpoint: Endpoint, known: KnownModel, wanted: Mapping[str, float]) -> list[str]:
    """Return the settings that have another default: what changes the text of one seed when a request leaves it out."""

    def drawn(*left_out: str) -> str:
        settings = {name: value for name, value in wanted.items() if name not in left_out}
        text, _ = endpoint.completion(
            known.prompt_ids, seed=7, max_tokens=_DRAWN_TOKENS, **settings
        )
        return text

    as_wanted = drawn()
    if drawn(*wanted) == as_wanted:
        return []
    if drawn() != as_wanted:
        raise NotAnswered("answers one seed in several ways")
    return [name for name in wanted if drawn(name) != as_wanted] or ["settings together"]


def context(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return whether the server takes rows as long as those of training."""
    served = endpoint.context
    if served is None:
        raise NotAnswered("tells no context length")
    if served >= known.max_length:
        return ServedPoint("right", f"{served:,} tokens")
    rows = known.answers.ids if known.answers is not None else ()
    does_fit = served > max(map(len, rows), default=0)
    text = f"the server takes {served:,} tokens, and training took {known.max_length:,}; raise --max-model-len"
    return ServedPoint("differs" if does_fit else "wrong", text)
