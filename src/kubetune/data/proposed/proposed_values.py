"""Settings of a new run for data that were looked at: `kubetune init` writes them down, the page's form fills them in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kubetune.config.naming import model_short_name
from kubetune.config.schema import DataConfig, ModelConfig
from kubetune.config.schema.run_facts import LEARNING_RATES
from kubetune.config.starting_values import starting_values
from kubetune.data.inspect.estimate import is_on_disk, load_here
from kubetune.data.proposed.proposal import Compared, Proposal, ReasonedChoice
from kubetune.plan.base_model import positions_of, require_kind
from kubetune.plan.model_shapes import ModelFiles

if TYPE_CHECKING:
    from kubetune.data.text.tokenizer import Tokenizer

_MOST_TOKENS: Final = 2048
# Tokens of an answer that an evaluation waits for, and rows that it asks: seconds of a small model on a laptop, before
# training and after each epoch.
_LEAST_NEW_TOKENS: Final = 32
_MOST_NEW_TOKENS: Final = 256
_ASKED: Final = 50


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a model before it is loaded. None for what is not."""

    has_template: bool | None = None
    positions: int | None = None
    tokenizer: Tokenizer | None = None


def model_facts(model: str | None, task: str, environ: Mapping[str, str]) -> ModelFacts:
    """Return facts from the files of a model, as far as they are on this machine.

    Raise ConfigError for a model that the task cannot train.
    """
    if model is None or not is_on_disk(model, environ):
        return ModelFacts()
    files = ModelFiles(model, environ)
    require_kind(task, files)
    positions = positions_of(task, files)
    limit = None
    if positions is not None:
        limit = positions.limit
    # A tokenizer needs no data, but its loader takes the folder of prepared data.
    data = DataConfig.model_validate({"train": "unread"})
    tokenizer = load_here(ModelConfig(path=model), data)
    has_template = tokenizer.chat is not None
    return ModelFacts(has_template, limit, tokenizer)


def proposed_values(
    proposal: Proposal,
    facts: ModelFacts,
    *,
    is_full: bool = False,  # every parameter is to be trained, without adapters
) -> dict[str, ReasonedChoice]:
    """Return the settings for data by dotted key, each with its reason.

    A key with the value None is better left out, for the reason that stands beside it.
    """
    values = general_values(proposal.task.value, proposal.rows, facts, is_full=is_full)
    values["name"] = ReasonedChoice(run_name(proposal.called or proposal.path), "")
    values["task"] = proposal.task
    if proposal.held_out is not None:
        values["data.eval"] = proposal.held_out
    values.update(_of_task(proposal, facts))
    values.update(_of_data(proposal, facts))
    # Answers are compared on rows that are held out.
    if proposal.answers is not None and values["data.eval"].value is not None:
        values.update(_of_answers(proposal.answers, facts.tokenizer))
    return values


def general_values(
    task: str,
    rows: int | None,  # of the data; None if unknown
    facts: ModelFacts,
    *,
    is_full: bool = False,
) -> dict[str, ReasonedChoice]:
    """Return the settings that need no look into the rows."""
    values = {"task": ReasonedChoice(task, "")}
    starts = starting_values(rows)
    for key in ("data.eval", "training.num_train_epochs", "training.global_batch_size"):
        values[key] = ReasonedChoice(starts[key].value, starts[key].reason)
    values["data.max_length"] = _max_length(task, facts)
    if not is_full:
        adapters = starts["lora"]
        values["lora.r"] = ReasonedChoice(adapters.value["r"], adapters.reason)
    of_adapters, of_all = LEARNING_RATES.get(task, (2e-4, 1e-5))
    reason = "of LoRA for this task; a tenth or less for full fine-tuning"
    values["training.learning_rate"] = ReasonedChoice(of_all if is_full else of_adapters, reason)
    return values


def run_name(path: str) -> str:
    """Return a name of a run that says which data it is for: my-data for `x/My data.csv`."""
    stem = re.split("[.#]", model_short_name(path))[0]
    words = re.findall(r"[a-z0-9]+", stem.lower())
    name = "-".join(words)[:40]
    return name.rstrip("-") or "my-run"


def _of_task(proposal: Proposal, facts: ModelFacts) -> dict[str, ReasonedChoice]:
    """Return the settings of the task, and a chat template where the model has none and needs one."""
    values = {}
    is_classifier = proposal.task.value == "sequence_classification"
    needs_template = proposal.conversations and not is_classifier
    if needs_template and facts.has_template is False:
        reason = "the model has no chat template, and the data are conversations"
        values["model.chat_template"] = ReasonedChoice("chatml", reason)
    if proposal.loss is not None:
        values["preference.loss"] = proposal.loss
    if proposal.images is not None:
        values["preference.images"] = proposal.images
    if proposal.reward is not None:
        values["rewards"] = ReasonedChoice([proposal.reward.value], proposal.reward.reason)
    if proposal.problem_type is not None:
        values["classification.problem_type"] = proposal.problem_type
    return values


def _of_data(proposal: Proposal, facts: ModelFacts) -> dict[str, ReasonedChoice]:
    """Return how records are read, where that has to be named."""
    values = {}
    shape = _format(proposal, facts)
    if shape is not None:
        values["data.train.format"] = shape
    for expected, choice in proposal.columns.items():
        values[f"data.train.columns.{expected}"] = choice
    return values


def _of_answers(answers: Compared, tokenizer: Tokenizer | None) -> dict[str, ReasonedChoice]:
    """Return what is asked before training and at each evaluation."""
    section = "evaluation.generate"
    return {
        f"{section}.metric": answers.metric,
        f"{section}.max_new_tokens": _most_new_tokens(answers.texts, tokenizer),
        f"{section}.rows": ReasonedChoice(
            _ASKED, "at most; more take longer, and say it more surely"
        ),
    }


def _most_new_tokens(texts: Sequence[str], tokenizer: Tokenizer | None) -> ReasonedChoice:
    """Return how long answers may become. One that ends earlier is not waited for."""
    # A text has no more tokens than bytes, so of short ones no tokenizer has to be loaded.
    longest = max(len(text.encode(errors="replace")) for text in texts)
    reason = "tokens: no fewer than the longest answer has bytes"
    if tokenizer is not None and longest > _LEAST_NEW_TOKENS:
        counts = [len(tokenizer.encode_text(text, special=False)) for text in texts]
        # A quarter more for the other rows, as `Lengths.longest_of` has it.
        longest = -(-5 * max(counts) // 4)
        reason = f"tokens; the longest answer that was looked at has {max(counts):,}"
    if longest > _MOST_NEW_TOKENS:
        reason = (
            f"tokens; longer answers are cut, since each takes time: {longest:,} would hold all"
        )
    tokens = min(_MOST_NEW_TOKENS, max(_LEAST_NEW_TOKENS, 8 * -(-longest // 8)))
    return ReasonedChoice(tokens, reason)


def _format(proposal: Proposal, facts: ModelFacts) -> ReasonedChoice | None:
    """Return the shape of records where it has to be named: plain prompts that are to go through a chat template."""
    return proposal.format if facts.has_template is not False else None


def _max_length(task: str, facts: ModelFacts) -> ReasonedChoice:
    """Return the longest row, in tokens."""
    if facts.positions is not None and facts.positions <= _MOST_TOKENS:
        return ReasonedChoice(facts.positions, "tokens: all positions that the model has")
    if task == "sequence_classification":
        return ReasonedChoice(
            _MOST_TOKENS, "tokens; longer texts are cut to it, or to the model's positions"
        )
    return ReasonedChoice(_MOST_TOKENS, "tokens; longer rows are left out and counted")
