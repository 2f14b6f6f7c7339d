"""What several tools have: sources of data, methods and bits, templates, and Hugging Face's TrainingArguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.engine import (
    OFF,
    Draft,
    Outcome,
    Row,
    Rule,
    Step,
    Table,
    as_list,
    carried,
    dropped,
    near,
    switch,
    unneeded,
)

NO_EFFECT = "has no counterpart, and no effect on the result"
NO_STOP = unneeded("the run goes on to its end, as here")
FAST_ATTENTION = "kubetune chooses the fastest attention that its self-check proves exact"
FUSED = "fused kernels are used where they are proved equal"
SHUFFLED = "rows are shuffled, each epoch anew"
NO_WEIGHT = "give each source a `weight`: how often it appears in an epoch"
SYSTEM = "put a system message into the data; the model then sees it at inference too"
NOT_SPLIT = "no splitting along a sequence or layer"
TRACKERS = ("mlflow", "wandb", "trackio")
REPOSITORY = r"[\w.-]+/[\w.-]+"
# Keys of a source as people write them, and what they are where they are left out.
_SOURCE: dict[str, Any] = {
    "path": None, "format": None, "subset": None, "split": "train", "weight": 1, "columns": {},
}  # fmt: skip
# Names of readers of `datasets`, which stand where a path usually does; the files are named beside them.
_READERS = ("json", "csv", "parquet", "text", None)
# Keys that change a schedule, of whatever name, and those that change a cosine alone.
_SHAPES = ("lr_scheduler_kwargs", "jagged_restart_steps")
_SHAPES_OF_COSINE = ("cosine_min_lr_ratio", "min_lr", "lr_decay_iters")
# Names of models that see, where their config.json is not on this machine.
_SEEING = re.compile(
    r"vl|vision|llava|omni|ocr|pixtral|gemma-?3|minicpm-?[vo]|ovis|molmo|llama-?4|glm-?[\d.]+v",
    re.I,
)
# As Qwen-VL counts.
_PIXELS_OF_A_TOKEN = 28 * 28
_DAY = 24 * 3600
_OWN_TEMPLATE = (
    "prompts are written by the tokenizer's own chat template. If that is another one, write this one into a Jinja "
    "file and name it in model.chat_template (`chatml` is built in); `kubetune data check` shows what is trained"
)
_NOT_PAGED = "the optimizer's state is not paged to the host"
# Ours for the names of transformers and bitsandbytes.
OPTIMIZERS: dict[str, Any] = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit", "paged_adamw": near("adamw", _NOT_PAGED),
    "paged_adamw_32bit": near("adamw", _NOT_PAGED), "paged_adamw_8bit": near("adamw_8bit", _NOT_PAGED),
}  # fmt: skip
SUBSET_AND_SPLIT = Table(same={"subset": "name subset", "split": "split"})


def take_sources(
    draft: Draft, keys: Mapping[str, str], source: Callable[[Draft, str, Any], list[Any]]
) -> None:
    """Take keys of data, each with our path. `source` returns our sources for one item at its place."""
    for key, path in keys.items():
        listed = draft.take(key)
        if listed is None:
            continue
        collected = []
        for number, item in enumerate(as_list(listed)):
            collected += source(draft, f"{key}[{number}]", item)
        draft.carry(key, path, collected)


def take_files(section: Draft) -> None:
    """Take `path` and `data_files` together: which of them names the data follows from both.

    path: json         data_files: a.jsonl    the data are a.jsonl
    path: owner/set    data_files: a.jsonl    the data are owner/set, and data_files is dropped
    path: owner/set                           the data are owner/set
    """
    path = section.take("path")
    files = as_list(section.take("data_files"))
    if len(files) > 1 or (files and path not in _READERS):
        why = f"one file or pattern a source: {', '.join(map(str, files))}; write a source for each file"
        section.drop("data_files", why)
    if files and path in _READERS:
        section.carry("data_files", "path", str(files[0]))
    elif path is not None:
        section.carry("path", "path", str(path))


def finish_source(draft: Draft, section: Draft, *tables: Table) -> dict[str, Any]:
    """Send the section's other keys to their rows, hand its notes to the draft, and return the source.

    What was carried over gets no note of its own: the source shows it.
    """
    rows: dict[str, Row] = {}
    for table in tables:
        rows.update(table.by_key())
    section.apply(rows, "sources have no such setting")
    draft.notes += [note for note in section.notes if note.kind != "carried"]
    return tidy(section.settings)


def tidy(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source in the usual order, without what it says by default."""
    tidied = {}
    for key, default in _SOURCE.items():
        value = source.get(key)
        if key == "columns" and value:
            # `columns: {text: text}` says nothing.
            value = {ours: theirs for ours, theirs in value.items() if ours != theirs}
        if value not in (None, default):
            tidied[key] = value
    return tidied


