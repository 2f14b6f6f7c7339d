"""What log-probabilities say of a server: how little training may have done, and how much a server may round."""

from __future__ import annotations

import numpy as np
import pytest

from kubetune.result.inference.proof_answers import ProofAnswers
from kubetune.result.served import served_weights

TOKENS = 2000
GENERATOR = np.random.default_rng(3)
BASE = GENERATOR.normal(-3, 1, TOKENS)
# Directions in which attention and feed-forward are trained, and in which a server differs from both.
ATTENTION = GENERATOR.normal(0, 1, TOKENS)
FEED_FORWARD = GENERATOR.normal(0, 1, TOKENS)
BESIDE = GENERATOR.normal(0, 1, TOKENS)


def judged(size: float, share: float, beside: float) -> tuple[str, str]:
    """Return state and text of a server. `size`: of what training did; `share`: of it that the server has."""
    effect = size * (ATTENTION + FEED_FORWARD) / np.sqrt(2)
    models = {
        "trained": BASE + effect,
        "base": BASE,
        "without attention": BASE + size * FEED_FORWARD / np.sqrt(2),
        "without feed-forward": BASE + size * ATTENTION / np.sqrt(2),
    }
    answers = ProofAnswers(
        (tuple(range(TOKENS + 1)),),
        {name: values.astype(np.float32) for name, values in models.items()},
        (0,),
    )
    served = (BASE + share * effect + beside * BESIDE).astype(np.float32)
    point = served_weights.judge(answers, served)
    return point.state, " ".join([point.text, *point.lines])


@pytest.mark.parametrize(
    ("size", "share", "beside", "state", "words"),
    [
        (1.0, 1, 0.0, "right", "those of the trained model"),
        (1.0, 1, 0.25, "right", "may be quantised"),
        # A base in four bits moves log-probabilities by more than careful training does.
        (0.05, 1, 0.15, "right", "may be quantised"),
        (0.05, 0, 0.02, "wrong", "those of the base"),
        (0.05, 0.5, 0.15, "unknown", "the server rounds more than that"),
        (1.0, 0.5, 0.02, "wrong", "0.50 times its effect"),
        # However far another model is, it is not what a server rounds.
        (0.05, 1, 2.0, "wrong", "another model"),
        (0.05, 1, 30.0, "wrong", "another model"),
        (1.0, 1, 1.5, "wrong", "another model"),
        (0.0001, 1, 0.01, "unknown", "the server rounds more than that"),
    ],
)
def test_what_a_server_rounds_is_told_from_another_model(
    size: float, share: float, beside: float, state: str, words: str
) -> None:
    found, text = judged(size, share, beside)
    assert (found, words in text) == (state, True), text
