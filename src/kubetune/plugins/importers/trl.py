"""TRL's commands: a flat YAML config, or options; keys are TrainingArguments', SFTConfig's, ModelConfig's and others'."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    as_names,
    carried,
    dropped,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.shared import (
    LORA,
    NO_EFFECT,
    OFFLOADING,
    PACKING,
    SHUFFLED,
    SUBSET_AND_SPLIT,
    TRAINING,
    finish_source,
    four_bits,
    fsdp,
    share,
    take_files,
    take_sources,
    template_file,
    tidy,
)
from kubetune.plugins.importers.targets import assume_peft_default, modules
from kubetune.plugins.importers.warm_up import WarmUp


def _method(draft: Draft) -> None:
    """Take `use_peft`, without which every parameter is trained."""
    if draft.take("use_peft"):
        draft.carry("use_peft", "lora", None)
    else:
        draft.ignore("off: every parameter is trained", "use_peft")


def _max_length(draft: Draft) -> None:
    """Take a limit that is switched off: `max_length: null`."""
    if "max_length" in draft.theirs and draft.theirs["max_length"] in (None, "None"):
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
    if draft.get("datasets") is not None:
        take_sources(draft, {"datasets": "data.train"}, _source)
    elif name is not None:
        _data_set(draft, str(name))


def _source(draft: Draft, place: str, item: Any) -> list[Any]:
    """Return our source for an item of `datasets`."""
    section = draft.section(place, item)
    take_files(section)
    return [finish_source(draft, section, SUBSET_AND_SPLIT)]


def _data_set(draft: Draft, name: str) -> None:
    """Take one data set of the hub with its subset, splits and column."""
    # The keys describe one source together, so each carries the whole of it.
    source = tidy(
        {
            "path": name,
            "subset": draft.take("dataset_config"),
            "split": draft.take("dataset_train_split"),
            "columns": {"text": draft.take("dataset_text_field") or "text"},
        }
    )
    draft.carry("dataset_name", "data.train", [source])
    for key in ("dataset_config", "dataset_train_split", "dataset_text_field"):
        if draft.get(key) is not None:
            draft.carry(key, "data.train", [source], "in the source of data.train")
    key = "dataset_test_split"
    split = draft.take(key)
    if draft.get("eval_strategy") in (None, "no", False):
        draft.ignore("nothing is evaluated: eval_strategy is not set", key)
    elif split is not None:
        draft.carry(key, "data.eval", [source | {"split": split}])
    else:
        draft.assume("data.eval", [source | {"split": "test"}], "TRL evaluates on the split `test`")


def _mixture(draft: Draft, mixture: dict[str, Any]) -> None:
    """Take `dataset_mixture`, as the recipes of the alignment handbook and of Open R1 have it."""
    place = "dataset_mixture"
    collected = []
    for number, item in enumerate(mixture.get("datasets") or []):
        section = draft.section(f"{place}.datasets[{number}]", item)
        unread = set(section.take("columns") or ()) - {"messages", "prompt", "completion", "text"}
        if unread:
            section.drop("columns", f"nothing is done with {', '.join(sorted(unread))}")
        collected.append(finish_source(draft, section, _MIXED))
    draft.carry(place, "data.train", collected)
    section = draft.section(place, mixture)
    section.take("datasets")
    size = section.take("test_split_size")
    if size is not None:
        draft.write(f"{place}.test_split_size", share(size, draft), "data.eval")
    finish_source(draft, section, Table(unneeded={"seed": "rows are drawn by training.seed"}))


def _loss(draft: Draft) -> None:
    """Take both keys that say which tokens are trained."""
    if draft.has("task"):
        return
    path = "data.train_on"
    answers = draft.take("assistant_only_loss")
    completions = draft.take("completion_only_loss")
    off = "off; data.train_on says what is trained"
    if answers:
        draft.carry("assistant_only_loss", path, "assistant")
        draft.ignore(off, "completion_only_loss")
        return
    draft.ignore(off, "assistant_only_loss")
    if completions is not None:
        draft.carry("completion_only_loss", path, "assistant" if completions else "all")
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
    return "packing_strategy says what becomes of long rows" if draft.get("packing") else ""


def _weight(value: Any, _: Draft) -> Outcome:
    """Carry the weight of a source."""
    return carried(float(value))


# Keys of a data set in `dataset_mixture`.
_MIXED = Table(
    same={"path": "id", "subset": "config", "split": "split"},
    rows=[Row("weight", "weight", other=_weight)],
)

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
        fsdp("fsdp", "fsdp_config"),
        four_bits("load_in_4bit", "bnb_4bit_quant_type", True),
        WarmUp().read,
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
    tables=(TRAINING, LORA, PACKING, OFFLOADING, Table(
        same={
            "model.path": "model_name_or_path",
            "model.revision": "model_revision",
            "data.max_length": "max_length max_seq_length",
            "data.num_proc": "dataset_num_proc",
            "lora.r": "lora_r",
            "lora.alpha": "lora_alpha",
            "lora.dropout": "lora_dropout",
        },
        rows=[
            Row("lora_target_modules", "lora.target_modules", other=modules("all-linear")),
            Row("lora_target_parameters", "lora.target_parameters", other=as_names),
            Row("lora_modules_to_save", "lora.modules_to_save", other=as_names),
            switch("load_in_4bit", "quantization", "4bit"),
            switch("load_in_8bit", "quantization", "8bit"),
            Row("packing_strategy", "data.overlong", other=_packing_strategy),
            Row("truncation_mode", "data.overlong", {"keep_start": "truncate"},
                near("truncate", "the end is cut, not the start"), unless=_packs),
            Row("chat_template_path chat_template", "model.chat_template", other=template_file),
        ],
        dropped={
            "loss_type": ("cross-entropy is the only loss", "nll", "chunked_nll"),
            "lora_task_type": ("the task is causal_lm; see task", "CAUSAL_LM"),
            "dataset_mixer": "write each data set into data.train as a source with its split and weight",
            "dataset_splits": "a source has one split; see data.train[…].split",
            "dataset_streaming": ("data are prepared once, into files that need no memory", False),
            "env": "environment variables are set where the command is started, or in kubernetes.env",
            "eos_token": "the tokenizer's own; a conversation ends as its chat template says",
            "dataset_kwargs": "see data.add_special_tokens",
            "model_init_kwargs": "a model has model.dtype, revision and attention",
        },
        unneeded={
            "pad_token": "nothing is padded",
            "shuffle_dataset": SHUFFLED,
            "use_bnb_nested_quant bnb_4bit_quant_storage eval_packing pad_to_multiple_of ignore_bias_buffers config":
                NO_EFFECT,
        },
    )),
)  # fmt: skip
