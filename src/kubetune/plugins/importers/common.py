"""Rows that several tools share: Hugging Face's TrainingArguments, schedules, optimizers, trackers, models that see."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.engine import (
    OFF,
    Draft,
    Outcome,
    Row,
    aliased,
    as_list,
    carried,
    drop,
    dropped,
    ignore,
    near,
    switch,
    unneeded,
)

NO_EFFECT = "has no counterpart, and no effect on the result"
NO_STOP = "the run goes on to its end, as here"
FAST_ATTENTION = "kubetune chooses the fastest attention that its self-check proves exact"
FUSED = "fused kernels are used where they are proved equal"
NOT_EXTENDED = "the vocabulary is not extended"
NOT_SPLIT = "no splitting along a sequence or layer"
TRACKERS = ("mlflow", "wandb", "trackio")
# Names of transformers and bitsandbytes for AdamW.
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "adamw": "adamw", "adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
}  # fmt: skip
_PAGED = {"paged_adamw_8bit": "adamw_8bit", "paged_adamw_32bit": "adamw", "paged_adamw": "adamw"}
_SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine",  # with one cycle, which is the default
}  # fmt: skip
# Keys that change a schedule, of whatever name, and those that change a cosine alone.
_SHAPES = ("lr_scheduler_kwargs", "jagged_restart_steps")
_SHAPES_OF_COSINE = ("cosine_min_lr_ratio", "min_lr", "lr_decay_iters")
# Names of models that see, where their config.json is not on this machine.
_SEEING = re.compile(
    r"vl|vision|llava|omni|ocr|pixtral|gemma-?3|minicpm-?[vo]|ovis|molmo|llama-?4|glm-?[\d.]+v",
    re.I,
)
REPOSITORY = r"[\w.-]+/[\w.-]+"
# As Qwen-VL counts.
_PIXELS_OF_A_TOKEN = 28 * 28
_DAY = 24 * 3600


def schedule(keys: str) -> Row:
    """Return the row of the learning rate's schedule, which other keys may give another shape."""
    reason = "kubetune knows cosine, linear and constant schedules"
    path = "training.lr_scheduler_type"
    by_name = Row(keys, path, values=_SCHEDULES, near="cosine", reason=reason)

    def rule(value: Any, draft: Draft) -> Outcome:
        outcome = by_name.outcome(value, draft)
        shapes = [key for key in _SHAPES if draft.get(key)]
        if outcome.value == "cosine":
            shapes += [key for key in _SHAPES_OF_COSINE if draft.get(key)]
        if outcome.kind == "carried" and shapes:
            return near(outcome.value, f"there its shape depends on {', '.join(shapes)} too")
        return outcome

    return Row(keys, path, rule)


def optimizer(value: Any, _: Draft) -> Outcome:
    """Carry AdamW in one of its forms; take it for any other optimizer."""
    if value in _OPTIMIZERS:
        return carried(_OPTIMIZERS[value])
    if value in _PAGED:
        return near(_PAGED[value], "the optimizer's state is not paged to the host")
    return near("adamw", f"{value} is not there; choose the learning rate anew for AdamW")


def steps(value: Any, _: Draft) -> Outcome:
    """Carry steps between events. A share of all steps is not known before the data are read."""
    if isinstance(value, (int, float)) and value >= 1:
        return carried(int(value))
    return near("epoch", "a share of all steps; `kubetune plan` shows how many there are")


def logging_steps(value: Any, _: Draft) -> Outcome:
    """Carry steps between lines of the log; transformers takes a number below 1 for a share of all steps."""
    if isinstance(value, (int, float)) and value >= 1:
        return carried(int(value))
    if isinstance(value, (int, float)) and 0 < value < 1:
        return near(10, "a share of all steps there, a number of steps here")
    return dropped("expected a number above 0; every 10 steps here")


def every(key: str, path: str, strategies: str) -> Row:
    """Return the row of the steps between two evaluations or checkpoints; each epoch's end may replace them."""

    def is_idle(draft: Draft) -> str:
        for name in strategies.split():
            if draft.get(name) == "epoch":
                return f"{name} is epoch, which takes no steps"
        return ""

    return Row(key, path, steps, unless=is_idle)


def strategy(keys: str, path: str, without: str) -> Row:
    """Return the row of `save_strategy` and its like. `without`: what happens even where it is off."""
    off = f"{without} all the same, which changes no result"
    same = {
        "steps": "follows from the number of steps",
        "best": "the best checkpoint is always kept",
        "no": off,
        False: off,
    }
    reason = "expected steps, epoch or no"
    return Row(keys, path, same=same, values={"epoch": "epoch"}, reason=reason)


