"""Whether the adapter of a run has the rank and the scale that the run was trained with.

A run may have been received, and then anybody may have written its adapter_config.json. With another scale the same
weights are another model, which answers, and nothing in them shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base.files import read_object
from kubetune.config.schema.model import LoraConfig
from kubetune.rundir import checkpoints

_FILE = "adapter_config.json"


def choose_trained(run_dir: Path, lora: LoraConfig | None, which: str = "best") -> Path:
    """Return the folder of a checkpoint, as `checkpoints.choose` does.

    Raise ModelError for an adapter with other settings than those of the run.
    """
    folder = checkpoints.choose(run_dir, which)
    if lora is not None:
        require_as_trained(folder, lora)
    return folder


def require_as_trained(folder: Path, lora: LoraConfig) -> None:
    """Raise ModelError for an adapter whose settings are not those that its run was trained with."""
    path = folder / _FILE
    # Whoever loads the adapter says that it is missing.
    if not path.is_file():
        return
    try:
        saved = read_object(path)
    except errors.KubetuneError:
        return  # the checksums of the checkpoint say that it is damaged
    trained: dict[str, Any] = {
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        # A run gives all modules the same.
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for key, expected in trained.items():
        value = saved.get(key) or type(expected)()
        if value != expected:
            raise errors.ModelError(
                f"{path} has {key}: {value!r}, and the run was trained with {expected!r}: the adapter would answer as "
                "another model. Put the file back from a copy, such as a mirror's, or choose another checkpoint. "
                "Nothing was loaded."
            )
