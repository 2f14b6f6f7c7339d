"""Axolotl's configs: flat YAML, `datasets` as a list of sections with a `type`."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.axolotl_sources import take_data
from kubetune.plugins.importers.by_teacher import OF_GKD
from kubetune.plugins.importers.common.image_keys import say_it_sees
from kubetune.plugins.importers.common.result_keys import TRACKERS, hub_model
from kubetune.plugins.importers.common.schedule_keys import assume_warm_up, schedule, warm_up
from kubetune.plugins.importers.common.source_keys import share
from kubetune.plugins.importers.common.target_keys import PATH, modules
from kubetune.plugins.importers.common.training_keys import (
    FAST_ATTENTION,
    FP8,
    NO_EFFECT,
    NO_STOP,
    OFFLOADING,
    OPTIMIZERS,
    SHUFFLED,
    TRAINING,
    bfloat16,
    fsdp,
    method,
    other_optimizer,
    packing,
    reference,
    template,
    template_file,
)
from kubetune.plugins.importers.engine import (
    OFF,
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
from kubetune.plugins.importers.preference_tuning import SIMPO
from kubetune.plugins.importers.readings import as_list
from kubetune.plugins.importers.servers import CORRECTION
from kubetune.plugins.importers.writing import inline


def _bits(value: Any, draft: Draft) -> Outcome:
    """Take 4 bits of the base, which axolotl has with qlora alone."""
    if value and draft.get("adapter") == "lora":
        why = "axolotl takes 4 bits only with adapter: qlora, and leaves this base as it is; set quantization: 4bit for them"
        return dropped(why)
    return carried("4bit") if value else unneeded("off, as here")


def _batch_size(value: Any, draft: Draft) -> Outcome:
    """Take the batch of one process: accumulation follows from it."""
    micro = draft.get("micro_batch_size") or 1
    if isinstance(value, int) and isinstance(micro, int) and value >= micro:
        return carried(value // micro)
    return dropped("expected a multiple of micro_batch_size; set training.global_batch_size")


def _train_on_inputs(value: Any, draft: Draft) -> Outcome:
    """Train all tokens, or the answers. Of `type: chat_template` axolotl trains what each message says, and no more."""
    if not value:
        return carried("assistant")
    if "chat_template" in inline(draft.get("datasets")):
        return near("all", "the template's own words between messages are trained too")
    return carried("all")


def _plugins(value: Any, _: Draft) -> Outcome:
    """Drop code of the user's own; axolotl's own plugins have keys for what they do."""
    foreign = [str(name) for name in as_list(value) if "axolotl.integrations." not in str(name)]
    if foreign:
        return dropped(f"code of your own is not run: {', '.join(foreign)}")
    return unneeded("what they switch on has keys of its own, each listed")


def _processor(_: Any, draft: Draft) -> Outcome:
    """Take from a processor that the model sees."""
    say_it_sees(draft, draft.at)
    return unneeded("images go through the model's own processor")


def _kd(value: Any, draft: Draft) -> Outcome:
    """Refuse distillation, of which axolotl compares other tokens than kubetune."""
    if value:
        draft.refuse(
            draft.at,
            "is distillation as axolotl does it; write task: distill and its settings by hand",
        )
    return OFF


def _model_type(value: Any, _: Draft) -> Outcome:
    """Take a class of transformers for a model that writes; drop any other."""
    if str(value).endswith(("ForCausalLM", "ForConditionalGeneration", "ForImageTextToText")):
        return unneeded("read from the model's own files")
    return dropped("classifiers are task: sequence_classification; code of your own is not run")


def _finish(draft: Draft) -> None:
    """Switch on each tracker whose project the file names, and write down defaults that depend on other keys."""
    for name, key in _PROJECTS.items():
        if draft.get(key) is not None:
            draft.settings.setdefault(f"tracking.{name}", None)
    if draft.get("adapter") == "qlora":
        draft.assume("quantization", "4bit", "adapter: qlora")
    if draft.get("lora_target_parameters"):
        draft.assume(PATH, [], "the file names tensors alone")
    elif draft.has("lora"):
        draft.assume(PATH, "all-linear", "the file names no module")
    assume_warm_up(draft, "lr_scheduler", 0.03)
    if draft.get("save_strategy") == "steps":
        draft.assume("training.save_steps", 500)


_PROJECTS = {
    "wandb": "wandb_project",
    "trackio": "trackio_project_name",
    "mlflow": "mlflow_experiment_name",
}
_OFF = unneeded("off; the last step is evaluated and saved all the same")
_PER_EPOCH = near(
    "epoch", "or the steps of an epoch (`kubetune plan` shows them) divided by this number"
)
TOOL = Tool(
    name="axolotl",
    marks="base_model sequence_len micro_batch_size datasets adapter val_set_size sample_packing num_epochs "
    "lora_target_linear dataset_prepared_path saves_per_epoch evals_per_epoch",
    first="adapter",
    sources=take_data,
    finish=_finish,
    merged="trl",
    defaults={"data.max_length": 512, "data.packing": False},
    defaults_of={
        "simpo": SIMPO,
        "gkd": OF_GKD,
        # On is TRL's default since 1.16, on which axolotl does not build yet.
        "grpo": {"grpo.use_bias_correction_kl": False, CORRECTION: "sequence_mask"},
    },
    tables=(TRAINING, OFFLOADING, FP8, Table(
        same={
            "model.path": "base_model",
            "model.revision": "revision_of_model model_revision",
            "model.tokenizer": "tokenizer_config",
            "data.max_length": "sequence_len",
            "data.num_proc": "dataset_processes dataset_num_proc",
            "lora.r": "lora_r",
            "lora.alpha": "lora_alpha",
            "lora.dropout": "lora_dropout",
            "training.per_device_train_batch_size": "micro_batch_size",
            "training.per_device_eval_batch_size": "eval_batch_size",
            "training.num_train_epochs": "num_epochs",
            "training.loss_watchdog_threshold": "loss_watchdog_threshold",
            "training.loss_watchdog_patience": "loss_watchdog_patience",
            "tracking.trackio.project": "trackio_project_name",
            "tracking.mlflow.experiment": "mlflow_experiment_name",
            "tracking.mlflow.uri": "mlflow_tracking_uri",
            "tracking.mlflow.log_model": "hf_mlflow_log_artifacts",
        },
        rows=[
            # The model and its numbers.
            *[switch(name, "model.dtype", name) for name in ("float32", "float16", "bfloat16")],
            Row("bf16", "model.dtype", other=bfloat16),
            switch("local_files_only", "model.local_files_only"),
            method("adapter"),
            fsdp("fsdp fsdp_config fsdp_version dp_shard_size"),
            Row("load_in_4bit", "quantization", other=_bits),
            switch("load_in_8bit", "quantization", "8bit"),
            # Data.
            Row("sample_packing", "data.packing", other=packing),
            Row("excess_length_strategy", "data.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"},
                dropped("kubetune has drop, truncate and raise")),
            Row("train_on_inputs", "data.train_on", other=_train_on_inputs),
            Row("val_set_size", "data.eval", other=share),
            # Training.
            Row("batch_size", "training.gradient_accumulation_steps", other=_batch_size),
            Row("early_stopping_patience", "training.early_stopping_patience", {0: NO_STOP}),
            # Where one is true, it says the kind of learning.
            Row("reward_model process_reward_model", values={False: OFF}),
            Row("save_total_limit", "training.save_total_limit", {0: unneeded("axolotl keeps 4")}),
            Row("optimizer", "training.optim", OPTIMIZERS, other_optimizer),
            schedule("lr_scheduler"),
            *warm_up("lr_scheduler", is_axolotl=True),
            Row("evals_per_epoch", "training.eval_steps", {0: _OFF, 1: "epoch"}, _PER_EPOCH),
            Row("saves_per_epoch", "training.save_steps", {0: _OFF, 1: "epoch"}, _PER_EPOCH),
            Row("chat_template", "model.chat_template", other=template),
            Row("chat_template_jinja", "model.chat_template", other=template_file),
            Row("gradient_checkpointing", "training.gradient_checkpointing", {True: True, False: False},
                near(True, "activations are recomputed, and not moved to the host")),
            # Adapters.
            Row("lora_target_linear", PATH, {False: unneeded("off: the modules that are named get adapters")},
                carried("all-linear")),
            Row("lora_target_modules", PATH, other=modules("all-linear", all_if="lora_target_linear")),
            Row("lora_modules_to_save", "lora.modules_to_save", other=as_names),
            Row("lora_target_parameters", "lora.target_parameters", other=as_names),
            switch("peft_use_dora", "lora.use_dora"),
            switch("peft_use_rslora", "lora.use_rslora"),
            # It uploads without push_to_hub.
            Row("hub_model_id", "push.repo", other=hub_model),
            # Trackers, which axolotl switches on one by one.
            switch("use_tensorboard", "tracking.tensorboard"),
            *[switch(f"use_{name}", f"tracking.{name}", None) for name in TRACKERS],
            # Nothing of ours is set, but a value may mean more than is done here.
            Row("base_model_config", other=reference),
            Row("plugins", other=_plugins),
            Row("model_type", other=_model_type),
            Row("processor_type", other=_processor),
            Row("kd_trainer", other=_kd),
        ],
        dropped={
            "shuffle_merged_datasets": (SHUFFLED, True),
            "pretraining_dataset": "datasets are given as well; write both into data.train",
            "special_tokens": "tokens are the tokenizer's own; padding needs none, since nothing is padded",
            "resize_token_embeddings_to_32x": ("the vocabulary is not extended", False),
            "model_config": "the model's config is used as it is",
            "eot_tokens": "an answer ends where the tokenizer's chat template ends it",
            "roles_to_train": "answers of the assistant are trained, or everything (data.train_on)",
            "cosine_min_lr_ratio cosine_constant_lr_ratio": ("the cosine ends at 0, with the last step", 0),
            "dataset_exact_deduplication": ("`kubetune data check` counts repeated rows; none is left out", False),
            "image_size": "images keep their shape; vision.image_max_tokens limits their size",
            "push_dataset_to_hub": "prepared data stay on the machine",
        },
        unneeded={
            "trl": "its keys are listed by name",
            "eager_attention flex_attention": FAST_ATTENTION,
            "hf_use_auth_token": "a token is taken from the environment (HF_TOKEN), never from a file",
            "fp8_enable_fsdp_float8_all_gather": "FSDP and fp8 are not combined",
            "skip_prepare_dataset": "images are read while training, tokens are prepared",
            "tokenizer_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model tokenizer_use_fast":
                "read from the model's and the tokenizer's own files",
            "strict dataset_prepared_path pad_to_sequence_len eval_sample_packing lora_fan_in_fan_out "
            "low_cpu_mem_usage eval_table_size eval_max_new_tokens save_first_step "
            "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv "
            "torchdistx_path experimental_skip_move_to_device debug": NO_EFFECT,
            "liger_rope liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm "
            "liger_use_token_scaling liger_fused_linear_cross_entropy liger_cross_entropy lora_mlp_kernel "
            "lora_qkv_kernel lora_o_kernel lora_embedding_kernel cut_cross_entropy unsloth_cross_entropy_loss "
            "use_kernels use_scattermoe use_sonicmoe experts_implementation fused_attn_kernel "
            "gemma4_hybrid_attn_impl flex_attn_compile_kwargs tiled_mlp":
                "kubetune uses its own fused parts where they are proved equal",
        },
    )),
)  # fmt: skip
