"""The settings that decide which rows a run's data become: one value for reading, checking and preparing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kubetune.config.schema import (
        ClassificationConfig,
        Config,
        DataConfig,
        DistillConfig,
        ModelConfig,
        PreferenceConfig,
        RecordKind,
        RewardConfig,
        Sources,
        VisionConfig,
    )

# A part of the data that is used in one way.
Split = Literal["train", "eval", "forget"]


@dataclass(frozen=True)
class DataSpec:
    """The settings that rows depend on.

    It says nothing of what is done with the rows, so runs that differ in their training alone share prepared data.
    """

    # What a record is taken for, and how its texts become ids.
    task: str
    record_kind: RecordKind
    model: ModelConfig  # whose tokenizer, image processor and embeddings the rows are made for
    data: DataConfig
    sources: Sources  # those that are named; none for a share held out of training
    # What rows of some tasks also depend on.
    classification: ClassificationConfig
    preference: PreferenceConfig
    vision: VisionConfig | None  # None where rows have no images
    # What reads columns that no row holds.
    rewards: tuple[RewardConfig, ...]
    distill: DistillConfig
    seed: int  # by which a share is held out, and samples are drawn

    @classmethod
    def of(cls, config: Config) -> DataSpec:
        """Take it from a run's config."""
        return cls(
            task=config.task,
            record_kind=config.record_kind,
            model=config.model,
            data=config.data,
            sources=config.sources,
            classification=config.classification,
            preference=config.preference,
            vision=config.sight,
            rewards=tuple(config.rewards),
            distill=config.distill,
            seed=config.training.seed,
        )

    @property
    def held_out_share(self) -> float:
        """Share of training's records that is held out to evaluate on; 0 if `data.eval` names sources."""
        return self.data.eval if isinstance(self.data.eval, float) else 0.0

    @property
    def splits(self) -> Sources:
        """Sources of each split that has some; a share held out comes from the sources of training."""
        # A share has no sources of its own: its rows are drawn from those of training.
        splits = dict(self.sources)
        if self.held_out_share:
            splits["eval"] = self.data.train
        return {split: sources for split, sources in splits.items() if sources}
