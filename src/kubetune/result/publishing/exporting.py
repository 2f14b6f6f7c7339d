"""From a checkpoint to a model that others can load, in a straight line: files → proof → provenance → card.

    export = export_run(run_dir, "best", WantedExport(merged=True))

One `ExportDraft` goes through all of it. Everything is written into another folder, which is renamed after the proof has
held. The forms (result/forms) write and prove weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from kubetune.base import fault_injection, files, locks, whole_folder
from kubetune.base.logs import scrub
from kubetune.data.vision.image_processor import write_limits
from kubetune.result.forms import FORMS, chosen, equivalence, programs, require_export
from kubetune.result.forms.draft import ExportDraft, ExportSource, Tell, dtype_to_write
from kubetune.result.forms.form import Form
from kubetune.result.forms.wanted import (
    PROVENANCE,
    TrainedModel,
    WantedExport,
    bytes_of,
    place_of,
    require_place,
)
from kubetune.result.inference.requirements import require_undamaged
from kubetune.result.inference.result import Result, default_device, open_result
from kubetune.result.publishing import base_files, model_card, modelfile
from kubetune.result.publishing.written_export import Export, facts_of
from kubetune.training.saving.full_disk import explained_full_disk

# Adapters as they are, weights that were trained whole as they are.
_USUAL: Final = WantedExport()


def export_run(
    run_dir: files.StrPath,
    which: str = "best",
    wanted: WantedExport = _USUAL,
    *,
    device: str | None = None,
    model: str | None = None,
    trust_code: str | None = None,
    tell: Tell = print,
) -> Export:
    """Write the model of a run's checkpoint (`best`, `last` or a step) as it is wanted, and prove it.

    `model`: the base, if it lies elsewhere here. `trust_code`: digest of code of the run that the user allows.

    Raise ConfigError for what makes no sense, ModelError when the proof fails, EnvironmentFault when the disk is full.
    Nothing is left in the folder then, and an export that was there before stays.
    """
    result = open_result(run_dir, which, model, trust_code)
    # Everything that can be refused is refused before the model is loaded.
    require_undamaged(result.checkpoint, result.damage)
    require_export(TrainedModel.of(result.config, result.run_dir), wanted)
    name = chosen(wanted, result.trained.lora)
    form = FORMS[name]
    form.require_known(result)
    folder = _place(result, name, wanted)
    source = ExportSource(
        result,
        form.kind(result.trained.lora, wanted),
        dtype=dtype_to_write(result, form.dtype(wanted)),
        device=torch.device(device) if device else default_device(),
        tell=tell,
        max_shard_bytes=bytes_of(wanted.max_shard_size),
        gguf=wanted.gguf,
    )

    # One export of a run at a time; others would remove each other's leftovers.
    with (
        locks.lock(result.run_dir / "logs" / "export.lock", wait=False),
        files.explained_writes(folder),
    ):
        folder.parent.mkdir(parents=True, exist_ok=True)
        whole_folder.remove_leftovers(folder.parent, folder.name)
        with whole_folder.written(folder, "export") as partial, explained_full_disk(folder):
            return Export(folder, source.kind, _fill(source, form, partial))


def _place(result: Result, form: str, wanted: WantedExport) -> Path:
    """Return the folder to write. Raise ConfigError if it holds something else."""
    if wanted.gguf is not None:
        form = f"{form}-{wanted.gguf}"
    folder = wanted.out or place_of(result.run_dir, result.checkpoint.name, form)
    require_place(folder)
    return folder.absolute()


def _fill(source: ExportSource, form: Form, folder: Path) -> dict[str, Any]:
    """Write everything that makes up an export, prove it, and return its provenance."""
    # The weights for transformers come first; another form is made of them.
    plain = FORMS[source.kind]
    is_plain = form is plain
    staging = folder if is_plain else folder / "transformers"
    staging.mkdir(exist_ok=True)
    with source.result.checked():
        sample = equivalence.choose_sample(source.result, source.tell)
        draft = ExportDraft(source, staging, staging, sample)
        draft = _written_and_proved(plain, draft)
    draft = _with_companions(draft)
    fault_injection.reach("export.proved")
    if not is_plain:
        draft = replace(draft, folder=folder)
        with source.result.checked():
            draft = _written_and_proved(form, draft)
        shutil.rmtree(staging)

    facts = facts_of(draft, form)
    if programs.OLLAMA in facts["served_by"]:
        modelfile.write(draft)
    model_card.write(draft, form, facts)

    # provenance.json comes last, since it has the checksums of all other files.
    whole_folder.share_like(folder, folder / model_card.CARD)
    facts["files"] = whole_folder.checksums(folder)
    text = json.dumps(facts, indent=1, ensure_ascii=False).replace(str(Path.home()), "~")
    files.write_atomic(folder / PROVENANCE, scrub(text + "\n"))
    return facts


def _written_and_proved(form: Form, draft: ExportDraft) -> ExportDraft:
    """Write the weights of a form, and compare them with what was trained. Raise ModelError if they differ too much."""
    draft = form.prove(form.write(draft))
    equivalence.require_equal(draft.comparisons)
    return draft


def _with_companions(draft: ExportDraft) -> ExportDraft:
    """Write the other files of an export for transformers, and prove the tokenizer."""
    # The file of the image processor gets the limits of training.
    result = draft.source.result
    changed = []
    if result.image_processor is not None:
        changed = write_limits(result.image_processor, draft.folder)
    licences, templates = base_files.copy(draft)
    names = equivalence.check_tokenizer(
        result.tokenizer,
        draft.folder,
        draft.sample,
        changed_files=changed,
    )
    equal = tuple(sorted([*names, *templates]))
    return replace(draft, licences=licences, tokenizer_files=equal)
