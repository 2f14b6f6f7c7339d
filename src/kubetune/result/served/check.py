"""Ask a server whether it is the model that was trained, point by point.

names               the server has a model of this name
ids                 conversations become the ids of training
context             the longest of the proof's rows fits
log-probabilities   of these rows, beside the trained model, its base and parts of its adapter

report = check(known_model(run_dir), "http://localhost:8000", None, 60)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune.result.inference.proof_answers import ProofAnswers, joined
from kubetune.result.served import conversations, settings, weights
from kubetune.result.served.endpoint import Endpoint, NotAnswered
from kubetune.result.served.finding import WEIGHTS, Finding, Report
from kubetune.result.served.known_model import KnownModel

if TYPE_CHECKING:
    from kubetune.result.inference.proof_answers import LogProbabilities

# Tokens that are asked for one by one of a server that tells no log-probabilities of prompts.
_MOST_TOKENS: Final = 48
_FEWEST_TOKENS: Final = 16


def check(known: KnownModel, url: str, name: str | None, seconds: float) -> Report:
    """Return what the server at an address says of a model. `name`: that requests ask for; None: the run's.

    Raise EnvironmentFault if the server does not answer in so many seconds.
    """
    endpoint = Endpoint(url, name or known.name, seconds)
    listed = endpoint.models()
    findings = [_named(endpoint, known, listed, is_asked_for=name is not None)]
    # Without a name nothing can be asked.
    if findings[0].state == "right":
        findings.append(
            conversations.compare(endpoint, known.tokenizer, known.conversations, known.origin)
        )
        prompt = known.prompt_ids()
        findings.append(settings.ends(endpoint, known.tokenizer, known.eos_ids, prompt))
        findings.append(settings.draws(endpoint, known.generation, prompt))
        findings += _of_weights(endpoint, known, _context(listed, endpoint.model))
    return Report(endpoint.url, endpoint.model, tuple(findings))


def reason_against(report: Report) -> str | None:
    """Return why a server does not pass for the model, None if it does."""
    if report.is_proved:
        return None
    if report.wrong:
        problems = [f"{finding.point}: {finding.text}" for finding in report.wrong]
        reason = "\n".join(problems)
        return f"{report.url} does not serve the model that was trained:\n{reason}"
    reason = "its weights could not be compared; so it is not proved"
    return f"{report.url}: nothing is wrong with {report.model}, but {reason}"


def _named(
    endpoint: Endpoint, known: KnownModel, listed: list[dict[str, Any]], *, is_asked_for: bool
) -> Finding:
    """Return whether the server has a model of the name."""
    names = [model["id"] for model in listed]
    if endpoint.model in names:
        return Finding("names", "right", f"the server has {endpoint.model}")
    # The only adapter, or the only model, can be meant where nobody named one.
    adapters = [model["id"] for model in listed if model.get("parent")]
    if not is_asked_for and 1 in (len(adapters), len(names)):
        asked = endpoint.model
        endpoint.model = (adapters if len(adapters) == 1 else names)[0]
        text = f"the server has {endpoint.model}, which is taken for {asked}"
        return Finding("names", "right", text)
    text = f"the server has no {endpoint.model}; it has {', '.join(names) or 'no model'}"
    if known.rank is not None:
        text += f" (the adapter's rank is {known.rank}, which --max-lora-rank of vLLM must allow)"
    return Finding("names", "wrong", f"{text}. --model NAME checks another")


def _context(listed: list[dict[str, Any]], name: str) -> int | None:
    """Return the most tokens that the server takes, if it says so."""
    for model in listed:
        if model["id"] == name:
            facts = {**model, **(model.get("meta") or {})}  # llama.cpp has it there
            for key in ("max_model_len", "n_ctx"):
                if isinstance(facts.get(key), int):
                    return int(facts[key])
    return None


def _of_weights(endpoint: Endpoint, known: KnownModel, context: int | None) -> list[Finding]:
    """Return what the log-probabilities of the rows say, and whether all rows fit the server."""
    findings = []
    answers = known.answers
    if answers is None:
        return [Finding(WEIGHTS, "unknown", f"nothing to compare with: {known.lacking}")]
    longest = max(map(len, answers.ids))
    if context is not None and context <= longest:
        text = (
            f"the server takes {context:,} tokens, and a row has {longest:,}; raise --max-model-len"
        )
        return [Finding("context", "wrong", text)]
    if context is not None:
        findings.append(Finding("context", "right", f"{context:,} tokens"))
    try:
        finding = weights.judge(*_answers_of(endpoint, answers))
    except NotAnswered as error:
        finding = Finding(WEIGHTS, "unknown", f"the server cannot be asked: it {error}")
    return [*findings, finding]


def _answers_of(endpoint: Endpoint, answers: ProofAnswers) -> tuple[ProofAnswers, LogProbabilities]:
    """Return what is known of tokens, and what the server says of the same ones. Raise NotAnswered if it says nothing."""
    try:
        served = [endpoint.log_probabilities(ids) for ids in answers.ids]
        return answers, joined(served)
    except NotAnswered as error:
        refusal = error
    # One token at a time: those that training moved most.
    places = []
    values = []
    for place, ids in _most_moved(answers):
        value = endpoint.next_log_probability(ids)
        if value is not None:
            places.append(place)
            values.append(value)
    if len(values) < _FEWEST_TOKENS:
        raise refusal
    return answers.at(places), joined([values])


def _most_moved(answers: ProofAnswers) -> list[tuple[int, tuple[int, ...]]]:
    """Return the place of a token in the arrays, and the ids up to it, of the tokens that training moved most."""
    moved = np.abs(answers.trained - (answers.base if answers.base is not None else 0.0))
    most = set(np.argsort(-moved, kind="stable")[:_MOST_TOKENS].tolist())
    chosen = []
    place = 0
    for ids in answers.ids:
        for end in range(2, len(ids) + 1):
            if place in most:
                chosen.append((place, ids[:end]))
            place += 1
    return chosen
