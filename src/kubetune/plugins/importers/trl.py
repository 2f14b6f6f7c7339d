"""TRL's commands: a flat YAML config, or options; keys are TrainingArguments', SFTConfig's, ModelConfig's and others'."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.by_teacher import OF_GKD, OF_SDFT
from kubetune.plugins.importers.common.schedule_keys import assume_warm_up, warm_up
from kubetune.plugins.importers.common.source_keys import read_source, share, take_sources, tidy
from kubetune.plugins.importers.common.target_keys import PATH, assume_peft_default, modules
from kubetune.plugins.importers.common.training_keys import (
    FSDP,
    LORA,
    NO_EFFECT,
    OFFLOADING,
    PACKING,
    SHUFFLED,
    TRAINING,
    bfloat16,
    bits,
    template_file,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    ToolCommand,
    as_names,
    dropped,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.preference_tuning import SIMPO
from kubetune.plugins.importers.reward_names import OF_TRL
from kubetune.plugins.importers.servers import CORRECTION

# Keys that describe one source together.
_DATA_SET = ("dataset_config", "dataset_train_split", "dataset_text_field")


def _data(draft: Draft) -> None:
    """Take the data: a mixture, a list of sources, or one data set of the hub with its splits."""
    key = "dataset_mixture"
    mixture = draft.take(key)
    if isinstance(mixture, dict):
        section = draft.section(key, mixture)
        sources = []
        for number, item in enumerate(section.take("datasets") or []):
            sources += _source(draft, f"{key}.datasets[{number}]", item)
        draft.carry(key, "data.train", sources)
        size = section.take("test_split_size")
        if size is not None:
            draft.write(f"{key}.test_split_size", share(size, draft), "data.eval")
        read_source(draft, section, Table(unneeded={"seed": "rows are drawn by training.seed"}))
    take_sources(draft, {"datasets": "data.train"}, _source)

    # One data set by its name. Some keys describe it.
    name = draft.take("dataset_name")
    if "dataset_name" in draft.unknown:
        draft.leave_open("dataset_name", "data.train", draft.unknown["dataset_name"])
    if name is None or draft.has("data.train"):
        return
    source = tidy(
        {
            "path": str(name),
            "subset": draft.get("dataset_config"),
            "split": draft.get("dataset_train_split"),
            "columns.text": draft.get("dataset_text_field") or "text",
        }
    )
    draft.carry("dataset_name", "data.train", [source])
    for key in _DATA_SET:
        if draft.take(key) is not None:
            draft.carry(key, "data.train", [source], "in the source of data.train")

    # Evaluation takes another split of the same data set, and only if it is switched on.
    key = "dataset_test_split"
    split = draft.take(key)
    evaluates = draft.get("eval_strategy") not in (None, "no", False)
    if split is not None and not evaluates:
        draft.note("unneeded", key, "nothing is evaluated: eval_strategy is not set")
    elif split is not None:
        draft.carry(key, "data.eval", [source | {"split": split}])
    elif evaluates:
        draft.assume("data.eval", [source | {"split": "test"}], "TRL evaluates on the split `test`")


def _source(draft: Draft, place: str, item: Any) -> list[Any]:
    """Return our source for an item of a list."""
    return [read_source(draft, draft.section(place, item), _ITEM)]


def _columns(value: Any, _: Draft) -> Outcome:
    """Drop `columns`: kubetune finds those of messages by itself, and reads no others."""
    unread = set(value) - {"messages", "prompt", "completion", "text"}
    if unread:
        return dropped(f"nothing is done with {', '.join(sorted(unread))}")
    return unneeded("seen from the data")


def _finish(draft: Draft) -> None:
    """Write down the defaults that depend on other keys."""
    assume_peft_default(draft)
    assume_warm_up(draft)
    if "max_length" in draft.theirs and draft.theirs["max_length"] in (None, "None"):
        why = "TRL sets no limit; in kubetune a row that is longer than data.max_length stops the run: raise it"
        draft.write("max_length", near("error", why), "data.overlong")
        draft.assume("data.max_length", 8192, "the file sets no limit")
    if draft.ours("task", "causal_lm") == "causal_lm":
        why = (
            "TRL trains on whole conversations unless assistant_only_loss is set; `all` does as TRL does. Of prompts "
            "with completions both train the completion"
        )
        draft.assume("data.train_on", "assistant", why)


# Kinds of learning whose trainers have a small learning rate.
_SLOW = ("dpo", "kto", "orpo", "cpo", "distillation")
_OFF = unneeded("off; data.train_on says what is trained")
# Keys of a data set in `datasets` or `dataset_mixture`.
_ITEM = Table(same={"path": "id"}, rows=[Row("columns", other=_columns)])

TOOL = Tool(
    name="TRL",
    marks="dataset_name use_peft dataset_train_split dataset_test_split assistant_only_loss completion_only_loss "
    "packing_strategy truncation_mode dataset_text_field dataset_config lora_task_type eos_token dataset_mixture "
    "dataset_mixer dataset_splits max_seq_length model_name_or_path reward_funcs num_generations teacher_model_name_or_path "
    "teacher_model_kind teacher_prompt_template teacher_model_server_url",
    command=ToolCommand(
        r"\btrl(?:\s+|/scripts/)(\w+)|"
        r"\bscripts/(sft|dpo|kto|orpo|cpo|reward|grpo|gkd|distillation|sdft)(?:_vlm|_modeling)?\.py",
        "trl sft`, `dpo` or `grpo",
    ),
    first="use_peft",
    sources=_data,
    finish=_finish,
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
    rewards=OF_TRL,
    # A YAML file does not say which trainer it is for, but a key may.
    kind_of_a_key={
        "teacher_model_server_url loss_top_k": "distillation",
        "lmbda seq_kd": "gkd",
        "distillation_alpha distillation_mode distillation_topk teacher_model_kind teacher_prompt_template": "sdft",
        "max_new_tokens": "gkd",
        "teacher_model_name_or_path": "distillation",
        "num_generations reward_funcs": "grpo",
        "desirable_weight": "kto",
        "center_rewards_coefficient": "reward",
        "simpo_gamma cpo_alpha": "cpo",
        "rpo_alpha precompute_ref_log_probs max_prompt_length beta": "dpo",
    },
    defaults_of={
        "lora": {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05},
        "reward": {"training.learning_rate": 1e-4},
        **{kind: {"training.learning_rate": 1e-6} for kind in _SLOW},
        "grpo": {"training.learning_rate": 1e-6, CORRECTION: "sequence_mask"},
        "simpo": SIMPO,
        "sdft": OF_SDFT,
        "gkd": {**OF_GKD, "distill.max_completion_length": 128},
    },
    tables=(TRAINING, LORA, PACKING, OFFLOADING, FSDP, Table(
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
            Row(
                "use_peft",
                "lora",
                {True: None, False: unneeded("off: every parameter is trained")},
                other=lambda _, draft: draft.refuse_value("use_peft"),
            ),
            *warm_up(),
            Row("assistant_only_loss", "data.train_on", {True: "assistant", False: _OFF}),
            Row("completion_only_loss", "data.train_on", {True: "assistant", False: "all"}, unless="assistant_only_loss"),
            Row("lora_target_modules", PATH, other=modules("all-linear")),
            Row("lora_target_parameters", "lora.target_parameters", other=as_names),
            Row("lora_modules_to_save", "lora.modules_to_save", other=as_names),
            *bits("load_in_4bit", "bnb_4bit_quant_type", True),
            switch("load_in_8bit", "quantization", "8bit"),
            Row("bf16", "model.dtype", other=bfloat16),
            Row("packing_strategy", "data.overlong",
                {"bfd_split": "split", "bfd-requeue": "split", "bfd": unneeded("whole sequences are packed, as here")},
                dropped("sequences are packed whole, and never cut"), beside="packing"),
            Row("truncation_mode", "data.overlong", {"keep_start": "truncate"},
                near("truncate", "the end is cut, not the start"), unless="packing"),
            Row("chat_template_path chat_template", "model.chat_template", other=template_file),
        ],
        dropped={
            "loss_type": ("cross-entropy is the only loss", "nll", "chunked_nll"),
            "lora_task_type": ("the task is causal_lm; see task", "CAUSAL_LM"),
            "dataset_mixer": "write each data set into data.train as a source with its split and weight",
            "dataset_splits": "a source has one split; see data.train[…].split",
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
