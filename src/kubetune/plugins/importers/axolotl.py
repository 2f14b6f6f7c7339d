"""Axolotl's configs: flat YAML, `datasets` as a list of sections with a `type`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kubetune.plugins.importers import sources
from kubetune.plugins.importers.common import (
    BITS,
    FAST_ATTENTION,
    FP8,
    NO_EFFECT,
    NO_STOP,
    NOT_EXTENDED,
    OFFLOADING,
    TRACKERS,
    TRAINING,
    of_tracker,
    optimizer,
    packing,
    pin_fsdp,
    refuse_both,
    say_it_sees,
    schedule,
    share,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Tool,
    aliased,
    as_list,
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
from kubetune.plugins.importers.prompts import template, template_file
from kubetune.plugins.importers.targets import of_axolotl
from kubetune.plugins.importers.warm_up import WarmUp
from kubetune.plugins.importers.writing import inline

_ADAPTER_KEYS = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_target_parameters "
    "lora_modules_to_save peft_use_dora peft_use_rslora load_in_4bit load_in_8bit"
)
_TEMPLATE_KEYS = ("chat_template", "chat_template_jinja")
_ANSWERS = ("messages", "prompt", "system", "chosen", "rejected", "completion", "label")
_TEMPLATE = template("chat_template", "chatml")


def _method(draft: Draft) -> None:
    """Take the adapter, without which keys of LoRA say nothing, and the bits of the base."""
    adapter = draft.take("adapter")
    if adapter in ("lora", "qlora"):
        draft.carry("adapter", "lora", None)
        _bits(draft, adapter)
        return
    if adapter is not None:
        draft.write("adapter", near(None, f"{adapter} is not there, LoRA is"), "lora")
        return
    for key in ("load_in_4bit", "load_in_8bit"):
        if draft.get(key):
            draft.refuse(
                key,
                "without `adapter`, which axolotl refuses too, since a quantised base is not trained itself; "
                "expected adapter: qlora or lora, or no quantisation",
            )
    for key in _ADAPTER_KEYS.split():
        if draft.take(key):
            draft.drop(
                key,
                "no `adapter` is named, so every parameter is trained, there as here; for LoRA: lora: true",
            )


def _bits(draft: Draft, adapter: str) -> None:
    """Take the bits of the base, which depend on the adapter: 4 for qlora alone, 8 for lora alone."""
    four = draft.take("load_in_4bit")
    eight = draft.take("load_in_8bit")
    if adapter == "qlora" and eight:
        draft.refuse("load_in_8bit", "axolotl refuses it beside adapter: qlora")
    if adapter == "qlora" and not four:
        draft.refuse("adapter", "axolotl asks for load_in_4bit: true beside qlora")
    if adapter == "qlora":
        draft.carry("load_in_4bit", "quantization", "4bit")
    elif four:
        why = "4 bits need adapter: qlora there, so axolotl leaves the base as it is; here: quantization: 4bit"
        draft.drop("load_in_4bit", why)
    else:
        draft.ignore("load_in_4bit", "off, as here")
    if eight:
        draft.carry("load_in_8bit", "quantization", "8bit")
    else:
        draft.ignore("load_in_8bit", "off, as here")


@dataclass(frozen=True)
class _Mention:
    """A chat template that the file, or a source in it, names."""

    place: str  # where it stands, such as `datasets[1].chat_template`
    key: str
    value: Any


def _templates(draft: Draft) -> None:
    """Take one chat template for the run: the file's, or that on which all its sources agree.

    chat_template: chatml, datasets[1].chat_template: llama3        llama3; chatml is dropped
    datasets[0].chat_template: chatml, datasets[1] …: llama3        both are dropped
    """
    of_file = []
    for key in _TEMPLATE_KEYS:
        value = draft.take(key)
        if value is not None:
            of_file.append(_Mention(key, key, value))
    of_sources = []
    for place, item in _sections(draft):
        for key in _TEMPLATE_KEYS:
            if item.get(key):
                of_sources.append(_Mention(f"{place}.{key}", key, item[key]))
    # A source's template takes precedence over the file's.
    values: dict[str, set[str]] = {key: set() for key in _TEMPLATE_KEYS}
    for mention in of_sources or of_file:
        values[mention.key].add(str(mention.value))
    for mention in [*of_file, *of_sources]:
        deciding = values[mention.key]
        is_overruled = bool(of_sources) and str(mention.value) not in deciding
        if len(deciding) > 1 or is_overruled:
            why = "the file and its sources name different ones; a run has one: model.chat_template"
            draft.drop(mention.place, why)
        else:
            _take_template(draft, mention)


def _take_template(draft: Draft, mention: _Mention) -> None:
    """Carry a template, by its file or its name."""
    if mention.key == "chat_template_jinja":
        draft.write(mention.place, template_file(mention.value, draft), "model.chat_template")
    elif mention.value == "jinja":
        draft.write(mention.place, unneeded("chat_template_jinja says which"))
    else:
        draft.write(mention.place, _TEMPLATE.outcome(mention.value, draft), _TEMPLATE.path)


def _sections(draft: Draft) -> list[tuple[str, dict[str, Any]]]:
    """Return the sources that are sections, with their places; one alone counts as a list of one."""
    sections = []
    for key in ("datasets", "test_datasets"):
        listed = draft.get(key)
        for number, item in enumerate(listed if isinstance(listed, list) else [listed]):
            if isinstance(item, dict):
                sections.append((f"{key}[{number}]", item))
    return sections


def _data(draft: Draft) -> None:
    """Take the sources; those of `pretraining_dataset` are plain texts."""
    if draft.get("datasets") is not None:
        draft.carry("datasets", "data.train", _sources(draft, "datasets"))
    elif draft.get("pretraining_dataset") is not None:
        texts = _sources(draft, "pretraining_dataset")
        texts = [{"format": "text"} | source for source in texts]
        draft.carry("pretraining_dataset", "data.train", texts)
    if draft.get("test_datasets") is not None:
        draft.carry("test_datasets", "data.eval", _sources(draft, "test_datasets"))


def _sources(draft: Draft, key: str) -> list[dict[str, Any]]:
    """Return our sources for a key of theirs; a source alone counts as a list of one."""
    items = draft.take(key)
    if not isinstance(items, list):
        items = [items]
    return [_source(draft, f"{key}[{number}]", item) for number, item in enumerate(items)]


def _source(draft: Draft, place: str, item: Any) -> dict[str, Any]:
    """Return our source for one of theirs, which is a path or a section."""
    if isinstance(item, str):
        return {"path": item}
    section = draft.section(place, item)
    sources.take_files(section)
    # `_templates` has read those of all sources.
    section.taken.update(_TEMPLATE_KEYS)
    if is_preferred(draft):
        _answers(section)
    else:
        _records(section)
    return sources.finished(draft, section, _SOURCE)


def _records(section: Draft) -> None:
    """Take the shape of a source's records: their `type`, and the columns that this type has."""
    kind = section.take("type")
    if isinstance(kind, dict):
        # A prompt format written out: our nearest is a prompt and a completion, as they stand in the data.
        columns = {"prompt": kind.get("field_instruction"), "completion": kind.get("field_output")}
        columns = {ours: theirs for ours, theirs in columns.items() if theirs}
        section.carry("type", "columns", columns)
        section.carry("type", "format", "prompt_completion")
        used = ("field_instruction", "field_output")
        rest = ", ".join(name for name in kind if name not in used) or "none"
        why = f"prompt formats are the chat template's, or the data's own; left out: {rest}"
        section.drop("type", why)
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
        _messages(section, is_chat_template=kind == "chat_template")
    elif column is not None:
        why = f"of type: chat_template; write columns: {{messages: {column}}}"
        section.drop("field_messages", why)
    for key in ("field", "text_column"):
        text = section.take(key)
        if text and form == "text":
            section.carry(key, "columns", {"text": text} | section.ours("columns", {}))
        elif text:
            section.drop(key, f"of type: completion; write columns: {{text: {text}}}")


