"""A job's resources: `resources`, `replicas`, `config_map` and `shared_volume`, as platforms take them beside a script.

Such a file says where something runs and nothing of what is trained, which stands in its script. What a script of this
kind usually does, LoRA on BERT for SST-2, is written down for the reader to replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kubetune.base.secrets import names_secret
from kubetune.config.environment import VARIABLES
from kubetune.config.schema.cluster import ENV_NAME, QUANTITY
from kubetune.plugins.importers.common import run_name
from kubetune.plugins.importers.draft import Draft, Rule, is_empty, rule_with, same

NAME = "job resources"
MARKS = ("resources", "replicas", "config_map", "shared_volume")

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
_GPU_MEMORY = {"H200": "141G", "H100": "80G", "A100": "80G", "L40S": "48G", "A10": "24G", "L4": "24G", "T4": "16G",
               "B200": "180G"}  # fmt: skip


def convert(draft: Draft) -> None:
    """Fill in the draft."""
    draft.given = dict(_flat(draft.given))
    draft.lines = {key: draft.lines.get(key.split(".")[0], 0) for key in draft.given}
    for key, value in draft.given.items():
        name = key.removeprefix("config_map.")
        if name != key and not is_empty(value):
            _variable(draft, key, name, value)
    draft.apply(RULES)
    draft.assume(
        "kubernetes.image", _IMAGE, "the file names none; put yours here, see docs/image.md"
    )
    chosen = ["kubernetes.image"]
    if not draft.has("model.path") and not draft.has("data.train"):
        for path, value in _USUAL.items():
            draft.assume(
                path, value, "not in the file; usual in the script beside it, put yours here"
            )
        chosen += ["model", "data.train", "data.eval"]
    draft.comments |= {
        tuple(path.split(".")): "not in that file: put yours here" for path in chosen
    }


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _variable(draft: Draft, key: str, name: str, value: Any) -> None:
    """A variable of the container: a secret by reference, a setting of ours, or one more variable."""
    if names_secret(name):
        secrets, secret = (
            draft.settings.get(("kubernetes", "secrets"), {}),
            name.lower().replace("_", "-"),
        )
        text = f"kubernetes.secrets: {name} by reference; put it into the cluster: kubetune secret"
        draft.carry(key, "kubernetes.secrets", {**secrets, name: {"secret": secret}}, text)
    elif name == "RUN_NAME":
        run_name(draft, key, value)
    elif name == "RESULT_MODEL_ID" and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(value)):
        draft.drop(
            key,
            "push.repo wants ORG/NAME; set it, and the result is uploaded there after a good end",
        )
    elif name in VARIABLES:
        path = VARIABLES[name].path
        draft.carry(key, path, [{"path": str(value)}] if path == "data.train" else value)
    elif re.fullmatch(ENV_NAME, name):
        draft.carry(key, "kubernetes.env", {**draft.settings.get(("kubernetes", "env"), {}), name: value},
                    f"kubernetes.env: {name}")  # fmt: skip
    else:
        draft.drop(key, "no name that an environment variable may have")


@rule_with
def _gigabytes(draft: Draft, key: str, value: Any, path: str) -> None:
    """A number of gigabytes, or a quantity as Kubernetes writes them."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        draft.carry(key, path, f"{value:g}G", f"{path}: {value:g}G, gigabytes")
    elif re.fullmatch(QUANTITY, str(value)):
        draft.carry(key, path, str(value))
    else:
        draft.drop(key, "expected a number of gigabytes")


def _accelerator(draft: Draft, key: str, value: Any) -> None:
    """The kind of GPU decides over memory; how nodes that have it are labelled differs from cluster to cluster."""
    memory = next((size for name, size in _GPU_MEMORY.items() if name in str(value).upper()), None)
    why = "nodes are chosen by kubernetes.node_selector, such as {nvidia.com/gpu.product: …}"
    if memory is None:
        draft.drop(key, why)
    else:
        draft.approximate(key, "compute.gpu_memory", memory, f"for `plan`; {why}")


RULES: dict[str, Rule] = {
    "resources.gpu.accelerator_count": same("compute.gpus_per_node"),
    "resources.gpu.accelerator": _accelerator,
    "resources.cpu": same("compute.cpu"),
    "resources.memory": _gigabytes("compute.memory"),
    "replicas": same("compute.nodes"),
    "shared_volume.size": _gigabytes("kubernetes.storage.outputs.size"),
}
