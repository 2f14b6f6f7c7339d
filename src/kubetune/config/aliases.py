"""A table of other tools' names for our settings. Loading reads it, and docs/config.md shows it.

Only names that mean exactly the same are here. Names that need judgement belong to `kubetune import`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from kubetune.base.provenance import Entry, KeyPath, Problem, dotted
from kubetune.config.schema import Config, TrainingConfig

# What `bf16: false` means: the dtype is not bfloat16, but the line does not say which one it is.
SAYS_NOTHING = object()


@dataclass(frozen=True)
class Alias:
    """Where another tool's key belongs in our file, and how its value becomes ours."""

    path: str  # our dotted key
    # Their value → ours, or a function that converts it. None: the values are the same.
    values: Mapping[Any, Any] | Callable[[Any], Any] | None = None

    def value(self, theirs: Any) -> Any:
        """Return our value for theirs. A value that is not in the table stays, for the schema to judge."""
        if callable(self.values):
            return self.values(theirs)
        if self.values is None or not isinstance(theirs, (str, int, bool)):
            return theirs
        for known, ours in self.values.items():
            # In Python 1 == True, but `load_in_4bit: 1` is not `load_in_4bit: true`.
            if known == theirs and type(known) is type(theirs):
                return ours
        return theirs


def _trackers(theirs: Any) -> Any:
    """Return our `tracking` section for transformers' `report_to`: `[wandb]` becomes `{wandb: true}`."""
    if isinstance(theirs, dict):
        return theirs
    names = theirs if isinstance(theirs, list) else [theirs]
    if all(str(name) in ("none", "None") for name in names):
        return SAYS_NOTHING
    return {str(name): True for name in names}


_METHOD: dict[Any, Any] = {"lora": {}, "full": None}
_SWITCH: dict[Any, Any] = {True: {}, False: None}
_ALL_MODULES: dict[Any, Any] = {"all": "all-linear"}

# The keys of peers that mean what ours do, by our path.
#
# A bare name works at the top of the file and inside the section it leads to.
_SAME_MEANING = {
    # our path: the names of other tools for it
    "model.path": "model_name_or_path model_name model_id base_model",
    "model.revision": "model_revision",
    "model.tokenizer": "tokenizer_name_or_path",
    "model.dtype": "torch_dtype dtype",
    "model.trust_remote_code": "trust_remote_code",
    "data.train": "dataset train_file",
    "data.eval": "eval_dataset validation_file val_size val_set_size split_dataset_ratio",
    "data.max_length": "max_length cutoff_len sequence_len seq_len max_seq_length max_seq_len block_size "
    "train.max_seq_length model.model_max_length",
    "data.packing": "packing sample_packing neat_packing",
    "data.num_proc": "preprocessing_num_workers dataset_num_proc dataset_processes",
    "lora": "peft",
    "lora.r": "lora_r lora_rank lora.rank lora.dim",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.modules_to_save": "modules_to_save lora_modules_to_save",
    "lora.target_parameters": "target_parameters lora_target_parameters",
    "lora.use_dora": "use_dora peft_use_dora",
    "lora.use_rslora": "use_rslora peft_use_rslora",
    "preference.beta": "beta pref_beta rl_beta",
    "preference.loss": "loss_type pref_loss",
    "preference.label_smoothing": "label_smoothing dpo_label_smoothing",
    "preference.gamma": "simpo_gamma",
    "preference.sft_weight": "rpo_alpha cpo_alpha pref_ftx",
    "preference.desirable_weight": "desirable_weight kto_chosen_weight kto_desirable_weight",
    "preference.undesirable_weight": "undesirable_weight kto_rejected_weight kto_undesirable_weight",
    "preference.reference_free": "reference_free",
    "preference.center_coefficient": "center_rewards_coefficient",
    "training.per_device_train_batch_size": "micro_batch_size batch_size train.micro_batch_size",
    "training.global_batch_size": "total_batch_size train.global_batch_size",
    "training.num_train_epochs": "num_epochs epochs train.epochs",
    "training.learning_rate": "lr",
    "training.lr_scheduler_type": "lr_scheduler",
    "training.optim": "optimizer",
    "training.per_device_eval_batch_size": "eval_batch_size",
    "training.early_stopping_patience": "early_stop_interval early_stopping_steps",
    "training.max_steps": "train.max_steps",
    "output": "output_dir training.output_dir",
    "name": "run_name training.run_name",
    "compute.processes": "nproc_per_node",
    "compute.nodes": "nnodes num_nodes",
}

ALIASES: dict[str, Alias] = {
    name: Alias(path) for path, names in _SAME_MEANING.items() for name in names.split()
}
ALIASES |= {
    # Names whose values differ from ours too.
    "bf16": Alias("model.dtype", {True: "bfloat16", False: SAYS_NOTHING}),
    "fp16": Alias("model.dtype", {True: "float16", False: SAYS_NOTHING}),
    "attn_implementation": Alias(
        "model.attention", {"flash_attention_2": "auto", "flash_attention_3": "auto"}
    ),
    "excess_length_strategy": Alias("data.overlong", {"raise": "error"}),
    "train_on_inputs": Alias("data.train_on", {True: "all", False: "assistant"}),
    "train_on_prompt": Alias("data.train_on", {True: "all", False: "assistant"}),
    "assistant_only_loss": Alias("data.train_on", {True: "assistant", False: "all"}),
    "finetuning_type": Alias("lora", _METHOD),
    "tuner_type": Alias("lora", _METHOD),
    "train_type": Alias("lora", _METHOD),
    "adapter": Alias("lora", {"lora": {}}),
    "use_peft": Alias("lora", _SWITCH),
    "target_modules": Alias("lora.target_modules", _ALL_MODULES),
    "lora_target": Alias("lora.target_modules", _ALL_MODULES),
    "lora_target_modules": Alias("lora.target_modules", _ALL_MODULES),
    "lora_target_linear": Alias("lora.target_modules", {True: "all-linear", False: SAYS_NOTHING}),
    "load_in_4bit": Alias("quantization", {True: "4bit", False: SAYS_NOTHING}),
    "load_in_8bit": Alias("quantization", {True: "8bit", False: SAYS_NOTHING}),
    "quantization_bit": Alias("quantization", {4: "4bit", 8: "8bit"}),
    **dict.fromkeys(("report_to", "training.report_to"), Alias("tracking", _trackers)),
    "resume_from_checkpoint": Alias("training.resume", {True: "must", False: SAYS_NOTHING}),
}

