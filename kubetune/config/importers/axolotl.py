"""Axolotl's configs: flat YAML, `datasets` as a list of sections with a `type`."""

from __future__ import annotations

from typing import Any

from kubetune.config.importers.common import (
    TRAINING,
    fp8,
    modules,
    names,
    optimizer,
    pin_fsdp,
    run_name,
    schedule,
    share,
    warmup_steps,
)
from kubetune.config.importers.draft import Draft, Note, Rule, as_flag, choice, dropped, each, flag, same, unneeded

NAME = "axolotl"
MARKS = (
    "base_model", "sequence_len", "micro_batch_size", "datasets", "adapter", "val_set_size", "sample_packing",
    "num_epochs", "lora_target_linear", "dataset_prepared_path", "saves_per_epoch", "evals_per_epoch",
)  # fmt: skip
"""Keys that no other tool has, or that are typical."""

_TYPES = {
    "alpaca": "alpaca",
    "completion": "text",
    "pretrain": "text",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
}
_ADAPTER_KEYS = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save peft_use_dora "
    "peft_use_rslora load_in_4bit load_in_8bit"
).split()
_SOURCE_KEYS = {
    "path",
    "type",
    "split",
    "name",
    "ds_type",
    "data_files",
    "field",
    "field_messages",
    "trust_remote_code",
}
_HARMLESS = {"ds_type", "trust_remote_code", "chat_template", "preprocess_shards", "message_property_mappings"}


def convert(draft: Draft) -> None:
    """Fill in the draft."""
    _method(draft)
    _data(draft)
    if draft.take("lora_target_linear"):
        draft.carry("lora_target_linear", "lora.target_modules", "all-linear")
    pin_fsdp(draft, "fsdp", "fsdp_config", "fsdp_version", "dp_shard_size")
    later = draft.take("fp8")
    draft.apply(RULES)
    if later is not None:
        fp8(draft, "fp8", later)
    draft.assume("data.max_length", 512)
    draft.assume("data.packing", False)
    if draft.has("lora.r") and not draft.has("lora.target_modules"):
        draft.assume("lora.target_modules", "all-linear", "no module is named")


def _method(draft: Draft) -> None:
    adapter = draft.take("adapter")
    if adapter in ("lora", "qlora"):
        draft.carry("adapter", "lora", None)
    elif adapter is not None:
        draft.approximate("adapter", "lora", None, f"{adapter} is not there, LoRA is")
    else:
        for key in _ADAPTER_KEYS:
            if draft.take(key):
                draft.unneeded(key, "says nothing without `adapter`, there as here")
        return
    if adapter == "qlora" and not as_flag(draft.given.get("load_in_8bit")):
        draft.carry("adapter", "quantization", "4bit")


def _data(draft: Draft) -> None:
    given = draft.take("datasets") or draft.take("pretraining_dataset")
    key = "datasets" if draft.given.get("datasets") else "pretraining_dataset"
    if given is not None:
        given = given if isinstance(given, list) else [given]
        draft.carry(key, "data.train", [_source(draft, f"{key}[{i}]", item) for i, item in enumerate(given)])
    tests = draft.take("test_datasets")
    if tests is not None:
        sources = [_source(draft, f"test_datasets[{i}]", item) for i, item in enumerate(tests)]
        draft.carry("test_datasets", "data.eval", sources)
        if draft.take("val_set_size"):
            draft.unneeded("val_set_size", "test_datasets are given")


