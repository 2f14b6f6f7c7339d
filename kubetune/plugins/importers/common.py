"""Keys that several tools share: Hugging Face's TrainingArguments, schedules, optimizers, attention and the like."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any

from kubetune.config.aliases import ALIASES
from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.draft import (
    Draft,
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
from kubetune.plugins.importers.targets import modules

SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine",  # with the one cycle that is the default
}  # fmt: skip
OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "adamw": "adamw", "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
}  # fmt: skip
_PAGED = {"paged_adamw_8bit": "adamw_8bit", "paged_adamw_32bit": "adamw", "paged_adamw": "adamw"}
_SEEING = re.compile(
    r"vl|vision|llava|omni|ocr|pixtral|gemma-?3|minicpm-?[vo]|ovis|molmo|llama-?4|glm-?[\d.]+v",
    re.I,
)
"""Names of models that see, where their config.json is not here."""
_MODEL = ("model", "model_name_or_path", "model_id_or_path")
FAST_ATTENTION = "kubetune chooses the fastest attention that its self-check proves exact"

schedule = choice(
    "training.lr_scheduler_type",
    SCHEDULES,
    "cosine",
    "kubetune knows cosine, linear and constant schedules",
)


def plain(keys: str) -> dict[str, Rule]:
    """Keys that a run file takes as they are, or that several tools have, and what they mean here."""
    return {key: _OF_SEVERAL.get(key) or same(ALIASES[key].path) for key in keys.split()}


def optimizer(draft: Draft, key: str, value: Any) -> None:
    """AdamW in one of its forms, or the nearest."""
    if value in OPTIMIZERS:
        draft.carry(key, "training.optim", OPTIMIZERS[value])
    elif value in _PAGED:
        draft.approximate(
            key, "training.optim", _PAGED[value], "the optimizer's state is not paged to the host"
        )
    else:
        why = f"{value} is not there; choose the learning rate anew for AdamW"
        draft.approximate(key, "training.optim", "adamw", why)


@rule_with
def steps(draft: Draft, key: str, value: Any, path: str) -> None:
    """Steps between events; a share of the whole run, which peers allow, is not known before the data are read."""
    if isinstance(value, (int, float)) and value >= 1:
        draft.carry(key, path, int(value))
    else:
        draft.approximate(
            key, path, "epoch", "a share of all steps; `kubetune plan` shows how many there are"
        )


@rule_with
def strategy(draft: Draft, key: str, value: Any, path: str) -> None:
    """`epoch` sets the interval; `steps` leaves it to the key with the number."""
    if value == "epoch":
        draft.carry(key, path, "epoch")
    elif value == "steps":
        draft.unneeded(key, "follows from the number of steps")
    elif value == "no" or as_flag(value) is False:
        saved, evaluated = "the last step is saved", "what data.eval holds out is evaluated"
        what = f"{saved}, and each epoch's," if path == "training.save_steps" else evaluated
        draft.unneeded(key, f"{what} all the same, which changes no result")
    elif value == "best":
        draft.unneeded(key, "the best checkpoint is always kept")
    else:
        draft.drop(key, "expected steps, epoch or no")


def resumption(draft: Draft, key: str, value: Any) -> None:
    """A run goes on by itself; from another's checkpoint none begins."""
    if as_flag(value) in (True, False):
        draft.unneeded(
            key, "a run goes on from its newest good checkpoint by itself; see training.resume"
        )
    else:
        own = "a run goes on from its own newest checkpoint only"
        draft.drop(key, f"{own}; merge another's result into the model first")


def push(draft: Draft, key: str, value: Any) -> None:
    """Upload of the result; where to, another key says."""
    if not as_flag(value):
        draft.unneeded(key, "off, as here")
    elif draft.given.get("hub_model_id"):
        draft.unneeded(key, "follows from `push`, which hub_model_id sets")
    else:
        draft.drop(key, "no hub_model_id is given; set push.repo: ORG/NAME")


