"""The Modelfile of an exported chat model, for `ollama create`: its chat template in Ollama's own language.

Ollama's templates are Go's and cannot run a model's Jinja. The texts in between are taken from renderings, and the
result is kept only if it gives the renderings again; a template that is not so simple is left to be written by hand.
Source: Ollama's parser/parser.go and template/template.go (0.30), which were run on what is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kubetune.base import files
from kubetune.base.logs import scrub
from kubetune.config.schema import ModelConfig
from kubetune.data.reading.hub import is_local
from kubetune.data.text.tokenizer_files import read_json
from kubetune.result.forms import programs
from kubetune.result.forms.wanted import base_name

if TYPE_CHECKING:
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.result.forms.draft import ExportDraft

MODELFILE: Final = "Modelfile"

# The base of an adapter as GGUF, which the user makes.
BASE_GGUF: Final = "base.gguf"

# Role and text.
Turn = tuple[str, str]

# From turns, the last of them the user's, to the prompt that a model answers.
Render = Callable[[Sequence[Turn]], str]

# Texts that no template has by itself, so that what is around them is the template's.
_SYSTEM: Final = "system text"
_QUESTION: Final = "first question"
_ANSWER: Final = "first answer"
_NEXT_QUESTION: Final = "second question"

_TALK: Final = (
    ("user", "a"),
    ("assistant", "b"),
    ("user", "c"),
    ("assistant", "d"),
)


@dataclass(frozen=True)
class Pieces:
    """What a chat template puts around texts.

    Example: ChatML, whose prompts are "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"

        lead      ""
        system    "<|im_start|>system\\n", "<|im_end|>\\n"
        user      "<|im_start|>user\\n"
        answer    "<|im_end|>\\n<|im_start|>assistant\\n", "<|im_end|>\\n"
    """

    lead: str  # before all turns, if there is no system text
    system: tuple[str, str]  # before and after the system text
    user: str  # before each question
    answer: tuple[str, str]  # before each answer, so after its question, and after it

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the prompt of turns, put together as Ollama does it with `template`."""
        # Ollama joins system texts by a blank line.
        system = "\n\n".join(text for role, text in turns if role == "system")
        prompt = self.lead
        if system:
            prompt = self.system[0] + system + self.system[1]
        for role, text in turns:
            if role == "user":
                prompt += self.user + text + self.answer[0]
            elif role == "assistant":
                prompt += text + self.answer[1]
        return prompt

    def template(self) -> str:
        """Return the same as a template of Go."""
        parts = (
            "{{ if .System }}", self.system[0], "{{ .System }}", self.system[1], "{{ else }}", self.lead, "{{ end }}",
            '{{ range .Messages }}{{ if eq .Role "user" }}', self.user, "{{ .Content }}", self.answer[0],
            '{{ else if eq .Role "assistant" }}{{ .Content }}', self.answer[1], "{{ end }}{{ end }}",
        )  # fmt: skip
        return "".join(parts)


def pieces_of(render: Render) -> Pieces | None:
    """Return the pieces of a chat template, or None if its prompts cannot be put together from pieces."""
    # A ValueError means that a text is missing or occurs twice, or that the template refuses these turns.
    try:
        pieces = _read_off(render)
        if any(pieces.prompt(turns) != render(turns) for turns in _conversations()):
            return None
    except ValueError:
        return None

    for text in (pieces.lead, *pieces.system, pieces.user, *pieces.answer):
        # A brace at the end of a piece and the action after it would be read as "{{" and "{".
        if "{{" in text or text.endswith("{") or not _is_writable(text):
            return None
    return pieces


def _is_writable(text: str) -> bool:
    """True if a Modelfile can hold a text between triple quotes.

    Ollama's parser leaves out what Go does not call printable, such as a no-break space, and prints nothing.
    """
    visible = text.translate({ord(space): None for space in "\t\r\n"})
    return visible.isprintable() and '"""' not in text