# Every key of `training` is Hugging Face's own and may be at the top of the file, as it does there.
ALIASES |= {name: Alias(f"training.{name}") for name in TrainingConfig.model_fields}


@cache
def _table() -> dict[KeyPath, Alias]:
    """Return ALIASES by path. A bare name also works inside the section that it leads to.

    `lora_r` means `lora.r`, so it is found at ("lora_r",) and at ("lora", "lora_r").
    """
    table: dict[KeyPath, Alias] = {}
    for name, alias in ALIASES.items():
        # `lora_r` → ("lora_r",), `lora.rank` → ("lora", "rank")
        theirs = tuple(name.split("."))
        ours = tuple(alias.path.split("."))
        table[theirs] = alias
        inside = (*ours[:-1], *theirs)
        if len(theirs) == 1 and len(ours) == 2 and inside != ours:
            table[inside] = alias
    return table


@cache
def _foreign_sections() -> frozenset[KeyPath]:
    """Return the sections that only other tools have, such as `train`. All their keys move into our sections."""
    return frozenset(
        path[:1] for path in _table() if len(path) == 2 and path[0] not in Config.model_fields
    )


def canonical(entry: Entry) -> Entry | None:
    """Return a setting under our key and with our value. None if the value says nothing.

    Renaming repeats, since one alias may lead to another:

        peft.lora_r: 8  →  lora.lora_r: 8  →  lora.r: 8
    """
    table = _table()
    path = entry.path
    value = entry.value
    while (end := _length_of_alias(path, table)) > 0:
        alias = table[path[:end]]
        if len(path) == end:
            value = alias.value(value)
        path = (*alias.path.split("."), *path[end:])
    if value is SAYS_NOTHING or (value == {} and path in _foreign_sections()):
        return None

    # The short forms of our own sections: `model: NAME`, `lora: true`, and a section without a line.
    if path == ("model",) and isinstance(value, str):
        path = ("model", "path")
    elif path == ("lora",) and isinstance(value, bool):
        value = {} if value else None
    elif value is None and len(path) == 1 and path[0] in _ALWAYS_THERE:
        value = {}  # `training:` with every line below it commented out
    return replace(entry, path=path, value=value)


def _length_of_alias(path: KeyPath, table: Mapping[KeyPath, Alias]) -> int:
    """Return how many parts at the beginning of a path are another tool's name: 1 or 2, or 0 if none is."""
    for end in (1, 2):
        if path[:end] in table:
            return end
    return 0


# Sections that every config has, whether the file names them or not.
_ALWAYS_THERE = {"data"} | {
    name for name, key in Config.model_fields.items() if key.default_factory is not None
}


def canonical_file(entries: Iterable[Entry]) -> tuple[list[Entry], list[Problem]]:
    """Return the settings of one file in our spelling, and a problem for each that is spelled in two ways."""
    seen: dict[KeyPath, Entry] = {}  # our path → the entry as it was written
    result: list[Entry] = []
    problems: list[Problem] = []
    for entry in entries:
        ours = canonical(entry)
        if ours is None:
            continue
        # The same key twice is an error of YAML already; here are two names of one setting.
        earlier = _same_setting(ours, seen)
        if earlier is not None and earlier.path != entry.path:
            other = dotted(earlier.path)
            if earlier.origin.line:
                other += f" (line {earlier.origin.line})"
            message = f"{dotted(entry.path)}: the same setting as {other}; keep one"
            problems.append(Problem(entry.origin, message))
            continue
        if ours.value != {}:  # a section's beginning cannot contradict what is in it
            seen[ours.path] = entry
        result.append(ours)
    return result, problems


def _same_setting(ours: Entry, seen: Mapping[KeyPath, Entry]) -> Entry | None:
    """Return the earlier entry at the same path, above it or below it: `lora: null` contradicts `lora.r: 8`."""
    if ours.value == {}:
        return None
    for path, entry in seen.items():
        common = min(len(path), len(ours.path))
        if path[:common] == ours.path[:common]:
            return entry
    return None


# Words of other tools for values of ours, by key: they are not taken, but a mistake is answered with ours.
VALUES: Final[dict[str, dict[str, str]]] = {
    "task": {
        **dict.fromkeys(("sft", "clm", "pt", "pretrain", "lm", "text-generation", "llm"), "causal_lm"),
        **dict.fromkeys(("dpo", "orpo", "kto", "simpo", "cpo", "ipo", "rlhf"), "preference"),
        **dict.fromkeys(("rm", "reward", "reward_modeling"), "reward_model"),
        **dict.fromkeys(("ppo", "rloo", "dapo", "gspo", "rl", "rlvr"), "grpo"),
        **dict.fromkeys(("gkd", "kd", "distillation", "opd", "sdft"), "distill"),
        **dict.fromkeys(("cls", "classification", "seq_cls", "text-classification"), "sequence_classification"),
        **dict.fromkeys(("vlm", "vision", "vl", "image-text-to-text"), "vision_language"),
    },
}  # fmt: skip
