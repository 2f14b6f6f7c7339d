"""ms-swift's `swift sft`: a YAML config, or more often its command line in a shell script."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from kubetune.config.data_files import is_file_name
from kubetune.plugins.importers.by_teacher import OF_GKD
from kubetune.plugins.importers.common.image_keys import pixels, sees
from kubetune.plugins.importers.common.schedule_keys import assume_warm_up, schedule, warm_up
from kubetune.plugins.importers.common.source_keys import share, take_sources
from kubetune.plugins.importers.common.target_keys import PATH, modules, without_words
from kubetune.plugins.importers.common.training_keys import (
    FAST_ATTENTION,
    FSDP,
    LORA,
    NO_EFFECT,
    NO_STOP,
    PACKING,
    SHUFFLED,
    STEP,
    TRAINING,
    bits,
    count,
    method,
    template,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    ToolCommand,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.reward_names import OF_SWIFT
from kubetune.plugins.importers.servers import CORRECTION

# Keys of `megatron sft`, which trains every parameter unless a file says otherwise.
_MEGATRON = set(
    "micro_batch_size global_batch_size lr lr_warmup_fraction train_iters min_lr finetune lr_warmup_iters "
    "lr_decay_style tensor_model_parallel_size recompute_granularity no_save_optim mcore_adapter".split()
)
# hf::owner/name:subset/subset#500
_DATASET = re.compile(
    r"^(?:(?P<hub>hf|ms)::)?(?P<path>[^:#]+)(?::(?P<subsets>[^#]+))?(?P<sample>#\d+)?$"
)


def _is_megatron(draft: Draft) -> bool:
    """True for a file of `megatron sft`, by its keys."""
    return not _MEGATRON.isdisjoint(draft.theirs)


def _data(draft: Draft) -> None:
    """Take the sources of training and evaluation."""
    take_sources(draft, {"dataset": "data.train", "val_dataset": "data.eval"}, _sources)


def _sources(draft: Draft, place: str, text: Any) -> list[Any]:
    """Return the sources of `hf::owner/name:subset/subset#500`; each subset is a source of its own."""
    key = place.partition("[")[0]
    match = _DATASET.match(str(text))
    if match is None:
        draft.drop(f"{key}: {text}", "not understood; put the file or hub id in its place")
        return [{"path": text}]
    path = match["path"]
    if not is_file_name(path) and match["hub"] != "hf" and not draft.get("use_hf"):
        why = "is looked for on Hugging Face's hub, not on ModelScope; see that the hub has it"
        draft.drop(f"{key}: {path}", why)
    source = {"path": path + (match["sample"] or "")}
    # `swift pt` trains plain texts, unless it is asked to use the chat template.
    if draft.command == "pt" and draft.get("use_chat_template") is not True:
        source["format"] = "text"
    if not match["subsets"]:
        return [source]
    return [{**source, "subset": subset} for subset in match["subsets"].split("/")]


def _chat_template(value: Any, draft: Draft) -> Outcome:
    """Take `use_chat_template`, whose default is on for `swift sft` and off for `swift pt`."""
    if not value and draft.command != "pt" and draft.get("task_type") != "seq_cls":
        draft.refuse(
            draft.at,
            "false trains what a user and an assistant write without a chat template, which kubetune does for records "
            "with `prompt` and `completion`, or with `text`, alone. Write the data so and take the key out",
        )
    return unneeded("conversations get the template, `text` is taken as it is")


def _labels(_: Any, draft: Draft) -> Outcome:
    """Take the number of labels, which alone may say the task."""
    if draft.get("task_type") is None and not draft.has("task"):
        return carried("sequence_classification")
    return unneeded("follows from the labels in the data, or from classification.labels")


def _max_epochs(value: Any, draft: Draft) -> Outcome:
    """Take `max_epochs`, which ends a run before the epochs or steps that its schedule is made for."""
    if _is_megatron(draft):
        return carried(value)
    epochs = draft.get("num_train_epochs") or 3
    if (draft.get("max_steps") or 0) > 0:
        return dropped("the run takes max_steps steps; in ms-swift epochs may end it before them")
    if value >= epochs:
        return unneeded(f"the run ends before, after {epochs} epochs")
    return near(value, f"the learning rate ends with them, in ms-swift after {epochs} epochs")


def _share(value: Any, draft: Draft) -> Outcome:
    """Take the share that is held out, if anything is evaluated; ms-swift trains on all rows otherwise."""
    key = "save_strategy" if draft.get("eval_strategy") is None else "eval_strategy"
    if draft.get(key) in ("no", False):
        return unneeded(f"{key}: no holds nothing out, so that all rows are trained")
    return share(value, draft)


def _loss_scale(value: Any, _: Draft) -> Outcome:
    """Take which answers are trained there; names joined by + also weigh parts of them."""
    strategy, *weights = str(value).split("+")
    differences = []
    if strategy == "last_round":
        differences.append(
            "all answers of a conversation are trained, and in ms-swift only the last"
        )
    if strategy not in ("default", "all", "last_round") or weights:
        differences.append("every answer weighs the same")
    trained = "all" if strategy == "all" else "assistant"
    return near(trained, "; ".join(differences))


def _deepspeed(value: Any, _: Draft) -> Outcome:
    """Take ZeRO-2 and ZeRO-3 for sharding."""
    if "zero3" in str(value) or "zero2" in str(value):
        return near("fsdp", "FSDP2 shards weights, gradients and state, as ZeRO-3")
    return dropped("use training.parallelism: auto where the model does not fit one GPU")


def _finish(draft: Draft) -> None:
    """Write down the defaults that depend on other keys."""
    assume_warm_up(draft)
    is_megatron = _is_megatron(draft)
    is_lora = not is_megatron or {"adapters", "mcore_adapter"} & draft.theirs.keys()
    if draft.get("tuner_type") is None and draft.get("train_type") is None and is_lora:
        draft.assume("lora", None)
    if is_megatron:
        draft.assume("training.global_batch_size", 16)
        draft.assume("training.per_device_train_batch_size", 1)
    elif not draft.has("training.global_batch_size") and draft.undecided.keys().isdisjoint(STEP):
        batch = draft.ours("training.per_device_train_batch_size", 1)
        world = draft.ours("compute.processes", 1) * draft.ours("compute.nodes", 1)
        steps = max(1, math.ceil(16 / max(1, batch) / max(1, world)))
        why = f"ms-swift's default: batches of 16, here of {batch} from each of {world} processes"
        draft.assume("training.gradient_accumulation_steps", steps, why)
    if draft.command == "pt":
        draft.assume("data.train_on", "all", "`swift pt` trains every token")
    is_reward = draft.ours("task") == "reward_model"
    if (
        draft.get("task_type") == "seq_cls"
        and not is_reward
        and draft.get("use_chat_template") is not False
    ):
        why = "kubetune classifies texts as they stand; ms-swift puts the model's chat template around them"
        draft.note("approximated", "use_chat_template", why)
    draft.assume("training.learning_rate", 1e-4 if draft.has("lora") else 1e-5)
    why = "ms-swift takes the model's own maximum, which the file does not say; longer rows are left out"
    draft.assume("data.max_length", 2048, why)
    draft.assume("training.save_steps", 500)
    if draft.has("data.eval"):
        draft.assume("training.eval_steps", draft.ours("training.save_steps"), "as save_steps")


TOOL = Tool(
    name="ms-swift",
    marks="tuner_type train_type split_dataset_ratio attn_impl freeze_vit val_dataset quant_bits quant_method "
    "truncation_strategy loss_scale task_type model_author load_from_cache_file tuner_backend "
    "rlhf_type external_plugins reward_funcs num_generations",
    command=ToolCommand(r"\b(?:swift|megatron|swift/cli/main\.py)\s+(\w+)|\bswift/cli/(sft|pt)\.py", "swift sft` or `rlhf"),
    # Of both keys of epochs that counts which comes first.
    first="max_epochs tuner_type train_type task_type",
    sources=_data,
    finish=_finish,
    defaults={
        "data.packing": False,
        "training.num_train_epochs": 3.0,
        "training.weight_decay": 0.1,
        "training.adam_beta2": 0.95,
        "training.logging_steps": 5,
        "training.gradient_checkpointing": True,
    },
    rewards=OF_SWIFT,
    defaults_of={
        "lora": {
            "lora.r": 8,
            "lora.alpha": 32,
            "lora.dropout": 0.05,
            "lora.target_modules": "all-linear",
        },
        "simpo": {"preference.beta": 2.0, "preference.gamma": 1.0, "preference.sft_weight": 1.0},
        "gkd": OF_GKD,
        "grpo": {
            "grpo.loss_type": "grpo",
            "grpo.beta": 0.04,
            "grpo.temperature": 0.9,
            # On is TRL's default since 1.16, on which ms-swift does not build yet.
            "grpo.use_bias_correction_kl": False,
            CORRECTION: "none",
            "grpo.importance_sampling_clip_max": 2.0,
        },
    },
    tables=(TRAINING, LORA, PACKING, FSDP, Table(
        same={
            "model.path": "model model_id_or_path",
            "model.revision": "model_revision",
            "data.max_length": "max_length",
            "data.num_proc": "dataset_num_proc",
            "lora.r": "lora_rank",
            "lora.alpha": "lora_alpha",
            "lora.dropout": "lora_dropout",
            "lora.target_modules": "target_regex",
            "classification.problem_type": "problem_type",
            "lora.target_parameters": "target_parameters",
            "training.per_device_train_batch_size": "per_device_train_batch_size micro_batch_size",
            "training.global_batch_size": "global_batch_size",
            "training.learning_rate": "learning_rate lr",
            "training.router_aux_loss_coef": "router_aux_loss_coef moe_aux_loss_coeff",
            "training.max_grad_norm": "max_grad_norm clip_grad",
            "training.max_steps": "train_iters",
        },
        rows=[
            # The task and what is trained.
            method("tuner_type"),
            method("train_type"),
            Row("task_type", "task", {"causal_lm": "causal_lm", "seq_cls": "sequence_classification"},
                lambda _, draft: draft.refuse_value("task_type")),
            Row("num_labels", "task", other=_labels),
            Row("use_chat_template", other=_chat_template),
            Row("max_epochs", "training.num_train_epochs", other=_max_epochs),
            # Batches and data.
            Row("truncation_strategy", "data.overlong", {"delete": "drop", "right": "truncate", "split": "split"},
                near("truncate", "a row's end is cut")),
            Row("split_dataset_ratio", "data.eval", other=_share),
            # A row that cannot be used stops the run here, with its line; there it is left out.
            Row("strict", "data.max_lost_share", {True: 0.0}, dropped("a row that cannot be used stops the run")),
            # Adapters and bits of the base.
            Row("target_modules", PATH, other=modules("all-linear", "all-linear"), unless="target_regex"),
            Row("modules_to_save", "lora.modules_to_save", other=without_words),
            *[replace(row, beside="quant_method") for row in bits("quant_bits", "bnb_4bit_quant_type", 4)],
            # Training, and where it runs.
            Row("early_stop_interval", "training.early_stopping_patience", {0: NO_STOP}),
            Row("loss_scale", "data.train_on", {"default": "assistant", "all": "all"}, _loss_scale),
            Row("deepspeed", "training.parallelism", other=_deepspeed),
            count("nproc_per_node", "compute.processes"),
            count("nnodes", "compute.nodes"),
            schedule("lr_decay_style"),
            *warm_up(),
            # A constant schedule of Megatron warms up too.
            *warm_up("", "lr_warmup_iters", "lr_warmup_fraction"),
            # Models that see, and prompts.
            Row("freeze_vit", "vision.freeze_vision_tower", other=sees),
            Row("freeze_aligner", "vision.freeze_projector", other=sees),
            Row("max_pixels MAX_PIXELS", "vision.image_max_tokens", other=pixels),
            Row("min_pixels MIN_PIXELS", "vision.image_min_tokens", other=pixels),
            Row("template", "model.chat_template", other=template),
        ],
        dropped={
            "dataset_shuffle train_dataloader_shuffle": (SHUFFLED, True),
            "packing_length": "rows are packed to data.max_length; scale the accumulation by the quotient",
            "columns": "name them at the source: data.train[…].columns, ours first",
            "model_author model_name": "the data say who the model is, as they stand",
            "acc_strategy": ("accuracy counts tokens", "token"),
            "load_data_args": ("the data are those of this file", False),
            "lora_bias": ("biases are not trained with adapters", "none"),
            "eval_iters": ("an evaluation takes all of data.eval", -1),
            "loss_type": "cross-entropy, or the mean squared error of a regression",
            "min_lr": ("the learning rate ends at 0, with the last step", 0),
        },
        unneeded={
            "vit_gradient_checkpointing": "training.gradient_checkpointing is for all of the model",
            "vit_attn_impl": FAST_ATTENTION,
            "merge_lora": "`kubetune export --merge` does it afterwards",
            "recompute_granularity recompute_method recompute_num_layers recompute_modules":
                "training.gradient_checkpointing: auto recomputes as many layers as memory asks for",
            "no_save_optim no_save_rng":
                "a checkpoint holds all that a run needs to go on; `kubetune export` leaves the rest out",
            "load_from_cache_file use_hf model_type add_version check_model tuner_backend lazy_tokenize save_only_model "
            "max_new_tokens temperature infer_backend create_checkpoint_symlink label_names use_logits_to_keep "
            "stream experts_impl finetune attention_backend cross_entropy_loss_fusion cross_entropy_fusion_impl "
            "moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap gradient_accumulation_fusion "
            "masked_softmax_fusion bnb_4bit_compute_dtype": NO_EFFECT,
        },
    )),
)  # fmt: skip
