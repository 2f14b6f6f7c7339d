"""Reward functions by the names that TRL and ms-swift know them by, and their settings."""

from __future__ import annotations

import re
from typing import Any

from kubetune.config.schema.grpo import GrpoConfig
from kubetune.plugins.importers.engine import Draft, Outcome, Reward, carried, dropped, near
from kubetune.plugins.importers.readings import as_list

_PUNISHMENT = "get_soft_overlong_punishment"
_MODULE_OF_TRL = "trl.rewards."
OF_TRL = {
    "accuracy_reward": Reward("accuracy_reward", column="solution"),
    "reasoning_accuracy_reward": Reward("reasoning_accuracy_reward", column="solution"),
    "think_format_reward": Reward("think_format_reward"),
    _PUNISHMENT: Reward(_PUNISHMENT, {"max_completion_len": ("", 1280), "soft_punish_cache": ("", 256)}),
}  # fmt: skip
_DIFFERS_IN_READING = "ms-swift reads a formula in <answer>…</answer> too, kubetune in \\boxed{…} and `The final answer is`"
OF_SWIFT = {
    "accuracy": Reward("accuracy_reward", differs=_DIFFERS_IN_READING),
    "cosine": Reward(
        "get_cosine_scaled_reward",
        # It names values by the length that has them, TRL by which is the lower.
        {
            "max_len": ("cosine_max_len", None),
            "min_value_wrong": ("cosine_min_len_value_wrong", -0.5),
            "max_value_wrong": ("cosine_max_len_value_wrong", 0.0),
            "min_value_correct": ("cosine_max_len_value_correct", 0.5),
            "max_value_correct": ("cosine_min_len_value_correct", 1.0),
        },
        differs=f"{_DIFFERS_IN_READING}; longer answers than max_len stay at its value",
    ),
    "format": Reward("format", {"pattern": ("", r"<think>.*?</think>\s*<answer>.*?</answer>")}),
    "soft_overlong": Reward(
        _PUNISHMENT,
        {"max_completion_len": ("soft_max_length", None), "soft_punish_cache": ("soft_cache_length", 0)},
    ),
    "repetition": Reward(
        "repetition",
        {"ngram_size": ("repetition_n_grams", 3), "max_penalty": ("repetition_max_penalty", -1.0)},
        differs="ms-swift counts words, kubetune tokens",
    ),
}  # fmt: skip
KEYS_OF_SWIFT = " ".join(key for reward in OF_SWIFT.values() for key, _ in reward.settings.values())


def rewards(value: Any, draft: Draft) -> Outcome:
    """Take the reward functions and their weights: built in here too, or `module.function` of the user's."""
    weights = as_list(draft.get("reward_weights"))
    listed = []
    differences = []
    for number, name in enumerate(map(str, as_list(value))):
        known = draft.tool.rewards.get(name)
        if known is None and name.startswith(_MODULE_OF_TRL):
            known = OF_TRL.get(name.rpartition(".")[2])
        if known is not None:
            reward = _built_in(draft, known)
            if known.differs:
                differences.append(f"{name}: {known.differs}")
        elif "/" not in name and "." not in name:
            why = "kubetune has no such reward; write a function: rewards: [{file: rewards.py, function: …}]"
            draft.drop(f"reward_funcs: {name}", why)
            continue
        else:
            reward = _named(name)
        if number < len(weights) and weights[number] != 1:
            reward["weight"] = float(weights[number])
        listed.append(reward)
    if not listed:
        return dropped("kubetune has none of them")
    if differences:
        return near(listed, "; ".join(differences))
    return carried(listed)


def _named(name: str) -> dict[str, Any]:
    """Return a reward model for `owner/name`, or the user's function for `module.function`."""
    if "/" in name:
        # TRL calls it by the last part of its name too.
        title = re.sub(r"[^\w.-]", "-", name.rstrip("/").rpartition("/")[2])
        return {"reward_model": name, "name": title}
    module, _, function = name.rpartition(".")
    return {"file": f"{module.replace('.', '/')}.py", "function": function}


def _built_in(draft: Draft, known: Reward) -> dict[str, Any]:
    """Return our reward with the settings that the file has for it."""
    reward: dict[str, Any] = {"name": known.name}
    if known.column:
        reward["column"] = known.column
    settings = {}
    for setting, (key, default) in known.settings.items():
        value = draft.get(key)
        if value is None:
            value = default
        if value is None:
            value = draft.get("max_completion_length") or GrpoConfig().max_completion_length
        settings[setting] = value
    if settings:
        reward["settings"] = settings
    return reward
