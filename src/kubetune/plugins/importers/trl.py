"""TRL's `trl sft`: a flat YAML config, or its command line; keys are TrainingArguments', SFTConfig's, ModelConfig's."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers import sources
from kubetune.plugins.importers.by_reward import is_by_reward
from kubetune.plugins.importers.common import (
    LORA,
    NO_EFFECT,
    OFFLOADING,
    PACKING,
    TRAINING,
    bits_of,
    four_bits,
    ignore_all,
    pin_fsdp,
    share,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Tool,
    aliased,
    carried,
    drop,
    dropped,
    ignore,
    names,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template_file
from kubetune.plugins.importers.targets import assume_peft_default, modules
from kubetune.plugins.importers.warm_up import OF_TRANSFORMERS

# Columns that are known by their names.
_READ = {"messages", "prompt", "completion", "text"}
_OF_THE_SOURCE = ("dataset_config", "dataset_train_split", "dataset_text_field")


def _method(draft: Draft) -> None:
    """Take `use_peft`, without which keys of LoRA say nothing, and refuse the bits that TRL refuses."""
    bits = [key for key in ("load_in_4bit", "load_in_8bit") if draft.get(key)]
    if len(bits) == 2:
        draft.refuse(bits[1], "TRL refuses it beside load_in_4bit")
    if draft.take("use_peft"):
        draft.carry("use_peft", "lora", None)
        return
    if bits:
        why = "a quantised base is not trained itself, there as here; expected use_peft: true, or no quantisation"
        draft.refuse(bits[0], why)
    draft.ignore("use_peft", "off: every parameter is trained")
    ignore_all(
        draft, "says nothing without use_peft", "lora_", "use_dora", "use_rslora", "load_in_"
    )


def _max_length(draft: Draft) -> None:
    """Take a limit that is switched off: `max_length: null`."""
    if str(draft.theirs.get("max_length", "")) == "None":
        why = (
            "no limit there; here a row that is longer than data.max_length stops the run: raise it"
        )
        draft.write("max_length", near("error", why), "data.overlong")
        draft.assume("data.max_length", 8192, "the file sets no limit")


def _data(draft: Draft) -> None:
    """Take the data: a mixture, a list of sources, or one data set."""
    mixture = draft.take("dataset_mixture")
    if isinstance(mixture, dict):
        _mixture(draft, mixture)
    name = draft.take("dataset_name")
    listed = draft.take("datasets")
    if listed is not None:
        collected = []
        for number, item in enumerate(listed):
            section = draft.section(f"datasets[{number}]", item)
            sources.take_files(section)
            collected.append(sources.finished(draft, section, sources.SUBSET_AND_SPLIT))
        draft.carry("datasets", "data.train", collected)
    elif name is not None:
        _data_set(draft, str(name))


def _data_set(draft: Draft, name: str) -> None:
    """Take one data set of the hub with its subset, splits and column."""
    # The keys describe one source together, so each carries the whole of it.
    source = sources.tidy(
        {
            "path": name,
            "subset": draft.take("dataset_config"),
            "split": draft.take("dataset_train_split"),
            "columns": {"text": draft.take("dataset_text_field") or "text"},
        }
    )
    draft.carry("dataset_name", "data.train", [source])
    for key in _OF_THE_SOURCE:
        if draft.get(key) is not None:
            draft.carry(key, "data.train", [source], "in the source of data.train")
    key = "dataset_test_split"
    split = draft.take(key)
    if draft.get("eval_strategy") in (None, "no", False):
        draft.ignore(key, "nothing is evaluated: eval_strategy is not set")
    elif split is not None:
        draft.carry(key, "data.eval", [source | {"split": split}])
    else:
        why = "TRL evaluates on the split `test`"
        draft.assume("data.eval", [source | {"split": "test"}], why)


def _mixture(draft: Draft, mixture: dict[str, Any]) -> None:
    """Take `dataset_mixture`, as the recipes of the alignment handbook and of Open R1 have it."""
    place = "dataset_mixture"
    collected = []
    for number, item in enumerate(mixture.get("datasets") or []):
        section = draft.section(f"{place}.datasets[{number}]", item)
        unread = sorted(set(section.take("columns") or ()) - _READ)
        if unread:
            section.drop("columns", f"nothing is done with {', '.join(unread)}")
        collected.append(sources.finished(draft, section, _MIXED))
    draft.carry(place, "data.train", collected)
    section = draft.section(place, mixture)
    section.take("datasets")
    size = section.take("test_split_size")
    if size is not None:
        draft.write(f"{place}.test_split_size", share(size, draft), "data.eval")
    sources.finished(draft, section, [ignore("seed", "rows are drawn by training.seed")])


def _loss(draft: Draft) -> None:
    """Take both keys that say which tokens are trained."""
    if is_preferred(draft) or is_by_reward(draft):
        return
    path = "data.train_on"
    answers = draft.take("assistant_only_loss")
    completions = draft.take("completion_only_loss")
    off = "off; data.train_on says what is trained"
    if answers:
        draft.carry("assistant_only_loss", path, "assistant")
        draft.ignore("completion_only_loss", off)
        return
    draft.ignore("assistant_only_loss", off)
    if completions is not None:
        draft.carry("completion_only_loss", path, "assistant" if completions else "all")
    else:
        why = (
            "TRL trains on whole conversations unless assistant_only_loss is set; `all` does as TRL does. Of prompts "
            "with completions both train the completion"
        )
        draft.assume(path, "assistant", why)


def _packing_strategy(value: Any, draft: Draft) -> Outcome:
    """Take what becomes of rows that are longer than a packed row."""
    if not draft.get("packing"):
        return unneeded("packing is off")
    if value in ("bfd_split", "bfd-requeue"):
        return carried("split")
    if value == "bfd":
        return unneeded("whole sequences are packed, as here")
    return dropped("sequences are packed whole, and never cut")


def _packs(draft: Draft) -> str:
    """Say why `truncation_mode` says nothing, where rows are packed."""
    if draft.get("packing"):
        return "packing_strategy says what becomes of long rows"
    return ""


# Keys of a data set in `dataset_mixture`.
_MIXED = [
    Row("id", "path"),
    Row("config", "subset"),
    Row("split", "split"),
    Row("weight", "weight", lambda value, _: carried(float(value))),
]

TOOL = Tool(
    name="TRL",
    marks="dataset_name use_peft dataset_train_split dataset_test_split assistant_only_loss completion_only_loss "
    "packing_strategy truncation_mode dataset_text_field dataset_config lora_task_type eos_token dataset_mixture "
    "dataset_mixer dataset_splits max_seq_length model_name_or_path reward_funcs num_generations",
    command=r"\btrl(?:\s+|/scripts/)(\w+)|\bscripts/(sft|dpo|kto|orpo|cpo|reward|grpo)(?:_vlm|_modeling)?\.py",
    together=(
        _method,
        _max_length,
        _data,
        _loss,
        lambda draft: pin_fsdp(draft, "fsdp fsdp_config"),
        OF_TRANSFORMERS.read,
    ),
    finish=assume_peft_default,
    defaults={
        "data.max_length": 1024,
        "data.overlong": "truncate",
        "data.packing": False,
        "training.num_train_epochs": 3.0,
        "training.per_device_train_batch_size": 8,
        "training.learning_rate": 2e-5,
        "training.lr_scheduler_type": "linear",
        "training.logging_steps": 10,
        "training.save_steps": 500,
        "training.gradient_checkpointing": True,
    },
    lora_defaults={"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05},
    rows=[
        # Names that other tools have too; rows below replace those of TRAINING.
        *TRAINING,
        *aliased("model_name_or_path model_revision max_length max_seq_length dataset_num_proc"),
        *aliased("lora_r lora_alpha lora_dropout"),
        # Adapters and bits of the base.
        modules("lora_target_modules", "all-linear"),
        names("lora_target_parameters", "lora.target_parameters"),
        names("lora_modules_to_save", "lora.modules_to_save"),
        *LORA,
        bits_of("load_in_4bit", "bnb_4bit_quant_type", four=True),
        switch("load_in_8bit", "quantization", "8bit"),
        four_bits("bnb_4bit_quant_type", "load_in_4bit", True),
        # Data and prompts.
        *PACKING,
        Row("packing_strategy", "data.overlong", _packing_strategy),
        Row("truncation_mode", "data.overlong", values={"keep_start": "truncate"}, near="truncate",
            reason="the end is cut, not the start", unless=_packs),
        Row("chat_template_path chat_template", "model.chat_template", template_file),
        # Values that are ours anyway; any other is dropped.
        Row("loss_type", same=dict.fromkeys(("nll", "chunked_nll"), "cross-entropy, as here"),
            reason="cross-entropy is the only loss"),
        Row("lora_task_type", same={"CAUSAL_LM": "follows from the task"}, reason="the task is causal_lm; see task"),
        # Not done here; a value behind the reason is that which switches it off there.
        *OFFLOADING,
        drop("dataset_mixer", "write each data set into data.train as a source with its split and weight"),
        drop("dataset_splits", "a source has one split; see data.train[…].split"),
        drop("dataset_streaming", "data are prepared once, into files that need no memory", False),
        drop("env", "environment variables are set where the command is started, or in kubernetes.env"),
        drop("eos_token", "the tokenizer's own; a conversation ends as its chat template says"),
        drop("dataset_kwargs", "see data.add_special_tokens"),
        drop("model_init_kwargs", "a model has model.dtype, revision and attention"),
        # Not needed.
        ignore("pad_token", "nothing is padded"),
        ignore("shuffle_dataset", "rows are shuffled, each epoch anew, there as here"),
        ignore("use_bnb_nested_quant bnb_4bit_quant_storage eval_packing pad_to_multiple_of ignore_bias_buffers config",
               NO_EFFECT),
    ],
)  # fmt: skip
