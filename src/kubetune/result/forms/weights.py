"""Weights loaded, asked and written, as the forms for transformers and PEFT share it. One model is in memory at a time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from torch import Tensor

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.result.forms import equivalence
from kubetune.result.forms.draft import ExportDraft, ExportSource
from kubetune.result.forms.equivalence import Sample
from kubetune.result.forms.wanted import base_name
from kubetune.result.inference import proof_recording


def load_and_ask(draft: ExportDraft) -> tuple[Any, list[Tensor], float | None]:
    """Return the base with its adapter, its logits, and how far the adapter moves them: what a merge must not lose.

    How far is None for a classifier: without its adapter its head is a random one.
    """
    source = draft.source
    source.tell(f"loading {base_name(source.model.path)} with its adapter")
    model = source.load(source.result.checkpoint)
    trained = source.ask(model, draft.sample)
    if source.result.trained.classifies:
        return model, trained, None
    with model.disable_adapter():
        base = source.ask(model, draft.sample)
    proof_recording.record(source.result, model, draft.sample.batches)
    return model, trained, equivalence.compare("", trained, base, 0.0).difference


def ask_reloaded(source: ExportSource, folder: Path, sample: Sample) -> list[Tensor]:
    """Return the logits of a whole model in a folder, loaded as anybody would load it."""
    # The model that was written may still be in memory, in a circle of objects.
    gc.collect()
    source.tell("loading the export with plain transformers")
    model = source.result.auto_class.from_pretrained(
        folder, trust_remote_code=source.model.trust_remote_code, local_files_only=True
    )
    return source.ask(model.to(source.device), sample)


def save_model(draft: ExportDraft, model: Any) -> None:
    """Write a whole model. Raise EnvironmentFault, before anything is written, if the disk lacks room for it."""
    folder = draft.folder
    needed = 0
    for parameter in model.parameters():
        needed += parameter.numel() * parameter.element_size()

    free = files.free_bytes(folder)
    if free < needed:
        raise errors.EnvironmentFault(
            f"{folder.parent}: the model takes {needed:,} bytes, {free:,} are free"
        )

    draft.source.tell(f"writing {needed / 1e9:.2f} GB")
    save_companions(draft, model)
    model.save_pretrained(folder, max_shard_size=draft.source.max_shard_bytes)
    fault_injection.reach("export.weights")


def save_companions(draft: ExportDraft, model: Any) -> None:
    """Write the tokenizer, and the generation config with the tokens that the model was taught to end with."""
    tokenizer = draft.source.result.tokenizer
    tokenizer.save(draft.folder)
    if model.can_generate():
        # A lone token is a number there, not a list of one.
        ends = list(tokenizer.eos_ids)
        model.generation_config.eos_token_id = ends if len(ends) != 1 else ends[0]
        model.generation_config.pad_token_id = tokenizer.pad_id
        model.generation_config.save_pretrained(draft.folder)