def _source(draft: Draft, key: str, item: Any) -> Any:
    if not isinstance(item, dict):
        return {"path": str(item)}
    files = item.get("data_files")
    generic = item.get("path") in ("json", "csv", "parquet", "text", None)
    source: dict[str, Any] = {"path": str(item.get("path"))}
    if files is not None:
        first, *more = files if isinstance(files, list) else [files]
        source["path"] = str(first) if generic else source["path"]
        if more or not generic:
            draft.drop(f"{key}.data_files", f"one file or pattern a source: {files}; write a source for each file")
    kind = item.get("type")
    if isinstance(kind, dict):
        _own_type(draft, key, kind, source)
    elif kind is not None:
        family = str(kind).split(".")[0].split(":")[0]
        if family in _TYPES and str(kind) == family:
            source["format"] = _TYPES[family]
            if family == "alpaca":
                why = "the model's chat template is used, not Alpaca's `### Instruction` text"
                draft.notes.append(Note("approximated", f"{key}.type", kind, f"format: alpaca; {why}"))
        else:
            draft.drop(f"{key}.type", f"{kind}: kubetune looks at the records and recognises their shape, or says so")
    if item.get("name"):
        source["subset"] = item["name"]
    if item.get("split") not in (None, "train"):
        source["split"] = item["split"]
    if source.get("format") == "messages":
        field = item.get("field_messages") or "messages"
        if field != "messages":
            source["columns"] = {"messages": field}
        mapped = item.get("message_property_mappings") or {}
        role = mapped.get("role") or item.get("message_field_role")
        if role == "from":
            source["format"] = "sharegpt"
            source.pop("columns", None)
            if field != "conversations":
                source["columns"] = {"conversations": field}
        elif role not in (None, "role"):
            draft.drop(f"{key}.message_property_mappings", f"messages need `role` and `content`, found {mapped}")
    if item.get("field") and source.get("format") == "text" and item["field"] != "text":
        source["columns"] = {"text": item["field"]}
    for name, value in item.items():
        if name not in _SOURCE_KEYS | _HARMLESS and value not in (None, "", [], {}, False):
            known = name in ("message_field_role", "message_field_content")
            if not known:
                draft.drop(f"{key}.{name}", "sources have no such setting")
    return source


def _own_type(draft: Draft, key: str, kind: dict[str, Any], source: dict[str, Any]) -> None:
    """A prompt format written out: our nearest is a prompt and a completion, as they stand in the data."""
    names_ = {"prompt": kind.get("field_instruction"), "completion": kind.get("field_output")}
    columns = {ours: theirs for ours, theirs in names_.items() if theirs and theirs != ours}
    source["format"] = "prompt_completion"
    if columns:
        source["columns"] = columns
    rest = ", ".join(name for name in kind if name not in ("field_instruction", "field_output"))
    draft.drop(f"{key}.type", f"prompt formats are the chat template's, or the data's own; left out: {rest or 'none'}")


