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


def judged(
    size: float,
    share: float,
    beside: float,
    base_beside: float | None = None,
    base_share: float = 0,
) -> tuple[str, str]:
    """Return state and text of a server.

    `size`: of what training did. `share`: of it that the server has. `base_beside`: how far the server's own base is
    beside that of training, None if it has none. `base_share`: of what training did that is in it.
    """
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
    served_base = None
    if base_beside is not None:
        served_base = (BASE + base_share * effect + base_beside * BESIDE).astype(np.float32)
    point = served_weights.judge(answers, served, served_base)
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
        # Nearer to the base, and not the base.
        (1.0, 0.4, 0.02, "wrong", "0.40 times its effect"),
        # However far another model is, it is not what a server rounds.
        (0.05, 1, 2.0, "wrong", "another model"),
        (0.05, 1, 30.0, "wrong", "another model"),
        (1.0, 1, 1.7, "wrong", "another model"),
        # Two bits move weights so far that they are not told from another model, if all that training did is in them.
        (1.0, 1, 1.2, "unknown", "in very few bits, or of another"),
        (0.1, 1, 0.8, "unknown", "in very few bits, or of another"),
        (0.3, 0, 0.8, "wrong", "another model"),
        (0.0001, 1, 0.01, "unknown", "the server rounds more than that"),
        # However much training did, no dtype moves a server so far, and no base in four bits.
        (13.0, 1, 0.25, "right", "may be quantised"),
        (13.0, 1, 1.2, "unknown", "in very few bits, or the adapter is another"),
    ],
)
def test_what_a_server_rounds_is_told_from_another_model(
    size: float, share: float, beside: float, state: str, words: str
) -> None:
    found, text = judged(size, share, beside)
    assert (found, words in text) == (state, True), text


@pytest.mark.parametrize(
    ("size", "share", "beside", "base_beside", "state", "words"),
    [
        (1.0, 1, 0.0, 0.0, "right", "those of the trained model"),
        # A dtype rounds base and adapter, not by the same.
        (0.05, 1, 0.02, 0.01, "right", "those of the trained model"),
        # Its effect is large enough to pass, and is not that of training, which shows where nothing is rounded.
        (1.0, 0.85, 0.0, 0.0, "wrong", "the adapter is another"),
        (1.0, 1, 0.2, 0.0, "wrong", "the adapter is another"),
        (1.0, 0.1, 0.2, 0.0, "wrong", "the adapter is another"),
        (1.0, 0.85, 0.2, 0.2, "right", "may be quantised"),
        # A base in so few bits is beside training by more than any limit, and the adapter on it is not.
        (0.1, 1, 0.4, 0.4, "unknown", "the server's base is 0.4 from that of training"),
        (1.0, 1, 1.5, 1.5, "unknown", "the server's base is 1.5 from that of training"),
        # What training did is seen beside such a base, however little it is.
        (0.1, 0, 0.8, 0.8, "wrong", "those of the base"),
        (0.1, 0.5, 0.8, 0.8, "wrong", "0.50 times its effect"),
        (0.002, 1, 0.25, 0.25, "right", "the server's base is 0.25 from that of training"),
        (0.002, 0, 0.25, 0.25, "wrong", "those of the base"),
        (1.0, 0, 1.7, 1.7, "wrong", "the server's base is 1.7 from that of training"),
        (1.0, 0, 0.2, 0.2, "wrong", "those of the base"),
        (1.0, 1, 1.4, 0.0, "wrong", "the adapter is another"),
        (1.0, 1, 1.7, 0.0, "wrong", "another model"),
        (1.0, 0.5, 0.0, float("nan"), "wrong", "0.50 times its effect"),
    ],
)
def test_the_own_base_of_a_server_tells_rounding_from_another_adapter(
    size: float, share: float, beside: float, base_beside: float, state: str, words: str
) -> None:
    found, text = judged(size, share, beside, base_beside)
    assert (found, words in text) == (state, True), text


def test_an_adapter_on_a_base_into_which_it_is_merged_is_wrong() -> None:
    state, text = judged(1.0, 2, 0.0, 0.0, base_share=1)
    assert (state, "2.00 times its effect" in text) == ("wrong", True), text


def test_few_bits_may_make_all_tokens_less_likely() -> None:
    training = np.abs(ATTENTION) * 0.4
    answers = ProofAnswers(
        (tuple(range(TOKENS + 1)),),
        {"trained": (BASE + training).astype(np.float32), "base": BASE.astype(np.float32)},
        (0,),
    )
    served = (BASE + training + 1.1 * BESIDE - 0.5).astype(np.float32)
    point = served_weights.judge(answers, served)
    assert (point.state, "in very few bits" in point.text) == ("unknown", True), point
