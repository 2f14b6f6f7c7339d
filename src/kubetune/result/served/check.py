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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.inference.proof_answers import ProofAnswers, joined
from kubetune.result.served import conversations, settings, weights
from kubetune.result.served.endpoint import Endpoint, NextToken, NotAnswered
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.points import WEIGHTS, ServedPoint, ServerCheck

if TYPE_CHECKING:
    from kubetune.result.inference.proof_answers import LogProbabilities

# Tokens that are asked for one by one of a server that tells no log-probabilities of prompts.
_MOST_TOKENS: Final = 48
_FEWEST_TOKENS: Final = 16
_NO_IMAGES: Final = "what the server makes of them is not asked; the texts behind them are compared"


def check_served(known: KnownModel, url: str, name: str | None, seconds: float) -> ServerCheck:
    """Return what the server at an address says of a model. `name`: that requests ask for; None: the run's.

    Raise EnvironmentFault if the server does not answer in so many seconds.
    """
    endpoint = Endpoint(url, name or known.name, seconds)
    cards = {str(card["id"]): card for card in endpoint.models()}
    points = [_named(endpoint, known, cards, is_asked_for=name is not None)]
    # Without a name nothing can be asked.
    if points[0].state == "right":
        tokenizer = known.tokenizer
        prompt = known.prompt_ids()

        def point(name: str, compare: Callable[..., ServedPoint], *what: Any) -> None:
            try:
                points.append(compare(endpoint, *what))
            except NotAnswered as error:
                text = f"the server cannot be asked: it {error}"
                points.append(ServedPoint(name, "unknown", text))

        point(conversations.IDS, conversations.compare, tokenizer, known.conversations)
        point(settings.ENDS, settings.ends, tokenizer, known.eos_ids, prompt)
        point(settings.DRAWS, settings.draws, known.generation, prompt)
        context = _context(cards[endpoint.model], known.answers)
        if context is not None:
            points.append(context)
        if context is None or context.state == "right":
            point(WEIGHTS, _of_weights, known)
        if known.sees:
            points.append(ServedPoint("images", "unknown", _NO_IMAGES))
    return ServerCheck(endpoint.url, endpoint.model, tuple(points))


def _named(
    endpoint: Endpoint, known: KnownModel, cards: dict[str, Any], *, is_asked_for: bool
) -> ServedPoint:
    """Return whether the server has a model of the name."""
    asked = endpoint.model
    # Ollama's names have only small letters, and a version.
    candidates = {asked, f"{asked.lower()}:latest"}.intersection(cards)
    # The only adapter, or the only model, can be meant where nobody named one.
    if not candidates and not is_asked_for:
        candidates = {name for name, card in cards.items() if card.get("parent")} or set(cards)
    if len(candidates) == 1:
        endpoint.model = candidates.pop()
        text = f"the server has {endpoint.model}"
        if endpoint.model != asked:
            text += f", which is taken for {asked}"
        return ServedPoint("names", "right", text)
    text = f"the server has no {asked}; it has {', '.join(cards) or 'no model'}"
    if known.rank is not None:
        text += f" (the adapter's rank is {known.rank}, which --max-lora-rank of vLLM must allow)"
    return ServedPoint("names", "wrong", f"{text}. --model NAME checks another")


def _context(card: dict[str, Any], answers: ProofAnswers | None) -> ServedPoint | None:
    """Return whether all rows fit the server, None if it does not say."""
    facts = {**card, **(card.get("meta") or {})}  # llama.cpp has it there
    context = facts.get("max_model_len") or facts.get("n_ctx")
    if answers is None or not isinstance(context, int):
        return None
    longest = max(map(len, answers.ids))
    if context > longest:
        return ServedPoint("context", "right", f"{context:,} tokens")
    text = f"the server takes {context:,} tokens, and a row has {longest:,}; raise --max-model-len"
    return ServedPoint("context", "wrong", text)


def _of_weights(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return what the log-probabilities of the rows say. Raise NotAnswered if the server tells none."""
    answers = known.answers
    if answers is None:
        return ServedPoint(WEIGHTS, "unknown", f"nothing to compare with: {known.lacking}")
    try:
        served = joined([endpoint.log_probabilities(ids) for ids in answers.ids])
    except NotAnswered as refusal:
        answers, served = _of_next_tokens(endpoint, known.tokenizer, answers, refusal)
    return weights.judge(answers, served)


def _of_next_tokens(
    endpoint: Endpoint, tokenizer: Tokenizer, answers: ProofAnswers, refusal: NotAnswered
) -> tuple[ProofAnswers, LogProbabilities]:
    """Return what is known, and what the server says, of single tokens: those that training moved most.

    Raise the refusal of whole rows if it says nothing of them.
    """
    base = answers.trained * 0 if answers.base is None else answers.base
    moved = np.argsort(-np.abs(answers.trained - base), kind="stable")
    places = []
    values = []
    floors = []
    for place in moved[:_MOST_TOKENS].tolist():
        token = _next_token(endpoint, tokenizer, answers.up_to(place), refusal)
        if token is not None:
            places.append(place)
            values.append(token.log_probability)
            floors.append(-np.inf if token.is_exact else token.log_probability)
    if len(values) < _FEWEST_TOKENS:
        raise refusal
    return answers.at(places, floors), joined([values])


def _next_token(
    endpoint: Endpoint, tokenizer: Tokenizer, ids: tuple[int, ...], refusal: NotAnswered
) -> NextToken | None:
    """Return what the server says of the last token, None if it takes only texts and none of them asks for it."""
    try:
        return endpoint.next_token(ids)
    except NotAnswered:
        pass
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
