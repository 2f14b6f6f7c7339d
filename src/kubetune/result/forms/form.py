"""A form of export: what each of them says and does, in the order in which kubetune asks.

    require    before torch is imported: may this run be written so?
    write      files into a folder, which gets its name when all is proved
    prove      the files, loaded as others load them, beside what was trained
    describe   what was written and proved, on a terminal; `card` says it in the model's card

A form that transformers loads is written from the checkpoint (`plain.PlainForm`). Any other one is made of such an
export, which lies in `draft.staging` and is deleted afterwards. So a form of your own has its work in `write`:

    class TextForm(Form):
        key = "text"
        option = QUANTIZE

        def write(self, draft):
            (draft.folder / "weights.txt").write_text(…)
            return replace(draft, notes={"lines": 7})

    FORM = TextForm()

Nothing here imports torch: the verbs and the page ask `require` and `describe` without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kubetune.base.humanize import counted
from kubetune.config.schema import LoraConfig
from kubetune.result.forms.wanted import Kind, TrainedModel, WantedExport

if TYPE_CHECKING:
    from kubetune.result.forms.draft import ExportDraft
    from kubetune.result.inference.result import Result

# The option of `kubetune export` that takes the name of a form.
QUANTIZE: Final = "--quantize"


@dataclass(frozen=True)
class CardModel:
    """The model of an export, as its card names it."""

    base: str  # its name
    revision: str | None  # of the base
    lora: LoraConfig | None
    task: str  # `Config.task_name`
    sees: bool
    classifies: bool


@dataclass(frozen=True)
class CardParts:
    """The parts of a card that differ between forms."""

    weights: str  # ends the sentence "Weights are …"
    usage: tuple[str, ...]  # sections on loading and serving it
    proof: tuple[str, ...] = ()  # sections that follow the proof


class Form:
    """One form of export. The defaults are those of a form that is made of another export."""

    key = ""  # of its notes in provenance.json; a form that transformers loads has none
    option = ""  # of `kubetune export`, with the form's name
    # On the page that offers forms.
    label = ""
    about = ""

    def require(self, trained: TrainedModel, wanted: WantedExport) -> None:
        """Raise an error for a model that cannot be written in this form."""

    def require_known(self, result: Result) -> None:
        """Raise ModelError for a model that cannot be written in this form, by its config and tokenizer."""

    def kind(self, lora: LoraConfig | None, wanted: WantedExport) -> Kind:
        """Return the weights that it is made of: with the adapter merged, unless a form says otherwise."""
        del wanted
        return "model" if lora is None else "merged"

    def dtype(self, wanted: WantedExport) -> str | None:
        """Return the dtype of the weights that it is made of; None for the base's."""
        return wanted.dtype

    def served_by(self, draft: ExportDraft) -> tuple[str, ...]:
        """Return the programs that can serve it, of those in `programs`."""
        del draft
        return ()

    def write(self, draft: ExportDraft) -> ExportDraft:
        """Write the files into `draft.folder`. Return the draft with notes on them."""
        raise NotImplementedError

    def prove(self, draft: ExportDraft) -> ExportDraft:
        """Return the draft with comparisons of the files and what was trained."""
        raise NotImplementedError

    def describe(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield labelled lines about it. `facts`: its provenance.json. The first line is on the weights."""
        sizes = sizes_of(facts, ".safetensors")
        count = counted(len(sizes), "file")
        yield "weights", f"{facts['kind']}, {facts['dtype']}, {count}, {sum(sizes):,} bytes"

    def card(self, facts: Mapping[str, Any], model: CardModel) -> CardParts:
        """Return its parts of the card."""
        raise NotImplementedError


def sizes_of(facts: Mapping[str, Any], ending: str) -> list[int]:
    """Return the sizes of an export's files with this ending, in bytes."""
    return [file["bytes"] for name, file in facts["files"].items() if name.endswith(ending)]
