"""Ask a server whether it is the model that was trained, point by point.

names               the server has a model of this name
ids                 conversations become the ids of training
end of answers      it stops where training did
sampling            what requests leave out is as the export says
context             the longest of the proof's rows fits
log-probabilities   of these rows, beside the trained model, its base and parts of its adapter
images              are not asked about, which is said

check = check_served(known_model(run_dir), "http://localhost:8000", None, 60)
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kubetune.result.inference.proof_answers import BASE, TRAINED, ProofAnswers, joined
from kubetune.result.served import answer_endings, conversation_ids, served_weights
from kubetune.result.served.endpoint import Bound, Endpoint, NotAnswered
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.points import WEIGHTS, ServedPoint, ServerCheck

# Tokens that are asked for one by one of a server that tells no log-probabilities of prompts.
_MOST_TOKENS: Final = 48
_FEWEST_TOKENS: Final = 16
_NO_IMAGES: Final = "what the server makes of them is not asked; the texts behind them are compared"


def check_served(known: KnownModel, url: str, name: str | None, seconds: float) -> ServerCheck:
    """Return what the server at an address says of a model. `name`: that requests ask for; None: the run's.

    Raise EnvironmentFault if the server does not answer in so many seconds.
    """
    endpoint = Endpoint(url, name or known.name, seconds)
    endpoint.read_cards()
    points = [_named(endpoint, known, is_asked_for=name is not None)]
    # Without a name nothing can be asked.
    if points[0].state == "right":
        for point, question in _QUESTIONS.items():
            try:
                points.append(question(endpoint, known))
            except NotAnswered as error:
                text = f"the server cannot be asked: it {error}"
                points.append(ServedPoint(point, "unknown", text))
        if known.sees:
            points.append(ServedPoint("images", "unknown", _NO_IMAGES))
    return ServerCheck(endpoint.url, endpoint.model, tuple(points))


def _named(endpoint: Endpoint, known: KnownModel, *, is_asked_for: bool) -> ServedPoint:
    """Return whether the server has a model of the name."""
    asked = endpoint.model
    # Ollama's names have only small letters, and a version.
    names = {asked, f"{asked.lower()}:latest"}.intersection(endpoint.cards)
    # The only adapter, or the only model, can be meant where nobody named one.
    if not names and not is_asked_for:
        adapters = {name for name, card in endpoint.cards.items() if card.get("parent")}
        names = adapters or set(endpoint.cards)
    if len(names) == 1:
        endpoint.model = names.pop()
        text = f"the server has {endpoint.model}"
        if endpoint.model != asked:
            text += f", which is taken for {asked}"
        return ServedPoint("names", "right", text)
    text = f"the server has no {asked}; it has {', '.join(endpoint.cards) or 'no model'}"
    if known.rank is not None:
        text += f" (the adapter's rank is {known.rank}, which --max-lora-rank of vLLM must allow)"
    return ServedPoint("names", "wrong", f"{text}. --model NAME checks another")


def _weights(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return what the log-probabilities of the rows say."""
    answers = known.answers
    if answers is None:
        return ServedPoint(WEIGHTS, "unknown", f"nothing to compare with: {known.lacking}")
    try:
        served = joined([endpoint.log_probabilities(ids) for ids in answers.ids])
    except NotAnswered as refusal:
        return _of_next_tokens(endpoint, known, answers, refusal)
    return served_weights.judge(answers, served)


def _of_next_tokens(
    endpoint: Endpoint, known: KnownModel, answers: ProofAnswers, refusal: NotAnswered
) -> ServedPoint:
    """Return what single tokens say: those that training moved most.

    Raise the refusal of whole rows if the server says nothing of them.
    """
    trained = answers.models[TRAINED]
    moved = np.abs(trained - answers.models.get(BASE, np.zeros_like(trained)))
    places = []
    bounds = []
    for place in np.argsort(-moved, kind="stable")[:_MOST_TOKENS].tolist():
        bound = _next_token(endpoint, known, answers.up_to(place), refusal)
        if bound is not None:
            places.append(place)
            bounds.append(bound)
    if len(places) < _FEWEST_TOKENS:
        raise refusal
    values, floors = zip(*bounds, strict=True)
    return served_weights.judge(answers.at(places, floors), joined([values]))


def _next_token(
    endpoint: Endpoint, known: KnownModel, ids: tuple[int, ...], refusal: NotAnswered
) -> Bound | None:
    """Return what the server says of the last token, None if it takes only texts and none of them asks for it."""
    try:
        return endpoint.next_token(ids)
    except NotAnswered:
        pass
    tokenizer = known.tokenizer
    *before, token = ids
    text = tokenizer.decode(before[len(tokenizer.prefix) :], skip_special_tokens=False)
    # A text that ends within a word is read as other tokens.
    if tokenizer.encode_text(text) != before:
        return None
    try:
        shown = tokenizer.decode([token], skip_special_tokens=False)
        return endpoint.next_token_of_text(text, shown.encode())
    except NotAnswered:
        raise refusal from None


_QUESTIONS: Final = {
    conversation_ids.IDS: conversation_ids.compare,
    answer_endings.ENDS: answer_endings.ends,
    answer_endings.DRAWS: answer_endings.draws,
    answer_endings.CONTEXT: answer_endings.context,
    WEIGHTS: _weights,
}
