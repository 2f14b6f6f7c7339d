"""Whether a run trains anything: targets of adapters, experts, and what is frozen."""

from __future__ import annotations

from kubetune.config.schema import LoraConfig, TrainingConfig
from kubetune.config.schema.grpo import ServersConfig
from kubetune.config.schema.model import ModelConfig, VisionConfig
from kubetune.errors import ConfigError
from kubetune.library.verdict.built_targets import require_targets_elsewhere
from kubetune.plan.adapter_targets import UNKNOWN_TO_SERVERS, may_lack_targets, require_targets
from kubetune.plan.base_model import require_fitting_codes
from kubetune.plan.linears import Trainable, adapted_stacks, part_of, trained_by_part
from kubetune.plan.model_shapes import Weights


def require_experts(training: TrainingConfig, weights: Weights | None) -> None:
    """Raise ConfigError if a loss of routers is set for a model that has no experts."""
    # Shapes that were computed from config.json need not have every part.
    if weights is None or not weights.stated:
        return
    parts = {part_of(name) for name in weights.shapes}
    if "router" in parts or "experts" in parts:
        return
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(training, name)
        if value:
            raise ConfigError(
                f"training.{name}: found {value:g}, but this model has no experts; leave it out"
            )


def require_targets_in_doubt(
    lora: LoraConfig | None,
    model: ModelConfig,
    task_name: str,
    vision: VisionConfig | None,
    weights: Weights | None,
) -> None:
    """Raise ConfigError for target modules that the model lacks, where the names of its weights leave that open.

    Another process builds the model without weights, as this one imports no torch.
    """
    # Code of the model itself is not run before training.
    if lora is None or weights is None or model.trust_remote_code:
        return
    if may_lack_targets(lora, weights):
        require_targets_elsewhere(lora, model, task_name, vision, weights)


def require_known_to_servers(
    servers: ServersConfig | None, lora: LoraConfig | None, weights: Weights | None
) -> None:
    """Raise ConfigError for adapters on experts, if servers draw the answers."""
    if servers is None or lora is None or weights is None:
        return
    if any(True for _ in adapted_stacks(lora, weights)):
        raise ConfigError(UNKNOWN_TO_SERVERS)


def require_training(
    lora: LoraConfig | None,
    model: ModelConfig,
    quantization: str,
    vision: VisionConfig | None,
    weights: Weights | None,
) -> None:
    """Raise ConfigError for targets that the model lacks, codes that cannot learn, or if nothing would be trained."""
    if weights is None:
        return
    if lora is not None and not model.trust_remote_code:
        require_targets(lora, weights)
    require_fitting_codes(quantization, lora, model.path, weights)
    # Regular expressions are for whole names, which files and models write differently.
    is_open = lora is not None and (
        lora.target_parameters
        or (isinstance(lora.target_modules, str) and lora.target_modules != "all-linear")
    )
    if not weights.stated or is_open or model.trust_remote_code:
        return
    if "quantization_config" in weights.config:
        return
    if not trained_by_part(Trainable(lora, vision), weights).total():
        raise ConfigError(
            f"lora.target_modules: none of the {weights.parameters:,} parameters of the model would be trained, as "
            "all that is named is frozen, or can have no adapter; name other modules, or all-linear"
        )
