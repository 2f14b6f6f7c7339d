"""Compare the log-probabilities of a server with those that were recorded, and name the model that they are nearest to.

Each candidate is a point with a coordinate for each token: the trained model, its base, and the trained model without its
adapter on some parts. Rounding, also that of few bits, moves the server by a little in all directions, so it is still
nearest to the model that it is. How far it may be from that follows from how far trained model and base are apart:

    base ─────────────────────── trained      apart: root mean square over the tokens
                            server            near 1 of the way, and beside it by less than `apart`, or than
                                              a base in four bits is beside itself

A server that has the base beside the adapter is asked for both, so that what it rounds is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from kubetune.result.inference.proof_answers import BASE, TRAINED, WITHOUT, ProofAnswers
from kubetune.result.served.points import ServedPoint, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.result.inference.proof_answers import LogProbabilities

    Values = NDArray[np.float64]

# vLLM writes -9999 for minus infinity, and tokens that are that unlikely say little.
_LOWEST: Final = -30.0
# A server that has 1 ± this times the effect of training has all of it.
_EFFECT_TOLERANCE: Final = 0.2
# A distance from the trained model above this share of `apart`, or above _DTYPE_DISTANCE, is more than a dtype rounds.
_DTYPE_SHARE: Final = 0.1
# A base in four bits may be this far from the line, even if training changed little: a divergence of 0.04 nats.
_FEW_BITS: Final = 0.3
# Weights in two bits may be this far: Llama 3 8B in q2_k is 1.3 from itself. Beyond it may be another model.
_FEWEST_BITS: Final = 1.5
# What bfloat16 does to log-probabilities at most.
_DTYPE_DISTANCE: Final = 0.2
# An effect of fewer standard errors than this, or a smaller one, is not told from rounding.
_STANDARD_ERRORS: Final = 4.0
_SMALLEST_EFFECT: Final = 1e-4


@dataclass(frozen=True)
class Place:
    """Where a server is. Distances are root mean squares over the tokens."""

    to_trained: float
    to_base: float
    apart: float  # trained model and base
    share: float  # of the way from the base to the trained model
    beside: float  # distance from the line between the two
    to_nearest: float  # of the candidates
    missing: tuple[str, ...]  # parts whose adapter the nearest candidate lacks; BASE if it has none

    def __str__(self) -> str:
        trained = f"{self.to_trained:.2g} from the trained model"
        return f"{trained}, {self.to_base:.2g} from the base, which are {self.apart:.2g} apart"


def judge(
    answers: ProofAnswers, served: LogProbabilities, served_base: LogProbabilities | None = None
) -> ServedPoint:
    """Return what the log-probabilities of a server say.

    `served`: of the same tokens as `answers`. `served_base`: of the base that the server has beside the adapter.
    """
    broken = int((~np.isfinite(served)).sum())
    if broken:
        text = (
            f"{broken:,} of {len(served):,} numbers are NaN or infinite: its dtype is too small, or its "
            "weights are damaged"
        )
        return ServedPoint("wrong", text)
    models = {name: _bounded(values) for name, values in answers.models.items()}
    values = _bounded(served)
    if BASE in models:
        if served_base is None or not np.isfinite(served_base).all():
            return _beside_base(models, values)
        return _on_served_base(models, values, _bounded(served_base))
    distance = _rms(values - models[TRAINED])
    text = f"{distance:.2g} from the trained model; allowed is {_DTYPE_DISTANCE:g}, since nothing is known of the base"
    state: State = "wrong" if distance > _DTYPE_DISTANCE else "right"
    return ServedPoint(state, text, numbers={"to_trained": distance})


def _beside_base(
    models: Mapping[str, Values], served: Values, rounding: float = _FEW_BITS
) -> ServedPoint:
    """Return what can be said between the trained model and its base. `rounding`: what it may move a right server by."""
    trained = models[TRAINED]
    effect = trained - models[BASE]
    moved = served - models[BASE]
    share, beside, smallest = _share(moved, effect)
    effects = {}
    lines = []
    for name, values in models.items():
        part = name.removeprefix(WITHOUT)
        if part == name:
            continue
        if _rms(trained - values) >= smallest:
            effects[part] = trained - values
        else:
            lines.append(
                f"whether the adapter on {part} is served cannot be told: it does too little"
            )
    missing, to_nearest = _nearest(models, effects, served)
    place = Place(
        _rms(served - trained), _rms(moved), _rms(effect), share, beside, to_nearest, missing
    )
    is_rounded = _may_be_rounded(moved, effect)
    state, text = _verdict(place, smallest, rounding, is_rounded=is_rounded)
    if state == "right" and place.to_trained > _dtype_distance(place.apart):
        lines.append(
            "this is more than a dtype rounds: the server's base may be quantised, or the adapter's scale another"
        )
    return ServedPoint(state, text, tuple(lines), asdict(place))


def _verdict(
    place: Place, smallest: float, rounding: float, *, is_rounded: bool
) -> tuple[State, str]:
    """Return what a server's place says. `smallest`: the least effect that is told from rounding.

    `is_rounded`: the server may have the trained model in very few bits.
    """
    unknown = f"nothing can be told: {place}"
    if min(place.to_nearest, place.beside) > max(place.apart, _FEW_BITS):
        if is_rounded:
            return (
                "unknown",
                f"{unknown}; they are those of the trained model in very few bits, or of another",
            )
        return "wrong", f"those of another model, or of the adapter on another base: {place}"

    fault = _fault(place)
    is_far = place.missing != (BASE,) and place.beside > place.apart
    if place.apart < smallest or (fault and is_far):
        return "unknown", f"{unknown}, and the server rounds more than that"
    if fault:
        return "wrong", f"{fault}: {place}"

    if place.to_trained > rounding:
        return (
            "unknown",
            f"{unknown}; the weights are in very few bits, or the adapter is another",
        )
    return "right", f"those of the trained model: {place}"


def _share(moved: Values, effect: Values) -> tuple[float, float, float]:
    """Return how many times an effect is in a move, what is beside it, and the least effect that is told from that."""
    share = float(moved @ effect / max(float(effect @ effect), 1e-30))
    beside = _rms(moved - share * effect)
    smallest = max(_STANDARD_ERRORS * beside / math.sqrt(len(moved)), _SMALLEST_EFFECT)
    return share, beside, smallest


def _may_be_rounded(moved: Values, effect: Values) -> bool:
    """True if a server may have the whole effect, in weights of very few bits, which make all tokens less likely."""
    spread = effect - effect.mean()
    share, beside, smallest = _share(moved - moved.mean(), spread)
    most = max(_EFFECT_TOLERANCE * _rms(spread), smallest)
    return beside <= _FEWEST_BITS and abs(share - 1) * _rms(spread) <= most


def _on_served_base(
    models: Mapping[str, Values], served: Values, served_base: Values
) -> ServedPoint:
    """Return what can be said where the server's own base is known: rounding is in both, so the adapter is seen without."""
    base = _beside_base(models, served_base).numbers
    # A base into which the adapter is merged has its effect twice.
    if base["missing"] != (BASE,):
        return _beside_base(models, served)
    to_base = base["to_base"]
    most = max(_dtype_distance(base["apart"]), _STANDARD_ERRORS * to_base)
    point = _beside_base(models, served - served_base + models[BASE], most)
    # Near the base is also a weaker adapter, or one of another run.
    is_near_base = point.numbers["missing"] == (BASE,)
    distance = point.numbers["to_base" if is_near_base else "to_trained"]
    if (point.state != "wrong" or is_near_base) and distance > most:
        text = (
            "the adapter is another, by checkpoint, lora_alpha or rsLoRA, for the server's base is that of training: "
            f"{Place(**point.numbers)}"
        )
        return replace(point, state="wrong", text=text, lines=())
    if point.state == "right" and to_base > max(base["apart"], _FEW_BITS):
        text = (
            "nothing can be told: the adapter does what it did in training, but the server's base is "
            f"{to_base:.2g} from that of training, so it is quantised to very few bits, or another"
        )
        return replace(point, state="unknown", text=text)
    if to_base > _DTYPE_SHARE * base["apart"]:
        line = f"the server's base is {to_base:.2g} from that of training: it may be quantised, or another"
        return replace(point, lines=(*point.lines, line))
    return point


