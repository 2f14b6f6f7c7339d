"""Axolotl's configs: flat YAML, `datasets` as a list of sections with a `type`."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    as_list,
    as_names,
    carried,
    dropped,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.shared import (
    FAST_ATTENTION,
    FP8,
    NO_EFFECT,
    NO_STOP,
    OFFLOADING,
    OPTIMIZERS,
    SHUFFLED,
    SUBSET_AND_SPLIT,
    TRACKERS,
    TRAINING,
    finish_source,
    fsdp,
    method,
    other_optimizer,
    packing,
    refuse_both,
    say_it_sees,
    schedule,
    share,
    take_files,
    take_sources,
    template,
    template_file,
)
from kubetune.plugins.importers.targets import of_axolotl
from kubetune.plugins.importers.warm_up import WarmUp
from kubetune.plugins.importers.writing import inline

_TEMPLATES = {"chat_template": template, "chat_template_jinja": template_file}
_ANSWERS = ("messages", "prompt", "system", "chosen", "rejected", "completion", "label")
# The shape of a source's records, by axolotl's name for how it writes prompts.
_TYPES = {
    "completion": "text",
    "pretrain": "text",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
}


def _method(draft: Draft) -> None:
    """Take the adapter, and the bits of the base: 4 for qlora alone, 8 for lora alone."""
    adapter = draft.take("adapter")
    if adapter is not None:
        method(draft, "adapter", adapter)
    four = draft.get("load_in_4bit")
    if adapter == "qlora" and draft.get("load_in_8bit"):
        draft.refuse("load_in_8bit", "axolotl refuses it beside adapter: qlora")
    if adapter == "qlora" and not four:
        draft.refuse("adapter", "axolotl asks for load_in_4bit: true beside qlora")
    if adapter == "lora" and four:
        why = "4 bits need adapter: qlora there, so axolotl leaves the base as it is; here: quantization: 4bit"
        draft.drop("load_in_4bit", why)


def _sections(draft: Draft) -> dict[str, Any]:
    """Return the sources that are sections, by their places; one alone counts as a list of one."""
    sections = {}
    for key in ("datasets", "test_datasets"):
        for number, item in enumerate(as_list(draft.get(key))):
            if isinstance(item, dict):
                sections[f"{key}[{number}]"] = item
    return sections


def _templates(draft: Draft) -> None:
    """Take one chat template for the run: the file's, or that on which all its sources agree.

    chat_template: chatml, datasets[1].chat_template: llama3        llama3; chatml is dropped
    datasets[0].chat_template: chatml, datasets[1] …: llama3        both are dropped
    """
    for key, rule in _TEMPLATES.items():
        mentions = {}
        for place, item in _sections(draft).items():
            if item.get(key):
                mentions[f"{place}.{key}"] = item[key]
        # A source's template takes precedence over the file's.
        deciding = {str(value) for value in mentions.values()}
        of_file = draft.take(key)
        if of_file is not None:
            deciding = deciding or {str(of_file)}
            mentions[key] = of_file
        for place, value in mentions.items():
            if len(deciding) > 1 or str(value) not in deciding:
                outcome = dropped(
                    "the file and its sources name different ones; a run has one: model.chat_template"
                )
            elif value == "jinja":
                outcome = unneeded("chat_template_jinja says which")
            else:
                outcome = rule(value, draft)
            draft.write(place, outcome, "model.chat_template")


def _data(draft: Draft) -> None:
    """Take the sources; those of `pretraining_dataset` are plain texts."""
    keys = {"datasets": "data.train", "test_datasets": "data.eval"}
    if draft.get("datasets") is None:
        keys["pretraining_dataset"] = "data.train"
    take_sources(draft, keys, _source)


def _source(draft: Draft, place: str, item: Any) -> list[Any]:
    """Return our source for one of theirs, which is a path or a section."""
    is_text = place.startswith("pretraining_dataset")
    if isinstance(item, str):
        return [{"format": "text", "path": item} if is_text else {"path": item}]
    section = draft.section(place, item)
    take_files(section)
    # `_templates` has read those of all sources.
    section.taken.update(_TEMPLATES)
    if draft.ours("task") in ("preference", "reward_model"):
        _answers(section)
    else:
        _records(section)
    source = finish_source(draft, section, SUBSET_AND_SPLIT, _SOURCE)
    return [{"format": "text"} | source if is_text else source]


def _records(section: Draft) -> None:
    """Take the shape of a source's records: their `type`, and the columns that this type has."""
    kind = section.take("type")
    if isinstance(kind, dict):
        # A prompt format written out: our nearest is a prompt and a completion, as they stand in the data.
        _columns(section, kind, {"prompt": "field_instruction", "completion": "field_output"})
        section.settings["format"] = "prompt_completion"
    elif kind == "alpaca":
        why = "the model's chat template is used, not Alpaca's `### Instruction` text"
        section.write("type", near("alpaca", why), "format")
    elif kind in _TYPES:
        section.carry("type", "format", _TYPES[kind])
    elif kind is not None:
        why = "kubetune looks at the records and recognises their shape, or says so"
        section.drop("type", f"{kind}: {why}")

    form = section.ours("format")
    column = section.take("field_messages")
    if form in ("messages", "sharegpt"):
        _messages(section, column or ("messages" if kind == "chat_template" else None))
    elif column is not None:
        why = f"of type: chat_template; write columns: {{messages: {column}}}"
        section.drop("field_messages", why)
    for key in ("field", "text_column"):
        text = section.take(key)
        if text and form == "text":
            section.carry(key, "columns", {"text": text} | section.ours("columns", {}))
        elif text:
            section.drop(key, f"of type: completion; write columns: {{text: {text}}}")


