"""Chat templates of other tools: their names decide every prompt, so none is passed over.

What is the same here is carried over; for the rest the note says what to do. Not for how a template is rendered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.plugins.importers.engine import Draft, Outcome, Row, carried, dropped, unneeded

_FILES = (".jinja", ".jinja2", ".j2")
_TO_DO = (
    "prompts are written by the tokenizer's own chat template. If that is another one, write this one into a Jinja "
    "file and name it in model.chat_template (`chatml` is built in); `kubetune data check` shows what is trained"
)


def template(keys: str, *same: str) -> Row:
    """Return the row of a template by its name. `same`: those that are, letter for letter, built in here."""

    def rule(value: Any, draft: Draft) -> Outcome:
        name = str(value)
        # axolotl's words for the tokenizer's own.
        if name in ("tokenizer_default", "tokenizer-default"):
            return unneeded("the tokenizer's own chat template, as here")
        if name.startswith("tokenizer_default_fallback_"):
            return unneeded(
                "the tokenizer's own; where it has none, name one in model.chat_template, as `chatml`"
            )
        if name in same:
            return carried(name)
        return dropped(f"a template of {draft.tool.name}'s own: {_TO_DO}")

    return Row(keys, "model.chat_template", rule)


def template_file(value: Any, _: Draft) -> Outcome:
    """Carry a file with a template; a template that stands in the config itself is to be written into one."""
    text = str(value)
    # Jinja, and no name of a file.
    if "{" in text:
        return dropped("write the template into a file and name it in model.chat_template")
    if text.endswith(_FILES) and "\n" not in text:
        return carried(text)
    name = Path(text).name
    return dropped(f"the template of {name}: write it into a Jinja file; {_TO_DO}")
