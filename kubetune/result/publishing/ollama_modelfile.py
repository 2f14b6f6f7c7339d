"""The Modelfile of an exported chat model, for `ollama create`: its chat template in Ollama's own language.

Ollama's templates are Go's and cannot run a model's Jinja. What stands between texts is read off renderings, and the
result is kept only if it gives the renderings again; a template that is not so simple is left to be written by hand.
Source: Ollama's Modelfile reference (FROM, ADAPTER, TEMPLATE, PARAMETER stop).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

MODELFILE: Final = "Modelfile"

Turn = tuple[str, str]
Render = Callable[[Sequence[Turn]], str]
"""From turns (role, text), the last of them the user's, to the prompt that a model answers."""

_SYSTEM, _ONE, _ANSWER, _TWO = "system text", "first question", "first answer", "second question"
_TALK: Final = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
_TRIED: Final[tuple[tuple[Turn, ...], ...]] = tuple(
    (*system, *_TALK[:length], ("user", "and now?"))
    for system in ((), (("system", "Be short."),))
    for length in (0, 2, 4)
)


@dataclass(frozen=True)
class Pieces:
    """Frame of texts: `lead` before all where there is no system text, or else that between its two pieces."""

    lead: str
    system: tuple[str, str]
    user: str
    answer: tuple[str, str]

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The prompt of turns, put together as Ollama does it with `template`."""
        system = "\n\n".join(text for role, text in turns if role == "system")
        parts = [self.system[0] + system + self.system[1] if system else self.lead]
        for role, text in turns:
            parts += [self.user, text, self.answer[0]] if role == "user" else []
            parts += [text, self.answer[1]] if role == "assistant" else []
        return "".join(parts)

    def template(self) -> str:
        """The same as a template of Go."""
        parts = (
            "{{ if .System }}", self.system[0], "{{ .System }}", self.system[1], "{{ else }}", self.lead, "{{ end }}",
            '{{ range .Messages }}{{ if eq .Role "user" }}', self.user, "{{ .Content }}", self.answer[0],
            '{{ else if eq .Role "assistant" }}{{ .Content }}', self.answer[1], "{{ end }}{{ end }}",
        )  # fmt: skip
        return "".join(parts)


def pieces_of(render: Render) -> Pieces | None:
    """The pieces of a chat template; None where its prompts are not made of such."""
    try:
        before, after = render([("user", _ONE)]).split(_ONE)
        first, _, between = render(
            [("user", _ONE), ("assistant", _ANSWER), ("user", _TWO)]
        ).partition(_ONE)
        opening, answered = between.split(_ANSWER)
        ended, closing = answered.split(_TWO)
        start, system_end = (
            render([("system", _SYSTEM), ("user", _ONE)]).split(_ONE)[0].split(_SYSTEM)
        )
        equal = (
            len(set(ends)) == 1
            for ends in zip(before[::-1], ended[::-1], system_end[::-1], strict=False)
        )
        cut = sum(1 for _ in takewhile(bool, equal))
        user = before[len(before) - cut :]
        lead = before[: len(before) - cut]
        system = (start, system_end[: len(system_end) - cut])
        found = Pieces(lead, system, user, (opening, ended[: len(ended) - cut]))
        if (first, opening, closing) != (before, after, after):
            return None
        if any(found.prompt(turns) != render(turns) for turns in _TRIED):
            return None
    except ValueError:  # a text is missing, or stands twice; or the template refuses these turns
        return None
    texts = (found.lead, *found.system, found.user, *found.answer)
    return None if any("{{" in text or '"""' in text for text in texts) else found


def modelfile(
    render: Render | None, *, stop: Sequence[str], base: str | None, gguf: str | None = None
) -> str:
    """The text of a Modelfile. `base`: the model that the folder's adapter is for; None for whole weights.

    `render`: None where the model has no chat template; `stop`: the tokens that end an answer; `gguf`: the file that
    Ollama takes in place of weights or an adapter that it does not convert.
    """
    lines = ["# ollama create NAME -f Modelfile && ollama run NAME"]
    if gguf:
        lines.append(
            f"# README.md has the command that makes {gguf}, which Ollama does not make of this model itself"
        )
    if base is not None:
        lines += ["# the base as Ollama calls it, or a folder with its weights", f"FROM {base}"]
    lines.append(f"{'FROM' if base is None else 'ADAPTER'} {f'./{gguf}' if gguf else '.'}")
    pieces = pieces_of(render) if render is not None else None
    if pieces is not None:
        lines.append(f'TEMPLATE """{pieces.template()}"""')
    elif render is not None:
        lines.append(
            "# TEMPLATE: the model's chat template has no form in Ollama's language that gives equal prompts"
        )
    lines += [f'PARAMETER stop "{token}"' for token in stop if '"' not in token]
    return "\n".join(lines) + "\n"
