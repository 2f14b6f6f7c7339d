"""ms-swift's `swift sft`: a YAML config, or more often its command line in a shell script."""

from __future__ import annotations

import math
import re
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
    is_empty,
    only,
    same,
    unneeded,
)
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template
from kubetune.plugins.importers.targets import modules
from kubetune.plugins.importers.warm_up import OF_MEGATRON, OF_SWIFT, warm_up

NAME = "ms-swift"
MARKS = ("tuner_type", "train_type", "split_dataset_ratio", "attn_impl", "freeze_vit", "val_dataset",
         "quant_bits", "quant_method", "truncation_strategy", "loss_scale", "task_type", "model_author",
         "load_from_cache_file", "tuner_backend")  # fmt: skip

_DEFAULTS: dict[str, Any] = {
    "data.packing": False, "training.num_train_epochs": 3.0, "training.weight_decay": 0.1, "training.adam_beta2": 0.95,
    "training.logging_steps": 5, "training.save_steps": 500, "training.gradient_checkpointing": True,
}  # fmt: skip
# Keys of `megatron sft`, which trains every parameter unless it is told otherwise.
_MEGATRON = {"micro_batch_size", "global_batch_size", "lr", "lr_warmup_fraction", "train_iters", "min_lr", "finetune",
             "lr_warmup_iters", "lr_decay_style",
             "tensor_model_parallel_size", "recompute_granularity", "no_save_optim", "mcore_adapter"}  # fmt: skip
_DEFAULTS_OF_MEGATRON = _DEFAULTS | {
    "training.global_batch_size": 16,
    "training.per_device_train_batch_size": 1,
}
_LORA = {"lora.r": 8, "lora.alpha": 32, "lora.dropout": 0.05, "lora.target_modules": "all-linear"}
_DATASET = re.compile(
    r"^(?:(?P<hub>hf|ms)::)?(?P<path>[^:#]+)(?::(?P<subsets>[^#]+))?(?:#(?P<number>\d+))?$"
)


def convert(draft: Draft) -> None:
    """Fill in the draft."""
    key = "train_type" if "train_type" in draft.given else "tuner_type"
    named, general = draft.take(key), _DEFAULTS
    if not _MEGATRON.isdisjoint(draft.given):
        general = _DEFAULTS_OF_MEGATRON
        named = named or ("lora" if {"adapters", "mcore_adapter"} & set(draft.given) else "full")
    _bits(draft, named)
    common.method(draft, key, named, "lora_", "target_", "quant_", "use_rslora", "use_dora")
    if not is_preferred(draft):
        _task(draft)
    _chat_template(draft)
    _data(draft)
    common.pin_fsdp(draft, "fsdp")
    warm_up(draft, OF_SWIFT if _MEGATRON.isdisjoint(draft.given) else OF_MEGATRON)
    draft.apply(RULES)
    if general is _DEFAULTS and not draft.has("training.global_batch_size"):
        _sixteen(draft)
    if draft.command == "pt":
        draft.assume("data.train_on", "all", "`swift pt` trains every token")
    common.defaults(draft, general, _LORA)
    draft.assume("training.learning_rate", 1e-4 if ("lora",) in draft.settings else 1e-5)
    why = "ms-swift takes the model's own maximum, which the file does not say; longer rows are left out"
    draft.assume("data.max_length", 2048, why)
    if draft.has("data.eval"):
        draft.assume(
            "training.eval_steps", draft.settings[("training", "save_steps")], "as save_steps"
        )


def _bits(draft: Draft, named: Any) -> None:
    """Take the bits of the base, which ms-swift reads where `quant_method` is given."""
    bits = draft.given.get("quant_bits")
    quantises = not is_empty(draft.given.get("quant_method"))
    if quantises and is_empty(bits):
        draft.refuse("quant_method", "ms-swift asks for quant_bits beside it")
    if quantises and named == "full":
        why = "a quantised base is not trained itself, there as here; expected tuner_type: lora"
        draft.refuse("quant_method", why)
    if quantises or is_empty(bits):
        return
    for key in ("quant_bits", "bnb_4bit_quant_type"):
        if draft.take(key) is not None:
            why = (
                "nothing is quantised there without quant_method; here: quantization: 4bit or 8bit"
            )
            draft.drop(key, why)


def _task(draft: Draft) -> None:
    kind = draft.take("task_type")
    if kind == "seq_cls" or (kind is None and draft.take("num_labels")):
        draft.carry("task_type" if kind else "num_labels", "task", "sequence_classification")
        draft.seen.add("num_labels")
        if kind and "num_labels" in draft.given:
            draft.unneeded(
                "num_labels", "follows from the labels in the data, or from classification.labels"
            )
        if problem := draft.take("problem_type"):
            draft.carry("problem_type", "classification.problem_type", problem)
    elif kind == "causal_lm":
        draft.carry("task_type", "task", "causal_lm")


