"""Axolotl's configs: flat YAML, `datasets` as a list of sections with a `type`."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers import common
from kubetune.plugins.importers.draft import (
    Draft,
    Note,
    Rule,
    always,
    as_flag,
    as_list,
    choice,
    dropped,
    each,
    flag,
    only,
    rule_with,
    same,
    unneeded,
)
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template, template_file
from kubetune.plugins.importers.targets import of_axolotl
from kubetune.plugins.importers.warm_up import OF_AXOLOTL, warm_up
from kubetune.plugins.importers.writing import inline

NAME = "axolotl"
MARKS = (
    "base_model", "sequence_len", "micro_batch_size", "datasets", "adapter", "val_set_size", "sample_packing",
    "num_epochs", "lora_target_linear", "dataset_prepared_path", "saves_per_epoch", "evals_per_epoch",
)  # fmt: skip
"""Keys that no other tool has, or that are typical."""

_TYPES = {
    "alpaca": "alpaca", "completion": "text", "pretrain": "text", "chat_template": "messages", "sharegpt": "sharegpt"
}  # fmt: skip
_ADAPTER_KEYS = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_target_parameters "
    "lora_modules_to_save peft_use_dora "
    "peft_use_rslora load_in_4bit load_in_8bit"
).split()
_SOURCE_KEYS = {
    "path",
    "type",
    "split",
    "name",
    "data_files",
    "field",
    "text_column",
    "field_messages",
}
_SOURCE_KEYS |= {"message_property_mappings", "message_field_role", "message_field_content"}
_TEMPLATE_KEYS = ("chat_template", "chat_template_jinja")
_HARMLESS = {
    "ds_type": "the kind of a file is seen from its name",
    "trust_remote_code": "no code comes with data sets any more",
    "preprocess_shards": "data are read in pieces by themselves",
}


def convert(draft: Draft) -> None:
    """Fill in the draft."""
    _method(draft)
    _templates(draft)
    _data(draft)
    if ("lora",) in draft.settings:
        of_axolotl(draft)
    common.pin_fsdp(draft, "fsdp", "fsdp_config", "fsdp_version", "dp_shard_size")
    _saves(draft)
    warm_up(draft, OF_AXOLOTL)
    draft.apply(RULES)
    draft.assume("data.max_length", 512)
    draft.assume("data.packing", False)


def _method(draft: Draft) -> None:
    adapter = draft.take("adapter")
    if adapter in ("lora", "qlora"):
        draft.carry("adapter", "lora", None)
    elif adapter is not None:
        draft.approximate("adapter", "lora", None, f"{adapter} is not there, LoRA is")
    else:
        for key in ("load_in_4bit", "load_in_8bit"):
            if as_flag(draft.given.get(key)):
                draft.refuse(
                    key,
                    "without `adapter`, which axolotl refuses too, since a quantised base is not trained itself; "
                    "expected adapter: qlora or lora, or no quantisation",
                )
        for key in _ADAPTER_KEYS:
            if as_flag(draft.take(key)):
                draft.drop(
                    key,
                    "no `adapter` is named, so every parameter is trained, there as here; for LoRA: lora: true",
                )
        return
    if adapter in ("lora", "qlora"):
        _bits(draft, adapter)


def _bits(draft: Draft, adapter: str) -> None:
    """Take the bits of the base, which depend on the adapter: 4 for qlora alone, 8 for lora alone."""
    four = as_flag(draft.take("load_in_4bit"))
    eight = as_flag(draft.take("load_in_8bit"))
    if adapter == "qlora":
        if eight:
            draft.refuse("load_in_8bit", "axolotl refuses it beside adapter: qlora")
        if not four:
            draft.refuse("adapter", "axolotl asks for load_in_4bit: true beside qlora")
        draft.carry("load_in_4bit", "quantization", "4bit")
    elif four:
        why = "4 bits need adapter: qlora there, so axolotl leaves the base as it is; here: quantization: 4bit"
        draft.drop("load_in_4bit", why)
    if adapter == "lora" and eight:
        draft.carry("load_in_8bit", "quantization", "8bit")
    for key, value in (("load_in_4bit", four), ("load_in_8bit", eight)):
        if value is False:
            draft.unneeded(key, "off, as here")


def _templates(draft: Draft) -> None:
    """One chat template for the run: the file's, or that on which all its sources agree."""
    top = {key: draft.take(key) for key in _TEMPLATE_KEYS}
    found: list[tuple[str, str, Any]] = []
    for listed in ("datasets", "test_datasets"):
        for number, item in enumerate(as_sections(draft.given.get(listed))):
            own = [
                (f"{listed}[{number}].{key}", key, item[key])
                for key in _TEMPLATE_KEYS
                if item.get(key)
            ]
            found += own
    said = [(key, key, value) for key, value in top.items() if value is not None]
    chosen = {
        key: {str(value) for _, kind, value in found or said if kind == key}
        for key in _TEMPLATE_KEYS
    }
    for name, kind, value in [*said, *found]:
        if len(chosen[kind]) > 1 or (found and str(value) not in chosen[kind]):
            draft.drop(
                name,
                "the file and its sources name different ones; a run has one: model.chat_template",
            )
        elif kind == "chat_template_jinja":
            template_file(draft, name, value)
        elif value == "jinja":
            draft.unneeded(name, "chat_template_jinja says which")
        else:
            template(("chatml",))(draft, name, value)