def hub_model(draft: Draft, key: str, value: Any) -> None:
    """Address for the result; only named, nothing is uploaded unless it is switched on there."""
    if draft.peer != "axolotl" and not as_flag(draft.given.get("push_to_hub")):
        draft.unneeded(key, "push_to_hub is off")
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(value)):
        draft.carry(key, "push.repo", value)
    else:
        draft.drop(key, f"push.repo wants ORG/NAME, found {value}")


@rule_with
def sees(draft: Draft, key: str, value: Any, path: str) -> None:
    """A setting of the parts of a model that see; freezing these, which is the default there, is set for others too."""
    model = next((str(draft.given[name]) for name in _MODEL if draft.given.get(name)), "")
    facts = read_config(model, os.environ)
    if "vision_config" in str(facts) or (
        not facts and (as_flag(value) is False or _SEEING.search(model))
    ):
        draft.carry(key, path, as_flag(value))
        say_it_sees(draft, key)
    else:
        draft.unneeded(
            key, "nothing here says that the model sees; where it does, set task: vision_language"
        )


def say_it_sees(draft: Draft, key: str) -> None:
    """Take from a key that the model sees: images in pairs of answers, or a task of their own."""
    task, why = draft.settings.get(("task",)), "is a setting of models that see"
    if task == "reward_model":
        draft.refuse(key, f"{why}, and a reward model scores texts alone")
    if task == "preference":
        draft.assume("preference.images", True, f"{key} {why}")
    elif task != "vision_language":
        draft.settings.pop(("task",), None)
        draft.assume(
            "task", "vision_language", f"{key} {why}; `causal_lm` for one that reads texts alone"
        )


