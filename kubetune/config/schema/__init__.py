"""The config as frozen data: every key a run file may hold, with its type, range, default and meaning.

Nothing here reads files (load.py), accepts other spellings (aliases.py) or looks at the machine (plan.py).
The descriptions are the documentation: docs/config.md and the JSON Schema are generated from them.
"""

from __future__ import annotations

import datetime
import json
import re
import warnings
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from kubetune.config.defaults import data_of_task, full_name, metrics_of
from kubetune.config.hub_names import todays_names
from kubetune.config.schema.cluster import ComputeConfig, KubernetesConfig
from kubetune.config.schema.tracking import LoggingConfig, PushConfig, TrackingConfig, as_push


class Section(BaseModel):
    """A part of the config: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, allow_inf_nan=False)


DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
OPTIM_NAMES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
}
QUANTIZATION_NAMES = {"nf4": "4bit", "int8": "8bit"}


def _as_tuple(value: Any) -> Any:
    """JSON and YAML have lists only, and strict validation takes no list for a tuple behind another validator."""
    return tuple(value) if isinstance(value, list) else value


AsTuple = BeforeValidator(_as_tuple)


def _renamed(names: dict[str, str]) -> BeforeValidator:
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


class ModelConfig(Section):
    path: str = Field(min_length=1, description="Hub id (`Qwen/Qwen3-8B`) or a folder that holds the model.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    tokenizer: str | None = Field(None, description="Hub id or folder of the tokenizer, when it is not the model's.")
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's."
    )
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], _renamed(DTYPE_NAMES)] = Field(
        "auto",
        description="Dtype of frozen weights and of the arithmetic. `auto`: bfloat16 where the GPU supports it, else "
        "float16; on a CPU float32, or bfloat16 where that multiplies faster: measured when a run begins, and kept. "
        "Trained parameters and optimizer state are always float32.",
    )
    attention: Literal["auto", "flat", "eager", "sdpa"] = Field(
        "auto",
        description="`auto`: padding-free attention over many sequences where the self-check proves it exact, else one "
        "sequence at a time.",
    )
    local_files_only: bool = Field(False, description="Never ask the hub; the model must be on disk or in the cache.")
    trust_remote_code: bool = Field(
        False,
        description="Run Python code that comes with the model. Needs `revision` pinned to a commit; for a folder, to "
        "the digest of its Python and JSON files, which the refusal of another names.",
    )

    @model_validator(mode="after")
    def _pinned_code(self) -> ModelConfig:
        commit = self.revision or ""
        if self.trust_remote_code and not (len(commit) == 40 and all(c in "0123456789abcdef" for c in commit)):
            raise ValueError(
                "trust_remote_code runs code from the model's repository: pin `revision` to a commit (40 hex digits)"
            )
        return self


class SourceConfig(Section):
    path: str = Field(min_length=1, description="File, folder or hub data set; `path#500` takes 500 seeded samples.")
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="How often this source appears in each epoch: 0.5 is a seeded half, 2 is twice. "
        "Evaluation takes as many rows of each source as make the same mix.",
    )
    format: Literal["auto", "messages", "prompt_completion", "text", "sharegpt", "alpaca", "labelled"] = Field(
        "auto", description="Shape of the records; `auto` looks at the first one."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Names in the file for the names expected, such as `{prompt: question}`."
    )
    subset: str | None = Field(
        None, description="Configuration name of a hub data set, such as `sst2` of `glue`; `path: glue/sst2` says both."
    )
    split: str = Field("train", description="Split of a hub data set; slices such as `train[:1%]` work.")
    range: Annotated[tuple[int, int] | None, AsTuple] = Field(
        None, description="Rows `[first, end)` of the source after shuffling with the data seed."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_as_today(cls, value: Any) -> Any:
        return todays_names(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _range_holds_rows(self) -> SourceConfig:
        if self.range and not 0 <= self.range[0] < self.range[1]:
            raise ValueError(f"range {list(self.range)} holds no row; expected [first, end) with 0 <= first < end")
        return self


def _as_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_sources(value: Any) -> Any:
    if isinstance(value, (str, dict)):
        value = [value]
    return tuple(_as_source(v) for v in value) if isinstance(value, (list, tuple)) else value


def _as_eval(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else _as_sources(value)


SourcesAsWritten = str | SourceConfig | tuple[str | SourceConfig, ...]
Sources = Annotated[
    tuple[SourceConfig, ...],
    BeforeValidator(_as_sources, json_schema_input_type=SourcesAsWritten),
    Field(min_length=1),
]
Share = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Section):
    train: Sources = Field(description="One source or a list of sources.")
    eval: Annotated[
        Share | tuple[SourceConfig, ...] | None,
        BeforeValidator(_as_eval, json_schema_input_type=Share | SourcesAsWritten | None),
    ] = Field(None, description="Share of `train` to hold out (`0.05`, seeded), or sources of its own.")
    max_length: int = Field(2048, ge=8, le=10_000_000, description="Longest sequence in tokens.")
    overlong: Literal["drop", "truncate", "error"] = Field(
        "drop", description="What becomes of rows longer than `max_length`; `truncate` by default for classifiers."
    )
    max_lost_share: float = Field(
        0.1, ge=0, le=1, description="Stop before training when more than this share of the rows would be left out."
    )
    packing: bool = Field(
        True,
        description="Fill micro-batches with whole sequences up to `per_device_train_batch_size × max_length` tokens. "
        "The sequences stay isolated, so the loss is the same; `false`: a fixed number of sequences each.",
    )
    train_on: Literal["assistant", "all"] = Field(
        "assistant", description="`assistant`: loss on answers only. `all`: loss on every token."
    )
    add_special_tokens: bool = Field(
        True, description="Let the tokenizer add its own BOS (and the like) to `text` and `prompt`+`completion` rows."
    )
    date: str | None = Field(
        None,
        description="Day that a chat template writes which asks for today's, such as `2026-11-22`. Left out: that of "
        "the run's first start, which later starts keep.",
    )
    num_proc: int | None = Field(None, ge=1, description="Processes that tokenise; left out: all cores.")
    cache: str | None = Field(None, description="Folder of the prepared data; left out: `~/.cache/kubetune`.")

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                datetime.date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"found {value!r}; expected a day such as 2026-11-22") from None
        return value


class LoraConfig(Section):
    r: int = Field(16, ge=1, le=4096, description="Rank.")
    alpha: float | None = Field(None, gt=0, description="Scale; left out: twice the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Annotated[Literal["all-linear"] | tuple[str, ...] | str, AsTuple] = Field(
        "all-linear", description="`all-linear`, a list of module names, or one regular expression."
    )
    modules_to_save: Annotated[tuple[str, ...], AsTuple] = Field(
        (), description="Modules trained in full and saved with the adapter."
    )
    use_dora: bool = Field(False, description="DoRA: magnitude and direction apart (arXiv 2402.09353).")
    use_rslora: bool = Field(False, description="Scale by alpha/√r instead of alpha/r (arXiv 2312.03732).")

    @field_validator("target_modules")
    @classmethod
    def _is_expression(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        try:
            if isinstance(value, str):
                with warnings.catch_warnings(action="ignore", category=FutureWarning):  # `[[`: as Python reads it today
                    re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"found {value!r}, no regular expression ({error}); expected all-linear, a list of module names, or "
                "an expression that whole names match, such as .*(q|v)_proj"
            ) from None
        return value

    @property
    def lora_alpha(self) -> float:
        """Alpha with its default filled in."""
        return self.alpha if self.alpha is not None else 2.0 * self.r


class ClassificationConfig(Section):
    problem_type: Literal["auto", "single_label_classification", "multi_label_classification", "regression"] = Field(
        "auto", description="One class, any number of classes, or a number; `auto`: as the labels look."
    )
    labels: Annotated[tuple[str, ...] | None, AsTuple] = Field(
        None,
        min_length=2,
        description="Names of the classes, in order. Left out: the model's own where they fit, else those in the data.",
    )


class VisionConfig(Section):
    image_max_tokens: int = Field(
        1024, ge=1, le=16_384, description="Larger images are scaled down until they take at most so many tokens."
    )
    image_min_tokens: int | None = Field(
        None,
        ge=1,
        description="Smaller images are scaled up to so many tokens. Left out: as the model's processor does.",
    )
    freeze_vision_tower: bool = Field(
        True, description="`false`: the part that sees learns too, through adapters of its own where there is LoRA."
    )
    freeze_projector: bool = Field(
        True, description="`false`: the part that turns what is seen into tokens learns too, in the same way."
    )

    @model_validator(mode="after")
    def _budget_holds_something(self) -> VisionConfig:
        if self.image_min_tokens is not None and self.image_min_tokens > self.image_max_tokens:
            raise ValueError(
                f"image_min_tokens is {self.image_min_tokens}, image_max_tokens {self.image_max_tokens}; expected no "
                "more than that"
            )
        return self


Interval = Annotated[int, Field(ge=1)] | Literal["epoch"]


class TrainingConfig(Section):
    num_train_epochs: float = Field(1.0, gt=0, le=10_000, description="Epochs; may be a fraction.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; takes precedence over epochs.")
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples per optimizer step over all ranks, whatever their number. Left out: "
        "`per_device_train_batch_size × gradient_accumulation_steps × world`.",
    )
    global_batch_tokens: Annotated[int, Field(ge=1)] | Literal["packed"] | None = Field(
        None,
        description="Instead of `global_batch_size`: about so many tokens per optimizer step, however many samples "
        "that is. `packed`: `per_device_train_batch_size × max_length × gradient_accumulation_steps × world`, as where "
        "packed rows are counted.",
    )
    per_device_train_batch_size: int = Field(
        1, ge=1, description="Samples per micro-batch; with packing, full-length sequences' worth of tokens."
    )
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="Micro-batches per step and rank. Derived when the global batch is given."
    )
    per_device_eval_batch_size: int | None = Field(None, ge=1, description="Left out: as in training.")
    learning_rate: float | None = Field(None, gt=0, lt=10, description="Left out: 2e-4 for LoRA, 1e-5 for full.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape after warm-up.")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="Share of the steps spent warming up.")
    warmup_steps: int | None = Field(None, ge=0, description="Steps spent warming up; takes precedence over the ratio.")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="AdamW's decay; never on norms and biases.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradient norm is clipped to this; 0 switches clipping off.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first decay rate.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second decay rate.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    optim: Annotated[Literal["adamw", "adamw_8bit"], _renamed(OPTIM_NAMES)] = Field(
        "adamw", description="Fused AdamW, or bitsandbytes' 8-bit AdamW."
    )
    logging_steps: int = Field(1, ge=1, description="Steps between log lines; metrics.jsonl holds every step.")
    eval_steps: Interval = Field("epoch", description="Steps between evaluations, or `epoch`.")
    save_steps: Interval = Field("epoch", description="Steps between checkpoints, or `epoch`.")
    save_total_limit: int = Field(3, ge=1, description="Newest checkpoints kept, besides the best one.")
    metric_for_best_model: Annotated[str, BeforeValidator(full_name, json_schema_input_type=str)] = Field(
        "eval_loss", description="Evaluation metric that chooses `best`; `accuracy` means `eval_accuracy`."
    )
    greater_is_better: bool | None = Field(None, description="Left out: false for losses, mae and perplexity.")
    early_stopping_patience: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without improvement."
    )
    loss_watchdog_threshold: float | None = Field(
        None,
        gt=0,
        description="A run whose loss lies above this for `loss_watchdog_patience` steps in a row ends with exit code "
        "4; meanwhile no checkpoint is due. Left out: only a loss that is not finite ends it.",
    )
    loss_watchdog_patience: int = Field(
        3, ge=1, description="Steps in a row with a loss above `loss_watchdog_threshold` that end the run."
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto", description="Recompute activations to save memory; `auto`: only where the memory plan asks for it."
    )
    parallelism: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="`ddp`: every process holds the whole model. `fsdp`: each holds a slice of every weight (FSDP2) "
        "and borrows the rest block by block, for models that do not fit one GPU.",
    )
    lean: bool = Field(
        True,
        description="Use faster forward code: for LoRA layers always, for norms and the like once equal "
        "results are proved.",
    )
    compile: Literal["auto", "blocks"] | bool = Field(
        "auto",
        description="torch.compile of pointwise parts; `auto`: where the planned work is worth it. `blocks`: of whole "
        "decoder layers too, but for attention; `auto` never takes it, since no GPU has shown yet where it pays.",
    )
    fp8: bool = Field(
        False,
        description="Compute the frozen layers under adapters in 8-bit floats, on GPUs that have them. Refused where "
        "it changes the loss of the first batch by more than 1 %.",
    )
    async_save: Literal["auto"] | bool = Field(
        "auto",
        description="Write checkpoints while training goes on, from a copy in the host's memory. `auto`: on a GPU, "
        "where a checkpoint is large enough to be felt.",
    )
    resume: Literal["auto", "must", "never"] = Field(
        "auto",
        description="`auto`: go on from the newest good checkpoint. `must`: fail without one. `never`: refuse to "
        "touch a run that has one.",
    )
    probe: bool = Field(False, description="Before step 1: the longest batch, an evaluation, a save; what they take.")
    timeout_seconds: float = Field(
        1800.0,
        ge=1,
        description="A rank that gets nowhere for this long ends the run, and so does one that others wait for this "
        "long, or a node that does not come. Loading the model, and each checkpoint, must take less.",
    )
    seed: int = Field(42, ge=0, lt=2**63, description="Decides data order, splits, initial weights and dropout.")


def _as_lora(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


_RUN_NAME = r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"


def _as_run_name(value: Any) -> Any:
    if isinstance(value, str) and not re.match(_RUN_NAME, value):
        raise ValueError(
            f"found {json.dumps(value)}; expected at most 40 lower case letters, digits and dashes, with no dash at "
            "either end, such as support-bot"
        )
    return value


RunName = Annotated[str, Field(pattern=_RUN_NAME, examples=["support-bot"]), BeforeValidator(_as_run_name)]


class Config(Section):
    """One run, whole. `load_config` is the way to make one."""

    name: RunName | None = Field(None, description="Name of the run: at most 40 lower case letters, digits and dashes.")
    task: Literal["causal_lm", "sequence_classification", "vision_language"] = Field(
        "causal_lm", description="What is learnt."
    )
    model: Annotated[ModelConfig, BeforeValidator(_as_source, json_schema_input_type=str | ModelConfig)] = Field(
        description="The model, or just its hub id or folder."
    )
    data: Annotated[DataConfig, BeforeValidator(data_of_task)] = Field(description="What it learns from.")
    lora: Annotated[LoraConfig | None, BeforeValidator(_as_lora, json_schema_input_type=LoraConfig | bool | None)] = (
        Field(None, description="`true` or a section: adapters. Left out: every parameter is trained.")
    )
    quantization: Annotated[Literal["none", "4bit", "fp4", "8bit", "auto"], _renamed(QUANTIZATION_NAMES)] = Field(
        "none",
        description="Quantised frozen base: 4-bit NormalFloat (`4bit`, `nf4`) or float (`fp4`), or 8-bit integers "
        "(`8bit`, `int8`). `auto`: 8-bit on a single GPU, none with several and none without.",
    )
    classification: ClassificationConfig = Field(
        default_factory=ClassificationConfig, description="What `task: sequence_classification` tells apart."
    )
    vision: VisionConfig = Field(
        default_factory=VisionConfig, description="How `task: vision_language` sees images, and what of that learns."
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="How it learns.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Where metrics go besides the run.")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="What is printed.")
    push: Annotated[PushConfig | None, BeforeValidator(as_push, json_schema_input_type=str | PushConfig | None)] = (
        Field(None, description="`ORG/NAME` or a section: the best checkpoint is uploaded there after a good end.")
    )
    output: str | None = Field(
        None,
        description="Run directory; left out: `outputs/MODEL/METHOD-lenN-TIME`. An address in an object store sets "
        "`mirror`, and the run directory is `outputs/BUCKET/PATH`.",
    )
    mirror: str | None = Field(
        None,
        pattern=r"^(s3|gs|gcs|az|abfs|abfss)://[^/\s]+/\S*[^/\s]$",
        description="Address in an object store that the run directory is copied to while the run goes on, and that "
        "it goes on from on an empty machine: `s3://bucket/run`, `gs://…`, `az://…`.",
    )
    compute: ComputeConfig = Field(default_factory=ComputeConfig, description="Processes, nodes and their size.")
    kubernetes: KubernetesConfig | None = Field(None, description="How it runs on a cluster.")

    @property
    def learning_rate(self) -> float:
        """Learning rate with the default of the method filled in."""
        return self.training.learning_rate or (2e-4 if self.lora else 1e-5)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = []
        if self.quantization in ("4bit", "fp4", "8bit") and self.lora is None:
            problems.append(
                f"quantization: found {self.quantization} without lora; a quantised base cannot be trained itself, "
                "add `lora: true` or set quantization to none"
            )
        if self.training.early_stopping_patience is not None and not self.data.eval:
            problems.append(
                "training.early_stopping_patience: needs evaluations; set data.eval to a share such as 0.05 or a file"
            )
        name = self.training.metric_for_best_model
        if self.data.eval and name not in (known := metrics_of(self.task, self.classification.problem_type)):
            problems.append(
                f"training.metric_for_best_model: found {name}; evaluations of this task have {', '.join(known)}"
            )
        if self.training.parallelism == "fsdp":
            problems += self._not_sharded()
        if self.training.fp8:
            problems += self._not_in_fp8()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _not_sharded(self) -> list[str]:
        """What `training.parallelism: fsdp` cannot be combined with."""
        lora = self.lora or LoraConfig()
        refused = {
            f"task: {self.task}": self.task == "sequence_classification",
            "task: vision_language without lora": self.task == "vision_language" and self.lora is None,
            f"quantization: {self.quantization}": self.quantization not in ("none", "auto"),
            "lora.use_dora": lora.use_dora,
            "lora.modules_to_save": bool(lora.modules_to_save),
            "training.compile: true": self.training.compile is True,
            "training.compile: blocks": self.training.compile == "blocks",
            "training.optim: adamw_8bit for full fine-tuning": self.lora is None and self.training.optim != "adamw",
        }
        said = "training.parallelism: fsdp does not work with {} yet; leave that out, or use ddp"
        return [said.format(setting) for setting, is_found in refused.items() if is_found]

    def _not_in_fp8(self) -> list[str]:
        """What `training.fp8` cannot be combined with."""
        refused = {
            f"task: {self.task}": self.task != "causal_lm",
            "full fine-tuning": self.lora is None,
            f"quantization: {self.quantization}": self.quantization != "none",
            "training.parallelism: fsdp": self.training.parallelism == "fsdp",
            "lora.dropout": self.lora is not None and self.lora.dropout > 0,
            "lora.use_dora": self.lora is not None and self.lora.use_dora,
        }
        return [f"training.fp8 does not work with {setting}" for setting, is_found in refused.items() if is_found]