def _messages(section: Draft, is_chat_template: bool) -> None:
    """Take the column of the messages, and the names of role and content in each message."""
    key = "message_property_mappings"
    # Older files have two keys in place of the mapping.
    properties = dict(section.take(key) or {})
    for ours, older in (("role", "message_field_role"), ("content", "message_field_content")):
        if section.take(older):
            properties[ours] = section.get(older)
            key = older
    role = properties.pop("role", "role")
    content = properties.pop("content", "content")
    if (role, content) == ("from", "value"):
        section.carry(key, "format", "sharegpt")
    elif (role, content) != ("role", "content"):
        why = (
            f"messages need `role` and `content`, or `from` and `value`; found {role} and {content}"
        )
        section.drop(key, why)
    renamed = {ours: theirs for ours, theirs in properties.items() if ours != theirs}
    if renamed:
        why = f"properties of messages keep their names; rename in the data: {inline(renamed)}"
        section.drop(key, why)
    wanted = "messages" if section.ours("format") == "messages" else "conversations"
    column = section.take("field_messages")
    if column is None:
        column = "messages" if is_chat_template else wanted
    section.carry("field_messages", "columns", {wanted: column})


def _answers(section: Draft) -> None:
    """Take answers to be compared or judged: their columns, and prompts in the model's own chat template."""
    # A `type` may be a name, or a section with the columns in it.
    kind = section.take("type")
    inside = kind if isinstance(kind, dict) else {}
    columns = {}
    for ours in _ANSWERS:
        key = f"field_{ours}"
        column = inside.get(key, section.take(key))
        if column is not None:
            columns[ours] = column
    section.carry("type", "columns", columns)
    rest = ", ".join(name for name in inside if name.removeprefix("field_") not in _ANSWERS)
    if rest:
        why = f"prompts are the chat template's, or the data's own; left out: {rest}"
        section.drop("type", why)
    if inside or kind in (None, "passthrough", "user_defined.default"):
        return
    if str(kind).startswith(("chat_template", "bradley_terry")):
        section.carry("type", "format", "messages")
    else:
        why = "the model's chat template is used; `kubetune data check` shows what it writes"
        section.write("type", near("messages", why), "format")