def _chat_template(draft: Draft) -> None:
    """Take `use_chat_template`, whose default is on for `swift sft` and off for `swift pt`."""
    key = "use_chat_template"
    value = as_flag(draft.take(key))
    if draft.settings.get(("task",)) == "sequence_classification":
        if value is False:
            draft.unneeded(key, "texts to classify get no chat template, there as here")
        else:
            why = "texts to classify stand as they are here; there the model's chat template is around them"
            draft.notes.append(Note("approximated", key, value, why, draft.lines.get(key, 0)))
    elif value is False and draft.command != "pt":
        draft.refuse(
            key,
            "false trains what a user and an assistant write without a chat template, which kubetune does for records "
            "with `prompt` and `completion`, or with `text`, alone. Write the data so and take the key out",
        )
    elif value is not None and value is not False:
        draft.unneeded(key, "conversations get the template, `text` is taken as it is")
    elif value is False:
        draft.unneeded(key, "off is the default of `swift pt`: records with `text` get no template")


def _is_plain_text(draft: Draft) -> bool:
    """Return True for `swift pt`, unless it is told to use the chat template."""
    return draft.command == "pt" and as_flag(draft.given.get("use_chat_template")) is not True


def _data(draft: Draft) -> None:
    for key, path in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        given = draft.take(key)
        if given is not None:
            words = given if isinstance(given, list) else [given]
            draft.carry(
                key, path, [source for word in words for source in _sources(draft, key, str(word))]
            )


def _sources(draft: Draft, key: str, text: str) -> list[dict[str, Any]]:
    """`hf::owner/name:subset/subset#500`; each subset is a source of its own."""
    found = _DATASET.match(text)
    if found is None:
        draft.drop(f"{key}: {text}", "not understood; put the file or hub id in its place")
        return [{"path": text}]
    sample = f"#{found['number']}" if found["number"] else ""
    path, is_file = (
        found["path"],
        bool(re.search(r"\.(jsonl?|csv|tsv|txt|parquet)$", found["path"])),
    )
    if not is_file and found["hub"] != "hf" and not as_flag(draft.given.get("use_hf")):
        draft.drop(
            f"{key}: {path}",
            "is looked for on Hugging Face's hub, not on ModelScope; see that it is there",
        )
    source = {"path": f"{path}{sample}"}
    if _is_plain_text(draft):
        source["format"] = "text"
    subsets = (found["subsets"] or "").split("/") if found["subsets"] else []
    return [{**source, "subset": subset} for subset in subsets] or [source]


def _accumulation(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, int):
        draft.carry(key, "training.gradient_accumulation_steps", value)
        return
    text = " ".join(map(str, as_list(value)))
    total = re.search(r"(\d+)\s*/", text)
    batch = draft.given.get("per_device_train_batch_size") or 1
    if total and isinstance(batch, int):
        wanted = int(total[1]) * batch
        draft.approximate(
            key,
            "training.global_batch_size",
            wanted,
            "divided by the processes there, which kubetune does",
        )
    else:
        draft.drop(key, f"a shell expression: {text}; set training.global_batch_size")


def _sixteen(draft: Draft) -> None:
    """Write down the accumulation that ms-swift chooses by itself: batches of 16, as nearly as processes allow."""
    batch = draft.settings.get(("training", "per_device_train_batch_size"), 1)
    world = 1
    for path in (("compute", "processes"), ("compute", "nodes")):
        world *= draft.settings.get(path, 1)
    steps = max(1, math.ceil(16 / max(1, batch) / max(1, world)))
    why = f"ms-swift's default: batches of 16, here of {batch} from each of {world} processes"
    draft.assume("training.gradient_accumulation_steps", steps, why)


def _packing_length(draft: Draft, key: str, value: Any) -> None:
    """Rows are packed to `max_length` here, so that a batch of longer ones is a larger batch of these."""
    if not as_flag(draft.given.get("packing")):
        draft.unneeded(key, "packing is off")
    elif value == draft.given.get("max_length"):
        draft.unneeded(key, "max_length says it too")
    else:
        draft.drop(
            key, "rows are packed to data.max_length; scale the accumulation by the quotient"
        )


def _target_modules(draft: Draft, key: str, value: Any) -> None:
    """Take names of modules, unless an expression says more."""
    if is_empty(draft.given.get("target_regex")):
        modules("all-linear", among_names=True)(draft, key, value)
    else:
        draft.unneeded(key, "target_regex takes precedence there")


def _share(draft: Draft, key: str, value: Any) -> None:
    """Hold out a share, unless nothing is evaluated: then ms-swift trains on all rows."""
    strategy = draft.given.get("eval_strategy")
    named = "save_strategy" if is_empty(strategy) else "eval_strategy"
    if as_flag(draft.given.get(named)) in ("no", False):
        draft.unneeded(key, f"{named}: no holds nothing out, so that all rows are trained")
    else:
        common.share(draft, key, value)


def _parallel(draft: Draft, key: str, value: Any) -> None:
    if "zero3" in str(value) or "zero2" in str(value):
        draft.approximate(
            key,
            "training.parallelism",
            "fsdp",
            "FSDP2 shards weights, gradients and state, as ZeRO-3",
        )
    else:
        draft.drop(key, "use training.parallelism: fsdp where the model does not fit one GPU")


