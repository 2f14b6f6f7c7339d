"""TRL's `trl sft`: a flat YAML config, or its command line; keys are TrainingArguments', SFTConfig's, ModelConfig's."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers import common
from kubetune.plugins.importers.draft import (
    Draft,
    Rule,
    as_flag,
    choice,
    dropped,
    each,
    is_empty,
    only,
    unneeded,
)
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template_file
from kubetune.plugins.importers.targets import assume_peft_default
from kubetune.plugins.importers.warm_up import OF_TRANSFORMERS, warm_up

NAME = "TRL"
MARKS = ("dataset_name", "use_peft", "dataset_train_split", "dataset_test_split", "assistant_only_loss",
         "completion_only_loss", "packing_strategy", "truncation_mode", "dataset_text_field", "dataset_config",
         "lora_task_type", "eos_token", "dataset_mixture", "dataset_mixer", "dataset_splits", "max_seq_length",
         "model_name_or_path")  # fmt: skip

_DEFAULTS: dict[str, Any] = {
    "data.max_length": 1024, "data.overlong": "truncate", "data.packing": False, "training.num_train_epochs": 3.0,
    "training.per_device_train_batch_size": 8, "training.learning_rate": 2e-5, "training.lr_scheduler_type": "linear",
    "training.logging_steps": 10, "training.save_steps": 500, "training.gradient_checkpointing": True,
}  # fmt: skip
_MIXED = {"subset": "config", "split": "split"}
_READ = ("messages", "prompt", "completion", "text")
_LORA = {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05}


def convert(draft: Draft) -> None:
    """Fill in the draft."""
    _bits(draft)
    if as_flag(draft.take("use_peft")):
        draft.carry("use_peft", "lora", None)
    else:
        if "use_peft" in draft.given:
            draft.unneeded("use_peft", "off: every parameter is trained")
        common.forget(
            draft, "says nothing without use_peft", "lora_", "use_dora", "use_rslora", "load_in_"
        )
    if str(draft.given.get("max_length", "")) == "None":
        why = (
            "no limit there; here a row that is longer than data.max_length stops the run: raise it"
        )
        draft.approximate("max_length", "data.overlong", "error", why)
        draft.assume("data.max_length", 8192, "the file sets no limit")
    _data(draft)
    if not is_preferred(draft):
        _loss(draft)
    common.pin_fsdp(draft, "fsdp", "fsdp_config")
    warm_up(draft, OF_TRANSFORMERS)
    draft.apply(RULES)
    common.defaults(draft, _DEFAULTS, _LORA)
    assume_peft_default(draft, "lora_target_modules", "model_name_or_path")


def _bits(draft: Draft) -> None:
    """Refuse what TRL refuses: both numbers of bits, and a quantised base that is trained itself."""
    asked = [key for key in ("load_in_4bit", "load_in_8bit") if as_flag(draft.given.get(key))]
    if len(asked) == 2:
        draft.refuse(asked[1], "TRL refuses it beside load_in_4bit")
    if asked and not as_flag(draft.given.get("use_peft")):
        why = "a quantised base is not trained itself, there as here; expected use_peft: true, or no quantisation"
        draft.refuse(asked[0], why)


def _data(draft: Draft) -> None:
    _mixture(draft)
    name, mixture = draft.take("dataset_name"), draft.take("datasets")
    strategy = draft.given.get("eval_strategy")
    if mixture is not None:
        sources = [_source(draft, f"datasets[{i}]", item) for i, item in enumerate(mixture)]
        draft.carry("datasets", "data.train", sources)
    elif name is not None:
        source: dict[str, Any] = {"path": str(name)}
        if subset := draft.take("dataset_config"):
            source["subset"] = subset
        if (split := draft.take("dataset_train_split")) and split != "train":
            source["split"] = split
        if (field := draft.take("dataset_text_field")) and field != "text":
            source["columns"] = {"text": field}
        draft.carry("dataset_name", "data.train", [source])
        for key in ("dataset_config", "dataset_train_split", "dataset_text_field"):
            if not is_empty(draft.given.get(key)):
                draft.carry(key, "data.train", [source], "in the source of data.train")
        tested = {**source, "split": draft.take("dataset_test_split") or "test"}
        if strategy not in (None, "no") and as_flag(strategy) is not False:
            if "dataset_test_split" in draft.given:
                draft.carry("dataset_test_split", "data.eval", [tested])
            else:
                draft.assume("data.eval", [tested], "TRL evaluates on the split `test`")
        elif "dataset_test_split" in draft.given:
            draft.unneeded("dataset_test_split", "nothing is evaluated: eval_strategy is not set")


def _mixture(draft: Draft) -> None:
    """`dataset_mixture`, as the recipes of the alignment handbook and of Open R1 have it."""
    given = draft.take("dataset_mixture")
    if not isinstance(given, dict):
        return
    sources = []
    for number, item in enumerate(given.get("datasets") or []):
        source: dict[str, Any] = {"path": str(item.get("id"))}
        source |= {ours: item[theirs] for ours, theirs in _MIXED.items() if item.get(theirs)}
        if item.get("weight") not in (None, 1):
            source["weight"] = float(item["weight"])
        place, others = (
            f"dataset_mixture.datasets[{number}]",
            set(item.get("columns") or ()).difference(_READ),
        )
        if others:
            draft.drop(f"{place}.columns", f"nothing is done with {', '.join(sorted(others))}")
        draft.drop_rest(place, item, ("id", "weight", "columns", *_MIXED.values()))
        sources.append(source)
    draft.drop_rest("dataset_mixture", given, ("datasets", "test_split_size", "seed"))
    draft.carry("dataset_mixture", "data.train", sources)
    if size := given.get("test_split_size"):
        common.share(draft, "dataset_mixture.test_split_size", size)
    if "seed" in given:
        draft.unneeded("dataset_mixture.seed", "rows are drawn by training.seed")


def _source(draft: Draft, key: str, item: Any) -> dict[str, Any]:
    files = item.get("data_files")
    is_file = item.get("path") in ("json", "csv", "parquet", "text") and isinstance(files, str)
    if files and not is_file:
        draft.drop(f"{key}.data_files", "write a source for each file")
    source: dict[str, Any] = {"path": str(files if is_file else item.get("path"))}
    wanted = {"subset": item.get("name"), "split": item.get("split")}
    source |= {ours: theirs for ours, theirs in wanted.items() if theirs not in (None, "", "train")}
    draft.drop_rest(key, item, ("path", "data_files", "name", "split"))
    return source


def _loss(draft: Draft) -> None:
    answers, completions = (
        as_flag(draft.take("assistant_only_loss")),
        as_flag(draft.take("completion_only_loss")),
    )
    if answers:
        draft.carry("assistant_only_loss", "data.train_on", "assistant")
    elif completions:
        draft.carry("completion_only_loss", "data.train_on", "assistant")
    elif completions is False:
        draft.carry("completion_only_loss", "data.train_on", "all")
    else:
        draft.assume(
            "data.train_on", "assistant", "TRL trains on whole conversations unless assistant_only_loss is set; "
            "`all` does as TRL does. Of prompts with completions both train the completion"
        )  # fmt: skip
    for key in ("assistant_only_loss", "completion_only_loss"):
        if key in draft.given and not any(note.key == key for note in draft.notes):
            draft.unneeded(key, "off; data.train_on says what is trained")


def _packing_strategy(draft: Draft, key: str, value: Any) -> None:
    packs = as_flag(draft.given.get("packing"))
    if packs and value in ("bfd_split", "bfd-requeue"):
        draft.carry(key, "data.overlong", "split")
    elif packs and value != "bfd":
        draft.drop(key, "sequences are packed whole, and never cut")
    else:
        draft.unneeded(key, "whole sequences are packed, as here" if packs else "packing is off")


RULES: dict[str, Rule] = {
    **common.TRAINING,
    **common.plain(
        "model_name_or_path model_revision max_length max_seq_length dataset_num_proc lora_r lora_alpha lora_dropout "
        "lora_target_parameters lora_modules_to_save lora_target_modules use_rslora use_dora load_in_4bit load_in_8bit "
        "packing padding_free activation_offloading"
    ),
    **each("chat_template_path chat_template", template_file),
    "dataset_mixer": dropped(
        "write each data set into data.train as a source with its split and weight"
    ),
    "dataset_splits": dropped("a source has one split; see data.train[…].split"),
    "packing_strategy": _packing_strategy,
    "truncation_mode": choice(
        "data.overlong", {"keep_start": "truncate"}, "truncate", "the end is cut, not the start"
    ),
    "dataset_streaming": dropped("data are prepared once, into files that need no memory", False),
    "bnb_4bit_quant_type": common.four_bits("load_in_4bit", True),
    "loss_type": only(
        ["nll", "chunked_nll"], "cross-entropy, as here", "cross-entropy is the only loss"
    ),
    "lora_task_type": only(
        ["CAUSAL_LM"], "follows from the task", "the task is causal_lm; see task"
    ),
    "pad_token": unneeded("nothing is padded"),
    "shuffle_dataset": unneeded("rows are shuffled, each epoch anew, there as here"),
    "env": dropped(
        "environment variables are set where the command is started, or in kubernetes.env"
    ),
    **each(
        "use_bnb_nested_quant bnb_4bit_quant_storage eval_packing pad_to_multiple_of ignore_bias_buffers config",
        unneeded("has no counterpart, and no effect on the result"),
    ),
    "eos_token": dropped("the tokenizer's own; a conversation ends as its chat template says"),
    "dataset_kwargs": dropped("see data.add_special_tokens"),
    "model_init_kwargs": dropped("a model has model.dtype, revision and attention"),
}
