"""Write digests of what each step worked with, for `kubetune verify-resume`, into the folder KUBETUNE_STEP_DIGESTS.

Each rank appends one line a step to `rank-N.jsonl` there: sample ids, losses to the last bit, and digests of the random
state and of the optimizer's tensors. Without the variable nothing is written. Numbers for people are in rundir/metrics.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kubetune.batching.batch import Batch
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.optimizer.shards import bytes_of

FOLDER = "KUBETUNE_STEP_DIGESTS"


def record(
    rank: int,
    step: int,
    batches: Sequence[Batch],
    losses: Sequence[Tensor],
    optimizer: FlatAdamW,
) -> None:
    """Append the line of the step after `step` completed ones. Call it after its gradient, before its update."""
    if FOLDER not in os.environ:
        return
    # Whatever a resumed run must have in common with the uninterrupted one.
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    # `hex` keeps every bit of a float; digests stand for tensors that are too large to write.
    state = {name: digest(tensor) for name, tensor in optimizer.state().items()}
    line = {
        "step": step,
        "samples": [list(batch.samples) for batch in batches],
        "losses": [float(loss).hex() for loss in losses],
        "random": {name: digest(state) for name, state in random.items()},
        "state": state,
    }
    with open(file_of(Path(os.environ[FOLDER]), rank), "a") as file:
        file.write(json.dumps(line) + "\n")


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's lines."""
    return folder / f"rank-{rank}.jsonl"


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes, of any shape and type."""
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).hexdigest()