@rule_with
def pixels(draft: Draft, key: str, value: Any, path: str) -> None:
    """A limit of an image in pixels becomes one in tokens of 28 × 28 pixels, as Qwen-VL counts; at least one."""
    if isinstance(value, int) and value > 0:
        tokens = max(1, min(16_384, value // (28 * 28)))
        draft.approximate(key, path, tokens, "tokens of 28 × 28 pixels; other models differ")
        say_it_sees(draft, key)
    else:
        draft.drop(key, f"no number of pixels; see {path}")


def max_steps(draft: Draft, key: str, value: Any) -> None:
    """transformers' own default, written out in many files, is -1: epochs decide."""
    if isinstance(value, int) and value < 1:
        draft.unneeded(key, "off: epochs decide")
    else:
        draft.carry(key, "training.max_steps", value)


def total_limit(draft: Draft, key: str, value: Any) -> None:
    """At least one checkpoint is kept; peers also keep all."""
    if isinstance(value, int) and value >= 1:
        draft.carry(key, "training.save_total_limit", value)
    else:
        draft.approximate(
            key, "training.save_total_limit", 1000, "all are kept there; the newest thousand here"
        )


def run_name(draft: Draft, key: str, value: Any) -> None:
    """Ours are names that Kubernetes accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].strip("-")
    if name == value:
        draft.carry(key, "name", name)
    elif name:
        draft.approximate(
            key, "name", name, "lower case letters, digits and dashes, as Kubernetes wants"
        )
    else:
        draft.drop(key, "holds no letter that a name may have")


def trackers(draft: Draft, key: str, value: Any) -> None:
    """TensorBoard, MLflow, Weights & Biases and Trackio."""
    wanted = [str(name).lower() for name in as_list(value)]
    if "tensorboard" in wanted or "all" in wanted:
        draft.carry(key, "tracking.tensorboard", True)
    for name in TRACKERS:
        if name in wanted:
            draft.carry(key, f"tracking.{name}", None)
    if others := [name for name in wanted if name not in ("tensorboard", *TRACKERS, "none", "all")]:
        draft.drop(
            key,
            f"{', '.join(others)} is not there; TensorBoard, {', '.join(TRACKERS)} are (tracking)",
        )
    elif wanted == ["none"]:
        draft.unneeded(key, "nothing is reported unless tracking says so")


@rule_with
def of_tracker(draft: Draft, key: str, value: Any, name: str, rule: Rule) -> None:
    """A setting of a tracker, which says nothing where the file does not switch that tracker on."""
    switches = [f"{verb}{name}{what}" for verb, what in itertools.product(("", "use_"), _SWITCHES)]
    own = switches if draft.peer == "axolotl" else ()
    if name in map(str, as_list(draft.given.get("report_to"))) or any(
        as_flag(draft.given.get(one)) for one in own
    ):
        rule(draft, key, value)
    else:
        draft.unneeded(key, f"{name} is not on in this file")


def bfloat16(draft: Draft, key: str, value: Any) -> None:
    """Switched off, with no other kind named, it means float32 to axolotl and TRL; ours is chosen by the GPU."""
    if as_flag(value):
        draft.carry(key, "model.dtype", "auto" if value == "auto" else "bfloat16")
    elif draft.peer in ("axolotl", "TRL") and not any(
        as_flag(draft.given.get(kind)) for kind in _OTHER_KINDS
    ):
        draft.carry(key, "model.dtype", "float32")
    else:
        draft.unneeded(key, "off; another setting says the kind of numbers, or the model does")


def remote_code(draft: Draft, key: str, value: Any) -> None:
    """Ours needs a commit, which no peer asks for."""
    if not as_flag(value):
        draft.unneeded(key, "off, as here")
    elif re.fullmatch(r"[0-9a-f]{40}", str(draft.settings.get(("model", "revision"), ""))):
        draft.carry(key, "model.trust_remote_code", True)
    else:
        draft.drop(
            key,
            "most models need no code of their own; where one does, set model.revision to a commit as well",
        )


def method(draft: Draft, key: str, value: Any, *of_lora: str) -> None:
    """LoRA, which is left out too, or every parameter, or what comes near; then keys that begin so say nothing."""
    if value == "full":
        draft.unneeded(key, "without a `lora` section every parameter is trained")
        forget(draft, "says nothing in full fine-tuning", *of_lora)
    elif value == "lora":
        draft.carry(key, "lora", None)
    elif value is None:
        draft.assume("lora", None)
    else:
        draft.approximate(key, "lora", None, f"{value} is not there, LoRA is")


def forget(draft: Draft, why: str, *beginnings: str) -> None:
    """Take all keys that begin so: none is needed."""
    for key in draft.given:
        if key.startswith(beginnings) and draft.take(key) is not None:
            draft.unneeded(key, why)


def defaults(draft: Draft, general: Mapping[str, Any], of_lora: Mapping[str, Any]) -> None:
    """Write down a tool's own, where they are not ours."""
    for path, value in {**general, **(of_lora if ("lora",) in draft.settings else {})}.items():
        draft.assume(path, value)


def names(path: str) -> Rule:
    """A list of names."""
    return lambda draft, key, value: draft.carry(key, path, as_list(value))


@rule_with
def four_bits(draft: Draft, key: str, value: Any, switch: str, on: Any) -> None:
    """The kind of 4 bits, which says nothing unless the key `switch` asks for 4 bits."""
    if as_flag(draft.given.get(switch)) != on:
        draft.unneeded(key, f"{switch} does not ask for 4 bits")
    else:
        choice("quantization", {"nf4": "4bit", "fp4": "fp4"}, "4bit", "nf4 and fp4 are there")(
            draft, key, value
        )


@rule_with
def seconds(draft: Draft, key: str, value: Any, path: str) -> None:
    """A patience. The enormous ones that peers' examples set hide hangs for years."""
    if isinstance(value, (int, float)) and 1 <= value <= 24 * 3600:
        draft.carry(key, path, float(value))
    else:
        draft.unneeded(
            key, "data are prepared before the ranks meet, so no such patience is needed"
        )


def packing(draft: Draft, key: str, value: Any) -> None:
    """Packed rows: where others pack before they batch, a batch counts full rows, and so it does here then."""
    if as_flag(value):
        draft.carry(
            key,
            "data.packing",
            True,
            f"data.packing: true, and training.global_batch_tokens: packed; {_ROWS}",
        )
        draft.assume(
            "training.global_batch_tokens",
            "packed",
            f"{draft.peer} counts packed rows, not samples",
        )
        draft.comments[("training", "global_batch_tokens")] = (
            "full rows of data.max_length are counted, as there"
        )
    else:
        draft.carry(key, "data.packing", False)


def share(draft: Draft, key: str, value: Any) -> None:
    """Part held out for evaluation: a share, or a number of rows, which depends on how many there are."""
    if value == 0:
        draft.unneeded(key, "off, as here")
    elif draft.has("data.eval"):
        draft.unneeded(key, f"{draft.origins['data', 'eval']} names the data of evaluations")
    elif isinstance(value, (int, float)) and 0 < value < 1:
        draft.carry(key, "data.eval", float(value))
    else:
        draft.approximate(
            key, "data.eval", 0.05, "a share is held out here, not a number of rows; adjust it"
        )


@rule_with
def number(draft: Draft, key: str, value: Any, path: str) -> None:
    """A whole number, where it is given as one."""
    if isinstance(value, int):
        draft.carry(key, path, value)
    else:
        draft.drop(key, f"a shell variable; set {path}")


_OF_SEVERAL: dict[str, Rule] = {
    "packing": packing,
    "padding_free": unneeded("nothing is padded here either way"),
    "lora_target_modules": modules("all-linear"),
    "use_rslora": flag("lora.use_rslora", True),
    "use_dora": flag("lora.use_dora", True),
    "load_in_4bit": flag("quantization", "4bit"),
    "load_in_8bit": flag("quantization", "8bit"),
    "fp8": flag("training.fp8", True),
    "activation_offloading": dropped(
        "activations are recomputed (gradient_checkpointing), not moved to the host", False
    ),
}
"""Rules for keys that some tools have, and others do not know."""
_OTHER_KINDS = ("fp16", "float16", "bfloat16", "dtype", "torch_dtype", "load_in_8bit")
_ROWS = "a step holds as many tokens as there"
TRACKERS, _SWITCHES = (
    ("mlflow", "wandb", "trackio"),
    ("", "_project", "_project_name", "_experiment_name"),
)
_NO_MODE = "online or offline; take tracking.wandb out to leave it off"
_WANDB: dict[str, Rule] = {
    **{f"wandb_{name}": same(f"tracking.wandb.{name}") for name in ("project", "entity")},
    "wandb_run_group": same("tracking.wandb.group"),
    "wandb_mode": choice(
        "tracking.wandb.mode", {"online": "online", "offline": "offline"}, None, _NO_MODE
    ),
    "wandb_log_model": choice(
        "tracking.wandb.log_model", {True: True, "end": True, "checkpoint": True, False: False}
    ),
}
_NO_EFFECT = "has no counterpart, and no effect on the result"

TRAINING: dict[str, Rule] = {
    **plain(
        "num_train_epochs per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing "
        "per_device_eval_batch_size learning_rate weight_decay max_grad_norm adam_beta1 adam_beta2 "
        "adam_epsilon metric_for_best_model greater_is_better early_stopping_patience seed output_dir"
    ),
    "adam_eps": same("training.adam_epsilon"),
    "streaming": dropped("data are prepared once, into files that need no memory", False),
    **each(
        "dtype torch_dtype",
        choice("model.dtype", {n: n for n in ("auto", "bfloat16", "float16", "float32")}),
    ),
    **each(
        "lora_model_dir adapter_name_or_path",
        dropped("no run begins from an adapter; merge it into the model"),
    ),
    "max_steps": max_steps,
    "save_total_limit": total_limit,
    **each("use_cpu no_cuda", flag("compute.gpus_per_node", 0)),
    "logging_steps": steps("training.logging_steps"),
    "eval_steps": steps("training.eval_steps"),
    "save_steps": steps("training.save_steps"),
    "save_strategy": strategy("training.save_steps"),
    **each("eval_strategy evaluation_strategy", strategy("training.eval_steps")),
    "optim": optimizer,
    "lr_scheduler_type": schedule,
    "bf16": bfloat16,
    "fp16": flag("model.dtype", "float16"),
    "tf32": unneeded("matrix products of float32 use TF32 where the GPU has it"),
    "run_name": run_name,
    "report_to": trackers,
    **each("use_swanlab use_comet", dropped("not there; others are (tracking)", False)),
    **each("comet_project_name swanlab_project", dropped("not there; others are (tracking)")),
    **{
        key: of_tracker("wandb", rule)
        for name, rule in _WANDB.items()
        for key in (name, name.upper())
    },
    **each("wandb_name WANDB_NAME wandb_exp_name mlflow_run_name trackio_run_name", run_name),
    "wandb_run_id": dropped(
        "a run's id follows from its directory, so that each start goes on with it"
    ),
    **each(
        "wandb_watch WANDB_WATCH",
        dropped("gradients and weights are not sent; their norm is", False),
    ),
    "MLFLOW_EXPERIMENT_NAME": of_tracker("mlflow", same("tracking.mlflow.experiment")),
    "MLFLOW_TRACKING_URI": of_tracker("mlflow", same("tracking.mlflow.uri")),
    "NPROC_PER_NODE": number("compute.processes"),
    "NNODES": number("compute.nodes"),
    "project": of_tracker("trackio", same("tracking.trackio.project")),
    "trackio_space_id": of_tracker("trackio", same("tracking.trackio.space_id")),
    "trust_remote_code": remote_code,
    "ddp_timeout": seconds("training.timeout_seconds"),
    "load_best_model_at_end": unneeded(
        "`best` is a link to the best checkpoint, `last` to the last"
    ),
    **each("resume_from_checkpoint auto_resume_from_checkpoints", resumption),
    "neftune_noise_alpha": dropped("noise on embeddings is not there", 0),
    "use_liger_kernel": unneeded("fused kernels are used where they are proved equal"),
    "label_smoothing_factor": dropped("label smoothing is not there", 0),
    "group_by_length": unneeded("it saves padding, and nothing is padded here"),
    "average_tokens_across_devices": always(
        "one divisor for the whole global batch, as here", "one divisor for the whole global batch"
    ),
    "auto_find_batch_size": dropped("`kubetune plan` and training.preflight say what fits", False),
    "push_to_hub": push,
    "hub_strategy": only(
        ["end"], "uploaded after a good end, as here", "the best is uploaded once, after a good end"
    ),
    "data_seed": dropped("training.seed decides the order of the data too"),
    "dataloader_drop_last": dropped(
        "the last step of an epoch takes the samples that are left", False
    ),
    "eval_on_start": dropped("nothing is evaluated before the first step", False),
    "do_train": always("a run trains", "a run trains; see `kubetune evaluate`"),
    "do_predict": dropped("see `kubetune generate`", False),
    "hub_model_id": hub_model,
    "hub_private_repo": same("push.private"),
    "lr_scheduler_kwargs": dropped("schedules have no settings of their own"),
    "optim_args": dropped("AdamW's settings are training.adam_beta1, adam_beta2 and adam_epsilon"),
    "deepspeed": dropped("use training.parallelism: fsdp where the model does not fit one GPU"),
    **each(
        "attn_implementation flash_attn flash_attention sdp_attention xformers_attention attn_impl",
        unneeded(FAST_ATTENTION),
    ),
    **each(
        "gradient_checkpointing_kwargs dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor remove_unused_columns overwrite_output_dir overwrite_cache do_eval "
        "logging_first_step logging_dir save_safetensors save_only_model ddp_find_unused_parameters disable_tqdm "
        "log_level include_num_input_tokens_seen include_tokens_per_second plot_loss local_rank "
        "prediction_loss_only torch_compile torch_compile_mode torch_compile_backend use_cache ddp_backend "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph dataloader_in_order eval_accumulation_steps "
        "dataloader_multiprocessing_context log_on_each_node save_on_each_node logging_nan_inf_filter "
        "torch_empty_cache_steps logging_strategy log_level_replica skip_memory_metrics",
        unneeded(_NO_EFFECT),
    ),
}
"""Rules for the keys of TrainingArguments, under their own names."""


def pin_fsdp(draft: Draft, *keys: str) -> None:
    """Take whatever switches sharding on, which is FSDP2 here, of any kind."""
    for key in keys:
        if as_flag(draft.take(key)) in (None, False):
            continue
        if draft.has("training.parallelism"):
            draft.unneeded(key, "follows from training.parallelism: fsdp")
        else:
            draft.carry(key, "training.parallelism", "fsdp")
