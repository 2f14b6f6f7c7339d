"""A job's resources: `resources`, `replicas`, `config_map` and `shared_volume`, as platforms take them beside a script.

Such a file says where something runs and nothing of what is trained, which stands in its script. What a script of this
kind usually does, LoRA on BERT for SST-2, is written down for the reader to replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kubetune.base.secrets import names_secret
from kubetune.config.environment import VARIABLES
from kubetune.config.schema.cluster import ENV_NAME, QUANTITY
from kubetune.plugins.importers.common import REPOSITORY, run_name
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Tool,
    carried,
    dropped,
    is_empty,
    near,
)

# What the script beside such a file usually trains.
_GLUE = {"path": "nyu-mll/glue", "subset": "sst2"}
_USUAL: dict[str, Any] = {
    "task": "sequence_classification",
    "model.path": "google-bert/bert-base-uncased",
    "data.train": [_GLUE],
    "data.eval": [{**_GLUE, "split": "validation"}],
    "data.max_length": 128,
    "lora.r": 8,
    "lora.alpha": 16,
    "lora.dropout": 0.05,
    "lora.target_modules": ["query", "value"],
    "quantization": "auto",
    "training.num_train_epochs": 1,
    "training.per_device_train_batch_size": 64,
    "training.gradient_checkpointing": True,
    "training.metric_for_best_model": "eval_accuracy",
}
_IMAGE = "registry.example/kubetune:1.0"
# Longer names first where one holds another: L40S before L4.
_GPU_MEMORY = {
    "H200": "141G",
    "H100": "80G",
    "A100": "80G",
    "L40S": "48G",
    "A10": "24G",
    "L4": "24G",
    "T4": "16G",
    "B200": "180G",
}


def _flatten(draft: Draft) -> None:
    """Make one key of each path, such as `resources.gpu.accelerator`, and read the variables of the container."""
    # {"resources": {"cpu": 4}} → {"resources.cpu": 4}
    draft.theirs = dict(_flat(draft.theirs))
    # Lines are known of the keys at the top only, so what is within has the line of its section.
    lines = {}
    for key in draft.theirs:
        section = key.split(".")[0]
        lines[key] = draft.lines.get(section, 0)
    draft.lines = lines

    for key, value in draft.theirs.items():
        if key.startswith("config_map.") and not is_empty(value):
            name = key.removeprefix("config_map.")
            draft.write(key, _variable(name, value, draft))


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each key that holds no section."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _variable(name: str, value: Any, draft: Draft) -> Outcome:
    """Carry a variable of the container: a secret by reference, a setting of ours, or one more variable."""
    # A secret's value must not be written into the run file, even if it stands in theirs.
    if names_secret(name):
        path = "kubernetes.secrets"
        reference = {name: {"secret": name.lower().replace("_", "-")}}
        text = f"{path}: {name} by reference; put it into the cluster: kubetune secret"
        return carried({**draft.ours(path, {}), **reference}, text, path)

    # Variables that have a key in our config, where it is checked by the key's own rules.
    if name == "RUN_NAME":
        return replace(run_name(value, draft), path="name")
    if name == "RESULT_MODEL_ID" and not re.fullmatch(REPOSITORY, str(value)):
        why = "push.repo wants ORG/NAME; set it, and the result is uploaded there after a good end"
        return dropped(why)
    if name in VARIABLES:
        path = VARIABLES[name].path
        if path == "data.train":
            value = [{"path": str(value)}]
        return carried(value, path=path)

    # Any other variable is one of the container.
    if re.fullmatch(ENV_NAME, name):
        path = "kubernetes.env"
        return carried({**draft.ours(path, {}), name: value}, f"{path}: {name}", path)
    return dropped("no name that an environment variable may have")


def _gigabytes(keys: str, path: str) -> Row:
    """Return the row of a number of gigabytes, or of a quantity as Kubernetes writes them."""

    def rule(value: Any, _: Draft) -> Outcome:
        # In Python, True is a number too.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return carried(f"{value:g}G", f"{path}: {value:g}G, gigabytes")
        if re.fullmatch(QUANTITY, str(value)):
            return carried(str(value))
        return dropped("expected a number of gigabytes")

    return Row(keys, path, rule)


def _accelerator(value: Any, _: Draft) -> Outcome:
    """Take the memory from the kind of GPU. Which nodes have it is labelled otherwise in each cluster."""
    why = "nodes are chosen by kubernetes.node_selector, such as {nvidia.com/gpu.product: …}"
    for name, memory in _GPU_MEMORY.items():
        if name in str(value).upper():
            return near(memory, f"for `plan`; {why}")
    return dropped(why)


def _finish(draft: Draft) -> None:
    """Write down what the file does not say, for the reader to replace."""
    draft.assume(
        "kubernetes.image", _IMAGE, "the file names none; put yours here, see docs/image.md"
    )
    chosen = ["kubernetes.image"]
    if not draft.has("model.path") and not draft.has("data.train"):
        why = "not in the file; usual in the script beside it, put yours here"
        for path, value in _USUAL.items():
            draft.assume(path, value, why)
        chosen += ["model", "data.train", "data.eval"]
    for path in chosen:
        draft.comments[path] = "not in that file: put yours here"


TOOL = Tool(
    name="job resources",
    marks="resources replicas config_map shared_volume",
    together=(_flatten,),
    finish=_finish,
    rows=[
        Row("resources.gpu.accelerator_count", "compute.gpus_per_node"),
        Row("resources.gpu.accelerator", "compute.gpu_memory", _accelerator),
        Row("resources.cpu", "compute.cpu"),
        _gigabytes("resources.memory", "compute.memory"),
        Row("replicas", "compute.nodes"),
        _gigabytes("shared_volume.size", "kubernetes.storage.outputs.size"),
    ],
)
