"""An export that is written, and its provenance.json: what it was made from, by which versions, what was proved of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kubetune.base import files, whole_folder
from kubetune.config.resolved import read_config, resolved
from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.result.forms import FORMS, chosen
from kubetune.result.forms.draft import ExportDraft
from kubetune.result.forms.form import Form
from kubetune.result.forms.wanted import PROVENANCE, Kind, WantedExport, base_name, place_of
from kubetune.result.inference.result import open_result
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.machine import versions

# What is taken from the state of a checkpoint.
_OF_STATE = (
    "step",
    "tokens",
    "trained_tokens",
    "data_fingerprint",
    "global_batch_size",
    "global_batch_tokens",
)


@dataclass(frozen=True)
class Export:
    """A written export."""

    path: Path
    kind: Kind
    facts: dict[str, Any]  # its provenance.json: files, and what was proved

    @property
    def files(self) -> dict[str, int]:
        """The sizes of the files in bytes, by name."""
        return {name: file["bytes"] for name, file in self.facts["files"].items()}


def facts_of(draft: ExportDraft, form: Form) -> dict[str, Any]:
    """Return provenance.json, but for the checksums of the files."""
    # The config as the run was started with, not with the base as it is on this machine.
    source = draft.source
    result = source.result
    config = read_config(result.run_dir)
    state = asdict(checkpoints.load_state(result.checkpoint))
    # Sorted by what they are of: this export, its run, its checkpoint, its base, its proof.
    facts = {
        "made_by": f"kubetune {versions().get('kubetune', '')}".strip(),
        "time": metrics.now(),
        "kind": source.kind,
        "dtype": draft.dtype,
        "served_by": list(form.served_by(draft)),
        "run": {"name": config.name, "directory": result.run_dir.name, "config": resolved(config)},
        "checkpoint": {
            "name": result.checkpoint.name,
            "manifest_sha256": files.sha256_file(result.checkpoint / checkpoints.MANIFEST),
            **{key: state[key] for key in _OF_STATE},
        },
        "base": {
            "name": base_name(source.model.path),
            "revision": source.model.revision,
            "quantization": result.spec.quantization,
            **draft.base,
            "licence_files": list(draft.licences),
        },
        "proof": {
            "rows": len(draft.sample.batches),
            "tokens": draft.sample.tokens,
            "origin": draft.sample.origin,
            "run_in": source.dtype_name,
            "comparisons": [asdict(comparison) for comparison in draft.comparisons],
            "effect_of_adapter": draft.effect,
            "tokenizer_files_equal": list(draft.tokenizer_files),
        },
        "versions": versions(),
    }
    if form.key:
        facts[form.key] = dict(draft.notes)
    return facts


def find_export(
    run_dir: Path,
    which: str = "best",
    *,
    merged: bool = False,
    dtype: str | None = None,
    model: str | None = None,
) -> Export | None:
    """Return the whole export of this very checkpoint that `export_run` would make again, if it is there."""
    result = open_result(run_dir, which, model)
    # The same kind in the same place, and whole.
    wanted = WantedExport(merged)
    name = chosen(wanted, result.trained.lora)
    kind = FORMS[name].kind(result.trained.lora, wanted)
    out = place_of(result.run_dir, result.checkpoint.name, name)
    if not whole_folder.is_whole(out, PROVENANCE):
        return None
    # A later run may have written another checkpoint of the same step.
    facts = json.loads((out / PROVENANCE).read_text())
    manifest = result.checkpoint / checkpoints.MANIFEST
    is_same = facts["checkpoint"]["manifest_sha256"] == files.sha256_file(manifest)
    is_wanted = dtype is None or facts["dtype"] == DTYPE_NAMES.get(dtype, dtype)
    is_named = model is None or facts["base"]["name"] == base_name(model)
    if is_same and is_wanted and is_named:
        return Export(out.absolute(), kind, facts)
    return None