# The shape of a source's records, by axolotl's name for how it writes prompts.
_TYPES = {
    "completion": "text",
    "pretrain": "text",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
}

# Keys of a source; those of its records' shape are read before it, by `_records` or `_answers`.
_SOURCE = [
    *sources.SUBSET_AND_SPLIT,
    ignore("ds_type", "the kind of a file is seen from its name"),
    ignore("trust_remote_code", "no code comes with data sets any more"),
    ignore("preprocess_shards", "data are read in pieces by themselves"),
    drop("field text_column", "of type: completion, which a source of answers is not"),
    drop("revision", "data come from the hub's main branch; download the revision and name its files"),
    drop("roles_to_train", "answers of the assistant are trained, or everything (data.train_on)"),
    drop("train_on_eos train_on_eot", "an answer is trained with the end that its chat template writes"),
    drop("skip", "write range: [first, end), which counts shuffled rows"),
    drop("message_field_training", "a message of the data says `train: false` itself"),
    drop("roles", "roles are known by their usual names: user, human, assistant, gpt, system, tool"),
]  # fmt: skip


def _per_epoch(key: str, steps: str) -> Row:
    """Return the row of `saves_per_epoch` or `evals_per_epoch`; the key `steps` takes precedence."""
    return Row(
        key,
        f"training.{steps}",
        same={0: "off; the last step is evaluated and saved all the same"},
        values={1: "epoch"},
        near="epoch",
        reason="or the steps of an epoch (`kubetune plan` shows them) divided by this number",
        unless=lambda draft: "" if draft.get(steps) is None else f"{steps} is given",
    )


def _intervals(draft: Draft) -> None:
    """Refuse what axolotl refuses beside a number of steps, and write down its own number for checkpoints."""
    for verb in ("save", "eval"):
        strategy = draft.get(f"{verb}_strategy")
        if draft.get(f"{verb}_steps") and strategy not in (None, "steps"):
            word = inline(draft.theirs[f"{verb}_strategy"])
            draft.refuse(f"{verb}_steps", f"axolotl refuses it beside {verb}_strategy: {word}")
    steps = draft.get("save_steps") or draft.get("saves_per_epoch")
    if draft.get("save_strategy") == "steps" and not steps:
        draft.assume("training.save_steps", 500)


