"""Modules that get adapters in other tools: their words for all of them, and PEFT's choice where none is named."""

from __future__ import annotations

import os
import re
from typing import Any

from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.engine import Draft, Outcome, Rule, carried, dropped, near
from kubetune.plugins.importers.readings import as_list

PATH = "lora.target_modules"
_NAMES = re.compile(r"[\w.,\s-]+")
# Words of ms-swift for several modules, which its files have among names.
_WORDS = ("all-embedding", "all-norm", "all-router")
# Names of modules that are no linear layers of the trunk, so `all-linear` leaves them out.
_BEYOND_LINEAR = ("embed_tokens", "lm_head", "wte", "wpe", "embed_out", *_WORDS)
# What PEFT adapts where no module is named, names or an expression, and the `model_type`s for which it does.
PEFT_DEFAULTS = {
    "q_proj v_proj": "bart opt gptj gpt_neo llama llama4 mistral mixtral stablelm gemma gemma2 gemma3_text qwen2 qwen3",
    "q v": "t5 mt5",
    "c_attn": "gpt2 gpt_bigcode",
    "query_key_value": "bloom gpt_neox chatglm RefinedWebModel RefinedWeb falcon",
    "q v q_proj v_proj": "blip-2",
    "query value": "bert roberta xlm-roberta electra layoutlm",
    "query_proj value_proj": "deberta-v2",
    "in_proj": "deberta",
    "Wqkv": "mpt",
    "c_proj c_attn": "btlm",
    "qkv_proj": "codegen",
    "q_proj v_proj fc1 fc2": "phi",
    r".*language_model\..*\.(q_proj|v_proj)": "gemma4",
    "q_proj k_proj v_proj o_proj": "nemotron_h",
    "key value receptance output": "rwkv",
    "r_proj k_proj v_proj o_proj key value": "rwkv7",
}  # fmt: skip


def of_family(model_type: str) -> list[str] | str | None:
    """Return the modules that PEFT adapts in a family of models by itself, or None where it asks for names."""
    for chosen, families in PEFT_DEFAULTS.items():
        if model_type in families.split():
            return chosen if "*" in chosen else chosen.split()
    return None


def modules(word: str, all_if: str = "") -> Rule:
    """Return the rule of the modules that get adapters: names, one regular expression, or all linear layers.

    `word` means all linear layers where it is alone. Beside names it does so only if the key `all_if` is set, as
    `lora_target_linear` of axolotl is; otherwise it is a name like the others.
    """

    def rule(value: Any, draft: Draft) -> Outcome:
        if isinstance(value, str) and not _NAMES.fullmatch(value):
            return carried(value)  # a regular expression
        names = [name for name in as_list(value) if name != word]
        has_word = len(names) < len(as_list(value))
        takes_all = has_word if all_if == word else bool(draft.get(all_if))
        if takes_all or not names:
            # `all-linear` cannot be combined with names here, so what lies beyond it is left out.
            outside = [name for name in names if str(name).split(".")[-1] in _BEYOND_LINEAR]
            if outside:
                return near("all-linear", f"adapters on {', '.join(outside)} are left out")
            return carried("all-linear")
        return without_words(names, draft)

    return rule


def without_words(value: Any, _: Draft) -> Outcome:
    """Carry names of modules; ms-swift's words for several of them, such as `all-embedding`, are none."""
    listed = as_list(value)
    names = [name for name in listed if name not in _WORDS]
    if names == listed:
        return carried(listed)
    words = ", ".join(name for name in listed if name in _WORDS)
    if not names:
        return dropped(f"kubetune has no word such as {words}; name the modules")
    return near(names, f"{words} are left out")


def assume_peft_default(draft: Draft) -> None:
    """Write down what PEFT adapts where a file of TRL names no module. Raise ConfigError where PEFT asks for names."""
    if not draft.has("lora") or draft.has(PATH):
        return
    # PEFT chooses by the family, which the model's config.json names.
    model = str(draft.get("model_name_or_path") or "")
    facts = read_config(model, os.environ)
    if facts is None:
        why = (
            "as PEFT chooses for Llama, Mistral, Qwen and Gemma where no module is named; the config.json of "
            f"{model}, which would say the family, is not on this machine"
        )
        draft.write("lora_target_modules", near(["q_proj", "v_proj"], why), PATH)
        draft.comments[PATH] = "PEFT's choice for most families; see below"
        return
    family = str(facts.get("model_type"))
    chosen = of_family(family)
    if chosen is None:
        why = f"names no lora_target_modules, and PEFT chooses none by itself for {family}"
        draft.refuse("use_peft", f"{why}; expected lora_target_modules: all-linear, or names")
    why = f"PEFT's choice for {family} where no module is named; `all-linear` adapts all layers"
    draft.assume(PATH, chosen, why)
