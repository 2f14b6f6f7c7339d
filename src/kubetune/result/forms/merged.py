"""Merged: the base with the adapter in its weights, one model for transformers and vLLM.

write    load base + adapter, ask → merge, ask → write
prove    load with plain transformers, ask         trained ≈ merged = reloaded
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kubetune.result.forms.plain import PlainForm
from kubetune.result.forms.wanted import TrainedModel, WantedExport, require_adapter

if TYPE_CHECKING:
    from kubetune.result.forms.draft import ExportDraft


class MergedForm(PlainForm):
    """The form of a base with its adapter merged."""

    own_kind = "merged"
    label = "Merged"
    about = "The adapter added to the base's weights: one model for transformers and vLLM."

    def require(self, trained: TrainedModel, wanted: WantedExport) -> None:
        """Raise ConfigError for a run that has no adapter."""
        del wanted
        require_adapter(trained)

    def write(self, draft: ExportDraft) -> ExportDraft:
        """Merge layer by layer, and write the model."""
        from kubetune.result.forms import merge, weights

        source = draft.source
        model, trained, effect = weights.load_and_ask(draft)
        if merge.is_quantised(model):
            source.tell(
                f"the base is quantised ({source.result.spec.quantization}): dequantising it to {source.dtype_name} before "
                "merging. The result has the weights that the adapter was trained on, not those of the original model"
            )
            model = merge.dequantise(model, source.result.checkpoint, source.dtype)

        source.tell("merging layer by layer")
        model = merge.merge_adapters(model, source.dtype)
        # Asked before it is written, so that merging and writing are judged apart.
        merged = source.ask(model, draft.sample)
        weights.save_model(draft, model)
        logits = {"trained": trained, "merged": merged}
        return replace(draft, logits=logits, effect=effect, dtype=source.dtype_name)

    def prove(self, draft: ExportDraft) -> ExportDraft:
        """Compare the adapter with the merged model, and that with its file."""
        import torch

        from kubetune.models.padding_free import TOLERANCE
        from kubetune.result.forms import equivalence, weights

        source = draft.source
        reloaded = weights.ask_reloaded(source, draft.folder, draft.sample)
        # Merging rounds the weights once more. Writing and reading changes nothing.
        allowed = TOLERANCE[source.dtype]
        if source.result.spec.quantization == "8bit":
            allowed = max(allowed, equivalence.TOLERANCE_8BIT)
        merged = draft.logits["merged"]
        return draft.proved_by(
            equivalence.compare(
                "adapter and merged model", draft.logits["trained"], merged, allowed
            ),
            equivalence.compare(
                "merged model and its reloaded export", merged, reloaded, TOLERANCE[torch.float32]
            ),
        )


FORM = MergedForm()
