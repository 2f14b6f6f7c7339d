"""What the forms have in common that transformers and PEFT load: programs that serve them, and how a card loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kubetune.config.schema import LoraConfig
from kubetune.result.forms import programs
from kubetune.result.forms.form import CardModel, CardParts, Form
from kubetune.result.forms.wanted import Kind, WantedExport
from kubetune.tasks import task_of

if TYPE_CHECKING:
    from kubetune.result.forms.draft import ExportDraft


class PlainForm(Form):
    """A form that is written from the checkpoint."""

    own_kind: Kind

    def kind(self, lora: LoraConfig | None, wanted: WantedExport) -> Kind:
        """Return its name."""
        del lora, wanted
        return self.own_kind

    def served_by(self, draft: ExportDraft) -> tuple[str, ...]:
        """Return the programs that load these weights."""
        trained = draft.source.result.trained
        return programs.served_by(trained.task_name, trained.lora, self.own_kind, draft.base)

    def card(self, facts: Mapping[str, Any], model: CardModel) -> CardParts:
        """Return how to load and to serve it."""
        kind = facts["kind"]
        commands = programs.commands(model.task, model.lora, kind, model.base, facts["base"])
        return CardParts(facts["dtype"], (loading_section(kind, model), *commands))


def loading_section(kind: Kind, model: CardModel) -> str:
    """Return the section of a card with the Python code that loads an export."""
    return f"## How to load\n\n```python\n{_snippet(kind, model)}\n```"


def _snippet(kind: Kind, model: CardModel) -> str:
    """Return the Python code that loads an export."""
    auto = task_of(model.task).auto_class
    # A processor has the tokenizer and what prepares images.
    reader = "AutoProcessor" if model.sees else "AutoTokenizer"
    name = "processor" if model.sees else "tokenizer"
    here = '"THIS_REPOSITORY_OR_FOLDER"'
    if kind != "adapter":
        return (
            f"from transformers import {auto}, {reader}\n\n"
            f"model = {auto}.from_pretrained({here})\n{name} = {reader}.from_pretrained({here})"
        )

    # An adapter needs its base, at the commit that it was trained on.
    arguments = json.dumps(model.base)
    if model.revision:
        arguments += f", revision={json.dumps(model.revision)}"
    lines = [
        "from peft import PeftModel",
        f"from transformers import {auto}, {reader}",
        "",
    ]
    if model.classifies:
        # The base knows nothing of the labels: the export's config.json does.
        lines[1] = f"from transformers import AutoConfig, {auto}, {reader}"
        lines.append(f"config = AutoConfig.from_pretrained({here})")
        arguments += ", config=config, ignore_mismatched_sizes=True"

    lines += [
        f"base = {auto}.from_pretrained({arguments})",
        f"model = PeftModel.from_pretrained(base, {here})",
        f"{name} = {reader}.from_pretrained({here})",
    ]
    return "\n".join(lines)