def method(draft: Draft, key: str, value: Any) -> None:
    """Take LoRA, which is the default, or every parameter."""
    if value == "full":
        draft.ignore("without a `lora` section every parameter is trained", key)
    elif value is None:
        draft.assume("lora", None)
    elif value in ("lora", "qlora"):
        draft.carry(key, "lora", None)
    else:
        draft.write(key, near(None, f"{value} is not there, LoRA is"), "lora")


def four_bits(bits: str, kind: str, on: Any) -> Step:
    """Return the step that takes 4 bits of the base, for which the key `bits` has the value `on`, and their kind."""

    def step(draft: Draft) -> None:
        if bits in draft.taken:
            return
        name = draft.take(kind)
        if draft.get(bits) != on:
            draft.ignore(f"{bits} does not ask for 4 bits", kind)
            return
        draft.take(bits)
        ours = "fp4" if name == "fp4" else "4bit"
        draft.carry(bits, "quantization", ours)
        if name in ("nf4", "fp4"):
            draft.carry(kind, "quantization", ours)
        elif name is not None:
            draft.write(kind, near(ours, "nf4 and fp4 are there"), "quantization")

    return step


def fsdp(*keys: str) -> Step:
    """Return the step that takes whatever switches sharding on, which is FSDP2 here, of any kind."""

    def step(draft: Draft) -> None:
        for key in keys:
            if draft.take(key) in (None, False):
                continue
            if draft.has("training.parallelism"):
                draft.ignore("follows from training.parallelism: fsdp", key)
            else:
                draft.carry(key, "training.parallelism", "fsdp")

    return step


def refuse_both(*pairs: tuple[str, str]) -> Step:
    """Return the step that raises ConfigError where both keys of a pair are set, which the tool refuses."""

    def step(draft: Draft) -> None:
        for key, other in pairs:
            if draft.get(key) and draft.get(other):
                draft.refuse(key, f"{draft.tool.name} refuses it beside {other}")

    return step


def template(value: Any, draft: Draft) -> Outcome:
    """Take a chat template by its name; `chatml` is, letter for letter, built in here."""
    name = str(value)
    # axolotl's words for the tokenizer's own.
    if name in ("tokenizer_default", "tokenizer-default"):
        return unneeded("the tokenizer's own chat template, as here")
    if name.startswith("tokenizer_default_fallback_"):
        return unneeded(
            "the tokenizer's own; where it has none, name one in model.chat_template, as `chatml`"
        )
    if name == "chatml":
        return carried(name)
    return dropped(f"a template of {draft.tool.name}'s own: {_OWN_TEMPLATE}")


def template_file(value: Any, _: Draft) -> Outcome:
    """Carry a file with a template; a template that stands in the config itself is to be written into one."""
    text = str(value)
    if "{" in text:
        return dropped("write the template into a file and name it in model.chat_template")
    if text.endswith((".jinja", ".jinja2", ".j2")) and "\n" not in text:
        return carried(text)
    return dropped(
        f"the template of {Path(text).name}: write it into a Jinja file; {_OWN_TEMPLATE}"
    )