def _columns(section: Draft, kind: dict[str, Any], keys: dict[str, str]) -> None:
    """Take columns from within a section `type`; the rest of it is dropped. `keys`: theirs for each of ours."""
    columns = {ours: kind[theirs] for ours, theirs in keys.items() if kind.get(theirs)}
    section.carry("type", "columns", columns)
    rest = ", ".join(name for name in kind if name not in keys.values())
    if rest:
        section.drop(
            "type", f"prompts are the chat template's, or the data's own; left out: {rest}"
        )


def _messages(section: Draft, column: str | None) -> None:
    """Take the column of the messages, and the names of role and content in each message."""
    key = "message_property_mappings"
    # Older files have two keys in place of the mapping.
    properties = dict(section.take(key) or {})
    for ours, older in (("role", "message_field_role"), ("content", "message_field_content")):
        if section.take(older):
            properties[ours] = section.get(older)
            key = older
    names = (properties.pop("role", "role"), properties.pop("content", "content"))
    if names == ("from", "value"):
        section.carry(key, "format", "sharegpt")
    elif names != ("role", "content"):
        why = f"messages need `role` and `content`, or `from` and `value`; found {' and '.join(names)}"
        section.drop(key, why)
    renamed = {ours: theirs for ours, theirs in properties.items() if ours != theirs}
    if renamed:
        why = f"properties of messages keep their names; rename in the data: {inline(renamed)}"
        section.drop(key, why)
    wanted = "messages" if section.ours("format") == "messages" else "conversations"
    section.carry("field_messages", "columns", {wanted: column or wanted})


def _answers(section: Draft) -> None:
    """Take answers to be compared or judged: their columns, and prompts in the model's own chat template."""
    # A `type` may be a name, or a section with the columns in it.
    kind = section.take("type")
    keys = {ours: f"field_{ours}" for ours in _ANSWERS}
    beside = {key: section.take(key) for key in keys.values()}
    _columns(section, beside | (kind if isinstance(kind, dict) else {}), keys)
    if isinstance(kind, dict) or kind in (None, "passthrough", "user_defined.default"):
        return
    if str(kind).startswith(("chat_template", "bradley_terry")):
        section.carry("type", "format", "messages")
    else:
        why = "the model's chat template is used; `kubetune data check` shows what it writes"
        section.write("type", near("messages", why), "format")


