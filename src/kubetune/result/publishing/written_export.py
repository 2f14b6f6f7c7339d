"""An export that is written: its folder, and what its provenance.json says of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune.base import files, whole_folder
from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.result.forms import FORMS, chosen
from kubetune.result.forms.wanted import PROVENANCE, Kind, WantedExport, base_name, place_of
from kubetune.result.inference.result import open_result
from kubetune.rundir import checkpoints


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