def _nearest(
    models: Mapping[str, Values], effects: Mapping[str, Values], served: Values
) -> tuple[tuple[str, ...], float]:
    """Return the parts without whose adapter a server is, and the distance. `effects`: of the adapter on each part."""
    distances = {(): _rms(served - models[TRAINED]), (BASE,): _rms(served - models[BASE])}
    # Without all parts it is the base, whose distance is exact.
    for number in range(1, len(effects)):
        for parts in combinations(effects, number):
            # Without several parts a model is near the sum of what it is without each.
            without = sum(effects[part] for part in parts)
            distances[parts] = _rms(served - models[TRAINED] + without)
    return min(distances.items(), key=lambda item: item[1])


def _fault(place: Place) -> str:
    """Return what is wrong with a server, "" if nothing is."""
    if place.missing == (BASE,) and abs(place.share) <= _EFFECT_TOLERANCE:
        return "those of the base: the server does not use what was trained"
    if place.missing not in ((), (BASE,)) and place.to_nearest <= place.beside:
        return f"the server passes over the adapter on {' and '.join(place.missing)}"
    if abs(place.share - 1) > _EFFECT_TOLERANCE:
        times = f"the adapter has {place.share:.2f} times its effect"
        return f"{times}, by another checkpoint, lora_alpha or rsLoRA"
    return ""


def _dtype_distance(apart: float) -> float:
    """Return the largest distance that a dtype alone makes, between models that are so far `apart`."""
    return min(_DTYPE_SHARE * apart, _DTYPE_DISTANCE)


def _bounded(values: LogProbabilities) -> Values:
    return np.maximum(values, _LOWEST).astype(np.float64)


def _rms(values: Values) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))
