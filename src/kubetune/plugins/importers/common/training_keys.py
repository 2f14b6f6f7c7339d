"""Conversions of values that several tools share, and the table of Hugging Face's TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubetune.plugins.importers.common.image_keys import MODELS
from kubetune.plugins.importers.common.result_keys import (
    hub_model,
    push,
    remote_code,
    run_name,
    trackers,
)
from kubetune.plugins.importers.common.schedule_keys import every, schedule, strategy
from kubetune.plugins.importers.engine import (
    OFF,
    Draft,
    Outcome,
    Row,
    Rule,
    Table,
    carried,
    dropped,
    near,
    switch,
    unneeded,
)

NO_EFFECT = "has no counterpart, and no effect on the result"
NO_STOP = unneeded("the run goes on to its end, as here")
FAST_ATTENTION = "kubetune chooses the fastest attention that its self-check proves exact"
FUSED = "fused kernels are used where they are proved equal"
SHUFFLED = "rows are shuffled, each epoch anew"
_DAY = 24 * 3600
_OWN_TEMPLATE = (
    "prompts are written by the tokenizer's own chat template. If that is another one, write this one into a Jinja "
    "file and name it in model.chat_template (`chatml` is built in); `kubetune data check` shows what is trained"
)
_NOT_PAGED = "the optimizer's state is not paged to the host"
# What a step's samples are counted from.
STEP = (
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "compute.processes",
    "compute.nodes",
)
# Ours for the names of transformers and bitsandbytes.
OPTIMIZERS: dict[str, Any] = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit", "paged_adamw": near("adamw", _NOT_PAGED),
    "paged_adamw_32bit": near("adamw", _NOT_PAGED), "paged_adamw_8bit": near("adamw_8bit", _NOT_PAGED),
}  # fmt: skip


def method(key: str) -> Row:
    """Return the row of the key that chooses LoRA or every parameter."""
    full = unneeded("without a `lora` section every parameter is trained")
    values = {"full": full, "lora": None, "qlora": None}
    return Row(
        key, "lora", values, lambda value, _: near(None, f"kubetune has no {value}; LoRA is used")
    )


def bits(key: str, kind: str, four: Any) -> tuple[Row, Row]:
    """Return two rows: how many bits the base has (4 if the key has the value `four`), and which kind of 4 bits."""

    def rule(value: Any, draft: Draft) -> Outcome:
        if value != four:
            return dropped("kubetune has 4 and 8 bits")
        return carried("fp4" if draft.get(kind) == "fp4" else "4bit")

    known = unneeded(f"says which 4 bits {key} means")
    return (
        Row(key, "quantization", {8: "8bit", False: unneeded("not quantised, as here")}, rule),
        Row(kind, values={"nf4": known, "fp4": known}, other=dropped("kubetune has nf4 and fp4")),
    )


def fsdp(keys: str) -> Row:
    """Return the row of whatever switches sharding on, which is FSDP2 here, of any kind."""
    off = unneeded("each GPU holds the model, as here")
    return Row(keys, "training.parallelism", {False: off}, carried("fsdp"))


def template(value: Any, draft: Draft) -> Outcome:
    """Take a chat template by its name; `chatml` is, letter for letter, built in here."""
    name = str(value)
    # axolotl's words for the tokenizer's own.
    if name.startswith(("tokenizer_default", "tokenizer-default")):
        return unneeded("the tokenizer's own; where it has none, name one in model.chat_template")
    if name == "chatml":
        return carried(name)
    if name == "jinja" and draft.get("chat_template_jinja"):
        return unneeded("chat_template_jinja says which")
    return dropped(f"a template of {draft.tool.name}'s own: {_OWN_TEMPLATE}")


def template_file(value: Any, _: Draft) -> Outcome:
    """Carry a file with a template; a template that is in the config itself is to be written into one."""
    text = str(value)
    if "{" in text:
        return dropped("write the template into a file and name it in model.chat_template")
    if text.endswith((".jinja", ".jinja2", ".j2")) and "\n" not in text:
        return carried(text)
    return dropped(
        f"the template of {Path(text).name}: write it into a Jinja file; {_OWN_TEMPLATE}"
    )


def numbers(
    of: Callable[[Any], Any], other: Outcome, least: float = 1, most: float = float("inf")
) -> Rule:
    """Return the rule that carries numbers within limits, as `of` makes them; anything else becomes `other`."""

    def rule(value: Any, _: Draft) -> Outcome:
        is_number = isinstance(value, (int, float)) and least <= value <= most
        return carried(of(value)) if is_number else other

    return rule


def count(keys: str, path: str) -> Row:
    """Return the row of a number that a script may leave to its shell."""
    return Row(keys, path, other=numbers(int, dropped(f"a shell variable; set {path}"), least=0))


def other_optimizer(value: Any, draft: Draft) -> Outcome:
    """Take AdamW for an optimizer that is not there."""
    if not isinstance(value, str):
        draft.refuse_value(draft.at)
    return near("adamw", f"kubetune has no {value}; choose the learning rate anew for AdamW")


def bfloat16(value: Any, draft: Draft) -> Outcome:
    """Take bfloat16. Switched off, with no other kind named, it means float32 to axolotl and TRL."""
    kinds = ("fp16", "float16", "bfloat16", "dtype", "torch_dtype", "load_in_8bit")
    if not value and not any(draft.get(kind) for kind in kinds):
        return carried("float32")
    return _BF16.outcome(value, draft)


def packing(value: Any, draft: Draft) -> Outcome:
    """Take packed rows. The tools pack before they batch, so a batch counts full rows, and so it does here."""
    if not value:
        return carried(False)
    path = "training.global_batch_tokens"
    draft.assume(path, "packed", f"{draft.tool.name} counts packed rows, not samples")
    draft.comments[path] = "full rows of data.max_length are counted, as in the file"
    return carried(
        True, f"data.packing: true, and {path}: packed; a step holds as many tokens as the tool's"
    )


def reference(value: Any, draft: Draft) -> Outcome:
    """Take a model or config that is the base itself; drop any other."""
    if value in [draft.get(key) for key in MODELS]:
        return unneeded("the same model")
    return dropped("the reference is the model before training; no other model can be named")


def loss(keys: str, path: str, known: Mapping[str, str]) -> Row:
    """Return the row of a loss by its name, ours for each of theirs. Any other is refused."""

    def rule(value: Any, draft: Draft) -> Outcome:
        name = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(name, str) or name not in known:
            why = f"{value} is a loss that kubetune does not have; expected {', '.join(known)}"
            draft.refuse(draft.at, why)
        return carried(known[name])

    return Row(keys, path, other=rule)


_BF16 = Row(
    "bf16",
    "model.dtype",
    {
        True: "bfloat16",
        "auto": "auto",
        False: unneeded("off; another setting says the kind of numbers, or the model does"),
    },
    carried("bfloat16"),
)
# Keys of TrainingArguments, under their own names, and what scripts and configs of all tools say of trackers.
TRAINING = Table(
    same={
        **{
            f"training.{name}": name
            for name in (
                "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "weight_decay",
                "gradient_checkpointing", "per_device_eval_batch_size", "learning_rate", "max_grad_norm", "adam_beta1",
                "adam_beta2", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "seed",
            )
        },
        "training.adam_epsilon": "adam_epsilon adam_eps",
        "output": "output_dir",
        "push.private": "hub_private_repo",
        "tracking.wandb.project": "wandb_project WANDB_PROJECT",
        "tracking.wandb.entity": "wandb_entity WANDB_ENTITY",
        "tracking.wandb.group": "wandb_run_group WANDB_RUN_GROUP",
        "tracking.mlflow.experiment": "MLFLOW_EXPERIMENT_NAME",
        "tracking.mlflow.uri": "MLFLOW_TRACKING_URI",
        "tracking.trackio.project": "project",
        "tracking.trackio.space_id": "trackio_space_id",
    },
    rows=[
        Row("dtype torch_dtype", "model.dtype", {name: name for name in ("auto", "bfloat16", "float16", "float32")},
            dropped("kubetune has auto, bfloat16, float16 and float32")),
        Row("max_steps", "training.max_steps", dict.fromkeys((-1, 0), unneeded("off: epochs decide"))),
        Row("save_total_limit", "training.save_total_limit",
            other=numbers(int, near(1000, "the tool keeps all, kubetune the newest thousand"))),
        switch("use_cpu no_cuda", "compute.gpus_per_node", 0),
        Row("logging_steps", "training.logging_steps", {0: dropped("expected 1 or more; kubetune logs every 10 steps")},
            numbers(int, near(10, "a share of all steps in the tool, a number of steps in kubetune"))),
        every("eval"),
        every("save"),
        strategy("save_strategy", "training.save_steps", "the last step is saved, and each epoch's,"),
        strategy("eval_strategy evaluation_strategy", "training.eval_steps", "what data.eval holds out is evaluated"),
        Row("optim", "training.optim", OPTIMIZERS, other_optimizer),
        schedule("lr_scheduler_type"),
        _BF16,
        switch("fp16", "model.dtype", "float16"),
        # Names and trackers.
        Row("run_name wandb_name WANDB_NAME wandb_exp_name mlflow_run_name trackio_run_name", "name", other=run_name),
        Row("report_to", other=trackers),
        Row("wandb_mode WANDB_MODE", "tracking.wandb.mode", {"online": "online", "offline": "offline"},
            dropped("online or offline; take tracking.wandb out to leave it off")),
        Row("wandb_log_model WANDB_LOG_MODEL", "tracking.wandb.log_model",
            {True: True, "end": True, "checkpoint": True, False: False}, dropped("true, end, checkpoint or false")),
        # Processes, starts and ends.
        count("NPROC_PER_NODE", "compute.processes"),
        count("NNODES", "compute.nodes"),
        Row("trust_remote_code", "model.trust_remote_code", {False: OFF}, remote_code),
        # The enormous patience that the tools' examples set would hide a hanging run for years.
        Row("ddp_timeout", "training.timeout_seconds",
            other=numbers(float, unneeded("data are prepared before the ranks meet, so no such patience is needed"),
                          most=_DAY)),
        Row("resume_from_checkpoint auto_resume_from_checkpoints",
            values=dict.fromkeys((True, False), unneeded("a run goes on from its newest good checkpoint by itself")),
            other=dropped("a run goes on from its own newest checkpoint; merge another's result into the model first")),
        Row("push_to_hub", values={False: OFF}, other=push),
        Row("hub_model_id", "push.repo", other=hub_model, beside="push_to_hub"),
    ],
    dropped={
        "hub_strategy": ("the best is uploaded once, after a good end", "end"),
        "average_tokens_across_devices": ("one divisor for the whole global batch", True),
        "do_train": ("a run trains; see `kubetune evaluate`", True),
        "streaming dataset_streaming": ("data are prepared once, into files that need no memory", False),
        "use_swanlab use_comet": ("kubetune has other trackers (tracking)", False),
        "wandb_run_id": "a run's id follows from its directory, so that each start goes on with it",
        "wandb_watch WANDB_WATCH": ("gradients and weights are not sent; their norm is", False),
        "label_smoothing_factor": ("kubetune has no label smoothing", 0),
        "auto_find_batch_size": ("`kubetune plan` and training.preflight say what fits", False),
        "data_seed": "training.seed decides the order of the data too",
        "dataloader_drop_last": ("the last step of an epoch takes the samples that are left", False),
        "do_predict": ("see `kubetune generate`", False),
        "lr_scheduler_kwargs": "schedules have no settings of their own",
        "optim_args": "AdamW's settings are training.adam_beta1, adam_beta2 and adam_epsilon",
        "deepspeed": "use training.parallelism: auto where the model does not fit one GPU",
    },
    unneeded={
        "tf32": "matrix products of float32 use TF32 where the GPU has it",
        "load_best_model_at_end": "`best` is a link to the best checkpoint, `last` to the last",
        "use_liger_kernel": FUSED,
        "group_by_length": "it saves padding, and nothing is padded here",
        "attn_implementation flash_attn flash_attention sdp_attention xformers_attention attn_impl": FAST_ATTENTION,
        "gradient_checkpointing_kwargs dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor remove_unused_columns overwrite_output_dir overwrite_cache do_eval "
        "logging_first_step logging_dir save_safetensors save_only_model ddp_find_unused_parameters disable_tqdm "
        "log_level include_num_input_tokens_seen include_tokens_per_second plot_loss local_rank "
        "prediction_loss_only torch_compile torch_compile_mode torch_compile_backend use_cache ddp_backend "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph dataloader_in_order eval_accumulation_steps "
        "dataloader_multiprocessing_context log_on_each_node save_on_each_node logging_nan_inf_filter "
        "torch_empty_cache_steps logging_strategy log_level_replica skip_memory_metrics": NO_EFFECT,
    },
)  # fmt: skip

# What some tools have, and not all of them.
REFERENCE_STAYS: dict[str, Any] = {
    "sync_ref_model": ("the reference stays as it is", False),
    "ref_model_mixup_alpha ref_model_sync_steps": "the reference stays as it is",
}
LORA = Table(rows=[switch("use_rslora", "lora.use_rslora"), switch("use_dora", "lora.use_dora")])
FP8 = Table(
    dropped={"fp8": ("set training.fp8, which is for LoRA without dropout on a whole base", False)}
)
FSDP = Table(rows=[fsdp("fsdp fsdp_config")])
PACKING = Table(
    rows=[Row("packing", "data.packing", other=packing)],
    unneeded={"padding_free": "nothing is padded here either way"},
)
OFFLOADING = Table(
    dropped={
        "activation_offloading": (
            "activations are recomputed (gradient_checkpointing), not moved to the host", False
        )
    }
)  # fmt: skip
