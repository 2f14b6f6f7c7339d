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
from kubetune.result.served.finding import WEIGHTS, Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.result.inference.proof_answers import LogProbabilities

    Values = NDArray[np.float64]

# vLLM writes -9999 for minus infinity, and tokens that are that unlikely say little.
_LOWEST: Final = -30.0
# A share of the adapter's effect that is nearer to 1 than this is the whole of it.
_SHARE: Final = 0.2
# A server that is farther from the trained model than this share of the distance between base and trained model rounds
# more than a dtype does.
_ROUNDED: Final = 0.1
# Without a base: what bfloat16 does to log-probabilities.
_ALONE: Final = 0.2
# Standard errors from which on an effect can be told from rounding.
_TOLD: Final = 4.0
# An effect that no server shows.
_LEAST: Final = 1e-4
_BASE: Final = "base"


@dataclass(frozen=True)
class Distances:
    """Where a server is, as root mean squares over the tokens."""

    tokens: int
    to_trained: float
    to_base: float
    apart: float  # trained model and base
    share: float  # of the way from the base to the trained model
    beside: float  # that way

    @property
    def least_told(self) -> float:
        """The smallest effect that can be told from what is beside the way."""
        return max(_TOLD * self.beside / math.sqrt(self.tokens), _LEAST)

    def __str__(self) -> str:
        trained = f"{self.to_trained:.2g} from the trained model"
        return f"{trained}, {self.to_base:.2g} from the base, which are {self.apart:.2g} apart"


def judge(answers: ProofAnswers, served: LogProbabilities) -> Finding:
    """Return what the log-probabilities of a server say. `served`: of the same tokens as `answers`."""
    broken = int((~np.isfinite(served)).sum())
    if broken:
        text = (
            f"{broken:,} of {len(served):,} numbers are NaN or infinite: its dtype is too small, or its "
            "weights are damaged"
        )
        return Finding(WEIGHTS, "wrong", text)
    known = {name: _bounded(values) for name, values in answers.models().items()}
    values = _bounded(served)
    if _BASE not in known:
        return _without_base(_rms(values - known["trained"]))
    return _beside_base(known, values)


def _without_base(distance: float) -> Finding:
    """Return what can be said where the base was not recorded."""
    numbers = {"to_trained": distance}
    compared = f"{distance:.2g} from it, allowed is {_ALONE:g}, since nothing is known of the base"
    if distance > _ALONE:
        return Finding(WEIGHTS, "wrong", f"not those of the trained model: {compared}", (), numbers)
    return Finding(WEIGHTS, "right", f"those of the trained model: {compared}", (), numbers)


def _beside_base(known: Mapping[str, Values], served: Values) -> Finding:
    """Return what can be said between the trained model and its base."""
    distances = _distances(known, served)
    missing, to_nearest, too_small = _nearest(known, served, distances.least_told)
    numbers: dict[str, Any] = {**vars(distances), "missing": list(missing)}
    lines = []
    if too_small:
        parts = " and ".join(too_small)
        lines.append(f"whether the adapter on {parts} is served cannot be told: it does too little")
    if distances.apart < distances.least_told:
        text = f"nothing can be told: {distances}, and the server rounds more than that"
        return Finding(WEIGHTS, "unknown", text, tuple(lines), numbers)
    text = _fault(distances, missing, to_nearest)
    if text:
        return Finding(WEIGHTS, "wrong", f"{text}: {distances}", tuple(lines), numbers)
    if distances.to_trained > _ROUNDED * distances.apart:
        lines.append("this is more than a dtype rounds: the server's base may be quantised")
    return Finding(
        WEIGHTS, "right", f"those of the trained model: {distances}", tuple(lines), numbers
    )


def _fault(distances: Distances, missing: tuple[str, ...], to_nearest: float) -> str:
    """Return what is wrong with a server, "" if nothing is. `to_nearest`: distance to the model without `missing`."""
    if min(to_nearest, distances.beside) > distances.apart:
        return "those of another model, or of the adapter on another base"
    if missing == (_BASE,):
        return "those of the base: the server does not use what was trained"
    if missing and to_nearest <= distances.beside:
        return f"the server passes over the adapter on {' and '.join(missing)}"
    if abs(distances.share - 1) > _SHARE:
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
        tokens=len(served),
        to_trained=_rms(served - trained),
        to_base=_rms(moved),
        apart=_rms(effect),
        share=share,
        beside=_rms(moved - share * effect),
    )


def _nearest(
    known: Mapping[str, Values], served: Values, least: float
) -> tuple[tuple[str, ...], float, list[str]]:
    """Return the parts without whose adapter a model is nearest to the server (`base`: all), and how near it is.

    The last: parts whose adapter does too little to be told.
    """
    trained = known["trained"]
    effects = {}
    too_small = []
    for name, values in known.items():
        if not name.startswith(WITHOUT):
            continue
        part = name.removeprefix(WITHOUT)
        effect = trained - values
        if _rms(effect) < least:
            too_small.append(part)
        else:
            effects[part] = effect

    candidates: dict[tuple[str, ...], Values] = {(): trained, (_BASE,): known[_BASE]}
    for number in range(1, len(effects) + 1):
        for parts in combinations(effects, number):
            # Without several parts a model is near the sum of what it is without each.
            candidates[parts] = trained - np.sum([effects[part] for part in parts], axis=0)
    distances = {parts: _rms(served - candidate) for parts, candidate in candidates.items()}
    nearest = min(distances, key=lambda parts: distances[parts])
    missing = nearest
    # All parts are the base.
    if nearest and len(nearest) == len(effects) and len(effects) > 1:
        missing = (_BASE,)
    return missing, distances[nearest], too_small


def _bounded(values: LogProbabilities) -> Values:
    return np.maximum(values, _LOWEST).astype(np.float64)


def _rms(values: Values) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))
