"""The config as frozen data: every key a run file may hold, with its type, range, default and meaning.

Nothing here reads files (config/load), accepts other spellings (config/aliases) or looks at the machine (plan).
The descriptions are the documentation: docs/config.md and the JSON Schema are generated from them.
`run_sections` lists the sections, which are a file each; `base` says what a section is. `run_facts` says what follows
from several of them, and `agreement` how they must fit.
"""

from __future__ import annotations

from pydantic import ConfigDict, model_validator

from kubetune.config.schema.agreement import disagreements
from kubetune.config.schema.base import Section
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.schema.compute import ComputeConfig
from kubetune.config.schema.data import DataConfig, SourceConfig
from kubetune.config.schema.distill import DistillConfig
from kubetune.config.schema.evaluation import EvaluationConfig
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.model import ClassificationConfig, LoraConfig, ModelConfig, VisionConfig
from kubetune.config.schema.preference import PreferenceConfig
from kubetune.config.schema.rewards import RewardConfig
from kubetune.config.schema.run_facts import RecordKind, RunFacts, Sources
from kubetune.config.schema.tracking import LoggingConfig, PushConfig, TrackingConfig
from kubetune.config.schema.training import TrainingConfig

__all__ = [
    "ClassificationConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "DistillConfig",
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


class Config(RunFacts):
    """The whole config of one run. Make one with `load_config`."""

    model_config = ConfigDict(defer_build=False)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = disagreements(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self
