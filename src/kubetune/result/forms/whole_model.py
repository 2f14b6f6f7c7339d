"""Model: one that was trained whole, for transformers and vLLM.

write    load, ask → write
prove    load with plain transformers, ask         trained ≈ reloaded
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from kubetune.result.forms.plain import PlainForm

if TYPE_CHECKING:
    from kubetune.result.forms.draft import ExportDraft


class WholeModelForm(PlainForm):
    """The form of a model whose every weight was trained."""

    own_kind = "model"
    label = "Model"
    about = "For transformers and vLLM: every weight was trained."

    def write(self, draft: ExportDraft) -> ExportDraft:
        """Write the model in the dtype of the export."""
        import torch
        import transformers

        from kubetune.models import loading
        from kubetune.result.forms import weights
        from kubetune.result.inference import proof_recording

        source = draft.source
        # The checkpoint is asked in the dtype that it is stored in, and then loaded again in that of the export.
        source.tell("loading the trained model")
        checkpoint = source.result.checkpoint
        facts = transformers.AutoConfig.from_pretrained(
            checkpoint, trust_remote_code=source.model.trust_remote_code
        )
        stored = facts.dtype or torch.float32
        model = loading.load_trained(
            source.result.auto_class,
            source.spec_in(stored),
            checkpoint,
            source.device,
        )
        trained = source.ask(model, draft.sample)
        proof_recording.record(source.result, model, draft.sample.batches)
        if stored != source.dtype:
            del model
            gc.collect()
            model = source.load(checkpoint)

        weights.save_model(draft, model)
        return replace(draft, logits={"trained": trained}, dtype=source.dtype_name)

    def prove(self, draft: ExportDraft) -> ExportDraft:
        """Compare the trained model with its file."""
        from kubetune.models.padding_free import TOLERANCE
        from kubetune.result.forms import equivalence, weights
        from kubetune.result.inference import proof_recording

        source = draft.source
        reloaded = weights.ask_reloaded(source, draft.folder, draft.sample)
        gc.collect()
        proof_recording.add_base(source.result, draft.sample.batches)
        comparison = equivalence.compare(
            "trained model and its reloaded export",
            draft.logits["trained"],
            reloaded,
            TOLERANCE[source.dtype],
        )
        return draft.proved_by(comparison)


FORM = WholeModelForm()