def _read_off(render: Render) -> Pieces:
    """Return the pieces as three renderings have them. Raise ValueError if they cannot be told apart.

        alone          before  [question]  closing
        two turns      before  [question]  opening  [answer]  ended  [next question]  closing
        with system    start  [system]  system_end  [question]  closing

    `before`, `ended` and `system_end` all end in what is before a question, which is what they have in common.
    """
    before, _ = render([("user", _QUESTION)]).split(_QUESTION)
    turns = [("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT_QUESTION)]
    _, between = render(turns).split(_QUESTION)
    opening, rest = between.split(_ANSWER)
    ended, _ = rest.split(_NEXT_QUESTION)
    head, _ = render([("system", _SYSTEM), ("user", _QUESTION)]).split(_QUESTION)
    start, system_end = head.split(_SYSTEM)

    user = _common_end([before, ended, system_end])
    return Pieces(
        lead=before.removesuffix(user),
        system=(start, system_end.removesuffix(user)),
        user=user,
        answer=(opening, ended.removesuffix(user)),
    )


def _common_end(texts: Sequence[str]) -> str:
    """Return the longest text that all of these end in."""
    end = min(texts, key=len)
    while not all(text.endswith(end) for text in texts):
        end = end[1:]
    return end


def _conversations() -> list[Sequence[Turn]]:
    """Return conversations of one to three questions, with a system text and without."""
    conversations: list[Sequence[Turn]] = []
    # Each with the user's turn last, as a prompt has it.
    for length in (0, 2, 4):
        turns = (*_TALK[:length], ("user", "and now?"))
        conversations += [turns, (("system", "Be short."), *turns)]
    return conversations


@dataclass(frozen=True)
class Base:
    """The model that an adapter is for."""

    name: str
    folder: Path | None = None  # where it lies, if Ollama converts the weights there itself

    def lines(self) -> list[str]:
        """Return the line FROM, and before it what is to be done first."""
        if self.folder is not None:
            folder = str(self.folder).replace(str(Path.home()), "~")
            # A line break in it would begin a command of its own.
            if folder.isprintable():
                return [f"FROM {folder}"]
        return [
            f"# {BASE_GGUF} is to be the base, {_on_a_line(self.name)}, as GGUF. To make it from a folder of transformers:",
            f"#     python llama.cpp/convert_hf_to_gguf.py FOLDER --outfile {BASE_GGUF}",
            "# Or write the name that the same model has in Ollama's library.",
            f"FROM ./{BASE_GGUF}",
        ]


def _on_a_line(text: str) -> str:
    """Return a text as it is, or with escapes if it has line breaks or the like."""
    return text if text.isprintable() else ascii(text)


def modelfile(
    render: Render | None,
    *,
    stop: Sequence[str],
    base: Base | None,
    gguf: str | None = None,
    is_made: bool = False,
) -> str:
    """Return the text of a Modelfile. `base`: the model that the adapter in `gguf` is for; None for whole weights.

    `render`: None if the model has no chat template; `stop`: the tokens that end an answer; `gguf`: the file that
    Ollama takes in place of weights or an adapter that it does not convert. `is_made`: it lies there already.
    """
    lines = ["# ollama create NAME -f Modelfile && ollama run NAME"]
    if gguf and not is_made:
        lines.append(
            f"# README.md has the command that makes {gguf}, which Ollama does not make of this model itself"
        )

    weights = "."
    if gguf:
        weights = f"./{gguf}"
    if base is None:
        lines.append(f"FROM {weights}")
    else:
        lines += base.lines()
        lines.append(f"ADAPTER {weights}")

    if render is not None:
        pieces = pieces_of(render)
        if pieces is not None:
            lines.append(f'TEMPLATE """{pieces.template()}"""')
        else:
            lines.append(
                "# TEMPLATE: the model's chat template has no form in Ollama's language that gives equal prompts"
            )
            # An adapter's base is a model of Ollama's, with a template of its own.
            if base is None:
                lines.append(
                    "# Ollama 0.30 and newer runs it as it is; older ones know no template"
                )

    for token in stop:
        if _is_writable(token):
            quotes = '"""' if '"' in token else '"'
            lines.append(f"PARAMETER stop {quotes}{token}{quotes}")
        else:
            lines.append(
                f"# PARAMETER stop: a Modelfile cannot hold {token!a}, at which answers end"
            )

    return "\n".join(lines) + "\n"


def write(draft: ExportDraft) -> None:
    """Write the Modelfile that Ollama wants beside weights."""
    tokenizer = draft.source.result.tokenizer
    gguf = draft.gguf_file or _gguf_to_make(draft.folder, draft.source.kind)
    base = None
    if draft.source.kind == "adapter":
        base = _base_of(draft.source.model, tokenizer)
    text = modelfile(
        _renderer(tokenizer),
        stop=_texts_at_the_end(tokenizer),
        base=base,
        gguf=gguf,
        is_made=draft.gguf_file is not None,
    )
    files.write_atomic(draft.folder / MODELFILE, scrub(text))


def _renderer(tokenizer: Tokenizer) -> Render | None:
    """Return how turns become a prompt; None for a tokenizer without a chat template."""
    if tokenizer.chat is None:
        return None
    # Ollama puts BOS before a prompt if the tokenizer puts it before a text. With others the template writes it: SmolLM2's
    # BOS is `<|im_start|>`, which its tokenizer does not add.
    bos = ""
    if tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.prefix:
        bos = tokenizer.backend.id_to_token(tokenizer.bos_id) or ""

    def render(turns: Sequence[Turn]) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        prompt = tokenizer.require_chat().render(messages, generation_prompt=True)
        return prompt.removeprefix(bos)

    return render


def _texts_at_the_end(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens that end an answer, as texts."""
    texts = [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.eos_ids]
    return [text for text in texts if text]


def _base_of(model: ModelConfig, tokenizer: Tokenizer) -> Base:
    """Return what a Modelfile says of the base of an adapter."""
    base = Base(base_name(model.path))
    architectures = read_json(tokenizer.files.get("config.json")).get("architectures") or ()
    if not is_local(model.path) or programs.CONVERTED_BY_OLLAMA.isdisjoint(architectures):
        return base
    # Files of the hub's cache are links to places outside of their folder, which Ollama refuses.
    folder = Path(model.path).expanduser().absolute()
    weights = list(folder.glob("model*.safetensors"))
    if not weights or any(file.is_symlink() for file in weights):
        return base
    return replace(base, folder=folder)


def _gguf_to_make(folder: Path, kind: str) -> str | None:
    """Return the GGUF file that Ollama wants of this export; None if it converts the weights itself."""
    if kind == "adapter":
        return programs.ADAPTER_GGUF
    # It converts few architectures. For the others it takes a file that llama.cpp makes.
    architectures = read_json(folder / "config.json").get("architectures") or ()
    if programs.CONVERTED_BY_OLLAMA.isdisjoint(architectures):
        return programs.MODEL_GGUF
    return None
