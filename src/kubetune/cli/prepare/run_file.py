"""Write the text of a run file that was chosen for data: each choice has its reason as a comment beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kubetune.base.humanize import counted
from kubetune.config.naming import model_short_name
from kubetune.config.schema import LEARNING_RATES, DataConfig, ModelConfig
from kubetune.config.starting_values import starting_values
from kubetune.data.inspect.estimate import is_on_disk, load_here
from kubetune.data.inspect.proposal import Choice, Proposal
from kubetune.errors import ConfigError
from kubetune.plan.base_model import positions_of, require_kind
from kubetune.plan.model_shapes import read_config

# Models to start from where the user names none, by task.
_EXAMPLES: Final = {"vision_language": "Qwen/Qwen2.5-VL-3B-Instruct"}
_EXAMPLE: Final = "Qwen/Qwen3-0.6B"
_MOST_TOKENS: Final = 2048
# Columns of text before the reasons.
_WIDTH: Final = 31
# Texts that YAML reads as they are; all others are quoted.
_PLAIN: Final = re.compile(r"[A-Za-z_./~][\w./~@-]*", re.ASCII)
_NO_TEXTS: Final = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a model before it is loaded. None for what is not."""

    has_template: bool | None = None
    positions: int | None = None


def model_facts(model: str | None, task: str, environ: Mapping[str, str]) -> ModelFacts:
    """Return facts from the files of a model, as far as they are on this machine.

    Raise ConfigError for a model that the task cannot train.
    """
    if model is None or not is_on_disk(model, environ):
        return ModelFacts()
    require_kind(task, model, environ)
    config = read_config(model, environ) or {}
    if task == "vision_language" and config and "vision_config" not in config:
        raise ConfigError(
            f"the rows have images, and model {model} sees none (its config.json has no vision_config); choose a "
            f"vision-language model such as {_EXAMPLES[task]}. Nothing was written."
        )
    positions = positions_of(task, model, environ)
    limit = None
    if positions is not None:
        limit = positions.limit
    # A tokenizer needs no data, but its loader takes the folder of prepared data.
    data = DataConfig.model_validate({"train": "unread"})
    tokenizer = load_here(ModelConfig(path=model), data)
    has_template = tokenizer.chat is not None
    return ModelFacts(has_template, limit)