def _intervals(draft: Draft) -> None:
    """Refuse what axolotl refuses beside a number of steps, and write down its own number for checkpoints."""
    for verb in ("save", "eval"):
        if draft.get(f"{verb}_steps") and draft.get(f"{verb}_strategy") not in (None, "steps"):
            word = inline(draft.theirs[f"{verb}_strategy"])
            draft.refuse(f"{verb}_steps", f"axolotl refuses it beside {verb}_strategy: {word}")
    steps = draft.get("save_steps") or draft.get("saves_per_epoch")
    if draft.get("save_strategy") == "steps" and not steps:
        draft.assume("training.save_steps", 500)


def _per_epoch(key: str, steps: str) -> Row:
    """Return the row of `saves_per_epoch` or `evals_per_epoch`; the key `steps` takes precedence."""
    off = unneeded("off; the last step is evaluated and saved all the same")
    why = "or the steps of an epoch (`kubetune plan` shows them) divided by this number"

    def is_idle(draft: Draft) -> str:
        return "" if draft.get(steps) is None else f"{steps} is given"

    return Row(key, f"training.{steps}", {0: off, 1: "epoch"}, near("epoch", why), unless=is_idle)


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
    if any(item.get("type") == "chat_template" for item in _sections(draft).values()):
        return near("all", "the template's own words between messages are trained too")
    return carried("all")


def _plugins(value: Any, _: Draft) -> Outcome:
    """Drop code of the user's own; axolotl's own plugins have keys for what they do."""
    modules = map(str, as_list(value))
    foreign = [name for name in modules if not name.startswith("axolotl.integrations.")]
    if foreign:
        return dropped(f"code of your own is not run: {', '.join(foreign)}")
    return unneeded("what they switch on has keys of its own, each listed here")


def _processor(_: Any, draft: Draft) -> Outcome:
    """Take from a processor that the model sees."""
    say_it_sees(draft, draft.at)
    return unneeded("images go through the model's own processor")


def _model_type(value: Any, _: Draft) -> Outcome:
    """Take a class of transformers for a model that writes; drop any other."""
    if str(value).endswith(("ForCausalLM", "ForConditionalGeneration", "ForImageTextToText")):
        return unneeded("read from the model's own files")
    return dropped("classifiers are task: sequence_classification; code of your own is not run")


def _config_of_base(value: Any, draft: Draft) -> Outcome:
    """Drop the config of another model than the base."""
    if value == draft.get("base_model"):
        return unneeded("comes with the model")
    return dropped("the config comes with the model; another's is not taken")


def _rate(value: Any, _: Draft) -> Outcome:
    """Carry a learning rate, which YAML reads as a text where it is written `1e-4`."""
    return carried(float(value))


def _switch_trackers_on(draft: Draft) -> None:
    """Switch on each tracker whose project or server the file names."""
    projects = {
        "tracking.wandb": "wandb_project",
        "tracking.trackio": "trackio_project_name",
        "tracking.mlflow": "mlflow_experiment_name",
    }
    for section, key in projects.items():
        if draft.get(key) is not None:
            draft.settings.setdefault(section, None)


# Keys of a source; those of its records' shape are read before it, by `_records` or `_answers`.
_SOURCE = Table(
    dropped={
        "field text_column": "of type: completion, which a source of answers is not",
        "revision": "data come from the hub's main branch; download the revision and name its files",
        "roles_to_train": "answers of the assistant are trained, or everything (data.train_on)",
        "train_on_eos train_on_eot": "an answer is trained with the end that its chat template writes",
        "skip": "write range: [first, end), which counts shuffled rows",
        "message_field_training": "a message of the data says `train: false` itself",
        "roles": "roles are known by their usual names: user, human, assistant, gpt, system, tool",
    },
    unneeded={
        "ds_type": "the kind of a file is seen from its name",
        "trust_remote_code": "no code comes with data sets any more",
        "preprocess_shards": "data are read in pieces by themselves",
    },
)

