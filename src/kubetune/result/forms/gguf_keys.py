"""The keys of a GGUF file that say what the model is: its name, its base, the base's licence."""

from __future__ import annotations

import re

from kubetune import errors
from kubetune.config.schema import ModelConfig
from kubetune.data.reading import hub
from kubetune.result.forms.wanted import base_name


def general_keys(name_of_run: str | None, model: ModelConfig) -> dict[str, str]:
    """Return the keys of `general.` that say what the model is. `model`: its base."""
    base = base_name(model.path)
    about = {
        "name": name_of_run or base,
        "finetune": "kubetune",
        **_licence_of(model),
    }
    # Qwen/Qwen3-8B; a folder of this machine has one part.
    organization, _, name = base.rpartition("/")
    if organization:
        about["base_model.0.name"] = name
        about["base_model.0.organization"] = organization
        about["base_model.0.repo_url"] = f"https://huggingface.co/{base}"
    return about


def _licence_of(model: ModelConfig) -> dict[str, str]:
    """Return the licence that the base's card names; nothing if it has no card, or none can be asked for."""
    try:
        card = hub.find_files(model, model.path, ("README.md",)).get("README.md")
    except errors.KubetuneError:
        return {}
    if card is None:
        return {}
    # The card's head is YAML between two lines of dashes, such as
    #     ---
    #     license: other
    #     license_name: "qwen"         → license.name
    #     ---
    parts = card.read_text("utf-8", errors="replace").split("---")
    licence = {}
    for line in "".join(parts[1:2]).splitlines():
        match = re.match(r"(license|license_name|license_link): *(\S.*)", line)
        if match is not None:
            key = match[1].replace("license_", "license.")
            licence[key] = match[2].strip().strip("\"'")
    return licence
