"""Modules that get adapters in other tools: their words for all of them, and PEFT's choice where none is named."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.draft import Draft, Note, as_flag, as_list, rule_with

PATH: Final = "lora.target_modules"
_NAMES = re.compile(r"[\w.,\s-]+")
_BEYOND_LINEAR: Final = (
    "embed_tokens",
    "lm_head",
    "wte",
    "wpe",
    "embed_out",
    "all-embedding",
    "all-router",
)
"""Names of modules that are no linear layers of the trunk, so `all-linear` leaves them out."""
_USUAL: Final = ("q_proj", "v_proj")
PEFT_DEFAULTS: Final[dict[tuple[str, ...] | str, str]] = {
    _USUAL: "bart opt gptj gpt_neo llama llama4 mistral mixtral stablelm gemma gemma2 gemma3_text qwen2 qwen3",
    ("q", "v"): "t5 mt5",
    ("c_attn",): "gpt2 gpt_bigcode",
    ("query_key_value",): "bloom gpt_neox chatglm RefinedWebModel RefinedWeb falcon",
    ("q", "v", "q_proj", "v_proj"): "blip-2",
    ("query", "value"): "bert roberta xlm-roberta electra layoutlm",
    ("query_proj", "value_proj"): "deberta-v2",
    ("in_proj",): "deberta",
    ("Wqkv",): "mpt",
    ("c_proj", "c_attn"): "btlm",
    ("qkv_proj",): "codegen",
    ("q_proj", "v_proj", "fc1", "fc2"): "phi",
    r".*language_model\..*\.(q_proj|v_proj)": "gemma4",
    ("q_proj", "k_proj", "v_proj", "o_proj"): "nemotron_h",
    ("key", "value", "receptance", "output"): "rwkv",
    ("r_proj", "k_proj", "v_proj", "o_proj", "key", "value"): "rwkv7",
}  # fmt: skip
"""What PEFT adapts where no module is named, and the `model_type`s for which it does."""


def of_family(model_type: str) -> list[str] | str | None:
    """Return the modules that PEFT adapts in a family of models by itself, or None where it asks for names."""
    for modules, families in PEFT_DEFAULTS.items():
        if model_type in families.split():
            return modules if isinstance(modules, str) else list(modules)
    return None


@rule_with
def modules(draft: Draft, key: str, value: Any, word: str, among_names: bool = False) -> None:
    """Carry names, one regular expression, or all linear layers.

    `word` means all linear layers where it stands alone. `among_names`: beside names too, as ms-swift reads it;
    the other tools take it for a name there.
    """
    names = value if isinstance(value, str) and not _NAMES.fullmatch(value) else as_list(value)
    if isinstance(names, str) or word not in names:
        draft.carry(key, PATH, names)
        return
    others = [name for name in names if name != word]
    if not others:
        draft.carry(key, PATH, "all-linear")
    elif among_names:
        all_and(draft, key, others)
    else:
        text = (
            f"{PATH}: {', '.join(map(str, others))}; `{word}` beside names is a module's name there"
        )
        draft.carry(key, PATH, others, text)


def all_and(draft: Draft, key: str, others: list[Any]) -> None:
    """Carry all linear layers, with names that they hold already or that come besides."""
    left = [str(name) for name in others if str(name).split(".")[-1] in _BEYOND_LINEAR]
    if left:
        why = f"adapters on {', '.join(left)} are left out"
        draft.approximate(key, PATH, "all-linear", why)
    else:
        shown = ", ".join(map(str, others))
        draft.carry(key, PATH, "all-linear", f"{PATH}: all-linear, which holds {shown}")


def of_axolotl(draft: Draft) -> None:
    """Take names of modules and `lora_target_linear` together: axolotl adapts both."""
    linear = as_flag(draft.take("lora_target_linear"))
    names = draft.take("lora_target_modules")
    if not linear:
        if linear is not None:
            draft.unneeded("lora_target_linear", "off: the modules that are named get adapters")
        _named_in_axolotl(draft, names)
        return
    draft.carry("lora_target_linear", PATH, "all-linear")
    if names is not None:
        all_and(draft, "lora_target_modules", as_list(names))


def _named_in_axolotl(draft: Draft, names: Any) -> None:
    """Carry the modules that are named. Raises ConfigError where none is, which axolotl refuses too."""
    if names is not None and names != ["all-linear"]:
        modules("all-linear")(draft, "lora_target_modules", names)
    elif names is None and draft.given.get("lora_target_parameters"):
        draft.assume(PATH, [], "the file names tensors alone")
    elif names is None and draft.given.get("lora_model_dir"):
        draft.assume(PATH, "all-linear", "the adapter in lora_model_dir says which; put them here")
    else:
        key = "adapter" if names is None else "lora_target_modules"
        draft.refuse(
            key,
            "no module of the model is named, which axolotl refuses too; expected lora_target_linear: true, or names in "
            "lora_target_modules",
        )


def assume_peft_default(draft: Draft, key: str, model_key: str) -> None:
    """Write down what PEFT adapts where the file names no module. Raises ConfigError where PEFT asks for names."""
    if ("lora",) not in draft.settings or draft.has(PATH):
        return
    model = str(draft.given.get(model_key) or "")
    facts = read_config(model, os.environ)
    if facts is None:
        draft.settings[tuple(PATH.split("."))] = list(_USUAL)
        why = (
            f"{PATH}: {', '.join(_USUAL)}, as PEFT chooses for Llama, Mistral, Qwen and Gemma where no module is "
            f"named; the config.json of {model}, which would say the family, is not on this machine"
        )
        draft.comments[tuple(PATH.split("."))] = "PEFT's choice for most families; see below"
        draft.notes.append(Note("approximated", key, None, why))
        return
    family = str(facts.get("model_type"))
    chosen = of_family(family)
    if chosen is None:
        draft.refuse(
            "use_peft",
            f"names no {key}, and PEFT chooses none by itself for {family}, so {draft.peer} does not train it either; "
            f"expected {key}: all-linear, or names",
        )
    why = f"PEFT's choice for {family} where no module is named; `all-linear` adapts all layers"
    draft.assume(PATH, chosen, why)
