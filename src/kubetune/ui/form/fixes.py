"""Buttons of the form. Each fills in values that fix a problem, or that make the form fit the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.config.starting_values import starting_values
from kubetune.data.proposed.proposal import Proposal
from kubetune.ui.form.form_fields import LABELS, TASKS

# A run needs these, so emptying them fixes nothing.
_NEEDED = ("name", "model.path", "data.train")
# Problems of these say the path that was typed.
_PATHS = ("data.train", "data.eval", "model.path", "model.tokenizer")

Values = dict[str, str]  # what a button fills in, by key; an empty text empties the field


def for_problems(problems: Sequence[str], typed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the buttons for problems: which it is `of`, a label, and the values that it fills in."""
    fixes = []
    for problem in problems:
        fix = _by_meant_word(problem, typed, "Use {}")
        fix = fix or _by_words(problem, typed) or _by_default(problem, typed)
        if fix is not None:
            label, values = fix
            fixes.append({"of": problem, "label": label, "values": values})
    return fixes


def for_failure(reason: str, texts: Mapping[str, str]) -> tuple[str, Values] | None:
    """Return label and values of what would mend a run that failed for a reason, None if nothing is known to.

    Emptying a field is no answer here: nobody looks at the form before the run starts.
    """

    if re.search(r"out of memory", reason, re.IGNORECASE):
        return _less_memory(texts)

    for line in reason.splitlines():
        fix = _by_meant_word(line, texts, "Set {key} to {}") or _by_words(line, texts)
        if fix is not None:
            return fix
    return None


def field_of(problem: str, typed: Mapping[str, str]) -> str:
    """Return the key of the field that a problem is about, "" if it is about none that is known."""
    # training.learning_rate: found "fast"; data.train.columns.text is set next to data.train.
    key = problem.partition(": ")[0] if re.match(r"[a-z_0-9.]+: ", problem) else ""
    while key:
        if key in typed or key in LABELS:
            return key
        key = key.rpartition(".")[0]
    for path in _PATHS:
        # data/train.jsonl:3: is no JSON
        if path in typed and _holds(problem, typed[path]):
            return path
    for key in re.findall(r"[a-z_]+\.[a-z_.]+[a-z_]", problem):
        if key in LABELS:
            return str(key)
    return ""


def _holds(text: str, word: str) -> bool:
    """True if a word or path stands in a text, and not as a part of a longer one."""
    return re.search(rf"(?<![\w./-]){re.escape(word)}(?![\w/-])", text) is not None


def _by_meant_word(problem: str, typed: Mapping[str, str], label: str) -> tuple[str, Values] | None:
    """Return label and values of the fix for a problem that asks "did you mean …?" of a typed value, else None."""
    # lora.target_modules: this model has no module named qproj; did you mean q_proj? It has …
    question = re.search(r"did you mean `?([^\s`]+?)`?[?,;]", problem)
    key = field_of(problem, typed)
    if question is None or not typed.get(key):
        return None

    meant = question[1]
    for word in re.findall(r"[\w./-]+", problem[: question.start()]):
        if _holds(typed[key], word):
            value = re.sub(rf"(?<![\w./-]){re.escape(word)}(?![\w/-])", meant, typed[key])
            return label.format(meant, key=key.rpartition(".")[2]), {key: value}
    return None


def _less_memory(texts: Mapping[str, str]) -> tuple[str, Values] | None:
    """Return the fix for a run that found too little memory: fewer rows at once, else activations computed twice."""
    key = "training.per_device_train_batch_size"
    rows = texts.get(key, "")
    if rows.isdecimal() and int(rows) > 1:
        half = str(int(rows) // 2)
        return f"Set {key.rpartition('.')[2]} to {half}", {key: half}
    if texts.get("training.gradient_checkpointing") != "true":
        return "Set gradient_checkpointing to true", {"training.gradient_checkpointing": "true"}
    return None


def _by_words(problem: str, typed: Mapping[str, str]) -> tuple[str, Values] | None:
    """Return label and values of the fix for a problem that is known by its words, None for others."""
    if "for LoRA only" in problem:
        return "Set method to LoRA", {"lora": "true"}
    if "model.chat_template: chatml" in problem:
        return "Use the chat template ChatML", {"model.chat_template": "chatml"}
    if problem.startswith("a step of fewer than"):
        rows = str(starting_values()["training.global_batch_size"].value)
        return f"Set batch size to {rows}", {"training.global_batch_size": rows}
    if problem.startswith("data.eval: found"):
        part = starting_values()["data.eval"].value
        return f"Hold out {100 * float(part):g} % of the rows", {"data.eval": str(part)}
    if problem.startswith("name: found"):
        return _another_name(typed.get("name", ""))
    if "left out: longer than" in problem:
        return "Cut longer rows instead", {"data.overlong": "truncate"}

    longest = re.search(r"the longest has ([\d,]+) tokens", problem)
    if longest is not None:
        tokens = longest[1].replace(",", "")
        return f"Allow rows of {longest[1]} tokens", {"data.max_length": tokens}

    # "… the model was trained on at most 512 positions", "set data.max_length to 512 or less"
    limit = re.search(r"(?:on at most|data\.max_length to) ([\d,]+) (?:positions|or less)", problem)
    if limit is None:
        return None
    tokens = limit[1].replace(",", "")
    return f"Leave out rows above {limit[1]} tokens", {"data.max_length": tokens}


def _another_name(text: str) -> tuple[str, Values] | None:
    """Return the fix for a name that no run may have."""
    name = as_run_name(text)
    if not name:
        return None
    return f"Call it {name}", {"name": name}


def _by_default(problem: str, typed: Mapping[str, str]) -> tuple[str, Values] | None:
    """Return the fix for any other setting: leave it at its default."""
    # training.learning_rate: found "fast"; expected a number above 0
    key = problem.partition(":")[0]
    if key not in typed or key in _NEEDED:
        return None
    return f"Empty “{LABELS.get(key, key)}”", {key: ""}


def as_run_name(text: str) -> str:
    """Return a text as the name of a run: `First Run!` becomes `first-run`."""
    return re.sub("[^a-z0-9]+", "-", text[:200].lower())[:40].strip("-")


def for_data(proposal: Proposal, values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return buttons that make the form fit the data: a label, and the values that it fills in."""
    fixes = []
    task = proposal.task.value
    wanted = {}
    if (values.get("task") or "causal_lm") != task:
        wanted["task"] = task
    if proposal.loss is not None and values.get("preference.loss") != proposal.loss.value:
        wanted["preference.loss"] = proposal.loss.value
    if proposal.reward is not None and not values.get("rewards"):
        wanted["rewards"] = proposal.reward.value

    kind = proposal.problem_type
    if kind is not None and values.get("classification.problem_type") != kind.value:
        wanted["classification.problem_type"] = kind.value
    if wanted:
        fixes.append({"label": f"Set task to {TASKS[task]}", "values": wanted})

    # Columns that are mapped already need no button.
    columns = {}
    for expected, choice in proposal.columns.items():
        key = f"data.train.columns.{expected}"
        if values.get(key) != choice.value:
            columns[key] = str(choice.value)
    if columns:
        pairs = [f"{key.rpartition('.')[2]} = {name}" for key, name in columns.items()]
        fixes.append({"label": f"Map columns: {', '.join(pairs)}", "values": columns})
    return fixes
