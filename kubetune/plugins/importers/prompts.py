"""Chat templates of other tools: their names decide every prompt, so none is passed over.

What is the same here is carried over; for the rest the note says what to do. Not for how a template is rendered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.plugins.importers.draft import Draft, rule_with

_OWN = ("tokenizer_default", "tokenizer-default")
_FALLBACK = "tokenizer_default_fallback_"
_FILES = (".jinja", ".jinja2", ".j2")
_TO_DO = (
    "prompts are written by the tokenizer's own chat template. If that is another one, write this one into a Jinja "
    "file and name it in model.chat_template (`chatml` is built in); `kubetune data check` shows what is trained"
)


@rule_with
def template(draft: Draft, key: str, value: Any, same: tuple[str, ...] = ()) -> None:
    """A template by its name in that tool. `same`: those that are, letter for letter, the one built in here."""
    name = str(value)
    if name in _OWN:
        draft.unneeded(key, "the tokenizer's own chat template, as here")
    elif name.startswith(_FALLBACK):
        draft.unneeded(
            key,
            "the tokenizer's own; where it has none, name one in model.chat_template, as `chatml`",
        )
    elif name in same:
        draft.carry(key, "model.chat_template", name)
    else:
        draft.drop(key, f"a template of {draft.peer}'s own: {_TO_DO}")


def template_file(draft: Draft, key: str, value: Any) -> None:
    """A file with a template, or the template itself."""
    text = str(value)
    if text.endswith(_FILES) and "{" not in text and "\n" not in text:
        draft.carry(key, "model.chat_template", text)
    elif "{" in text:
        draft.drop(key, "write the template into a file and name it in model.chat_template")
    else:
        draft.drop(key, f"the template of {Path(text).name}: write it into a Jinja file; {_TO_DO}")