def as_sections(value: Any) -> list[dict[str, Any]]:
    """Sources that are sections; one by itself counts as a list of one."""
    return [
        item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)
    ]


def _data(draft: Draft) -> None:
    given = draft.take("datasets") or draft.take("pretraining_dataset")
    key = "datasets" if draft.given.get("datasets") else "pretraining_dataset"
    if given is not None:
        given = given if isinstance(given, list) else [given]
        sources = [_source(draft, f"{key}[{i}]", item) for i, item in enumerate(given)]
        if key == "pretraining_dataset":
            sources = [{"format": "text"} | source for source in sources]
        draft.carry(key, "data.train", sources)
    tests = draft.take("test_datasets")
    if tests is not None:
        sources = [_source(draft, f"test_datasets[{i}]", item) for i, item in enumerate(tests)]
        draft.carry("test_datasets", "data.eval", sources)


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
            draft.drop(
                f"{key}.data_files",
                f"one file or pattern a source: {files}; write a source for each file",
            )
    kind = item.get("type")
    if is_preferred(draft):
        _answers(draft, key, item, source)
    elif isinstance(kind, dict):
        _own_type(draft, key, kind, source)
    elif kind is not None:
        family = str(kind).split(".")[0].split(":")[0]
        if family in _TYPES and str(kind) == family:
            source["format"] = _TYPES[family]
            if family == "alpaca":
                why = "the model's chat template is used, not Alpaca's `### Instruction` text"
                draft.notes.append(
                    Note("approximated", f"{key}.type", kind, f"format: alpaca; {why}")
                )
        else:
            draft.drop(
                f"{key}.type",
                f"{kind}: kubetune looks at the records and recognises their shape, or says so",
            )
    if item.get("name"):
        source["subset"] = item["name"]
    if item.get("split") not in (None, "train"):
        source["split"] = item["split"]
    field, text = item.get("field_messages"), item.get("field") or item.get("text_column")
    if is_preferred(draft):
        pass
    elif source.get("format") in ("messages", "sharegpt"):
        _messages(draft, key, item, source)
    elif field:
        draft.drop(
            f"{key}.field_messages", f"of type: chat_template; write columns: {{messages: {field}}}"
        )
    if text and source.get("format") == "text":
        source |= {"columns": {"text": text}} if text != "text" else {}
    else:
        for name in ("field", "text_column"):
            if item.get(name):
                draft.drop(f"{key}.{name}", f"of type: completion; write columns: {{text: {text}}}")
    for name in item.keys() & _HARMLESS.keys():
        draft.unneeded(f"{key}.{name}", _HARMLESS[name])
    draft.drop_rest(
        key, item, (*_HARMLESS, *_SOURCE_KEYS, *_TEMPLATE_KEYS, *_ANSWER_FIELDS), _NOT_OF_SOURCES
    )
    return source


