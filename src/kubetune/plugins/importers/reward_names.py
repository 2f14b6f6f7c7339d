"""Reward functions by the names that TRL and ms-swift know them by, and their settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kubetune.config.schema.grpo import GrpoConfig
from kubetune.plugins.importers.engine import Draft, Outcome, carried, dropped, near
from kubetune.plugins.importers.readings import as_list

_PUNISHMENT: Final = "get_soft_overlong_punishment"
_COSINE: Final = "get_cosine_scaled_reward"
_MODULE_OF_TRL: Final = "trl.rewards."
# Rewards that TRL's command and ms-swift know by a name. A text says from which keys its settings are, or what they are
# where these are left out.
_KNOWN: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "TRL": {
        "accuracy_reward": {"name": "accuracy_reward", "column": "solution"},
        "reasoning_accuracy_reward": {"name": "reasoning_accuracy_reward", "column": "solution"},
        "think_format_reward": {"name": "think_format_reward"},
        _PUNISHMENT: {"name": _PUNISHMENT, "settings": {"max_completion_len": 1280, "soft_punish_cache": 256}},
    },
    "ms-swift": {
        "accuracy": {"name": "accuracy_reward"},
        "cosine": {
            "name": _COSINE,
            "settings": {
                "max_len": None, "min_value_wrong": -0.5, "max_value_wrong": 0.0, "min_value_correct": 0.5,
                "max_value_correct": 1.0,
            },
        },
        "format": {"name": "format", "settings": {"pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"}},
        "soft_overlong": {"name": _PUNISHMENT, "settings": {"max_completion_len": None, "soft_punish_cache": 0}},
        "repetition": {"name": "repetition", "settings": {"ngram_size": 3, "max_penalty": -1.0}},
    },
}  # fmt: skip
# Keys of ms-swift for settings of a reward.
SETTINGS: Final = {
    "max_completion_len": "soft_max_length",
    "soft_punish_cache": "soft_cache_length",
    "ngram_size": "repetition_n_grams",
    "max_penalty": "repetition_max_penalty",
    # It names values by the length that has them, TRL by which is the lower.
    "max_len": "cosine_max_len",
    "min_value_wrong": "cosine_min_len_value_wrong",
    "max_value_wrong": "cosine_max_len_value_wrong",
    "min_value_correct": "cosine_max_len_value_correct",
    "max_value_correct": "cosine_min_len_value_correct",
}
_DIFFERS_IN_READING: Final = (
    "there <answer>…</answer> marks a formula too, here \\boxed{…} and The final answer is $…$ do"
)
# What a reward of ours does otherwise than that of ms-swift.
_DIFFERS: Final = {
    "accuracy": _DIFFERS_IN_READING,
    "cosine": f"{_DIFFERS_IN_READING}; longer answers than max_len stay at its value here",
    "repetition": "there words are counted, here tokens",
}


def rewards(value: Any, draft: Draft) -> Outcome:
    """Take the reward functions and their weights: built in here too, or `module.function` of the user's."""
    weights = as_list(draft.get("reward_weights"))
    listed = []
    differences = []
    for number, name in enumerate(map(str, as_list(value))):
        reward = _reward(draft, name)
        if isinstance(reward, str):
            draft.drop(f"reward_funcs: {name}", reward)
            continue
        if name in _DIFFERS and draft.tool.name == "ms-swift":
            differences.append(f"{name}: {_DIFFERS[name]}")
        if number < len(weights) and weights[number] != 1:
            reward["weight"] = float(weights[number])
        listed.append(reward)
    if not listed:
        return dropped("none of them is here")
    if differences:
        return near(listed, "; ".join(differences))
    return carried(listed)


def _reward(draft: Draft, name: str) -> dict[str, Any] | str:
    """Return our reward for a name of theirs, or why there is none."""
    known = _KNOWN.get(draft.tool.name, {}).get(name)
    if known is None and name.startswith(_MODULE_OF_TRL):
        known = _KNOWN["TRL"].get(name.rpartition(".")[2])
    if known is None:
        module, _, function = name.rpartition(".")
        if "/" in name:
            # TRL calls it by the last part of its name too.
            title = re.sub(r"[^\w.-]", "-", name.rstrip("/").rpartition("/")[2])
            return {"reward_model": name, "name": title}
        if not module:
            return "not built in here; write a function of yours: rewards: [{file: rewards.py, function: …}]"
        return {"file": f"{module.replace('.', '/')}.py", "function": function}

    reward = dict(known)
    if draft.tool.name == "ms-swift" and "settings" in known:
        longest = draft.get("max_completion_length") or GrpoConfig().max_completion_length
        settings = {}
        for setting, default in known["settings"].items():
            value = draft.get(SETTINGS.get(setting, setting))
            if value is None:
                value = longest if default is None else default
            settings[setting] = value
        reward["settings"] = settings
    return reward
