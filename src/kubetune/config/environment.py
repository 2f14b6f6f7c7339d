"""Environment variables that take precedence over the run file, for containers whose manifest sets them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kubetune.base.provenance import Origin

log = logging.getLogger(__name__)


class Variable(NamedTuple):
    """A variable of the environment, in docs/config.md and for loading."""

    path: str  # dotted key that it sets
    meaning: str  # for the documentation


VARIABLES: dict[str, Variable] = {
    "MODEL_ID": Variable("model.path", "Hub id or folder of the model."),
    "DATASET_ID": Variable("data.train", "Training data; `#N` takes N samples."),
    "MAX_LEN": Variable("data.max_length", "Longest sequence in tokens."),
    "BATCH": Variable(
        "training.per_device_train_batch_size", "Samples per micro-batch and process."
    ),
    "GRAD_ACC": Variable(
        "training.gradient_accumulation_steps", "Micro-batches per step and process."
    ),
    "EPOCHS": Variable("training.num_train_epochs", "Epochs."),
    "LR": Variable("training.learning_rate", "Learning rate."),
    "LORA_RANK": Variable("lora.r", "Rank; switches LoRA on."),
    "LORA_ALPHA": Variable("lora.alpha", "Scale; switches LoRA on."),
    "NPROC": Variable("compute.processes", "Processes on each node."),
    "DTYPE": Variable("model.dtype", "`auto`, `bf16`, `fp16` or `fp32`."),
    "IMAGE_MAX_TOKEN_NUM": Variable("vision.image_max_tokens", "Most tokens of an image."),
    "RESULT_MODEL_ID": Variable(
        "push.repo", "Repository on the hub that the result is uploaded to."
    ),
    "RUN_NAME": Variable("name", "Name of the run; `run #1` becomes `run-1`."),
}


def max_samples(environ: Mapping[str, str]) -> int | None:
    """Return how many samples to take of each training source (`MAX_SAMPLES`), None for all. Raise ValueError."""
    text = environ.get("MAX_SAMPLES", "").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"found {text!r}; expected a whole number, 0 for all samples")
    return int(text) or None


def read_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Origin]]:
    """Yield `(key, text, origin)` for each variable of VARIABLES that is set and not empty."""
    if environ.get("MAX_HISTORY_ROUNDS"):
        log.warning(
            "MAX_HISTORY_ROUNDS is set in the environment: `kubetune data convert fire` reads it, nothing here"
        )
    for name, variable in VARIABLES.items():
        text = environ.get(name, "").strip()
        if not text:
            continue
        log.info("%s is set in the environment: it decides %s", name, variable.path)
        if name == "RUN_NAME":
            # Wrappers pass free text such as "Run #1"; the name of a run is also a name on the cluster.
            text = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
        yield variable.path, text, Origin(f"environment variable {name}")