def numbers(
    of: Callable[[Any], Any], other: Outcome, least: float = 1, most: float = float("inf")
) -> Rule:
    """Return the rule that carries numbers within limits, as `of` makes them; anything else becomes `other`."""

    def rule(value: Any, _: Draft) -> Outcome:
        if isinstance(value, (int, float)) and least <= value <= most:
            return carried(of(value))
        return other

    return rule


def count(keys: str, path: str) -> Row:
    """Return the row of a number that a script may leave to its shell."""
    return Row(keys, path, other=numbers(int, dropped(f"a shell variable; set {path}"), least=0))


def schedule(keys: str) -> Row:
    """Return the row of the learning rate's schedule, which other keys may give another shape."""

    def rule(value: Any, draft: Draft) -> Outcome:
        name = {"constant_with_warmup": "constant", "cosine_with_restarts": "cosine"}.get(
            value, value
        )
        if name not in ("cosine", "linear", "constant"):
            return near("cosine", "kubetune knows cosine, linear and constant schedules")
        shapes = [key for key in _SHAPES if draft.get(key)]
        if name == "cosine":
            shapes += [key for key in _SHAPES_OF_COSINE if draft.get(key)]
        if shapes:
            return near(name, f"there its shape depends on {', '.join(shapes)} too")
        return carried(name)

    return Row(keys, "training.lr_scheduler_type", other=rule)


def other_optimizer(value: Any, draft: Draft) -> Outcome:
    """Take AdamW for an optimizer that is not there."""
    if not isinstance(value, str):
        draft.refuse_value(draft.at)
    return near("adamw", f"{value} is not there; choose the learning rate anew for AdamW")


def every(key: str, path: str, *strategies: str) -> Row:
    """Return the row of the steps between two evaluations or checkpoints; each epoch's end may replace them."""

    def is_idle(draft: Draft) -> str:
        for name in strategies:
            if draft.get(name) == "epoch":
                return f"{name} is epoch, which takes no steps"
        return ""

    # A share of all steps is not known before the data are read.
    share_of_steps = near("epoch", "a share of all steps; `kubetune plan` shows how many there are")
    return Row(key, path, other=numbers(int, share_of_steps), unless=is_idle)


def strategy(keys: str, path: str, without: str) -> Row:
    """Return the row of `save_strategy` and its like. `without`: what happens even where it is off."""
    off = unneeded(f"{without} all the same, which changes no result")
    values = {
        "steps": unneeded("follows from the number of steps"),
        "best": unneeded("the best checkpoint is always kept"),
        "no": off,
        False: off,
        "epoch": "epoch",
    }
    return Row(keys, path, values, dropped("expected steps, epoch or no"))


def hub_model(value: Any, draft: Draft) -> Outcome:
    """Carry where the result is uploaded, if it is."""
    if draft.tool.name != "axolotl" and not draft.get("push_to_hub"):
        return unneeded("push_to_hub is off")
    if re.fullmatch(REPOSITORY, str(value)):
        return carried(value)
    return dropped(f"push.repo wants ORG/NAME, found {value}")


def push(_: Any, draft: Draft) -> Outcome:
    """Upload the result where another key says where to."""
    if draft.get("hub_model_id"):
        return unneeded("follows from `push`, which hub_model_id sets")
    return dropped("no hub_model_id is given; set push.repo: ORG/NAME")


def sees(value: Any, draft: Draft) -> Outcome:
    """Carry a setting of the parts of a model that see. Tools freeze these by default, for models of text too."""
    model = ""
    for key in ("model", "model_id_or_path", "model_name_or_path", "base_model"):
        model = str(draft.get(key) or model)
    facts = read_config(model, os.environ)
    does_see = "vision_config" in str(facts)
    if not facts:
        does_see = value is False or bool(_SEEING.search(model))
    if not does_see:
        return unneeded(
            "nothing here says that the model sees; where it does, set task: vision_language"
        )
    say_it_sees(draft, draft.at)
    return carried(value)


