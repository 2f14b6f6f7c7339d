"""The sections of a run file, each with its type and meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo

from kubetune.config.metric_names import RunTask
from kubetune.config.schema.base import Section, renamed, switched
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.schema.compute import ComputeConfig
from kubetune.config.schema.data import DataConfig, as_source, data_of_task
from kubetune.config.schema.distill import DistillConfig
from kubetune.config.schema.evaluation import EvaluationConfig, asked_by_reward
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.model import ClassificationConfig, LoraConfig, ModelConfig, VisionConfig
from kubetune.config.schema.preference import PreferenceConfig
from kubetune.config.schema.rewards import Rewards
from kubetune.config.schema.tracking import (
    HooksConfig,
    LoggingConfig,
    PushConfig,
    TrackingConfig,
    as_push,
)
from kubetune.config.schema.training import TrainingConfig

QUANTIZATION_NAMES = {"nf4": "4bit", "int8": "8bit"}

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
    """Let the best checkpoint be chosen by what its task is about, unless the run file says by what."""
    if not isinstance(training, dict) or not _is_judged_by_reward(info.data):
        return training
    return {"metric_for_best_model": "eval_reward", **training}


def _evaluation_of_task(evaluation: Any, info: ValidationInfo) -> Any:
    """Let evaluations of a run by reward ask for answers."""
    if not _is_judged_by_reward(info.data) or "grpo" not in info.data:
        return evaluation
    return asked_by_reward(evaluation, info.data["grpo"])


class RunSections(Section):
    """All that a run file may hold."""

    # Only `Config` is made of a run file; building validators of its parents too would cost each command 0.1 s.
    model_config = ConfigDict(defer_build=True)

    name: RunName | None = Field(
        None, description="Name of the run: at most 40 lower case letters, digits and dashes."
    )
    task: RunTask = Field(
        "causal_lm",
        description="What the model learns: to write, to classify, to write about images, to prefer one answer to "
        "another, to score answers, to write what is rewarded, or what a teacher would write.",
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
    distill: DistillConfig = Field(
        default_factory=DistillConfig,
        description="The teacher of `task: distill`, and how the model learns from it.",
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
