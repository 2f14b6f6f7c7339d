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

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.inference.proof_answers import BASE, TRAINED, ProofAnswers, joined
from kubetune.result.served import answer_endings, conversation_ids, served_weights
from kubetune.result.served.endpoint import OLLAMA, Bound, Endpoint, NotAnswered
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.points import WEIGHTS, ServedPoint, ServerCheck

# Tokens that are asked for one by one of a server that tells no log-probabilities of prompts.
_MOST_TOKENS: Final = 48
_FEWEST_TOKENS: Final = 16


def check_served(known: KnownModel, url: str, name: str | None, seconds: float) -> ServerCheck:
    """Return what the server at an address says of a model. `name`: that requests ask for; None: the run's.

    Raise EnvironmentFault if the server does not answer in so many seconds.
    """
    endpoint = Endpoint(url, name or known.name, seconds)
    points = {"names": _named(endpoint, known, is_asked_for=name is not None)}
    # Without a name nothing can be asked.
    if points["names"].state == "right":
        for point, question in _QUESTIONS.items():
            try:
                points[point] = question(endpoint, known)
            except NotAnswered as error:
                text = f"the server cannot be asked: it {error}"
                points[point] = ServedPoint("unknown", text)
        if known.sees:
            text = "what the server makes of them is not asked; the texts behind them are compared"
            points["images"] = ServedPoint("unknown", text)
    return ServerCheck(endpoint.url, endpoint.model, points)


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
        return ServedPoint("right", text)
    text = f"the server has no {asked}; it has {', '.join(endpoint.cards) or 'no model'}"
    if known.rank is not None:
        text += f" (the adapter's rank is {known.rank}, which --max-lora-rank of vLLM must allow)"
    return ServedPoint("wrong", f"{text}. --model NAME checks another")


def _weights(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return what the log-probabilities of the rows say."""
    answers = known.answers
    if answers is None:
        return ServedPoint("unknown", f"nothing to compare with: {known.lacking}")
    try:
        served = joined([endpoint.log_probabilities(ids) for ids in answers.ids])
    except NotAnswered:
        return _of_next_tokens(endpoint, known.tokenizer, answers)
    base = None
    if endpoint.base is not None:
        with suppress(NotAnswered):
            base = joined([endpoint.log_probabilities(ids, endpoint.base) for ids in answers.ids])
    return served_weights.judge(answers, served, base)


def _of_next_tokens(endpoint: Endpoint, tokenizer: Tokenizer, answers: ProofAnswers) -> ServedPoint:
    """Return what single tokens say: those that training moved most."""
    trained = answers.models[TRAINED]
    moved = np.abs(trained - answers.models.get(BASE, np.zeros_like(trained)))
    bounds = {}
    failure = NotAnswered("can be asked for too few tokens")
    for place in np.argsort(-moved, kind="stable")[:_MOST_TOKENS].tolist():
        try:
            bounds[place] = _next_token(endpoint, tokenizer, answers.up_to(place))
        except NotAnswered as error:
            # llama.cpp's server fails where the token that it would write is a part of a character.
            failure = error
    if len(bounds) < _FEWEST_TOKENS:
        raise failure
    values, floors = zip(*bounds.values(), strict=True)
    return served_weights.judge(answers.at(list(bounds), floors), joined([values]))


def _next_token(endpoint: Endpoint, tokenizer: Tokenizer, ids: Sequence[int]) -> Bound:
    """Return what the server says of the last token after the others."""
    if not endpoint.is_of(OLLAMA):
        return endpoint.next_token(ids)
    prompt, text = [
        tokenizer.decode(part[len(tokenizer.prefix) :], skip_special_tokens=False)
        for part in (ids[:-1], ids)
    ]
    # Ollama takes texts alone, and one that ends within a character or a word is read as other tokens.
    if tokenizer.encode_text(text) != [*ids] or tokenizer.encode_text(prompt) != [*ids[:-1]]:
        raise NotAnswered("takes only texts, and too few of the tokens can be asked for by them")
    return endpoint.next_token_of_text(prompt, text.removeprefix(prompt))


_QUESTIONS: Final = {
    "ids": conversation_ids.compare,
    "end of answers": answer_endings.ends,
    "sampling": answer_endings.draws,
    "context": answer_endings.context,
    WEIGHTS: _weights,
}
