"""Texts of fields that suit the data and the model: they are filled in as `kubetune init` would write them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kubetune.data.proposed.proposal import Proposal, ReasonedChoice
from kubetune.data.proposed.proposed_values import (
    ModelFacts,
    general_values,
    model_facts,
    proposed_values,
)
from kubetune.errors import KubetuneError
from kubetune.ui.form.form_fields import LABELS, TASKS

# What the form calls settings that are filled in and have no field at its top.
_CALLED = {
    "evaluation.generate.metric": "Answers judged by",
    "evaluation.generate.max_new_tokens": "Longest answer, in tokens",
    "evaluation.generate.rows": "Rows that are judged",
}


def suited_texts(
    proposal: Proposal | None,  # None: there are no data to look at
    typed: Mapping[str, str],  # the fields that somebody has touched
) -> dict[str, str]:
    """Return the texts of the fields that nobody has touched, by key. An empty text empties the field."""
    task = typed.get("task") or (proposal.task.value if proposal is not None else "causal_lm")
    is_full = typed.get("lora") == ""
    facts = _facts(typed.get("model.path"), task)
    if proposal is not None and proposal.task.value == task:
        values = proposed_values(proposal, facts, is_full=is_full)
    else:
        # The rows are for another task than somebody wants, but their number holds.
        rows = proposal.rows if proposal is not None else None
        values = general_values(task, rows, facts, is_full=is_full)
    texts = {} if is_full else {"lora": "true"}
    for key, choice in values.items():
        # Without rows that are held out nothing can be asked.
        if key.startswith("evaluation.generate.") and typed.get("data.eval") == "":
            continue
        texts[key] = _text(choice)
    return {key: text for key, text in texts.items() if key not in typed}


def free_name(folder: Path, name: str) -> str:
    """Return a name like this one that no run in a folder has: support-bot-2 for support-bot; "" without one."""
    stem = name[:36].rstrip("-")
    for number in range(2, 1000):
        if not (folder / f"{stem}-{number}").exists():
            return f"{stem}-{number}"
    return ""


def filled_in(texts: Mapping[str, str], typed: Collection[str]) -> list[str]:
    """Return in words which fields are filled in for the data at hand; none that are the same without data."""
    usual = suited_texts(None, {})
    pairs = []
    for key, text in texts.items():
        # A name shows what it is for, and how rows are read stands below the fields.
        is_shown = key == "name" or key.startswith("data.train.")
        if not is_shown and key not in typed and text != usual.get(key, ""):
            shown = TASKS[text] if key == "task" else text
            label = LABELS.get(key) or _CALLED.get(key, key)
            pairs.append(f"{label} = {shown or 'none'}")
    return pairs


def _facts(model: str | None, task: str) -> ModelFacts:
    """Return what is known about the model; nothing of one that is of no use, which the plan says in words."""
    try:
        return model_facts(model or None, task, os.environ)
    except (KubetuneError, OSError):
        return ModelFacts()


def _text(choice: ReasonedChoice) -> str:
    """Return a value as one types it."""
    value: Any = choice.value
    if value is None:
        return ""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return value
    return json.dumps(value)
