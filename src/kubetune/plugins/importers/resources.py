"""A job's resources: `resources`, `replicas`, `config_map` and `shared_volume`, as platforms take them beside a script.

Such a file says where something runs and nothing of what is trained, which is in its script. What a script of this
kind usually does, LoRA on BERT for SST-2, is written down for the reader to replace.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kubetune.base.secrets import names_secret
from kubetune.config.environment import VARIABLES
from kubetune.config.schema.quantities import ENV_NAME, QUANTITY
from kubetune.plugins.importers.common.result_keys import REPOSITORY, run_name
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    carried,
    dropped,
    near,
)
from kubetune.plugins.importers.readings import is_empty

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
    "H200": "141G", "H100": "80G", "A100": "80G", "L40S": "48G", "A10": "24G", "L4": "24G", "T4": "16G", "B200": "180G",
}  # fmt: skip


def _variables(draft: Draft) -> None:
    """Take the variables of the container."""
    for key, value in draft.theirs.items():
        if key.startswith("config_map.") and not is_empty(value):
            draft.write(key, _variable(key.removeprefix("config_map."), value, draft))


def _variable(name: str, value: Any, draft: Draft) -> Outcome:
    """Carry a variable of the container: a secret by reference, a setting of ours, or one more variable."""
    # A secret's value must not be written into the run file, even if it is in theirs.
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
        return carried([{"path": str(value)}] if path == "data.train" else value, path=path)

    # Any other variable is one of the container.
    if not re.fullmatch(ENV_NAME, name):
        return dropped("no name that an environment variable may have")
    path = "kubernetes.env"
    return carried({**draft.ours(path, {}), name: value}, f"{path}: {name}", path)


def _gigabytes(value: Any, _: Draft) -> Outcome:
    """Carry a number of gigabytes, or a quantity as Kubernetes writes them."""
    # In Python, True is a number too.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return carried(f"{value:g}G")
    if re.fullmatch(QUANTITY, str(value)):
        return carried(str(value))
    return dropped("expected a number of gigabytes")


def _accelerator(value: Any, _: Draft) -> Outcome:
    """Take the memory from the kind of GPU. Which nodes have it is labelled otherwise in each cluster."""
    why = "nodes are chosen by kubernetes.node_selector, such as {nvidia.com/gpu.product: …}"
    for name, memory in _GPU_MEMORY.items():
        if name in str(value).upper():
            return near(memory, f"for `plan`; {why}")
    return dropped(why)


def _finish(draft: Draft) -> None:
    """Write down what the file does not say, for the reader to replace."""
    why = "the file names none; put yours here, see docs/image.md"
    draft.assume("kubernetes.image", _IMAGE, why)
    chosen = ["kubernetes.image"]
    if not draft.has("model.path") and not draft.has("data.train"):
        why = "not in the file; usual in the script beside it, put yours here"
        for path, value in _USUAL.items():
            draft.assume(path, value, why)
    if any(path.startswith("lora.") for path in draft.settings):
        draft.settings.setdefault("lora", None)
        chosen += ["model", "data.train", "data.eval"]
    for path in chosen:
        draft.comments[path] = "not in that file: put yours here"


TOOL = Tool(
    name="job resources",
    marks="resources replicas config_map shared_volume",
    has_sections=True,
    sources=_variables,
    finish=_finish,
    tables=(
        Table(
            same={
                "compute.gpus_per_node": "resources.gpu.accelerator_count",
                "compute.cpu": "resources.cpu",
                "compute.nodes": "replicas",
            },
            rows=[
                Row("resources.gpu.accelerator", "compute.gpu_memory", other=_accelerator),
                Row("resources.memory", "compute.memory", other=_gigabytes),
                Row("shared_volume.size", "kubernetes.storage.outputs.size", other=_gigabytes),
            ],
        ),
    ),
)
