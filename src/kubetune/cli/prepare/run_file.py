"""Write the text of a run file that was chosen for data: each choice has its reason as a comment beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kubetune.base.humanize import counted
from kubetune.config.starting_values import VISION_MODEL
from kubetune.data.proposed.proposal import Proposal, ReasonedChoice
from kubetune.data.proposed.proposed_values import ModelFacts, proposed_values

# Models to start from where the user names none, by task.
_EXAMPLES: Final = {"vision_language": VISION_MODEL}
_EXAMPLE: Final = "Qwen/Qwen3-0.6B"
# Columns of text before the reasons.
_WIDTH: Final = 31
# Texts that YAML reads as they are; all others are quoted.
_PLAIN: Final = re.compile(r"[A-Za-z_./~][\w./~@-]*", re.ASCII)
_NO_TEXTS: Final = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


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
    values = proposed_values(proposal, facts)
    lines = _Lines()
    name = values["name"].value
    lines.add(0, "name", name)
    lines.add(0, "task", *values["task"])
    _add_model(lines, proposal, model, facts, values)
    of_preference = [key for key in ("loss", "images") if f"preference.{key}" in values]
    if of_preference:
        lines.add(0, "preference")
    for key in of_preference:
        lines.add(1, key, *values[f"preference.{key}"])
    if "rewards" in values:
        lines.add(0, "rewards", *values["rewards"])
    if "classification.problem_type" in values:
        lines.add(0, "classification")
        lines.add(1, "problem_type", *values["classification.problem_type"])

    _add_data(lines, proposal, values)
    _add_evaluation(lines, values)
    _add_training(lines, values)
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


def _add_model(
    lines: _Lines,
    proposal: Proposal,
    model: str | None,
    facts: ModelFacts,
    values: Mapping[str, ReasonedChoice],
) -> None:
    """Add the model, and a template where it has none and needs one."""
    if model is None:
        example = _EXAMPLES.get(proposal.task.value, _EXAMPLE)
        reason = "an example: put a hub id or a folder of your own"
        lines.add(0, "model", example, reason)
        return
    if "model.chat_template" in values:
        lines.add(0, "model")
        lines.add(1, "path", model)
        lines.add(1, "chat_template", *values["model.chat_template"])
        return
    known = {
        True: "it has a chat template of its own",
        False: "it has no chat template, and needs none for plain texts",
        None: "not on this machine yet, so its chat template is not known",
    }
    lines.add(0, "model", model, known[facts.has_template])


def _add_data(lines: _Lines, proposal: Proposal, values: Mapping[str, ReasonedChoice]) -> None:
    """Add the data: where they are, what they are, and what is evaluated on."""
    lines.add(0, "data")
    rows = ""
    if proposal.rows is not None:
        rows = counted(proposal.rows, "record")
    _add_source(lines, "train", ReasonedChoice(proposal.path, rows), proposal, values)
    held_out = values["data.eval"]
    if held_out.value is None:
        lines.lines.append(f"  # eval: heldout.jsonl         # {held_out.reason}")
    elif isinstance(held_out.value, str):
        _add_source(lines, "eval", held_out, proposal, values)
    else:
        lines.add(1, "eval", *held_out)
    lines.add(1, "max_length", *values["data.max_length"])


def _add_source(
    lines: _Lines,
    key: str,
    path: ReasonedChoice,
    proposal: Proposal,
    values: Mapping[str, ReasonedChoice],
) -> None:
    """Add files of data, with how their records are read."""
    lines.add(1, key)
    lines.add(2, "path", *path)
    if "data.train.format" in values:
        lines.add(2, "format", *values["data.train.format"])
    if proposal.columns:
        lines.add(2, "columns")
    for expected in proposal.columns:
        lines.add(3, expected, *values[f"data.train.columns.{expected}"])


def _add_evaluation(lines: _Lines, values: Mapping[str, ReasonedChoice]) -> None:
    """Add what is measured before training and at each evaluation, where rows are held out and have answers."""
    if "evaluation.generate.metric" not in values:
        return
    lines.add(0, "evaluation")
    lines.add(
        1, "generate", reason="the model answers held-out rows, before training too: better or not?"
    )
    for name in ("metric", "max_new_tokens", "rows"):
        lines.add(2, name, *values[f"evaluation.generate.{name}"])


def _add_training(lines: _Lines, values: Mapping[str, ReasonedChoice]) -> None:
    """Add what is trained, and how."""
    lines.add(0, "lora")
    lines.add(1, "r", *values["lora.r"])
    lines.add(0, "training")
    for name in ("num_train_epochs", "global_batch_size", "learning_rate"):
        lines.add(1, name, *values[f"training.{name}"])