_NOT_OF_SOURCES = {
    "revision": "data come from the hub's main branch; download the revision and name its files",
    "roles_to_train": "answers of the assistant are trained, or everything (data.train_on)",
    "train_on_eos": "an answer is trained with the end that its chat template writes",
    "train_on_eot": "an answer is trained with the end that its chat template writes",
    "skip": "write range: [first, end), which counts shuffled rows",
    "message_field_training": "a message of the data says `train: false` itself",
    "roles": "roles are known by their usual names: user, human, assistant, gpt, system, tool",
}


def _messages(draft: Draft, key: str, item: dict[str, Any], source: dict[str, Any]) -> None:
    """The column of the messages, and the names of role and content in each."""
    mapped = dict(item.get("message_property_mappings") or {})
    told = f"{key}.message_property_mappings"
    for ours, old in (("role", "message_field_role"), ("content", "message_field_content")):
        if item.get(old):
            mapped[ours], told = item[old], f"{key}.{old}"
    role, content = mapped.pop("role", "role"), mapped.pop("content", "content")
    if (role, content) == ("from", "value"):
        source["format"] = "sharegpt"
    elif (role, content) != ("role", "content"):
        draft.drop(
            told,
            f"messages need `role` and `content`, or `from` and `value`; found {role} and {content}",
        )
    others = {ours: theirs for ours, theirs in mapped.items() if ours != theirs}
    if others:
        draft.drop(
            told, f"properties of messages keep their names; rename in the data: {inline(others)}"
        )
    wanted = "messages" if source["format"] == "messages" else "conversations"
    field = item.get("field_messages") or (
        "messages" if item.get("type") == "chat_template" else wanted
    )
    if field != wanted:
        source["columns"] = {wanted: field}


def _answers(draft: Draft, key: str, item: dict[str, Any], source: dict[str, Any]) -> None:
    """A source of answers to be compared or judged: their columns, and prompts in the model's own chat template."""
    kind = item.get("type")
    given = {**item, **kind} if isinstance(kind, dict) else item
    columns = {
        ours: given[field]
        for field, ours in _ANSWER_FIELDS.items()
        if given.get(field) not in (None, ours)
    }
    if columns:
        source["columns"] = columns
    if isinstance(kind, dict):
        formats = ", ".join(name for name in kind if name.endswith("_format"))
        if formats:
            draft.drop(
                f"{key}.type",
                f"prompts are the chat template's, or the data's own; left out: {formats}",
            )
    elif kind is not None and str(kind) not in ("passthrough", "user_defined.default"):
        source["format"] = "messages"
        if not str(kind).startswith(("chat_template", "bradley_terry")):
            why = "the model's chat template is used; `kubetune data check` shows what it writes"
            draft.notes.append(
                Note("approximated", f"{key}.type", kind, f"format: messages; {why}")
            )


_ANSWER_FIELDS = {
    f"field_{ours}": ours
    for ours in "messages prompt system chosen rejected completion label".split()
}


def _own_type(draft: Draft, key: str, kind: dict[str, Any], source: dict[str, Any]) -> None:
    """A prompt format written out: our nearest is a prompt and a completion, as they stand in the data."""
    names_ = {"prompt": kind.get("field_instruction"), "completion": kind.get("field_output")}
    columns = {ours: theirs for ours, theirs in names_.items() if theirs and theirs != ours}
    source["format"] = "prompt_completion"
    if columns:
        source["columns"] = columns
    rest = ", ".join(name for name in kind if name not in ("field_instruction", "field_output"))
    draft.drop(
        f"{key}.type",
        f"prompt formats are the chat template's, or the data's own; left out: {rest or 'none'}",
    )


@rule_with
def _per_epoch(draft: Draft, key: str, value: Any, path: str, other: str) -> None:
    if other in draft.given and draft.given[other] is not None:
        draft.unneeded(key, f"{other} is given")
    elif value == 1:
        draft.carry(key, path, "epoch")
    elif as_flag(value) is False or value == 0:
        draft.unneeded(key, "off; the last step is evaluated and saved all the same")
    else:
        draft.approximate(
            key,
            path,
            "epoch",
            f"or the steps of an epoch (`kubetune plan` shows them) divided by {value}",
        )