def push(value: Any, draft: Draft) -> Outcome:
    """Upload the result where another key says where to."""
    if not value:
        return unneeded(OFF)
    if draft.get("hub_model_id"):
        return unneeded("follows from `push`, which hub_model_id sets")
    return dropped("no hub_model_id is given; set push.repo: ORG/NAME")


def hub_model(value: Any, draft: Draft) -> Outcome:
    """Carry where the result is uploaded, if it is."""
    if draft.tool.name != "axolotl" and not draft.get("push_to_hub"):
        return unneeded("push_to_hub is off")
    if re.fullmatch(REPOSITORY, str(value)):
        return carried(value)
    return dropped(f"push.repo wants ORG/NAME, found {value}")


def sees(value: Any, draft: Draft) -> Outcome:
    """Carry a setting of the parts of a model that see. Tools freeze these by default, for models of text too."""
    model = model_path(draft)
    facts = read_config(model, os.environ)
    does_see = "vision_config" in str(facts)
    if not facts:
        does_see = value is False or bool(_SEEING.search(model))
    if not does_see:
        why = "nothing here says that the model sees; where it does, set task: vision_language"
        return unneeded(why)
    say_it_sees(draft, draft.at)
    return carried(value)


def say_it_sees(draft: Draft, key: str) -> None:
    """Take from a key that the model sees: images in pairs of answers, or a task of their own."""
    # Images in pairs of answers are a flag of their own; supervised fine-tuning has a task for them.
    task = draft.ours("task")
    why = "is a setting of models that see"
    if task == "reward_model":
        draft.refuse(key, f"{why}, and a reward model scores texts alone")
    if task == "preference":
        draft.assume("preference.images", True, f"{key} {why}")
    elif task != "vision_language":
        draft.settings.pop("task", None)
        origin = draft.origins.pop("task", None)
        if origin is not None:
            draft.ignore(origin, f"the task follows from {key}, which {why}")
        why = f"{key} {why}; `causal_lm` for one that reads texts alone"
        draft.assume("task", "vision_language", why)


