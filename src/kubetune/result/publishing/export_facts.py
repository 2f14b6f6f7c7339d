"""provenance.json of an export: what it was made from, by which versions, and what was proved of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kubetune.base import files
from kubetune.config.resolved import read_config, resolved
from kubetune.result.forms.draft import ExportDraft
from kubetune.result.forms.form import Form
from kubetune.result.forms.wanted import base_name
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