def _saves(draft: Draft) -> None:
    """Refuse keys of checkpoints that axolotl refuses together, and write down its number of steps."""
    strategy = draft.given.get("save_strategy")
    if draft.given.get("save_steps"):
        if draft.given.get("saves_per_epoch"):
            draft.refuse("save_steps", "axolotl refuses it beside saves_per_epoch")
        if strategy is not None and strategy != "steps":
            draft.refuse(
                "save_steps", f"axolotl refuses it beside save_strategy: {inline(strategy)}"
            )
    elif strategy == "steps" and not draft.given.get("saves_per_epoch"):
        draft.assume("training.save_steps", 500)


def _batch_size(draft: Draft, key: str, value: Any) -> None:
    """Of one process: accumulation follows from it where that is left out."""
    micro = draft.given.get("micro_batch_size") or 1
    if draft.given.get("gradient_accumulation_steps"):
        draft.unneeded(key, "micro_batch_size and gradient_accumulation_steps say it too")
    elif isinstance(value, int) and isinstance(micro, int) and value >= micro:
        draft.carry(key, "training.gradient_accumulation_steps", value // micro)
    else:
        draft.drop(key, "expected a multiple of micro_batch_size; set training.global_batch_size")


def _plugins(draft: Draft, key: str, value: Any) -> None:
    own = [name for name in as_list(value) if not str(name).startswith("axolotl.integrations.")]
    if own:
        draft.drop(key, f"code of your own is not run: {', '.join(map(str, own))}")
    else:
        draft.unneeded(key, "what they switch on has keys of its own, each listed here")


def _processor(draft: Draft, key: str, _: Any) -> None:
    common.say_it_sees(draft, key)
    draft.unneeded(key, "images go through the model's own processor")


def _model_type(draft: Draft, key: str, value: Any) -> None:
    if str(value).endswith(("ForCausalLM", "ForConditionalGeneration", "ForImageTextToText")):
        draft.unneeded(key, "read from the model's own files")
    else:
        draft.drop(
            key, "classifiers are task: sequence_classification; code of your own is not run"
        )


def _config_of_base(draft: Draft, key: str, value: Any) -> None:
    if value == draft.given.get("base_model"):
        draft.unneeded(key, "comes with the model")
    else:
        draft.drop(key, "the config comes with the model; another's is not taken")


_KERNEL = unneeded("kubetune uses its own fused parts where they are proved equal")

RULES: dict[str, Rule] = {
    **common.TRAINING,
    **common.plain(
        "base_model sequence_len micro_batch_size eval_batch_size num_epochs lora_r lora_alpha lora_dropout "
        "lora_target_modules load_in_4bit load_in_8bit fp8 activation_offloading dataset_processes dataset_num_proc "
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    **each("revision_of_model model_revision", same("model.revision")),
    **{name: flag("model.dtype", name) for name in ("float32", "float16", "bfloat16")},
    **each("eager_attention flex_attention", unneeded(common.FAST_ATTENTION)),
    "pretraining_dataset": dropped("datasets are given as well; write both into data.train"),
    "batch_size": _batch_size,
    "base_model_config": _config_of_base,
    "tokenizer_config": same("model.tokenizer"),
    "sample_packing": common.packing,
    "excess_length_strategy": choice(
        "data.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"}
    ),
    "train_on_inputs": choice("data.train_on", {True: "all", False: "assistant"}),
    "val_set_size": common.share,
    "learning_rate": lambda draft, key, value: draft.carry(
        key, "training.learning_rate", float(value)
    ),
    "optimizer": common.optimizer,
    "lr_scheduler": common.schedule,
    "evals_per_epoch": _per_epoch("training.eval_steps", "eval_steps"),
    "saves_per_epoch": _per_epoch("training.save_steps", "save_steps"),
    "lora_modules_to_save": common.names("lora.modules_to_save"),
    "peft_use_dora": flag("lora.use_dora", True),
    "peft_use_rslora": flag("lora.use_rslora", True),
    "use_tensorboard": flag("tracking.tensorboard", True),
    **{f"use_{name}": flag(f"tracking.{name}", None) for name in common.TRACKERS},
    "wandb_project": same("tracking.wandb.project"),
    "trackio_project_name": same("tracking.trackio.project"),
    "mlflow_experiment_name": same("tracking.mlflow.experiment"),
    "mlflow_tracking_uri": common.of_tracker("mlflow", same("tracking.mlflow.uri")),
    "hf_mlflow_log_artifacts": common.of_tracker("mlflow", same("tracking.mlflow.log_model")),
    "special_tokens": dropped(
        "tokens are the tokenizer's own; padding needs none, since nothing is padded"
    ),
    **each("tokens added_tokens_overrides", dropped("the vocabulary is not extended")),
    "resize_token_embeddings_to_32x": dropped("the vocabulary is not extended", False),
    "gradient_checkpointing": choice(
        "training.gradient_checkpointing",
        {True: True, False: False},
        True,
        "activations are recomputed, and not moved to the host",
    ),
    "shuffle_merged_datasets": always("rows are shuffled, each epoch anew"),
    "local_files_only": flag("model.local_files_only", True),
    "model_config": dropped("the model's config is used as it is"),
    "eot_tokens": dropped("an answer ends where the tokenizer's chat template ends it"),
    "roles_to_train": dropped(
        "answers of the assistant are trained, or everything (data.train_on)"
    ),
    "unfrozen_parameters": dropped("either adapters or every parameter is trained"),
    **each("quantize_moe_experts gptq", dropped("the base is quantised by `quantization`", False)),
    **each("qat model_quantization_config", dropped("the base is quantised by `quantization`")),
    **each(
        "cosine_min_lr_ratio cosine_constant_lr_ratio",
        dropped("the cosine ends at 0, with the last step", 0),
    ),
    "hf_use_auth_token": unneeded(
        "a token is taken from the environment (HF_TOKEN), never from a file"
    ),
    **each("fp8_enable_fsdp_float8_all_gather", unneeded("FSDP and fp8 are not combined")),
    "dataset_exact_deduplication": dropped(
        "`kubetune data check` counts repeated rows; none is left out", False
    ),
    "use_ray": dropped("several nodes: see compute.nodes and `kubetune submit`", False),
    "ray_num_workers": dropped("several nodes: see compute.nodes and `kubetune submit`", 1),
    "lora_target_parameters": common.names("lora.target_parameters"),
    "plugins": _plugins,
    "model_type": _model_type,
    "processor_type": _processor,
    "skip_prepare_dataset": unneeded("images are read while training, tokens are prepared"),
    "image_size": dropped("images keep their shape; vision.image_max_tokens limits their size"),
    **each(
        "tokenizer_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model tokenizer_use_fast",
        unneeded("read from the model's and the tokenizer's own files"),
    ),
    **each(
        "strict dataset_prepared_path pad_to_sequence_len eval_sample_packing lora_fan_in_fan_out "
        "low_cpu_mem_usage eval_table_size eval_max_new_tokens save_first_step "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv "
        "torchdistx_path experimental_skip_move_to_device debug",
        unneeded("has no counterpart, and no effect on the result"),
    ),
    **each(
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm liger_use_token_scaling "
        "liger_fused_linear_cross_entropy liger_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel cut_cross_entropy unsloth_cross_entropy_loss use_kernels use_scattermoe use_sonicmoe "
        "experts_implementation fused_attn_kernel gemma4_hybrid_attn_impl flex_attn_compile_kwargs tiled_mlp",
        _KERNEL,
    ),
    "push_dataset_to_hub": dropped("prepared data are kept here"),
    **each(
        "context_parallel_size sequence_parallel_degree tensor_parallel_size expert_parallel_size dp_replicate_size",
        only(
            [1],
            "off, as here",
            "no splitting along a sequence or layer, and none into groups of GPUs",
        ),
    ),
}