class _Lines:
    """Lines of YAML, with comments that begin in the same column."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, depth: int, key: str, value: Any = None, reason: str = "") -> None:
        """Add a key, with its value unless it begins a section."""
        indent = "  " * depth
        text = f"{indent}{key}:"
        if value is not None:
            text += f" {_yaml(value)}"
        if reason:
            # A reason is one line, whatever a column is called.
            words = " ".join(reason.split())
            text = f"{text:<{_WIDTH}} # {words}"
        self.lines.append(text)


def _yaml(value: Any) -> str:
    """Return a value as YAML has it; a text is quoted as JSON unless it needs no quotes."""
    if isinstance(value, float):
        if value >= 0.001:
            return f"{value:g}"
        # As people write it: 5e-6, where Python writes 5e-06.
        text = f"{value:.0e}"
        return text.replace("e-0", "e-")
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXTS:
        return value
    return json.dumps(value, ensure_ascii=False)


def run_file(proposal: Proposal, model: str | None, facts: ModelFacts) -> str:
    """Return the text of a run file for a proposal. `model`: None where the user names none."""
    task = proposal.task.value
    lines = _Lines()
    name = _name(proposal.path)
    lines.add(0, "name", name)
    lines.add(0, "task", task, proposal.task.reason)
    _add_model(lines, proposal, model, facts)
    if proposal.loss is not None:
        lines.add(0, "preference")
        lines.add(1, "loss", *proposal.loss)

    if proposal.reward is not None:
        lines.add(0, "rewards", [proposal.reward.value], proposal.reward.reason)
    if proposal.problem_type is not None:
        lines.add(0, "classification")
        lines.add(1, "problem_type", *proposal.problem_type)

    _add_data(lines, proposal, facts)
    _add_evaluation(lines, proposal)
    _add_training(lines, proposal)
    reason = "the run directory: the same command continues in it"
    lines.add(0, "output", f"outputs/{name}", reason)
    return "\n".join([*_head(proposal), "", *lines.lines, ""])


def _head(proposal: Proposal) -> list[str]:
    """Return the comments at the top."""
    remarks = [
        f"Made by `kubetune init` from the first records of {proposal.path}. "
        "Each choice has its reason beside it.",
        "Every key with its range and default: docs/config.md",
        *proposal.remarks,
        *proposal.unused,
    ]
    lines = []
    for remark in remarks:
        # A remark is one line, whatever a file is called.
        words = " ".join(remark.split())
        lines.append(f"# {words}")
    return lines


def _name(path: str) -> str:
    """Return a name of a run that says which data it is for: my-data for `x/My data.csv`."""
    stem = re.split("[.#]", model_short_name(path))[0]
    words = re.findall(r"[a-z0-9]+", stem.lower())
    name = "-".join(words)[:40]
    return name.rstrip("-") or "my-run"


def _add_model(lines: _Lines, proposal: Proposal, model: str | None, facts: ModelFacts) -> None:
    """Add the model, and a template where it has none and needs one."""
    if model is None:
        example = _EXAMPLES.get(proposal.task.value, _EXAMPLE)
        reason = "an example: put a hub id or a folder of your own"
        lines.add(0, "model", example, reason)
        return
    is_classifier = proposal.task.value == "sequence_classification"
    needs_template = proposal.conversations and not is_classifier
    if needs_template and facts.has_template is False:
        lines.add(0, "model")
        lines.add(1, "path", model)
        reason = "the model has no chat template, and the data are conversations"
        lines.add(1, "chat_template", "chatml", reason)
        return
    known = {
        True: "it has a chat template of its own",
        False: "it has no chat template, and needs none for plain texts",
        None: "not on this machine yet, so its chat template is not known",
    }
    lines.add(0, "model", model, known[facts.has_template])


def _add_data(lines: _Lines, proposal: Proposal, facts: ModelFacts) -> None:
    """Add the data: where they are, what they are, and what is held out of them."""
    lines.add(0, "data")
    lines.add(1, "train")
    rows = ""
    if proposal.rows is not None:
        rows = counted(proposal.rows, "record")
    lines.add(2, "path", proposal.path, rows)
    shape = _format(proposal, facts)
    if shape is not None:
        lines.add(2, "format", *shape)
    if proposal.columns:
        lines.add(2, "columns")
    for expected, choice in proposal.columns.items():
        lines.add(3, expected, *choice)
    share = starting_values(proposal.rows)["data.eval"]
    if share.value is None:
        lines.lines.append(f"  # eval: heldout.jsonl         # {share.reason}")
    else:
        lines.add(1, "eval", share.value, share.reason)
    lines.add(1, "max_length", *_max_length(proposal.task.value, facts))


def _add_evaluation(lines: _Lines, proposal: Proposal) -> None:
    """Add what is measured before training and at each evaluation, where rows are held out and have answers."""
    if proposal.answers is None or starting_values(proposal.rows)["data.eval"].value is None:
        return
    generate = proposal.answers.value
    lines.add(0, "evaluation")
    lines.add(
        1, "generate", reason="the model answers held-out rows, before training too: better or not?"
    )
    lines.add(2, "metric", generate["metric"], proposal.answers.reason)
    lines.add(2, "max_new_tokens", generate["max_new_tokens"], "of the longest answer, about")
    lines.add(2, "rows", generate["rows"], "at most; more take longer, and say it more surely")


def _add_training(lines: _Lines, proposal: Proposal) -> None:
    """Add what is trained, and how."""
    start = starting_values(proposal.rows)
    lora = start["lora"]
    lines.add(0, "lora")
    lines.add(1, "r", lora.value["r"], lora.reason)
    lines.add(0, "training")
    for name in ("num_train_epochs", "global_batch_size"):
        value = start[f"training.{name}"]
        lines.add(1, name, value.value, value.reason)
    rate, _ = LEARNING_RATES.get(proposal.task.value, (2e-4, 1e-5))
    reason = "of LoRA for this task; a tenth or less for full fine-tuning"
    lines.add(1, "learning_rate", rate, reason)


def _format(proposal: Proposal, facts: ModelFacts) -> Choice | None:
    """Return the shape of records where it has to be named: plain prompts that are to go through a chat template."""
    if proposal.format is not None:
        return proposal.format
    if not proposal.plain_prompts or facts.has_template is False:
        return None
    reason = "prompts go through the chat template, as in `chat` and `generate`"
    if proposal.task.value in ("preference", "reward_model"):
        return Choice("messages", reason)
    return Choice("question_answer", reason)


def _max_length(task: str, facts: ModelFacts) -> Choice:
    """Return the longest row, in tokens."""
    if facts.positions is not None and facts.positions <= _MOST_TOKENS:
        return Choice(facts.positions, "tokens: all positions that the model has")
    if task == "sequence_classification":
        return Choice(
            _MOST_TOKENS, "tokens; longer texts are cut to it, or to the model's positions"
        )
    return Choice(_MOST_TOKENS, "tokens; longer rows are left out and counted")
