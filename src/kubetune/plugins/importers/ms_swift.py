"""ms-swift's `swift sft`: a YAML config, or more often its command line in a shell script."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from kubetune.config.data_files import is_file_name
from kubetune.plugins.importers.common import (
    FAST_ATTENTION,
    LORA,
    NO_EFFECT,
    NO_STOP,
    NOT_SPLIT,
    PACKING,
    TRAINING,
    bits_of,
    count,
    four_bits,
    method,
    pin_fsdp,
    pixels,
    schedule,
    sees,
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
    near,
    unneeded,
)
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template
from kubetune.plugins.importers.targets import modules, saved
from kubetune.plugins.importers.warm_up import WarmUp

# Keys of `megatron sft`, which trains every parameter unless a file says otherwise.
_MEGATRON = set(
    "micro_batch_size global_batch_size lr lr_warmup_fraction train_iters min_lr finetune lr_warmup_iters "
    "lr_decay_style tensor_model_parallel_size recompute_granularity no_save_optim mcore_adapter".split()
)
# hf::owner/name:subset/subset#500
_DATASET = re.compile(
    r"^(?:(?P<hub>hf|ms)::)?(?P<path>[^:#]+)(?::(?P<subsets>[^#]+))?(?P<sample>#\d+)?$"
)
_WARM_UP = WarmUp(refuses_both=True)
_WARM_UP_OF_MEGATRON = WarmUp(
    "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", refuses_both=True, constant_warms_up=True
)  # fmt: skip


def _is_megatron(draft: Draft) -> bool:
    """True for a file of `megatron sft`, by its keys."""
    return not _MEGATRON.isdisjoint(draft.theirs)


def _method(draft: Draft) -> None:
    """Take LoRA or every parameter, and the bits of the base."""
    key = "train_type" if "train_type" in draft.theirs else "tuner_type"
    value = draft.take(key)
    if value is None and _is_megatron(draft):
        has_adapter = "adapters" in draft.theirs or "mcore_adapter" in draft.theirs
        value = "lora" if has_adapter else "full"
    _bits(draft, value)
    method(draft, key, value, "lora_", "target_", "quant_", "use_rslora", "use_dora")


def _bits(draft: Draft, tuner: Any) -> None:
    """Take the bits of the base, which ms-swift reads where `quant_method` is given."""
    bits = draft.get("quant_bits")
    if draft.get("quant_method") is not None:
        if bits is None:
            draft.refuse("quant_method", "ms-swift asks for quant_bits beside it")
        if tuner == "full":
            why = "a quantised base is not trained itself, there as here; expected tuner_type: lora"
            draft.refuse("quant_method", why)
    elif bits is not None:
        why = "nothing is quantised there without quant_method; here: quantization: 4bit or 8bit"
        for key in ("quant_bits", "bnb_4bit_quant_type"):
            if draft.take(key) is not None:
                draft.drop(key, why)


def _task(draft: Draft) -> None:
    """Take the task, which `num_labels` alone may say too."""
    if is_preferred(draft):
        return
    kind = draft.take("task_type")
    if kind == "causal_lm":
        draft.carry("task_type", "task", "causal_lm")
    labels = draft.get("num_labels")
    if kind != "seq_cls" and (kind is not None or labels is None):
        return
    draft.carry("task_type" if kind else "num_labels", "task", "sequence_classification")
    if kind:
        why = "follows from the labels in the data, or from classification.labels"
        draft.ignore("num_labels", why)
    problem = draft.take("problem_type")
    if problem is not None:
        draft.carry("problem_type", "classification.problem_type", problem)


def _chat_template(draft: Draft) -> None:
    """Take `use_chat_template`, whose default is on for `swift sft` and off for `swift pt`."""
    key = "use_chat_template"
    value = draft.take(key)
    if draft.ours("task") == "sequence_classification":
        if value is False:
            draft.ignore(key, "texts to classify get no chat template, there as here")
        else:
            why = "texts to classify stand as they are here; there the model's chat template is around them"
            draft.note("approximated", key, why)
    elif value is not False:
        draft.ignore(key, "conversations get the template, `text` is taken as it is")
    elif draft.command == "pt":
        draft.ignore(key, "off is the default of `swift pt`: records with `text` get no template")
    else:
        draft.refuse(
            key,
            "false trains what a user and an assistant write without a chat template, which kubetune does for records "
            "with `prompt` and `completion`, or with `text`, alone. Write the data so and take the key out",
        )


def _data(draft: Draft) -> None:
    """Take the sources of training and evaluation."""
    for key, path in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        listed = draft.take(key)
        if listed is None:
            continue
        collected = []
        for text in listed if isinstance(listed, list) else [listed]:
            collected += _sources(draft, key, str(text))
        draft.carry(key, path, collected)


def _sources(draft: Draft, key: str, text: str) -> list[dict[str, Any]]:
    """Return the sources of `hf::owner/name:subset/subset#500`; each subset is a source of its own."""
    match = _DATASET.match(text)
    if match is None:
        draft.drop(f"{key}: {text}", "not understood; put the file or hub id in its place")
        return [{"path": text}]
    path = match["path"]
    if not is_file_name(path) and match["hub"] != "hf" and not draft.get("use_hf"):
        why = "is looked for on Hugging Face's hub, not on ModelScope; see that it is there"
        draft.drop(f"{key}: {path}", why)
    source = {"path": path + (match["sample"] or "")}
    # `swift pt` trains plain texts, unless it is told to use the chat template.
    if draft.command == "pt" and draft.get("use_chat_template") is not True:
        source["format"] = "text"
    if not match["subsets"]:
        return [source]
    return [{**source, "subset": subset} for subset in match["subsets"].split("/")]


def _epochs(draft: Draft) -> None:
    """Take `max_epochs`, which ends a run before the epochs or steps that its schedule is made for."""
    if _is_megatron(draft):
        return
    last = draft.take("max_epochs")
    epochs = draft.get("num_train_epochs") or 3
    if last is None:
        return
    if (draft.get("max_steps") or 0) > 0:
        draft.drop(
            "max_epochs",
            "the run takes max_steps steps here, though epochs may end it before them there",
        )
    elif last >= epochs:
        draft.ignore("max_epochs", f"the run ends before, after {epochs} epochs")
    else:
        why = f"the learning rate ends with them; there it is on its way through {epochs} epochs"
        draft.write("max_epochs", near(last, why), "training.num_train_epochs")
        if draft.take("num_train_epochs") is not None:
            draft.drop("num_train_epochs", "max_epochs ends the run before")


def _accumulation(value: Any, draft: Draft) -> Outcome:
    """Carry the micro-batches of a step, or make them of a division such as `$(expr 64 / $NPROC_PER_NODE)`."""
    if isinstance(value, int):
        return carried(value)
    text = " ".join(map(str, as_list(value)))
    # `$(expr 64 / 4)` with a batch of 2: the 64 micro-batches of all processes are 128 samples.
    total = re.search(r"(\d+)\s*/", text)
    batch = draft.get("per_device_train_batch_size") or 1
    if total and isinstance(batch, int):
        why = "divided by the processes there, which kubetune does"
        return near(int(total[1]) * batch, why, "training.global_batch_size")
    return dropped(f"a shell expression: {text}; set training.global_batch_size")


def _packing_length(value: Any, draft: Draft) -> Outcome:
    """Drop another length of packed rows than `max_length`, to which they are packed here."""
    if not draft.get("packing"):
        return unneeded("packing is off")
    if value == draft.get("max_length"):
        return unneeded("max_length says it too")
    return dropped("rows are packed to data.max_length; scale the accumulation by the quotient")


def _has_expression(draft: Draft) -> str:
    """Say why names of modules say nothing, beside a regular expression."""
    if draft.get("target_regex") is not None:
        return "target_regex takes precedence there"
    return ""


def _holds_nothing_out(draft: Draft) -> str:
    """Say why a share says nothing, where nothing is evaluated: ms-swift then trains on all rows."""
    key = "eval_strategy"
    if draft.get(key) is None:
        key = "save_strategy"
    if draft.get(key) in ("no", False):
        return f"{key}: no holds nothing out, so that all rows are trained"
    return ""


def _deepspeed(value: Any, _: Draft) -> Outcome:
    """Take ZeRO-2 and ZeRO-3 for sharding."""
    if "zero3" in str(value) or "zero2" in str(value):
        return near("fsdp", "FSDP2 shards weights, gradients and state, as ZeRO-3")
    return dropped("use training.parallelism: fsdp where the model does not fit one GPU")


def _finish(draft: Draft) -> None:
    """Write down the defaults that depend on other keys."""
    batch = draft.ours("training.per_device_train_batch_size", 1)
    if _is_megatron(draft):
        draft.assume("training.global_batch_size", 16)
        draft.assume("training.per_device_train_batch_size", 1)
    elif not draft.has("training.global_batch_size"):
        world = draft.ours("compute.processes", 1) * draft.ours("compute.nodes", 1)
        steps = max(1, math.ceil(16 / max(1, batch) / max(1, world)))
        why = f"ms-swift's default: batches of 16, here of {batch} from each of {world} processes"
        draft.assume("training.gradient_accumulation_steps", steps, why)
    if draft.command == "pt":
        draft.assume("data.train_on", "all", "`swift pt` trains every token")
    rate = 1e-5
    if draft.has("lora"):
        rate = 1e-4
    draft.assume("training.learning_rate", rate)
    why = "ms-swift takes the model's own maximum, which the file does not say; longer rows are left out"
    draft.assume("data.max_length", 2048, why)
    draft.assume("training.save_steps", 500)
    if draft.has("data.eval"):
        draft.assume("training.eval_steps", draft.ours("training.save_steps"), "as save_steps")


def _warm_up(draft: Draft) -> None:
    """Take the keys of the warm-up, which Megatron names otherwise."""
    if _is_megatron(draft):
        _WARM_UP_OF_MEGATRON.read(draft)
    else:
        _WARM_UP.read(draft)


TOOL = Tool(
    name="ms-swift",
    marks="tuner_type train_type split_dataset_ratio attn_impl freeze_vit val_dataset quant_bits quant_method "
    "truncation_strategy loss_scale task_type model_author load_from_cache_file tuner_backend",
    command=r"\b(?:swift|megatron|swift/cli/main\.py)\s+(\w+)|\bswift/cli/(sft|pt)\.py",
    together=(
        _method,
        _task,
        _chat_template,
        _data,
        lambda draft: pin_fsdp(draft, "fsdp"),
        _epochs,
        _warm_up,
    ),
    finish=_finish,
    defaults={
        "data.packing": False,
        "training.num_train_epochs": 3.0,
        "training.weight_decay": 0.1,
        "training.adam_beta2": 0.95,
        "training.logging_steps": 5,
        "training.gradient_checkpointing": True,
    },
    lora_defaults={
        "lora.r": 8,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
        "lora.target_modules": "all-linear",
    },
    rows=[
        # Names that other tools have too; rows below replace those of TRAINING.
        *TRAINING,
        *aliased(
            "model_revision max_length dataset_num_proc lora_rank lora_alpha lora_dropout "
            "micro_batch_size global_batch_size lr target_parameters"
        ),
        # The model, batches and data.
        Row("model model_id_or_path", "model.path"),
        Row("gradient_accumulation_steps", "training.gradient_accumulation_steps", _accumulation),
        Row("truncation_strategy", "data.overlong", values={"delete": "drop", "right": "truncate", "split": "split"},
            near="truncate", reason="a row's end is cut"),
        Row("split_dataset_ratio", "data.eval", share, unless=_holds_nothing_out),
        *PACKING,
        Row("packing_length", rule=_packing_length),
        # Adapters and bits of the base.
        replace(modules("target_modules", "all-linear", among_names=True), unless=_has_expression),
        Row("target_regex", "lora.target_modules"),
        Row("modules_to_save", "lora.modules_to_save", saved),
        *LORA,
        bits_of("quant_bits", "bnb_4bit_quant_type"),
        Row("quant_method", same={"bnb": "bitsandbytes, as here"}, reason="the base is quantised by bitsandbytes"),
        four_bits("bnb_4bit_quant_type", "quant_bits", 4),
        # Training, and where it runs.
        Row("early_stop_interval", "training.early_stopping_patience", same={0: NO_STOP}),
        Row("loss_scale", "data.train_on", values={"default": "assistant", "all": "all"}, near="assistant",
            reason="every answer weighs the same"),
        Row("deepspeed", "training.parallelism", _deepspeed),
        count("nproc_per_node", "compute.processes"),
        count("nnodes", "compute.nodes"),
        Row("router_aux_loss_coef moe_aux_loss_coeff", "training.router_aux_loss_coef"),
        Row("clip_grad", "training.max_grad_norm"),
        Row("max_epochs", "training.num_train_epochs"),
        Row("train_iters", "training.max_steps"),
        schedule("lr_decay_style"),
        # Models that see, and prompts.
        Row("freeze_vit", "vision.freeze_vision_tower", sees),
        Row("freeze_aligner", "vision.freeze_projector", sees),
        Row("max_pixels MAX_PIXELS", "vision.image_max_tokens", pixels),
        Row("min_pixels MIN_PIXELS", "vision.image_min_tokens", pixels),
        template("template"),
        # Values that are ours anyway; any other is dropped.
        Row("dataset_shuffle train_dataloader_shuffle", same={True: "rows are shuffled, each epoch anew"},
            reason="rows are shuffled, each epoch anew"),
        Row("strict", "data.max_lost_share", values={True: 0.0},
            reason="a row that cannot be used stops the run here, with its line; there it is left out"),
        # Not done here; a value behind the reason is that which switches it off there.
        drop("columns", "name them at the source: data.train[…].columns, ours first"),
        drop("interleave_prob", "give each source a `weight`: how often it appears in an epoch"),
        drop("system", "put a system message into the data; the model then sees it at inference too"),
        drop("init_weights", "adapters begin at zero", True),
        drop("adapters", "training does not begin from an adapter; merge it into the model first"),
        drop("model_author model_name", "the data say who the model is, as they stand"),
        drop("agent_template response_prefix", "the chat template is the tokenizer's own"),
        drop("acc_strategy", "accuracy counts tokens", "token"),
        drop("load_data_args", "the data are those of this file", False),
        drop("lora_bias", "biases are not trained with adapters", "none"),
        drop("freeze_llm", "the language model always learns, through adapters or whole", False),
        drop("eval_iters", "an evaluation takes all of data.eval", -1),
        drop("sequence_parallel_size", "no splitting along a sequence", 1),
        drop("sequence_parallel", NOT_SPLIT, False),
        drop("tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size "
             "expert_tensor_parallel_size", NOT_SPLIT, 1),
        drop("loss_type", "cross-entropy, or the mean squared error of a regression"),
        drop("optimizer", "AdamW and its 8-bit form are there (training.optim)"),
        drop("vit_lr aligner_lr", "one learning rate for all of the model"),
        drop("min_lr", "the learning rate ends at 0, with the last step", 0),
        # Not needed.
        ignore("vit_gradient_checkpointing", "training.gradient_checkpointing is for all of the model"),
        ignore("vit_attn_impl", FAST_ATTENTION),
        ignore("merge_lora", "`kubetune export --merge` does it afterwards"),
        ignore("recompute_granularity recompute_method recompute_num_layers recompute_modules",
               "training.gradient_checkpointing: auto recomputes as many layers as memory asks for"),
        ignore("no_save_optim no_save_rng",
               "a checkpoint holds all that a run needs to go on; `kubetune export` leaves the rest out"),
        ignore(
            "load_from_cache_file use_hf model_type add_version check_model tuner_backend lazy_tokenize save_only_model "
            "max_new_tokens temperature infer_backend create_checkpoint_symlink label_names use_logits_to_keep "
            "stream experts_impl finetune attention_backend cross_entropy_loss_fusion cross_entropy_fusion_impl "
            "moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap gradient_accumulation_fusion "
            "masked_softmax_fusion bnb_4bit_compute_dtype",
            NO_EFFECT
        ),
    ],
)  # fmt: skip