def pixels(value: Any, draft: Draft) -> Outcome:
    """Make a limit of an image in tokens, at least one token, of one in pixels."""
    if not isinstance(value, int) or value <= 0:
        return dropped("no number of pixels; see image_min_tokens and image_max_tokens of vision")
    say_it_sees(draft, draft.at)
    tokens = max(1, min(16_384, value // _PIXELS_OF_A_TOKEN))
    return near(tokens, "tokens of 28 × 28 pixels; other models differ")


def total_limit(value: Any, _: Draft) -> Outcome:
    """Carry how many checkpoints are kept: at least one here, or all there."""
    if isinstance(value, int) and value >= 1:
        return carried(value)
    return near(1000, "all are kept there; the newest thousand here")


def run_name(value: Any, _: Draft) -> Outcome:
    """Make a name that Kubernetes accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].strip("-")
    if name == value:
        return carried(name)
    if name:
        return near(name, "lower case letters, digits and dashes, as Kubernetes wants")
    return dropped("holds no letter that a name may have")


def trackers(value: Any, draft: Draft) -> Outcome:
    """Switch on the trackers of `report_to`, each in its own section."""
    # One key may switch on several: each is a note and a setting of its own, and the last outcome is the key's.
    wanted = [str(name).lower() for name in as_list(value)]
    outcome = unneeded("nothing is reported unless tracking says so")
    if "tensorboard" in wanted or "all" in wanted:
        outcome = carried(True, path="tracking.tensorboard")
        draft.write(draft.at, outcome)
    for name in TRACKERS:
        if name in wanted:
            outcome = carried(None, path=f"tracking.{name}")
            draft.write(draft.at, outcome)
    known = ("tensorboard", *TRACKERS, "none", "all", "false")
    others = [name for name in wanted if name not in known]
    if others:
        ours = ", ".join(TRACKERS)
        return dropped(f"{', '.join(others)} is not there; TensorBoard, {ours} are (tracking)")
    return outcome


def of_tracker(name: str, *rows: Row) -> list[Row]:
    """Return rows that say nothing where the file does not switch the tracker on."""

    # WANDB_PROJECT in a file whose report_to is [tensorboard] says nothing.
    # axolotl switches a tracker on by its settings too: use_wandb, wandb_project …
    switches = []
    for part in ("", "_project", "_project_name", "_experiment_name"):
        switches += [f"{name}{part}", f"use_{name}{part}"]

    def is_off(draft: Draft) -> str:
        if name in map(str, as_list(draft.get("report_to"))):
            return ""
        if draft.tool.name == "axolotl" and any(draft.get(key) for key in switches):
            return ""
        return f"{name} is not on in this file"

    return [replace(row, unless=is_off) for row in rows]


def bfloat16(value: Any, draft: Draft) -> Outcome:
    """Take bfloat16. Switched off, with no other kind named, it means float32 to axolotl and TRL."""
    if value:
        return carried("auto" if value == "auto" else "bfloat16")
    kinds = ("fp16", "float16", "bfloat16", "dtype", "torch_dtype", "load_in_8bit")
    if draft.tool.name in ("axolotl", "TRL") and not any(draft.get(kind) for kind in kinds):
        return carried("float32")
    return unneeded("off; another setting says the kind of numbers, or the model does")


def remote_code(value: Any, draft: Draft) -> Outcome:
    """Carry the consent to code that comes with a model; ours needs a commit, for which no tool asks."""
    if not value:
        return unneeded(OFF)
    if re.fullmatch(r"[0-9a-f]{40}", str(draft.ours("model.revision"))):
        return carried(True)
    return dropped(
        "most models need no code of their own; where one does, set model.revision to a commit as well"
    )


def method(draft: Draft, key: str, value: Any, *of_lora: str) -> None:
    """Take LoRA, which is the default, or every parameter; then keys that begin with `of_lora` say nothing."""
    if value == "full":
        draft.ignore(key, "without a `lora` section every parameter is trained")
        ignore_all(draft, "says nothing in full fine-tuning", *of_lora)
    elif value == "lora":
        draft.carry(key, "lora", None)
    elif value is None:
        draft.assume("lora", None)
    else:
        draft.write(key, near(None, f"{value} is not there, LoRA is"), "lora")


def refuse_both(draft: Draft, *pairs: tuple[str, str]) -> None:
    """Raise ConfigError where both keys of a pair are set, which the tool refuses."""
    for key, other in pairs:
        if draft.get(key) and draft.get(other):
            draft.refuse(key, f"{draft.tool.name} refuses it beside {other}")


def ignore_all(draft: Draft, why: str, *beginnings: str) -> None:
    """Take all keys that begin so: none is needed."""
    for key in draft.theirs:
        if key.startswith(beginnings) and draft.take(key) is not None:
            draft.ignore(key, why)


_KINDS_OF_4_BITS = {"nf4": "4bit", "fp4": "fp4"}


def four_bits(keys: str, switch_: str, on: Any) -> Row:
    """Return the row of the kind of 4 bits, which says nothing unless the key `switch_` asks for 4 bits."""

    def is_off(draft: Draft) -> str:
        if draft.get(switch_) == on:
            return ""
        return f"{switch_} does not ask for 4 bits"

    reason = "nf4 and fp4 are there"
    return Row(
        keys, "quantization", values=_KINDS_OF_4_BITS, near="4bit", reason=reason, unless=is_off
    )


def bits_of(keys: str, kind_key: str, four: Any = 4) -> Row:
    """Return the row of the bits of the base. `four` asks for 4 bits, of the kind that the key `kind_key` names."""

    def rule(value: Any, draft: Draft) -> Outcome:
        # load_in_4bit: true and quantization_bit: 4. In Python 1 == True, so types are compared too.
        if value == four and type(value) is type(four):
            return carried(_KINDS_OF_4_BITS.get(draft.get(kind_key), "4bit"))
        if value == 8:
            return carried("8bit")
        if value is False and four is True:
            return unneeded(OFF)
        return dropped("4 and 8 bits are there")

    return Row(keys, "quantization", rule)


def seconds(value: Any, _: Draft) -> Outcome:
    """Carry a patience. The enormous ones that the tools' examples set would hide a hanging run for years."""
    if isinstance(value, (int, float)) and 1 <= value <= _DAY:
        return carried(float(value))
    return unneeded("data are prepared before the ranks meet, so no such patience is needed")


def packing(value: Any, draft: Draft) -> Outcome:
    """Take packed rows. The tools pack before they batch, so a batch counts full rows, and so it does here."""
    if not value:
        return carried(False)
    name = draft.tool.name
    draft.assume(
        "training.global_batch_tokens", "packed", f"{name} counts packed rows, not samples"
    )
    comment = "full rows of data.max_length are counted, as there"
    draft.comments["training.global_batch_tokens"] = comment
    return carried(
        True,
        "data.packing: true, and training.global_batch_tokens: packed; a step holds as many tokens as there",
    )


def share(value: Any, draft: Draft) -> Outcome:
    """Carry the share that is held out for evaluation. A number of rows is no share before the rows are counted."""
    if value == 0:
        return unneeded(OFF)
    if draft.has("data.eval"):
        return unneeded(f"{draft.origins['data.eval']} names the data of evaluations")
    if isinstance(value, (int, float)) and 0 < value < 1:
        return carried(float(value))
    return near(0.05, "a share is held out here, not a number of rows; adjust it")


def pin_fsdp(draft: Draft, keys: str) -> None:
    """Take whatever switches sharding on, which is FSDP2 here, of any kind."""
    for key in keys.split():
        if draft.take(key) in (None, False):
            continue
        if draft.has("training.parallelism"):
            draft.ignore(key, "follows from training.parallelism: fsdp")
        else:
            draft.carry(key, "training.parallelism", "fsdp")


def count(keys: str, path: str) -> Row:
    """Return the row of a number that a script may leave to its shell."""

    def rule(value: Any, _: Draft) -> Outcome:
        if isinstance(value, int):
            return carried(value)
        return dropped(f"a shell variable; set {path}")

    return Row(keys, path, rule)


def model_path(draft: Draft) -> str:
    """Return the model that the file names, under whichever key; empty where it names none."""
    for key in ("base_model", "model_name_or_path", "model", "model_id_or_path"):
        if draft.get(key) is not None:
            return str(draft.get(key))
    return ""


_DTYPES = {name: name for name in ("auto", "bfloat16", "float16", "float32")}
_NO_MODE = "online or offline; take tracking.wandb out to leave it off"
_NO_TRACKER = "not there; others are (tracking)"
_GOES_ON = "a run goes on from its newest good checkpoint by itself; see training.resume"
_NO_ADAPTER = "no run begins from an adapter; merge it into the model"
# Scripts set wandb's own variables; configs have the same names in lower case.
_WANDB = [
    Row("wandb_project WANDB_PROJECT", "tracking.wandb.project"),
    Row("wandb_entity WANDB_ENTITY", "tracking.wandb.entity"),
    Row("wandb_run_group WANDB_RUN_GROUP", "tracking.wandb.group"),
    Row("wandb_mode WANDB_MODE", "tracking.wandb.mode", values={"online": "online", "offline": "offline"}, reason=_NO_MODE),
    Row("wandb_log_model WANDB_LOG_MODEL", "tracking.wandb.log_model",
        values={True: True, "end": True, "checkpoint": True, False: False}),
]  # fmt: skip
_MLFLOW = [
    Row("MLFLOW_EXPERIMENT_NAME", "tracking.mlflow.experiment"),
    Row("MLFLOW_TRACKING_URI", "tracking.mlflow.uri"),
]
_TRACKIO = [
    Row("project", "tracking.trackio.project"),
    Row("trackio_space_id", "tracking.trackio.space_id"),
]

# What several tools have, and not all of them: a tool names those that it has.
LORA = [
    switch("use_rslora", "lora.use_rslora"),
    switch("use_dora", "lora.use_dora"),
]
BITS = [
    switch("load_in_4bit", "quantization", "4bit"),
    switch("load_in_8bit", "quantization", "8bit"),
]
PACKING = [
    Row("packing", "data.packing", packing),
    ignore("padding_free", "nothing is padded here either way"),
]
FP8 = [switch("fp8", "training.fp8")]
OFFLOADING = [
    drop("activation_offloading",
         "activations are recomputed (gradient_checkpointing), not moved to the host", False),
]  # fmt: skip

# Keys of TrainingArguments, under their own names.
TRAINING = [
    *aliased(
        "num_train_epochs per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing "
        "per_device_eval_batch_size learning_rate weight_decay max_grad_norm adam_beta1 adam_beta2 "
        "adam_epsilon metric_for_best_model greater_is_better early_stopping_patience seed output_dir"
    ),
    # Training.
    Row("adam_eps", "training.adam_epsilon"),
    Row("dtype torch_dtype", "model.dtype", values=_DTYPES),
    Row("max_steps", "training.max_steps", same=dict.fromkeys((-1, 0), "off: epochs decide")),
    Row("save_total_limit", "training.save_total_limit", total_limit),
    switch("use_cpu no_cuda", "compute.gpus_per_node", 0),
    Row("logging_steps", "training.logging_steps", logging_steps),
    every("eval_steps", "training.eval_steps", "eval_strategy evaluation_strategy"),
    every("save_steps", "training.save_steps", "save_strategy"),
    strategy("save_strategy", "training.save_steps", "the last step is saved, and each epoch's,"),
    strategy("eval_strategy evaluation_strategy", "training.eval_steps", "what data.eval holds out is evaluated"),
    # The optimizer and kinds of numbers.
    Row("optim", "training.optim", optimizer),
    schedule("lr_scheduler_type"),
    Row("bf16", "model.dtype", bfloat16),
    switch("fp16", "model.dtype", "float16"),
    # Names and trackers.
    Row("run_name wandb_name WANDB_NAME wandb_exp_name mlflow_run_name trackio_run_name", "name", run_name),
    Row("report_to", rule=trackers),
    *of_tracker("wandb", *_WANDB),
    *of_tracker("mlflow", *_MLFLOW),
    *of_tracker("trackio", *_TRACKIO),
    # Processes, starts and ends.
    count("NPROC_PER_NODE", "compute.processes"),
    count("NNODES", "compute.nodes"),
    Row("trust_remote_code", "model.trust_remote_code", remote_code),
    Row("ddp_timeout", "training.timeout_seconds", seconds),
    Row("resume_from_checkpoint auto_resume_from_checkpoints", same=dict.fromkeys((True, False), _GOES_ON),
        reason="a run goes on from its own newest checkpoint only; merge another's result into the model first"),
    Row("push_to_hub", rule=push),
    Row("hub_model_id", "push.repo", hub_model),
    Row("hub_private_repo", "push.private"),
    Row("hub_strategy", same={"end": "uploaded after a good end, as here"},
        reason="the best is uploaded once, after a good end"),
    Row("average_tokens_across_devices", same={True: "one divisor for the whole global batch, as here"},
        reason="one divisor for the whole global batch"),
    Row("do_train", same={True: "a run trains"}, reason="a run trains; see `kubetune evaluate`"),
    # Not done here; a value behind the reason is that which switches it off there.
    drop("streaming", "data are prepared once, into files that need no memory", False),
    drop("lora_model_dir adapter_name_or_path", _NO_ADAPTER),
    drop("use_swanlab use_comet", _NO_TRACKER, False),
    drop("comet_project_name swanlab_project", _NO_TRACKER),
    drop("wandb_run_id", "a run's id follows from its directory, so that each start goes on with it"),
    drop("wandb_watch WANDB_WATCH", "gradients and weights are not sent; their norm is", False),
    drop("neftune_noise_alpha", "noise on embeddings is not there", 0),
    drop("label_smoothing_factor", "label smoothing is not there", 0),
    drop("auto_find_batch_size", "`kubetune plan` and training.preflight say what fits", False),
    drop("data_seed", "training.seed decides the order of the data too"),
    drop("dataloader_drop_last", "the last step of an epoch takes the samples that are left", False),
    drop("eval_on_start", "nothing is evaluated before the first step", False),
    drop("do_predict", "see `kubetune generate`", False),
    drop("lr_scheduler_kwargs", "schedules have no settings of their own"),
    drop("optim_args", "AdamW's settings are training.adam_beta1, adam_beta2 and adam_epsilon"),
    drop("deepspeed", "use training.parallelism: fsdp where the model does not fit one GPU"),
    # Not needed.
    ignore("tf32", "matrix products of float32 use TF32 where the GPU has it"),
    ignore("load_best_model_at_end", "`best` is a link to the best checkpoint, `last` to the last"),
    ignore("use_liger_kernel", FUSED),
    ignore("group_by_length", "it saves padding, and nothing is padded here"),
    ignore("attn_implementation flash_attn flash_attention sdp_attention xformers_attention attn_impl", FAST_ATTENTION),
    ignore(
        "gradient_checkpointing_kwargs dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor remove_unused_columns overwrite_output_dir overwrite_cache do_eval "
        "logging_first_step logging_dir save_safetensors save_only_model ddp_find_unused_parameters disable_tqdm "
        "log_level include_num_input_tokens_seen include_tokens_per_second plot_loss local_rank "
        "prediction_loss_only torch_compile torch_compile_mode torch_compile_backend use_cache ddp_backend "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph dataloader_in_order eval_accumulation_steps "
        "dataloader_multiprocessing_context log_on_each_node save_on_each_node logging_nan_inf_filter "
        "torch_empty_cache_steps logging_strategy log_level_replica skip_memory_metrics",
        NO_EFFECT
    ),
]  # fmt: skip
