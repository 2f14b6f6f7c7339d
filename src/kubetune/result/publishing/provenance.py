"""provenance.json of an export: what it was made from, by which versions, and what was proved of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kubetune.base import files
from kubetune.config.load import read_config, resolved
from kubetune.result.publishing.equivalence import Comparison, Sample
from kubetune.result.publishing.model_card import base_name
from kubetune.result.publishing.serving import served_by
from kubetune.result.publishing.writers import Job
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


def facts_of(
    job: Job,
    sample: Sample,
    comparisons: list[Comparison],
    tokenizer_files: list[str],
    notes: dict[str, Any],
) -> dict[str, Any]:
    """Return provenance.json, but for the checksums of the files. `notes` are those of `writers.Proof`."""
    # The config as the run was started with, not with the base as it is on this machine.
    result = job.result
    config = read_config(result.run_dir)
    state = asdict(checkpoints.load_state(result.checkpoint))
    base = notes.get("base", {})
    # Sorted by what they are of: this export, its run, its checkpoint, its base, its proof.
    return {
        "made_by": f"kubetune {versions().get('kubetune', '')}".strip(),
        "time": metrics.now(),
        "kind": job.kind,
        "dtype": notes.get("dtype", job.dtype_name),
        "served_by": list(served_by(config.task_name, config.lora, job.kind, base)),
        "run": {"name": config.name, "directory": result.run_dir.name, "config": resolved(config)},
        "checkpoint": {
            "name": result.checkpoint.name,
            "manifest_sha256": files.sha256_file(result.checkpoint / checkpoints.MANIFEST),
            **{key: state[key] for key in _OF_STATE},
        },
        "base": {
            "name": base_name(job.config.model.path),
            "revision": job.config.model.revision,
            "quantization": job.config.quantization,
            **base,
        },
        "proof": {
            "rows": len(sample.batches),
            "tokens": sample.tokens,
            "origin": sample.origin,
            "run_in": job.dtype_name,
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "effect_of_adapter": notes.get("effect"),
            "tokenizer_files_equal": tokenizer_files,
        },
        "versions": versions(),
    }
