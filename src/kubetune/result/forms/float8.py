"""fp8: weights in 8-bit floats, in the form of compressed-tensors, which vLLM and transformers load. No data is needed.

Each row of a linear layer is scaled by its largest number and rounded to e4m3. The program that runs the model rounds the
inputs of these layers in the same way, token by token (FP8_DYNAMIC of compressed-tensors). Embeddings and the head stay.

The base is the measure of the cost: quantised alike, the logits of the model may move twice as far as those of the base.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune import errors, extras
from kubetune.base.humanize import counted
from kubetune.result.forms import programs
from kubetune.result.forms.form import QUANTIZE, CardModel, CardParts, Form, sizes_of
from kubetune.result.forms.plain import loading_section
from kubetune.result.forms.wanted import TrainedModel, WantedExport

if TYPE_CHECKING:
    from kubetune.result.forms.draft import ExportDraft, ExportSource
    from kubetune.result.forms.equivalence import Comparison

# How far logits may move, relative to their norm.
WITHOUT_BASE: Final = 0.2  # if the base cannot be quantised for comparison
LEAST_ALLOWED: Final = 2e-2  # a smaller move cannot be distinguished from rounding
SHARE_OF_BASE: Final = 2.0  # times as far as the base


class Float8Form(Form):
    """The form of weights in 8-bit floats."""

    key = "quantised"
    option = QUANTIZE
    label = "FP8"
    about = "Weights in 8-bit floats, about half the size, for vLLM."

    def require(self, trained: TrainedModel, wanted: WantedExport) -> None:
        """Raise an error for a model that does not answer text with text, or has code of its own."""
        del wanted
        extras.require("--quantize fp8", "compressed_tensors")
        if not trained.answers_text:
            raise errors.ModelError(
                f"{trained.task} is not quantised to FP8, only models that answer text with text. Nothing was written."
            )
        if trained.model.trust_remote_code:
            raise errors.ModelError(
                "a model with code of its own is not quantised to FP8. Nothing was written."
            )

    def served_by(self, draft: ExportDraft) -> tuple[str, ...]:
        """Return the one program that loads it."""
        del draft
        return (programs.VLLM,)

    def write(self, draft: ExportDraft) -> ExportDraft:
        """Write the export in `draft.staging` with weights in FP8."""
        from kubetune.result.forms import compressed

        source = draft.source
        with compressed.without_progress_bars():
            source.tell("rounding the weights to FP8")
            model = _load(source, draft.staging)
            plain = source.ask(model, draft.sample)
            layers = compressed.quantise(model)
            quantised = source.ask(model, draft.sample)
            compressed.save(model, draft.staging, draft.folder)
        size = sum(path.stat().st_size for path in draft.staging.glob("*.safetensors"))
        notes = {"form": "fp8", "layers": layers, "bytes_before": size}
        return replace(draft, notes=notes, logits={"plain": plain, "quantised": quantised})

    def prove(self, draft: ExportDraft) -> ExportDraft:
        """Compare the model with its weights in FP8, and these with their file."""
        from kubetune.models.padding_free import TOLERANCE
        from kubetune.result.forms import compressed, equivalence, weights

        source = draft.source
        plain = draft.logits["plain"]
        quantised = draft.logits["quantised"]
        with compressed.without_progress_bars():
            reloaded = weights.ask_reloaded(source, draft.folder, draft.sample)
            allowed, base = _allowed(draft)
        draft = draft.proved_by(
            equivalence.compare("model and its weights in FP8", plain, quantised, allowed),
            equivalence.compare(
                "weights in FP8 and their reloaded export",
                quantised,
                reloaded,
                TOLERANCE[source.dtype],
            ),
        )
        return replace(draft, notes={**draft.notes, "base_quantised_alike": base})

    def describe(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the size of the weights, and how far the base moves."""
        yield from super().describe(facts)
        size = sum(sizes_of(facts, ".safetensors"))
        notes = facts[self.key]
        before = notes["bytes_before"]
        yield (
            "",
            f"{counted(notes['layers'], 'layer')} in FP8: {size / before:.0%} of {before:,} bytes",
        )
        base = notes["base_quantised_alike"]
        if isinstance(base, float):
            yield "", f"the base quantised alike moves by {base:.1e}"
        else:
            yield "", f"the base quantised alike: {base}"

    def card(self, facts: Mapping[str, Any], model: CardModel) -> CardParts:
        """Return how to load and to serve it."""
        serving = "## How to serve\n\n```console\n$ vllm serve .\n```"
        return CardParts(
            f"in FP8 (compressed-tensors), {facts['dtype']} elsewhere",
            (loading_section(facts["kind"], model), serving),
        )


def _load(source: ExportSource, folder: Path) -> Any:
    """Return the model of a folder on the device of the export."""
    return source.load_plain(folder, source.dtype).to(source.device)


def _allowed(draft: ExportDraft) -> tuple[float, float | str]:
    """Return how far the logits may move, and how far those of the base move; or why it was not asked."""
    gc.collect()
    try:
        base = _compare_base(draft)
    except (errors.KubetuneError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        draft.source.tell(f"the base is not quantised alike for comparison: {reason}")
        return WITHOUT_BASE, f"not compared: {reason}"
    return max(LEAST_ALLOWED, SHARE_OF_BASE * base.difference), base.difference


def _compare_base(draft: ExportDraft) -> Comparison:
    """Return how far the base moves when it is quantised alike."""
    from kubetune.result.forms import compressed, equivalence

    source = draft.source
    folder = source.require_base()
    source.tell("rounding the base alike")
    base = _load(source, folder)
    # An adapter may bring tokens that the base does not have.
    size = base.get_input_embeddings().weight.shape[0]
    sample = equivalence.known_rows(draft.sample, size)
    plain = source.ask(base, sample)
    compressed.quantise(base)
    return equivalence.compare("the base", plain, source.ask(base, sample), 0.0)


FORM = Float8Form()
