"""The config as frozen data: every key a run file may hold, with its type, range, default and meaning.

Nothing here reads files (config/load), accepts other spellings (config/aliases) or looks at the machine (plan).
The descriptions are the documentation: docs/config.md and the JSON Schema are generated from them.
`Config` is below, its sections are a file each; `base.py` says what a section is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from kubetune.config.gate import Condition
from kubetune.config.metric_names import metrics_of
from kubetune.config.schema.base import Section, renamed, switched
from kubetune.config.schema.cluster import ComputeConfig, KubernetesConfig
from kubetune.config.schema.data import DataConfig, SourceConfig, as_source, data_of_task
from kubetune.config.schema.evaluation import EvaluationConfig, asked_by_reward
from kubetune.config.schema.grpo import GrpoConfig, problems_of_run
from kubetune.config.schema.model import ClassificationConfig, LoraConfig, ModelConfig, VisionConfig
from kubetune.config.schema.preference import PreferenceConfig
from kubetune.config.schema.rewards import RewardConfig, Rewards
from kubetune.config.schema.tracking import (
    HooksConfig,
    LoggingConfig,
    PushConfig,
    TrackingConfig,
    as_push,
)
from kubetune.config.schema.training import TrainingConfig

__all__ = [
    "ClassificationConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GrpoConfig",
    "KubernetesConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "PreferenceConfig",
    "PushConfig",
    "RecordKind",
    "RewardConfig",
    "Section",
    "SourceConfig",
    "Sources",
    "TrackingConfig",
    "TrainingConfig",
    "VisionConfig",
]

# Kinds of record that a task learns from.
#
# text: texts; labelled: texts with a label; pair: two answers, one of them better; graded: the same, with by how
# much; judged: answers that are each good or bad; prompt: prompts that the model itself answers.
RecordKind = Literal["text", "labelled", "pair", "graded", "judged", "prompt"]

# Sources of each split.
Sources = dict[Literal["train", "eval", "forget"], tuple[SourceConfig, ...]]

QUANTIZATION_NAMES = {"nf4": "4bit", "int8": "8bit"}

# Task → default learning rates for (adapters, all parameters), from TRL's scripts and LLaMA-Factory's examples.
#
# They are lower than those of supervised fine-tuning, since comparing answers pushes a model away from what it writes
# well.
LEARNING_RATES = {
    "preference": (5e-6, 5e-7),
    "reward_model": (1e-4, 1e-5),
    "grpo": (1e-5, 1e-6),
}

# Section, or key of a section, → the tasks that read it, for messages.
READERS = {
    "classification": "`task: sequence_classification`",
    "vision": "`task: vision_language` and `preference.images: true`",
    "preference": "`task: preference`",
    "preference.center_coefficient": "`task: reward_model`",
    "grpo": "`task: grpo`",
}

_RUN_NAME = r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"


def _as_run_name(value: Any) -> Any:
    if isinstance(value, str) and not re.match(_RUN_NAME, value):
        raise ValueError(
            f"found {json.dumps(value)}; expected at most 40 lower case letters, digits and dashes, with no dash at "
            "either end, such as support-bot"
        )
    return value


RunName = Annotated[
    str, Field(pattern=_RUN_NAME, examples=["support-bot"]), BeforeValidator(_as_run_name)
]


def _is_judged_by_reward(fields: Mapping[str, Any]) -> bool:
    """True if a config, of which these fields are valid, has evaluations by the rewards of `task: grpo`."""
    data = fields.get("data")
    return fields.get("task") == "grpo" and data is not None and bool(data.eval)


def _training_of_task(training: Any, info: ValidationInfo) -> Any:
    """Let the best checkpoint be chosen by what its task is about, where the run file says nothing of it."""
    if not isinstance(training, dict) or not _is_judged_by_reward(info.data):
        return training
    return {"metric_for_best_model": "eval_reward", **training}


def _evaluation_of_task(evaluation: Any, info: ValidationInfo) -> Any:
    """Let evaluations of a run by reward ask for answers."""
    if not _is_judged_by_reward(info.data) or "grpo" not in info.data:
        return evaluation
    return asked_by_reward(evaluation, info.data["grpo"])


class Config(Section):
    """The whole config of one run. Make one with `load_config`."""

    name: RunName | None = Field(
        None, description="Name of the run: at most 40 lower case letters, digits and dashes."
    )
    task: Literal[
        "causal_lm",
        "sequence_classification",
        "vision_language",
        "preference",
        "reward_model",
        "grpo",
    ] = Field(
        "causal_lm",
        description="What the model learns: to write, to classify, to write about images, to prefer one answer to "
        "another, to score answers, or to write what is rewarded.",
    )
    model: Annotated[
        ModelConfig, BeforeValidator(as_source, json_schema_input_type=str | ModelConfig)
    ] = Field(description="The model, or just its hub id or folder.")
    data: Annotated[DataConfig, BeforeValidator(data_of_task)] = Field(
        description="What it learns from."
    )
    lora: Annotated[LoraConfig | None, switched(LoraConfig)] = Field(
        None,
        description="LoRA trains small adapters; without it every weight is trained. `true`, or a section.",
    )
    quantization: Annotated[
        Literal["none", "4bit", "fp4", "8bit", "auto"], renamed(QUANTIZATION_NAMES)
    ] = Field(
        "none",
        description="Quantised frozen base: 4-bit NormalFloat (`4bit`, `nf4`) or float (`fp4`), or 8-bit integers "
        "(`8bit`, `int8`). `auto`: 8-bit on a single GPU, none with several and none without.",
    )
    classification: ClassificationConfig = Field(
        default_factory=ClassificationConfig,
        description="What `task: sequence_classification` tells apart.",
    )
    vision: VisionConfig = Field(
        default_factory=VisionConfig,
        description="How `task: vision_language` and `preference.images` see images, and which parts of that learn.",
    )
    preference: PreferenceConfig = Field(
        default_factory=PreferenceConfig,
        description="How `task: preference` learns which answer is better, and `task: reward_model` to score them.",
    )
    grpo: GrpoConfig = Field(
        default_factory=GrpoConfig,
        description="How `task: grpo` draws answers, and learns from their rewards.",
    )
    rewards: Rewards = Field((), description="What rewards the answers of `task: grpo`.")
    training: Annotated[TrainingConfig, BeforeValidator(_training_of_task)] = Field(
        default_factory=dict, validate_default=True, description="How it learns."
    )
    evaluation: Annotated[EvaluationConfig, BeforeValidator(_evaluation_of_task)] = Field(
        default_factory=dict,
        validate_default=True,
        description="Metrics besides the loss, and what they must reach.",
    )
    tracking: TrackingConfig = Field(
        default_factory=TrackingConfig, description="Where metrics go besides the run."
    )
    hooks: HooksConfig = Field(
        default_factory=HooksConfig, description="A command that is called for events."
    )
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="What is printed.")
    push: Annotated[
        PushConfig | None, BeforeValidator(as_push, json_schema_input_type=str | PushConfig | None)
    ] = Field(
        None,
        description="`ORG/NAME` or a section: the best checkpoint is uploaded there after a successful end.",
    )
    output: str | None = Field(
        None,
        description="Run directory; left out: `outputs/MODEL/METHOD-lenN-TIME`. An address in an object store sets "
        "`mirror`, and the run directory is `outputs/BUCKET/PATH`.",
    )
    mirror: str | None = Field(
        None,
        pattern=r"^(s3|gs|gcs|az|abfs|abfss)://[^/\s]+/\S*[^/\s]$",
        description="Address in an object store: the run directory is copied there while the run goes on, and a start "
        "on an empty machine continues from there. `s3://bucket/run`, `gs://…`, `az://…`.",
    )
    compute: ComputeConfig = Field(
        default_factory=ComputeConfig, description="Processes, nodes and their size."
    )
    kubernetes: KubernetesConfig | None = Field(None, description="How it runs on a cluster.")

    @property
    def learning_rate(self) -> float:
        """Return the learning rate, or the default of the task and method."""
        if self.training.learning_rate is not None:
            return self.training.learning_rate
        of_adapters, of_all_parameters = LEARNING_RATES.get(self.task, (2e-4, 1e-5))
        return of_adapters if self.lora else of_all_parameters

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return all metrics that evaluations of this task may have."""
        return metrics_of(
            self.task, self.classification.problem_type, judged=self.record_kind == "judged"
        )

    @property
    def task_name(self) -> str:
        """Return the name of the task in `tasks.TASKS`: pairs of answers about images are a task of their own."""
        return "vision_preference" if self.preference.images else self.task

    @property
    def classifies(self) -> bool:
        """True if a head judges each text by one of its tokens, instead of predicting tokens."""
        return self.task in ("sequence_classification", "reward_model")

    @property
    def sees(self) -> bool:
        """True if the model has a vision tower, so that the data may have images."""
        return self.task == "vision_language" or self.preference.images

    @property
    def answers_text(self) -> bool:
        """True if the model answers text with text: it neither classifies nor sees."""
        return not (self.classifies or self.sees)

    @property
    def sight(self) -> VisionConfig | None:
        """Return how the model sees images. None if it reads only text."""
        return self.vision if self.sees else None

    @property
    def record_kind(self) -> RecordKind:
        """Return the kind of record that the task learns from."""
        if self.task == "preference":
            return "judged" if self.preference.traits.judges else "pair"
        kinds: dict[str, RecordKind] = {
            "sequence_classification": "labelled",
            "reward_model": "graded",
            "grpo": "prompt",
        }
        return kinds.get(self.task, "text")

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with what it was before training."""
        return self.task == "preference" and self.preference.needs_reference

    @property
    def needs_base(self) -> bool:
        """True if the model before training is measured too, so that the run says whether it got better."""
        # What these tasks measure is read off rows that are evaluated anyway, so it costs one evaluation.
        tells = self.classifies or self.task == "preference"
        return bool(self.evaluation.names) or (tells and bool(self.data.eval))

    @property
    def longest_row(self) -> int:
        """Return the tokens of the longest row that is allowed. A pair of answers is one row of two sequences."""
        if self.task == "grpo":
            return self.data.max_length + self.grpo.max_completion_length
        sequences = 2 if self.record_kind in ("pair", "graded") else 1
        return sequences * self.data.max_length

    @property
    def uses_of_row(self) -> int:
        """Return how many steps of an epoch learn from each row: answers to a prompt may serve several."""
        return self.grpo.num_iterations if self.task == "grpo" else 1

    @property
    def sources(self) -> Sources:
        """Return the sources of each split. A share that is held out of training has none of its own."""
        data = self.data
        forget = self.evaluation.forget
        return {
            "train": data.train,
            "eval": data.eval if isinstance(data.eval, tuple) else (),
            "forget": forget.data if forget is not None else (),
        }

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = []
        # Sections that need another one.
        if self.quantization in ("4bit", "fp4", "8bit") and self.lora is None:
            problems.append(
                f"quantization: found {self.quantization} without lora; a quantised base cannot be trained itself, "
                "add `lora: true` or set quantization to none"
            )
        if self.training.early_stopping_patience is not None and not self.data.eval:
            problems.append(
                "training.early_stopping_patience: needs evaluations; set data.eval to a share such as 0.05 or a file"
            )
        if self.lora is not None and self.lora.leaves_routers:
            for name in ("router_aux_loss_coef", "router_z_loss_coef"):
                value = getattr(self.training, name)
                if value:
                    problems.append(
                        f"training.{name}: found {value:g}, but no router learns here; leave it out, or name the "
                        "router in lora.target_parameters ([mlp.gate.weight])"
                    )
        # Settings of another task, or of another kind of record.
        problems += self._of_other_tasks()
        problems += problems_of_run(self)
        if self.record_kind not in ("pair", "graded") and self.data.unusable_pairs != "error":
            problems.append(
                "data.unusable_pairs: means nothing to a run that compares no pairs; leave it out"
            )
        if self.record_kind not in ("text", "labelled") and self.data.train_on == "all":
            problems.append(
                f"data.train_on: found all with `task: {self.task}`, which compares answers; leave it out"
            )
        # Metrics that exist.
        name = self.training.metric_for_best_model
        known = (*self.metrics, *self.evaluation.names)
        if name not in known:
            problems.append(
                f"training.metric_for_best_model: found {name}; evaluations of this task have {', '.join(known)}"
            )
        problems += self._not_evaluated(known)
        # What a way of computing cannot do.
        if self.training.parallelism == "fsdp":
            problems += self._not_sharded()
        if self.training.fp8:
            problems += self.not_in_fp8()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _of_other_tasks(self) -> list[str]:
        """Return a problem for each setting in a section that this task does not read."""
        is_read = {
            "classification": self.task == "sequence_classification",
            "vision": self.sees,
            "preference": self.task == "preference",
            "preference.center_coefficient": self.task == "reward_model",
            "grpo": self.task == "grpo",
        }
        problems = []
        for section in ("classification", "vision", "preference", "grpo"):
            for key in getattr(self, section).changed_keys:
                name = f"{section}.{key}"
                place = name if name in is_read else section
                if not is_read[place]:
                    problems.append(
                        f"{name}: means nothing to `task: {self.task}`, but to {READERS[place]}; leave it out, or "
                        "change the task"
                    )
        return problems

    def _not_evaluated(self, known: tuple[str, ...]) -> list[str]:
        """Return a problem for each setting of `evaluation` that cannot work with the rest of this config."""
        evaluation = self.evaluation
        problems = []
        # Benchmarks run after the last step, without data.eval.
        gate = {
            name: text
            for name, text in evaluation.gate.items()
            if not evaluation.is_benchmark(name)
        }
        if (evaluation.names or gate) and not self.data.eval:
            problems.append(
                "evaluation: needs data.eval; set that to a share such as 0.05 or a file"
            )
        if evaluation.generate is not None and self.classifies:
            problems.append(
                f"evaluation.generate: found it with `task: {self.task}`, which writes no answers"
            )
        if "reward" in evaluation.answer_measures and self.task != "grpo":
            problems.append(
                f"evaluation.generate.metric: found reward with `task: {self.task}`, which has no rewards; expected "
                "`task: grpo`, or another metric"
            )
        if evaluation.benchmarks is not None and not self.answers_text:
            problems.append(
                f"evaluation.benchmarks: found it with `task: {self.task}`; they are for models of text"
            )
        for name, text in gate.items():
            if name not in known:
                problems.append(
                    f"evaluation.gate: found {name}; evaluations of this task have {', '.join(known)}"
                )
            elif Condition.parse(text).is_change and not self.needs_base:
                problems.append(
                    f"evaluation.gate: {name} is compared with the base model, which is measured only where "
                    "evaluation.generate or evaluation.forget is set"
                )
        return problems

    def _not_sharded(self) -> list[str]:
        """Return a problem for each setting that does not work with `training.parallelism: fsdp`."""
        lora = self.lora or LoraConfig()
        refused = {
            "task: sequence_classification": self.task == "sequence_classification",
            "preference.images without lora": self.preference.images and self.lora is None,
            f"quantization: {self.quantization}": self.quantization not in ("none", "auto"),
            "lora.use_dora": lora.use_dora,
            "lora.modules_to_save": bool(lora.modules_to_save),
            "training.compile: true": self.training.compile is True,
            "training.compile: layers": self.training.compile == "layers",
            "training.optim: adamw_8bit for full fine-tuning": self.lora is None
            and self.training.optim != "adamw",
        }
        return [
            f"training.parallelism: fsdp does not work with {setting} yet; leave that out, or use ddp"
            for setting, is_set in refused.items()
            if is_set
        ]

    def not_in_fp8(self) -> list[str]:
        """Return a problem for each setting that does not work with `training.fp8`."""
        refused = {
            f"task: {self.task}": self.task != "causal_lm",
            "full fine-tuning": self.lora is None,
            f"quantization: {self.quantization}": self.quantization != "none",
            "training.parallelism: fsdp": self.training.parallelism == "fsdp",
            "lora.dropout": self.lora is not None and self.lora.dropout > 0,
            "lora.use_dora": self.lora is not None and self.lora.use_dora,
        }
        return [
            f"training.fp8 does not work with {setting}"
            for setting, is_set in refused.items()
            if is_set
        ]
