"""Compare the log-probabilities of a server with those that were recorded, and name the model that they are nearest to.

Each candidate is a point with a coordinate for each token: the trained model, its base, and the trained model without its
adapter on some parts. Rounding, also that of few bits, moves the server by a little in all directions, so it is still
nearest to the model that it is. How far it may be from that follows from how far trained model and base are apart:

    base ─────────────────────── trained      apart: root mean square over the tokens
                            server            near 1 of the way, and beside it by less than `apart`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune.result.inference.proof_answers import WITHOUT, ProofAnswers
from kubetune.result.served.points import WEIGHTS, ServedPoint, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.result.inference.proof_answers import LogProbabilities

    Values = NDArray[np.float64]

# vLLM writes -9999 for minus infinity, and tokens that are that unlikely say little.
_LOWEST: Final = -30.0
# A server that has 1 ± this times the effect of training has all of it.
_EFFECT_TOLERANCE: Final = 0.2
# A distance from the trained model above this share of `apart` is more than a dtype rounds.
_DTYPE_SHARE: Final = 0.1
# Where the base is not known: what bfloat16 does to log-probabilities.
_DTYPE_DISTANCE: Final = 0.2
# An effect of fewer standard errors than this, or a smaller one, is not told from rounding.
_STANDARD_ERRORS: Final = 4.0
_SMALLEST_EFFECT: Final = 1e-4
_BASE: Final = "base"


@dataclass(frozen=True)
class Distances:
    """Where a server is, as root mean squares over the tokens."""

    to_trained: float
    to_base: float
    apart: float  # trained model and base
    share: float  # of the way from the base to the trained model
    beside: float  # that way

    def __str__(self) -> str:
        trained = f"{self.to_trained:.2g} from the trained model"
        return f"{trained}, {self.to_base:.2g} from the base, which are {self.apart:.2g} apart"


@dataclass(frozen=True)
class Nearest:
    """The candidate that a server is nearest to."""

    missing: tuple[str, ...]  # parts without whose adapter it is; `base`: all
    distance: float


def judge(answers: ProofAnswers, served: LogProbabilities) -> ServedPoint:
    """Return what the log-probabilities of a server say. `served`: of the same tokens as `answers`."""
    broken = int((~np.isfinite(served)).sum())
    if broken:
        text = (
            f"{broken:,} of {len(served):,} numbers are NaN or infinite: its dtype is too small, or its "
            "weights are damaged"
        )
        return ServedPoint(WEIGHTS, "wrong", text)
    known = {name: _bounded(values) for name, values in answers.models().items()}
    values = _bounded(served)
    if _BASE in known:
        return _beside_base(known, values)
    distance = _rms(values - known["trained"])
    text = f"{distance:.2g} from the trained model; allowed is {_DTYPE_DISTANCE:g}, since nothing is known of the base"
    state: State = "wrong" if distance > _DTYPE_DISTANCE else "right"
    return ServedPoint(WEIGHTS, state, text, numbers={"to_trained": distance})


def _beside_base(known: Mapping[str, Values], served: Values) -> ServedPoint:
    """Return what can be said between the trained model and its base."""
    distances = _distances(known, served)
    # The smallest effect that is told from what is beside the way.
    smallest = max(_STANDARD_ERRORS * distances.beside / math.sqrt(len(served)), _SMALLEST_EFFECT)
    effects = {}
    lines = []
    for name, values in known.items():
        if name.startswith(WITHOUT):
            effects[name.removeprefix(WITHOUT)] = known["trained"] - values
    for part in list(effects):
        if _rms(effects[part]) < smallest:
            del effects[part]
            lines.append(
                f"whether the adapter on {part} is served cannot be told: it does too little"
            )
    nearest = _nearest(known, effects, served)
    fault = _fault(distances, nearest)
    state: State = "right"
    text = f"those of the trained model: {distances}"
    if distances.apart < smallest:
        state = "unknown"
        text = f"nothing can be told: {distances}, and the server rounds more than that"
    elif fault:
        state = "wrong"
        text = f"{fault}: {distances}"
    elif distances.to_trained > _DTYPE_SHARE * distances.apart:
        lines.append("this is more than a dtype rounds: the server's base may be quantised")
    numbers: dict[str, Any] = {**vars(distances), "missing": list(nearest.missing)}
    return ServedPoint(WEIGHTS, state, text, tuple(lines), numbers)


def _fault(distances: Distances, nearest: Nearest) -> str:
    """Return what is wrong with a server, "" if nothing is."""
    if min(nearest.distance, distances.beside) > distances.apart:
        return "those of another model, or of the adapter on another base"
    if nearest.missing == (_BASE,):
        return "those of the base: the server does not use what was trained"
    if nearest.missing and nearest.distance <= distances.beside:
        return f"the server passes over the adapter on {' and '.join(nearest.missing)}"
    if abs(distances.share - 1) > _EFFECT_TOLERANCE:
        times = f"the adapter has {distances.share:.2f} times its effect"
        return f"{times}, by another checkpoint, lora_alpha or rsLoRA"
    return ""


def _distances(known: Mapping[str, Values], served: Values) -> Distances:
    trained = known["trained"]
    effect = trained - known[_BASE]
    moved = served - known[_BASE]
    # How many times the effect is in what the server differs from the base by.
    share = float(moved @ effect / max(float(effect @ effect), 1e-30))
    return Distances(
        to_trained=_rms(served - trained),
        to_base=_rms(moved),
        apart=_rms(effect),
        share=share,
        beside=_rms(moved - share * effect),
    )


def _nearest(known: Mapping[str, Values], effects: Mapping[str, Values], served: Values) -> Nearest:
    """Return the candidate that a server is nearest to. `effects`: of the adapter on each part."""
    candidates: dict[tuple[str, ...], Values] = {(): known["trained"], (_BASE,): known[_BASE]}
    for number in range(1, len(effects) + 1):
        for parts in combinations(effects, number):
            # Without several parts a model is near the sum of what it is without each.
            without = sum(effects[part] for part in parts)
            candidates[parts] = known["trained"] - without
    distances = {parts: _rms(served - candidate) for parts, candidate in candidates.items()}
    missing = min(distances, key=lambda parts: distances[parts])
    distance = distances[missing]
    # All parts are the base.
    if len(missing) == len(effects) > 1:
        missing = (_BASE,)
    return Nearest(missing, distance)


def _bounded(values: LogProbabilities) -> Values:
    return np.maximum(values, _LOWEST).astype(np.float64)


def _rms(values: Values) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))