TOOL = Tool(
    name="axolotl",
    marks="base_model sequence_len micro_batch_size datasets adapter val_set_size sample_packing num_epochs "
    "lora_target_linear dataset_prepared_path saves_per_epoch evals_per_epoch",
    together=(
        _method,
        _templates,
        _data,
        of_axolotl,
        fsdp("fsdp", "fsdp_config", "fsdp_version", "dp_shard_size"),
        refuse_both(
            ("save_steps", "saves_per_epoch"),
            ("eval_steps", "evals_per_epoch"),
            ("batch_size", "gradient_accumulation_steps"),
        ),
        _intervals,
        WarmUp(
            schedule="lr_scheduler",
            zero_steps_count=True,
            refuses_both=True,
            default=0.03,
            default_at_most=100,
            rounds_down=True,
            least=2,
        ).read,
    ),
    finish=_switch_trackers_on,
    defaults={"data.max_length": 512, "data.packing": False},
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
            switch("local_files_only", "model.local_files_only"),
            switch("load_in_4bit", "quantization", "4bit"),
            switch("load_in_8bit", "quantization", "8bit"),
            # Data.
            Row("sample_packing", "data.packing", other=packing),
            Row("excess_length_strategy", "data.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"},
                dropped("drop, truncate and raise are there")),
            Row("train_on_inputs", "data.train_on", other=_train_on_inputs),
            Row("val_set_size", "data.eval", other=share),
            # Training.
            Row("learning_rate", "training.learning_rate", other=_rate),
            Row("batch_size", "training.gradient_accumulation_steps", other=_batch_size),
            Row("early_stopping_patience", "training.early_stopping_patience", {0: NO_STOP}),
            Row("save_total_limit", "training.save_total_limit", {0: unneeded("4 are kept there")}),
            Row("optimizer", "training.optim", OPTIMIZERS, other_optimizer),
            schedule("lr_scheduler"),
            _per_epoch("evals_per_epoch", "eval_steps"),
            _per_epoch("saves_per_epoch", "save_steps"),
            Row("gradient_checkpointing", "training.gradient_checkpointing", {True: True, False: False},
                near(True, "activations are recomputed, and not moved to the host")),
            # Adapters.
            switch("lora_target_linear", "lora.target_modules", "all-linear"),
            Row("lora_target_modules", "lora.target_modules", other=as_names),
            Row("lora_modules_to_save", "lora.modules_to_save", other=as_names),
            Row("lora_target_parameters", "lora.target_parameters", other=as_names),
            switch("peft_use_dora", "lora.use_dora"),
            switch("peft_use_rslora", "lora.use_rslora"),
            # Trackers, which axolotl switches on one by one.
            switch("use_tensorboard", "tracking.tensorboard"),
            *[switch(f"use_{name}", f"tracking.{name}", None) for name in TRACKERS],
            # Nothing of ours is set, but a value may mean more than is done here.
            Row("base_model_config", other=_config_of_base),
            Row("plugins", other=_plugins),
            Row("model_type", other=_model_type),
            Row("processor_type", other=_processor),
        ],
        dropped={
            "shuffle_merged_datasets": (SHUFFLED, True),
            "pretraining_dataset": "datasets are given as well; write both into data.train",
            "special_tokens": "tokens are the tokenizer's own; padding needs none, since nothing is padded",
            "tokens added_tokens_overrides": "the vocabulary is not extended",
            "resize_token_embeddings_to_32x": ("the vocabulary is not extended", False),
            "model_config": "the model's config is used as it is",
            "eot_tokens": "an answer ends where the tokenizer's chat template ends it",
            "roles_to_train": "answers of the assistant are trained, or everything (data.train_on)",
            "unfrozen_parameters": "either adapters or every parameter is trained",
            "quantize_moe_experts gptq": ("the base is quantised by `quantization`", False),
            "qat model_quantization_config": "the base is quantised by `quantization`",
            "cosine_min_lr_ratio cosine_constant_lr_ratio": ("the cosine ends at 0, with the last step", 0),
            "dataset_exact_deduplication": ("`kubetune data check` counts repeated rows; none is left out", False),
            "use_ray": ("several nodes: see compute.nodes and `kubetune submit`", False),
            "ray_num_workers": ("several nodes: see compute.nodes and `kubetune submit`", 1),
            "image_size": "images keep their shape; vision.image_max_tokens limits their size",
            "push_dataset_to_hub": "prepared data are kept here",
            "context_parallel_size sequence_parallel_degree tensor_parallel_size expert_parallel_size "
            "dp_replicate_size": ("no splitting along a sequence or layer, and none into groups of GPUs", 1),
        },
        unneeded={
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