def _per_epoch(path: str, other: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        if other in draft.given and draft.given[other] is not None:
            draft.unneeded(key, f"{other} is given")
        elif value == 1:
            draft.carry(key, path, "epoch")
        elif as_flag(value) is False or value == 0:
            draft.unneeded(key, "off; the last step is evaluated and saved all the same")
        else:
            draft.approximate(
                key, path, "epoch", f"or the steps of an epoch (`kubetune plan` shows them) divided by {value}"
            )

    return rule


def _rate(draft: Draft, key: str, value: Any) -> None:
    draft.carry(key, "training.learning_rate", float(value))


_KERNEL = unneeded("kubetune uses its own fused parts where they are proved equal")
_TRACKER = dropped("W&B and the like are not there; TensorBoard and MLflow are (tracking)")

RULES: dict[str, Rule] = {
    **TRAINING,
    "base_model": same("model.path"),
    "revision_of_model": same("model.revision"),
    "batch_size": unneeded("micro_batch_size and gradient_accumulation_steps say it too"),
    "adam_eps": same("training.adam_epsilon"),
    "base_model_config": unneeded("comes with the model"),
    "tokenizer_config": same("model.tokenizer"),
    "sequence_len": same("data.max_length"),
    "sample_packing": same("data.packing"),
    "excess_length_strategy": choice("data.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"}),
    "train_on_inputs": choice("data.train_on", {True: "all", False: "assistant"}),
    "val_set_size": share,
    "micro_batch_size": same("training.per_device_train_batch_size"),
    "eval_batch_size": same("training.per_device_eval_batch_size"),
    "num_epochs": same("training.num_train_epochs"),
    "learning_rate": _rate,
    "optimizer": optimizer,
    "lr_scheduler": schedule,
    "warmup_steps": warmup_steps,
    "evals_per_epoch": _per_epoch("training.eval_steps", "eval_steps"),
    "saves_per_epoch": _per_epoch("training.save_steps", "save_steps"),
    "bf16": choice("model.dtype", {True: "bfloat16", "auto": "auto", "full": "bfloat16", False: "auto"}),
    "fp16": flag("model.dtype", "float16"),
    "float16": flag("model.dtype", "float16"),
    "bfloat16": flag("model.dtype", "bfloat16"),
    "lora_r": same("lora.r"),
    "lora_alpha": same("lora.alpha"),
    "lora_dropout": same("lora.dropout"),
    "lora_target_modules": modules,
    "lora_modules_to_save": names("lora.modules_to_save"),
    "peft_use_dora": flag("lora.use_dora", True),
    "peft_use_rslora": flag("lora.use_rslora", True),
    "load_in_4bit": flag("quantization", "4bit"),
    "load_in_8bit": flag("quantization", "8bit"),
    "use_tensorboard": flag("tracking.tensorboard", True),
    "mlflow_experiment_name": same("tracking.mlflow.experiment"),
    "mlflow_tracking_uri": same("tracking.mlflow.uri"),
    "wandb_name": run_name,
    "dataset_processes": same("data.num_proc"),
    "chat_template_jinja": dropped("write the template into a file and name it in model.chat_template"),
    "special_tokens": dropped("tokens are the tokenizer's own; padding needs none, since nothing is padded"),
    "tokens": dropped("the vocabulary is not extended"),
    "added_tokens_overrides": dropped("the vocabulary is not extended"),
    "gradient_checkpointing": choice(
        "training.gradient_checkpointing",
        {True: True, False: False},
        True,
        "activations are recomputed, and not moved to the host",
    ),
    "loss_watchdog_threshold": unneeded("a run ends before weights are spoilt by a loss that is not finite"),
    "loss_watchdog_patience": unneeded("a run ends before weights are spoilt by a loss that is not finite"),
    "local_files_only": flag("model.local_files_only", True),
    "lora_model_dir": dropped("training does not begin from an adapter; merge it into the model first"),
    "model_config": dropped("the model's config is used as it is"),
    "eot_tokens": dropped("an answer ends where the tokenizer's chat template ends it"),
    "roles_to_train": dropped("answers of the assistant are trained, or everything (data.train_on)"),
    "unfrozen_parameters": dropped("either adapters or every parameter is trained"),
    **each(
        "quantize_moe_experts gptq qat model_quantization_config", dropped("the base is quantised by `quantization`")
    ),
    **each("cosine_min_lr_ratio cosine_constant_lr_ratio", dropped("the cosine ends at 0, with the last step")),
    "hf_use_auth_token": unneeded("a token is taken from the environment (HF_TOKEN), never from a file"),
    **each("fp8_enable_fsdp_float8_all_gather", unneeded("FSDP and fp8 are not combined")),
    "resize_token_embeddings_to_32x": dropped("the vocabulary is not extended"),
    "dataset_exact_deduplication": dropped("`kubetune data check` counts repeated rows; none is left out"),
    **each("use_ray ray_num_workers", dropped("several nodes: see compute.nodes and `kubetune submit`")),
    "activation_offloading": dropped("activations are recomputed (gradient_checkpointing), not moved to the host"),
    "lora_target_parameters": dropped("adapters sit on linear layers; experts kept as one parameter get none"),
    "plugins": unneeded("kubetune has no plugins; what they switch on has keys of its own, each listed here"),
    "processor_type": lambda draft, key, value: draft.carry(key, "task", "vision_language"),
    "skip_prepare_dataset": unneeded("images are read while training, tokens are prepared"),
    "image_size": dropped("images keep their shape; vision.image_max_tokens limits their size"),
    **each(
        "model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model "
        "tokenizer_use_fast tokenizer_use_mistral_common tokenizer_legacy chat_template",
        unneeded("read from the model's and the tokenizer's own files"),
    ),
    **each(
        "strict dataset_prepared_path pad_to_sequence_len eval_sample_packing lora_fan_in_fan_out "
        "low_cpu_mem_usage eval_table_size eval_max_new_tokens save_first_step early_stopping "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv gptq_groupsize "
        "gptq_model_v1 torchdistx_path experimental_skip_move_to_device max_packed_sequence_len "
        "shuffle_merged_datasets use_otel_metrics debug",
        unneeded("has no counterpart, and no effect on the result"),
    ),
    **each(
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm liger_use_token_scaling "
        "liger_fused_linear_cross_entropy liger_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel cut_cross_entropy unsloth_cross_entropy_loss use_kernels use_scattermoe use_sonicmoe "
        "experts_implementation fused_attn_kernel gemma4_hybrid_attn_impl flex_attn_compile_kwargs tiled_mlp",
        _KERNEL,
    ),
    **each(
        "wandb_project wandb_entity wandb_watch wandb_log_model wandb_run_id comet_project_name swanlab_project "
        "use_wandb trackio_project_name trackio_run_name push_dataset_to_hub",
        _TRACKER,
    ),
    **each(
        "context_parallel_size sequence_parallel_degree tensor_parallel_size expert_parallel_size dp_replicate_size",
        lambda draft, key, value: (
            draft.unneeded(key, "off, as here")
            if value == 1
            else draft.drop(key, "no splitting along a sequence or layer, and none into groups of GPUs")
        ),
    ),
}
