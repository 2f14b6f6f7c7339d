"""Names of a run: of its method and model, of its run directory, and of what that holds."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetune.config.schema import LoraConfig

# File in a run directory with the whole config, defaults included.
RESOLVED = "resolved.json"
# Folders of a run directory that kubetune writes and reads.
FOLDERS = ("checkpoints", "logs", "answers", "exports")
# Folders of a run directory that trackers write, with links in them. Kubetune never reads them.
OF_TRACKERS = ("wandb", "mlruns", "tensorboard")


def method_label(lora: LoraConfig | None) -> str:
    """Return `lora-r16-a32`, or `full` without adapters."""
    if lora is None:
        return "full"
    return f"lora-r{lora.r}-a{lora.lora_alpha:g}"


def default_output(model_path: str, lora: LoraConfig | None, max_length: int, now: datetime) -> str:
    """Return the default run directory: `outputs/Qwen3-8B/lora-r16-a32-len2048-20261120-1015`."""
    run = f"{method_label(lora)}-len{max_length}-{now:%Y%m%d-%H%M}"
    return f"outputs/{model_short_name(model_path)}/{run}"


def model_short_name(path: str) -> str:
    """Return the last part of a hub id or folder, with characters that a folder's name may have."""
    parts = PurePosixPath(path).parts or ("model",)
    name = parts[-1]
    for part in parts:
        # In the hub's cache the last part is a hash: hub/models--Qwen--Qwen3-8B/snapshots/1a2b3c…
        if part.startswith("models--"):
            name = part.rsplit("--", 1)[1]
            break
    # An image of a registry: kubetune/oci/registry.example.com/team/bot/sha256-1a2b3c…
    if re.fullmatch("sha256-[0-9a-f]{64}", name) and len(parts) > 1:
        name = parts[-2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"


def model_label(path: str) -> str:
    """Return a model's name for people: the last two parts, since the last alone is often `model` or `best`."""
    parts = []
    for part in PurePosixPath(path).parts:
        # In the hub's cache: hub/models--Qwen--Qwen3-8B/snapshots/1a2b3c…
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
        # outputs/support/checkpoints/best is support/best.
        if part not in ("/", ".", "..", "checkpoints"):
            parts.append(part)
    # An image of a registry ends with a digest, which names nothing to a reader.
    if parts and re.fullmatch("sha256-[0-9a-f]{64}", parts[-1]):
        parts.pop()
    return "/".join(parts[-2:]) or "model"