def say_it_sees(draft: Draft, key: str) -> None:
    """Take from a key that the model sees: images in pairs of answers, or a task of their own."""
    task = draft.ours("task")
    why = f"{key} is a setting of models that see"
    if task == "reward_model":
        draft.refuse(key, "is a setting of models that see, and a reward model scores texts alone")
    if task == "preference":
        draft.assume("preference.images", True, why)
    elif task != "vision_language":
        draft.withdraw("task", f"the task follows from another key: {why}", "unneeded")
        draft.assume(
            "task", "vision_language", f"{why}; `causal_lm` for one that reads texts alone"
        )


def pixels(value: Any, draft: Draft) -> Outcome:
    """Make a limit of an image in tokens, at least one token, of one in pixels."""
    if not isinstance(value, int) or value <= 0:
        return dropped("no number of pixels; see image_min_tokens and image_max_tokens of vision")
    say_it_sees(draft, draft.at)
    tokens = max(1, min(16_384, value // _PIXELS_OF_A_TOKEN))
    return near(tokens, "tokens of 28 × 28 pixels; other models differ")


def run_name(value: Any, _: Draft) -> Outcome:
    """Make a name that Kubernetes accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].strip("-")
    if name == value:
        return carried(name)
    if name:
        return near(name, "lower case letters, digits and dashes, as Kubernetes wants")
    return dropped("holds no letter that a name may have")


def trackers(value: Any, draft: Draft) -> Outcome:
    """Switch on the trackers of `report_to`, or of verl's loggers `['console', 'wandb']`, each in its own section."""
    # One key may switch on several: each is a note and a setting of its own, and the last outcome is the key's.
    text = re.sub(r"[\[\]'\" ]", "", str(value)).lower()
    wanted = as_list(text)
    outcome = unneeded(
        "nothing is reported unless tracking says so; the log of the run is there in any case"
    )
    if "tensorboard" in wanted or "all" in wanted:
        outcome = carried(True, path="tracking.tensorboard")
        draft.write(draft.at, outcome)
    for name in TRACKERS:
        if name in wanted:
            outcome = carried(None, path=f"tracking.{name}")
            draft.write(draft.at, outcome)
    known = ("tensorboard", *TRACKERS, "none", "all", "false", "console", "file")
    others = [name for name in wanted if name not in known]
    if others:
        return dropped(
            f"{', '.join(others)} is not there; TensorBoard, {', '.join(TRACKERS)} are (tracking)"
        )
    return outcome


def bfloat16(value: Any, draft: Draft) -> Outcome:
    """Take bfloat16. Switched off, with no other kind named, it means float32 to axolotl and TRL."""
    if value:
        return carried("auto" if value == "auto" else "bfloat16")
    kinds = ("fp16", "float16", "bfloat16", "dtype", "torch_dtype", "load_in_8bit")
    if draft.tool.name in ("axolotl", "TRL") and not any(draft.get(kind) for kind in kinds):
        return carried("float32")
    return unneeded("off; another setting says the kind of numbers, or the model does")


def remote_code(_: Any, draft: Draft) -> Outcome:
    """Carry the consent to code that comes with a model; ours needs a commit, for which no tool asks."""
    if re.fullmatch(r"[0-9a-f]{40}", str(draft.ours("model.revision"))):
        return carried(True)
    return dropped(
        "most models need no code of their own; where one does, set model.revision to a commit as well"
    )


def packing(value: Any, draft: Draft) -> Outcome:
    """Take packed rows. The tools pack before they batch, so a batch counts full rows, and so it does here."""
    if not value:
        return carried(False)
    path = "training.global_batch_tokens"
    draft.assume(path, "packed", f"{draft.tool.name} counts packed rows, not samples")
    draft.comments[path] = "full rows of data.max_length are counted, as there"
    return carried(
        True, f"data.packing: true, and {path}: packed; a step holds as many tokens as there"
    )


def share(value: Any, draft: Draft) -> Outcome:
    """Carry the share that is held out for evaluation. A number of rows is no share before the rows are counted."""
    if value == 0:
        return OFF
    if draft.has("data.eval"):
        return unneeded(f"{draft.origin('data.eval')} names the data of evaluations")
    if isinstance(value, (int, float)) and 0 < value < 1:
        return carried(float(value))
    return near(0.05, "a share is held out here, not a number of rows; adjust it")


# Keys of TrainingArguments, under their own names, and what scripts and configs of all tools say of trackers.
TRAINING = Table(
    same={
        **{
            f"training.{name}": name
            for name in (
                "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "weight_decay",
                "gradient_checkpointing", "per_device_eval_batch_size", "learning_rate", "max_grad_norm", "adam_beta1",
                "adam_beta2", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "seed",
            )
        },
        "training.adam_epsilon": "adam_epsilon adam_eps",
        "output": "output_dir",
        "push.private": "hub_private_repo",
        "tracking.wandb.project": "wandb_project WANDB_PROJECT",
        "tracking.wandb.entity": "wandb_entity WANDB_ENTITY",
        "tracking.wandb.group": "wandb_run_group WANDB_RUN_GROUP",
        "tracking.mlflow.experiment": "MLFLOW_EXPERIMENT_NAME",
        "tracking.mlflow.uri": "MLFLOW_TRACKING_URI",
        "tracking.trackio.project": "project",
        "tracking.trackio.space_id": "trackio_space_id",
    },
    rows=[
        Row("dtype torch_dtype", "model.dtype", {name: name for name in ("auto", "bfloat16", "float16", "float32")},
            dropped("auto, bfloat16, float16 and float32 are there")),
        Row("max_steps", "training.max_steps", dict.fromkeys((-1, 0), unneeded("off: epochs decide"))),
        Row("save_total_limit", "training.save_total_limit",
            other=numbers(int, near(1000, "all are kept there; the newest thousand here"))),
        switch("use_cpu no_cuda", "compute.gpus_per_node", 0),
        Row("logging_steps", "training.logging_steps", {0: dropped("expected a number above 0; every 10 steps here")},
            numbers(int, near(10, "a share of all steps there, a number of steps here"))),
        every("eval_steps", "training.eval_steps", "eval_strategy", "evaluation_strategy"),
        every("save_steps", "training.save_steps", "save_strategy"),
        strategy("save_strategy", "training.save_steps", "the last step is saved, and each epoch's,"),
        strategy("eval_strategy evaluation_strategy", "training.eval_steps", "what data.eval holds out is evaluated"),
        Row("optim", "training.optim", OPTIMIZERS, other_optimizer),
        schedule("lr_scheduler_type"),
        Row("bf16", "model.dtype", other=bfloat16),
        switch("fp16", "model.dtype", "float16"),
        # Names and trackers.
        Row("run_name wandb_name WANDB_NAME wandb_exp_name mlflow_run_name trackio_run_name", "name", other=run_name),
        Row("report_to", other=trackers),
        Row("wandb_mode WANDB_MODE", "tracking.wandb.mode", {"online": "online", "offline": "offline"},
            dropped("online or offline; take tracking.wandb out to leave it off")),
        Row("wandb_log_model WANDB_LOG_MODEL", "tracking.wandb.log_model",
            {True: True, "end": True, "checkpoint": True, False: False}, dropped("true, end, checkpoint or false")),
        # Processes, starts and ends.
        count("NPROC_PER_NODE", "compute.processes"),
        count("NNODES", "compute.nodes"),
        Row("trust_remote_code", "model.trust_remote_code", {False: OFF}, remote_code),
        # The enormous patience that the tools' examples set would hide a hanging run for years.
        Row("ddp_timeout", "training.timeout_seconds",
            other=numbers(float, unneeded("data are prepared before the ranks meet, so no such patience is needed"),
                          most=_DAY)),
        Row("resume_from_checkpoint auto_resume_from_checkpoints",
            values=dict.fromkeys((True, False), unneeded("a run goes on from its newest good checkpoint by itself")),
            other=dropped("a run goes on from its own newest checkpoint; merge another's result into the model first")),
        Row("push_to_hub", values={False: OFF}, other=push),
        Row("hub_model_id", "push.repo", other=hub_model),
    ],
    dropped={
        "hub_strategy": ("the best is uploaded once, after a good end", "end"),
        "average_tokens_across_devices": ("one divisor for the whole global batch", True),
        "do_train": ("a run trains; see `kubetune evaluate`", True),
        "streaming": ("data are prepared once, into files that need no memory", False),
        "lora_model_dir adapter_name_or_path": "no run begins from an adapter; merge it into the model",
        "use_swanlab use_comet": ("not there; others are (tracking)", False),
        "comet_project_name swanlab_project": "not there; others are (tracking)",
        "wandb_run_id": "a run's id follows from its directory, so that each start goes on with it",
        "wandb_watch WANDB_WATCH": ("gradients and weights are not sent; their norm is", False),
        "neftune_noise_alpha": ("noise on embeddings is not there", 0),
        "label_smoothing_factor": ("label smoothing is not there", 0),
        "auto_find_batch_size": ("`kubetune plan` and training.preflight say what fits", False),
        "data_seed": "training.seed decides the order of the data too",
        "dataloader_drop_last": ("the last step of an epoch takes the samples that are left", False),
        "eval_on_start": ("nothing is evaluated before the first step", False),
        "do_predict": ("see `kubetune generate`", False),
        "lr_scheduler_kwargs": "schedules have no settings of their own",
        "optim_args": "AdamW's settings are training.adam_beta1, adam_beta2 and adam_epsilon",
        "deepspeed": "use training.parallelism: fsdp where the model does not fit one GPU",
    },
    unneeded={
        "tf32": "matrix products of float32 use TF32 where the GPU has it",
        "load_best_model_at_end": "`best` is a link to the best checkpoint, `last` to the last",
        "use_liger_kernel": FUSED,
        "group_by_length": "it saves padding, and nothing is padded here",
        "attn_implementation flash_attn flash_attention sdp_attention xformers_attention attn_impl": FAST_ATTENTION,
        "gradient_checkpointing_kwargs dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor remove_unused_columns overwrite_output_dir overwrite_cache do_eval "
        "logging_first_step logging_dir save_safetensors save_only_model ddp_find_unused_parameters disable_tqdm "
        "log_level include_num_input_tokens_seen include_tokens_per_second plot_loss local_rank "
        "prediction_loss_only torch_compile torch_compile_mode torch_compile_backend use_cache ddp_backend "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph dataloader_in_order eval_accumulation_steps "
        "dataloader_multiprocessing_context log_on_each_node save_on_each_node logging_nan_inf_filter "
        "torch_empty_cache_steps logging_strategy log_level_replica skip_memory_metrics": NO_EFFECT,
    },
)  # fmt: skip

# What some tools have, and not all of them.
LORA = Table(rows=[switch("use_rslora", "lora.use_rslora"), switch("use_dora", "lora.use_dora")])
FP8 = Table(rows=[switch("fp8", "training.fp8")])
PACKING = Table(
    rows=[Row("packing", "data.packing", other=packing)],
    unneeded={"padding_free": "nothing is padded here either way"},
)
OFFLOADING = Table(
    dropped={
        "activation_offloading": (
            "activations are recomputed (gradient_checkpointing), not moved to the host", False
        )
    }
)  # fmt: skip