RULES: dict[str, Rule] = {
    **common.TRAINING,
    **common.plain(
        "model_revision max_length dataset_num_proc lora_rank lora_alpha lora_dropout "
        "early_stop_interval micro_batch_size global_batch_size lr target_parameters use_rslora use_dora "
        "packing padding_free"
    ),
    **each("model model_id_or_path", same("model.path")),
    "gradient_accumulation_steps": _accumulation,
    "truncation_strategy": choice(
        "data.overlong",
        {"delete": "drop", "right": "truncate", "split": "split"},
        "truncate",
        "a row's end is cut",
    ),
    "split_dataset_ratio": _share,
    "packing_length": _packing_length,
    "target_modules": _target_modules,
    "target_regex": same("lora.target_modules"),
    "modules_to_save": common.names("lora.modules_to_save"),
    "quant_bits": choice("quantization", {4: "4bit", 8: "8bit"}, None, "4 and 8 bits are there"),
    "quant_method": only(["bnb"], "bitsandbytes, as here", "the base is quantised by bitsandbytes"),
    "bnb_4bit_quant_type": common.four_bits("quant_bits", 4),
    "loss_scale": choice(
        "data.train_on",
        {"default": "assistant", "all": "all"},
        "assistant",
        "every answer weighs the same",
    ),
    "deepspeed": _parallel,
    "columns": dropped("name them at the source: data.train[…].columns, ours first"),
    "interleave_prob": dropped("give each source a `weight`: how often it appears in an epoch"),
    "nproc_per_node": common.number("compute.processes"),
    "nnodes": common.number("compute.nodes"),
    "system": dropped(
        "put a system message into the data; the model then sees it at inference too"
    ),
    "init_weights": dropped("adapters begin at zero", True),
    "adapters": dropped("training does not begin from an adapter; merge it into the model first"),
    **each("model_author model_name", dropped("the data say who the model is, as they stand")),
    **each("agent_template response_prefix", dropped("the chat template is the tokenizer's own")),
    "acc_strategy": dropped("accuracy counts tokens", "token"),
    "load_data_args": dropped("the data are those of this file", False),
    "lora_bias": dropped("biases are not trained with adapters", "none"),
    "freeze_llm": dropped("the language model always learns, through adapters or whole", False),
    "freeze_vit": common.sees("vision.freeze_vision_tower"),
    "freeze_aligner": common.sees("vision.freeze_projector"),
    **each("max_pixels MAX_PIXELS", common.pixels("vision.image_max_tokens")),
    **each("min_pixels MIN_PIXELS", common.pixels("vision.image_min_tokens")),
    "template": template(),
    **each(
        "dataset_shuffle train_dataloader_shuffle", always("rows are shuffled, each epoch anew")
    ),
    "strict": choice(
        "data.max_lost_share",
        {True: 0.0},
        None,
        "a row that cannot be used stops the run here, with its line; there it is left out",
    ),
    "eval_iters": dropped("an evaluation takes all of data.eval", -1),
    "sequence_parallel_size": dropped("no splitting along a sequence", 1),
    "loss_type": dropped("cross-entropy, or the mean squared error of a regression"),
    "optimizer": dropped("AdamW and its 8-bit form are there (training.optim)"),
    **each("vit_lr aligner_lr", dropped("one learning rate for all of the model")),
    "vit_gradient_checkpointing": unneeded(
        "training.gradient_checkpointing is for all of the model"
    ),
    **each(
        "router_aux_loss_coef moe_aux_loss_coeff",
        same("training.router_aux_loss_coef"),
    ),
    "clip_grad": same("training.max_grad_norm"),
    "max_epochs": same("training.num_train_epochs"),
    "lr_decay_style": common.schedule,
    "vit_attn_impl": unneeded(common.FAST_ATTENTION),
    "train_iters": same("training.max_steps"),
    "min_lr": dropped("the learning rate ends at 0, with the last step", 0),
    "merge_lora": unneeded("`kubetune export --merge` does it afterwards"),
    **each(
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size "
        "expert_tensor_parallel_size",
        dropped("no splitting along a sequence or layer", 1),
    ),
    "sequence_parallel": dropped("no splitting along a sequence or layer", False),
    **each(
        "recompute_granularity recompute_method recompute_num_layers recompute_modules",
        unneeded(
            "training.gradient_checkpointing: auto recomputes as many layers as memory asks for"
        ),
    ),
    **each(
        "no_save_optim no_save_rng",
        unneeded(
            "a checkpoint holds all that a run needs to go on; `kubetune export` leaves the rest out"
        ),
    ),
    **each(
        "load_from_cache_file use_hf model_type add_version check_model tuner_backend "
        "lazy_tokenize save_only_model max_new_tokens temperature infer_backend "
        "create_checkpoint_symlink label_names use_logits_to_keep "
        "stream experts_impl finetune attention_backend cross_entropy_loss_fusion cross_entropy_fusion_impl "
        "moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap gradient_accumulation_fusion "
        "masked_softmax_fusion bnb_4bit_compute_dtype",
        unneeded("has no counterpart, and no effect on the result"),
    ),
}
