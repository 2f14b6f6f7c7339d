"""The settings of a run about its model, as the one value that loading, adapting and tasks work from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kubetune.config.schema import DistillConfig, GrpoConfig, PreferenceConfig
from kubetune.models import quantization

if TYPE_CHECKING:
    from kubetune.config.schema import Config, LoraConfig, ModelConfig, VisionConfig
    from kubetune.distributed.process_group import World


@dataclass(frozen=True)
class ModelSpec:
    """A model: its base, what of it learns, and the settings that its task builds it with.

    It says nothing of data, batches or schedule, so a model of the same spec is the same whatever it is trained on.
    """

    model: ModelConfig
    lora: LoraConfig | None = None  # None: all parameters learn
    quantization: str = "none"  # of the base; `auto` until `decided_for` has chosen
    vision: VisionConfig | None = None  # None for a model that reads only text
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)  # how answers are drawn, of any task
    distill: DistillConfig = field(default_factory=DistillConfig)
    cut_over: World | None = None  # ranks that share it as a frozen base; None: each has all of it
    copy_size: int | None = None  # of these, how many share a copy at most; None: all

    @classmethod
    def of(cls, config: Config) -> ModelSpec:
        """Take it from a run's config."""
        return cls(
            config.model,
            config.lora,
            config.quantization,
            config.sight,
            config.preference,
            config.drawing,
            config.distill,
            copy_size=config.training.fsdp_size,
        )

    def decided_for(self, world: World) -> ModelSpec:
        """Return the spec with `quantization: auto` replaced by what that means on these devices."""
        chosen = quantization.decide(self.quantization, self.lora, world)
        return replace(self, quantization=chosen)