_REFUSED_TOGETHER = (
    ("save_steps", "saves_per_epoch"),
    ("eval_steps", "evals_per_epoch"),
    ("batch_size", "gradient_accumulation_steps"),
)


def _batch_size(value: Any, draft: Draft) -> Outcome:
    """Take the batch of one process: accumulation follows from it where that is left out."""
    micro = draft.get("micro_batch_size") or 1
    if draft.get("gradient_accumulation_steps"):
        return unneeded("micro_batch_size and gradient_accumulation_steps say it too")
    if isinstance(value, int) and isinstance(micro, int) and value >= micro:
        return carried(value // micro)
    return dropped("expected a multiple of micro_batch_size; set training.global_batch_size")


def _train_on_inputs(value: Any, draft: Draft) -> Outcome:
    """Train all tokens, or the answers. Of `type: chat_template` axolotl trains what each message says, and no more."""
    if not value:
        return carried("assistant")
    if any(item.get("type") == "chat_template" for _, item in _sections(draft)):
        return near("all", "the template's own words between messages are trained too")
    return carried("all")


def _plugins(value: Any, _: Draft) -> Outcome:
    """Drop code of the user's own; axolotl's own plugins have keys for what they do."""
    modules = [str(name) for name in as_list(value)]
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


_NODES = "several nodes: see compute.nodes and `kubetune submit`"
_QUANTISED = "the base is quantised by `quantization`"
_RECOMPUTED = "activations are recomputed, and not moved to the host"

TOOL = Tool(
    name="axolotl",
    marks="base_model sequence_len micro_batch_size datasets adapter val_set_size sample_packing num_epochs "
    "lora_target_linear dataset_prepared_path saves_per_epoch evals_per_epoch",
    together=(
        _method,
        _templates,
        _data,
        of_axolotl,
        lambda draft: pin_fsdp(draft, "fsdp fsdp_config fsdp_version dp_shard_size"),
        lambda draft: refuse_both(draft, *_REFUSED_TOGETHER),
        _intervals,
        WarmUp(
            schedule="lr_scheduler",
            zero_steps_count=True,
            refuses_both=True,
            default=0.03,
            at_most=100,
            rounds_down=True,
            least=2,
        ).read,
    ),
    defaults={"data.max_length": 512, "data.packing": False},
    rows=[
        # Names that other tools have too; rows below replace those of TRAINING.
        *TRAINING,
        *aliased(
            "base_model sequence_len micro_batch_size eval_batch_size num_epochs lora_r lora_alpha lora_dropout "
            "dataset_processes dataset_num_proc loss_watchdog_threshold loss_watchdog_patience"
        ),
        # The model and its numbers.
        Row("revision_of_model model_revision", "model.revision"),
        Row("tokenizer_config", "model.tokenizer"),
        switch("float32", "model.dtype", "float32"),
        switch("float16", "model.dtype", "float16"),
        switch("bfloat16", "model.dtype", "bfloat16"),
        switch("local_files_only", "model.local_files_only"),
        *BITS,
        # Data.
        Row("sample_packing", "data.packing", packing),
        Row("excess_length_strategy", "data.overlong", values={"drop": "drop", "truncate": "truncate", "raise": "error"}),
        Row("train_on_inputs", "data.train_on", _train_on_inputs),
        Row("val_set_size", "data.eval", share),
        # Training.
        Row("learning_rate", "training.learning_rate", lambda value, _: carried(float(value))),
        Row("batch_size", "training.gradient_accumulation_steps", _batch_size),
        Row("early_stopping_patience", "training.early_stopping_patience", same={0: NO_STOP}),
        Row("save_total_limit", "training.save_total_limit", same={0: "4 are kept there"}),
        Row("optimizer", "training.optim", optimizer),
        schedule("lr_scheduler"),
        _per_epoch("evals_per_epoch", "eval_steps"),
        _per_epoch("saves_per_epoch", "save_steps"),
        *FP8,
        Row("gradient_checkpointing", "training.gradient_checkpointing", values={True: True, False: False}, near=True,
            reason=_RECOMPUTED),
        # Adapters.
        names("lora_target_modules", "lora.target_modules"),
        names("lora_modules_to_save", "lora.modules_to_save"),
        names("lora_target_parameters", "lora.target_parameters"),
        switch("peft_use_dora", "lora.use_dora"),
        switch("peft_use_rslora", "lora.use_rslora"),
        # Trackers, which axolotl switches on one by one.
        switch("use_tensorboard", "tracking.tensorboard"),
        *[switch(f"use_{name}", f"tracking.{name}", None) for name in TRACKERS],
        Row("wandb_project", "tracking.wandb.project"),
        Row("trackio_project_name", "tracking.trackio.project"),
        Row("mlflow_experiment_name", "tracking.mlflow.experiment"),
        *of_tracker("mlflow", Row("mlflow_tracking_uri", "tracking.mlflow.uri"),
                    Row("hf_mlflow_log_artifacts", "tracking.mlflow.log_model")),
        # Nothing of ours is set, but a value may mean more than is done here.
        Row("base_model_config", rule=_config_of_base),
        Row("plugins", rule=_plugins),
        Row("model_type", rule=_model_type),
        Row("processor_type", rule=_processor),
        Row("shuffle_merged_datasets", same={True: "rows are shuffled, each epoch anew"},
            reason="rows are shuffled, each epoch anew"),
        # Not done here; a value behind the reason is that which switches it off there.
        drop("pretraining_dataset", "datasets are given as well; write both into data.train"),
        drop("special_tokens", "tokens are the tokenizer's own; padding needs none, since nothing is padded"),
        drop("tokens added_tokens_overrides", NOT_EXTENDED),
        drop("resize_token_embeddings_to_32x", NOT_EXTENDED, False),
        *OFFLOADING,
        drop("model_config", "the model's config is used as it is"),
        drop("eot_tokens", "an answer ends where the tokenizer's chat template ends it"),
        drop("roles_to_train", "answers of the assistant are trained, or everything (data.train_on)"),
        drop("unfrozen_parameters", "either adapters or every parameter is trained"),
        drop("quantize_moe_experts gptq", _QUANTISED, False),
        drop("qat model_quantization_config", _QUANTISED),
        drop("cosine_min_lr_ratio cosine_constant_lr_ratio", "the cosine ends at 0, with the last step", 0),
        drop("dataset_exact_deduplication", "`kubetune data check` counts repeated rows; none is left out", False),
        drop("use_ray", _NODES, False),
        drop("ray_num_workers", _NODES, 1),
        drop("image_size", "images keep their shape; vision.image_max_tokens limits their size"),
        drop("push_dataset_to_hub", "prepared data are kept here"),
        drop("context_parallel_size sequence_parallel_degree tensor_parallel_size expert_parallel_size dp_replicate_size",
             "no splitting along a sequence or layer, and none into groups of GPUs", 1),
        # Not needed.
        ignore("eager_attention flex_attention", FAST_ATTENTION),
        ignore("hf_use_auth_token", "a token is taken from the environment (HF_TOKEN), never from a file"),
        ignore("fp8_enable_fsdp_float8_all_gather", "FSDP and fp8 are not combined"),
        ignore("skip_prepare_dataset", "images are read while training, tokens are prepared"),
        ignore("tokenizer_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model tokenizer_use_fast",
               "read from the model's and the tokenizer's own files"),
        ignore(
            "strict dataset_prepared_path pad_to_sequence_len eval_sample_packing lora_fan_in_fan_out "
            "low_cpu_mem_usage eval_table_size eval_max_new_tokens save_first_step "
            "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv "
            "torchdistx_path experimental_skip_move_to_device debug",
            NO_EFFECT
        ),
        ignore(
            "liger_rope liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm "
            "liger_use_token_scaling liger_fused_linear_cross_entropy liger_cross_entropy lora_mlp_kernel "
            "lora_qkv_kernel lora_o_kernel lora_embedding_kernel cut_cross_entropy unsloth_cross_entropy_loss "
            "use_kernels use_scattermoe use_sonicmoe experts_implementation fused_attn_kernel "
            "gemma4_hybrid_attn_impl flex_attn_compile_kwargs tiled_mlp",
            "kubetune uses its own fused parts where they are proved equal"
        ),
    ],
)  # fmt: skip
