"""Modules that get adapters in other tools: their words for all of them, and PEFT's choice where none is named."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Rule,
    as_list,
    carried,
    dropped,
    near,
)

PATH: Final = "lora.target_modules"
_NAMES = re.compile(r"[\w.,\s-]+")
# Names of modules that are no linear layers of the trunk, so `all-linear` leaves them out.
_BEYOND_LINEAR: Final = (
    "embed_tokens",
    "lm_head",
    "wte",
    "wpe",
    "embed_out",
    "all-embedding",
    "all-router",
)
# Words of ms-swift for several modules, which its files have among names.
_WORDS: Final = ("all-embedding", "all-norm", "all-router")
# What PEFT adapts where no module is named, names or an expression, and the `model_type`s for which it does.
PEFT_DEFAULTS: Final[dict[str, str]] = {
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


def modules(word: str, among_names: bool = False) -> Rule:
    """Return the rule of the modules that get adapters: names, one regular expression, or all linear layers.

    `word` means all linear layers where it stands alone. `among_names`: beside names too, as ms-swift reads it;
    the other tools take it for a name there.
    """

    def rule(value: Any, draft: Draft) -> Outcome:
        # A regular expression.
        if isinstance(value, str) and not _NAMES.fullmatch(value):
            return carried(value)
        listed = as_list(value)
        others = [name for name in listed if name != word]
        if not others:
            return carried("all-linear")
        if len(others) == len(listed):
            return without_words(listed, draft) if among_names else carried(listed)
        if among_names:
            return _all_and(others)
        shown = ", ".join(map(str, others))
        return carried(others, f"{PATH}: {shown}; `{word}` beside names is a module's name there")

    return rule


def without_words(value: Any, _: Draft) -> Outcome:
    """Carry names of modules; ms-swift's words for several of them, such as `all-embedding`, are none."""
    listed = as_list(value)
    names = [name for name in listed if name not in _WORDS]
    if len(names) == len(listed):
        return carried(listed)
    words = ", ".join(name for name in listed if name in _WORDS)
    if not names:
        return dropped(f"{words} is not there; name the modules")
    return near(names, f"{words} are left out")


def _all_and(others: list[Any]) -> Outcome:
    """Carry all linear layers, with names that they hold already or that come besides."""
    # `all-linear` cannot be combined with names here, so what lies beyond it is left out.
    outside = [str(name) for name in others if str(name).split(".")[-1] in _BEYOND_LINEAR]
    if outside:
        return near("all-linear", f"adapters on {', '.join(outside)} are left out")
    shown = ", ".join(map(str, others))
    return carried("all-linear", f"{PATH}: all-linear, which holds {shown}")


def of_axolotl(draft: Draft) -> None:
    """Take names of modules and `lora_target_linear` together: axolotl adapts both."""
    if not draft.has("lora"):
        return
    # lora_target_linear: true beside [embed_tokens] adapts all linear layers and the embedding.
    key = "lora_target_modules"
    linear = draft.take("lora_target_linear")
    listed = draft.take(key)
    if linear:
        draft.carry("lora_target_linear", PATH, "all-linear")
        if listed is not None:
            draft.write(key, _all_and(as_list(listed)), PATH)
        return
    draft.ignore("off: the modules that are named get adapters", "lora_target_linear")
    if listed not in (None, ["all-linear"]):
        draft.write(key, modules("all-linear")(listed, draft), PATH)
    elif listed is None and draft.get("lora_target_parameters"):
        draft.assume(PATH, [], "the file names tensors alone")
    elif listed is None and draft.get("lora_model_dir"):
        draft.assume(PATH, "all-linear", "the adapter in lora_model_dir says which; put them here")
    else:
        draft.refuse(
            "adapter" if listed is None else key,
            "no module of the model is named, which axolotl refuses too; expected lora_target_linear: true, or names in "
            "lora_target_modules",
        )


def assume_peft_default(draft: Draft) -> None:
    """Write down what PEFT adapts where a file of TRL names no module. Raise ConfigError where PEFT asks for names."""
    if not draft.has("lora") or draft.has(PATH):
        return
    key = "lora_target_modules"
    if draft.theirs.get(key) == []:
        draft.refuse(key, "names no module, which PEFT refuses too; expected all-linear, or names")
    # PEFT chooses by the family, which the model's config.json names.
    model = str(draft.get("model_name_or_path") or "")
    facts = read_config(model, os.environ)
    if facts is None:
        why = (
            "as PEFT chooses for Llama, Mistral, Qwen and Gemma where no module is named; the config.json of "
            f"{model}, which would say the family, is not on this machine"
        )
        draft.write(key, near(["q_proj", "v_proj"], why), PATH)
        draft.comments[PATH] = "PEFT's choice for most families; see below"
        return
    family = str(facts.get("model_type"))
    chosen = of_family(family)
    if chosen is None:
        why = f"names no {key}, and PEFT chooses none by itself for {family}, so TRL does not train it either"
        draft.refuse("use_peft", f"{why}; expected {key}: all-linear, or names")
    why = f"PEFT's choice for {family} where no module is named; `all-linear` adapts all layers"
    draft.assume(PATH, chosen, why)
