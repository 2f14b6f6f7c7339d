"""Vision-language modelling: a causal language model with a vision tower. It differs from causal_lm in what goes in.

Sequences with and without images share a packed batch: the vision tower sees all images of a micro-batch at once, and
each sequence has its own positions. A packed batch without any image skips the tower on that rank only. Ranks meet once
per step, so none waits for another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from kubetune import errors
from kubetune.batching.batch import Batch
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.vision.image_processor import load_image_processor
from kubetune.distributed.process_group import World
from kubetune.models import fsdp, loading
from kubetune.models.acceleration import Workload, tune, without_compiler
from kubetune.models.adapters import lora
from kubetune.models.learner import Learner, lone_sequences
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import Route, choose_attention
from kubetune.plan.linears import frozen_names
from kubetune.plan.model_shapes import TOWERS
from kubetune.tasks import vision_check
from kubetune.tasks.causal_lm import CausalLM
from kubetune.tasks.vision_forward import hidden_states, plain_logits

if TYPE_CHECKING:
    from kubetune.config.schema import TrainingConfig, VisionConfig


class VisionLanguage(CausalLM):
    """Train a language model that sees images."""

    auto_class = "AutoModelForImageTextToText"
    pipeline = "image-text-to-text"

    def build(
        self,
        spec: ModelSpec,
        training: TrainingConfig,
        world: World,
        workload: Workload,
    ) -> Learner:
        """Load the model, freeze what is not to learn, add adapters, and choose and prove the attention."""
        from transformers import AutoModelForImageTextToText

        spec = spec.decided_for(world)
        vision = spec.vision
        assert vision is not None, "the config of this task has it"
        model = fsdp.load(
            AutoModelForImageTextToText,
            spec,
            training,
            world,
            lambda lm: frozen_modules(lm, vision),
        )

        # Adapters go to what may learn; without them, what must not learn is frozen.
        frozen = frozen_modules(model, vision)
        if spec.lora is not None:
            model = self.with_adapters(model, spec, training.seed)
        elif frozen is not None:
            _freeze(model, frozen)

        learner = self.learner_of(model.train(), spec)
        # What compiled kernels gain here has not been measured.
        training = without_compiler(training)
        return tune(learner, training, workload, world)

    def with_adapters(self, model: nn.Module, spec: ModelSpec, seed: int) -> nn.Module:
        """Return a model with adapters on what may learn. Raise ConfigError for targets that it lacks."""
        assert spec.lora is not None, "asked only of runs with adapters"
        assert spec.vision is not None, "the config of this task has it"
        frozen = frozen_modules(model, spec.vision)
        return lora.add_lora(model, spec.lora, task_type="CAUSAL_LM", seed=seed, frozen=frozen)

    def learner_of(self, model: nn.Module, spec: ModelSpec) -> Learner:
        """Choose how sequences go through a loaded model."""
        assert spec.vision is not None, "the config of this task has it"
        processor = load_image_processor(
            spec.model,
            spec.vision,
            load_tokenizer(spec.model),
            compares=spec.preference.images,
        )
        route = choose_attention(
            model, spec.model.attention, lambda m: vision_check.check_packed(m, processor)
        )
        if not route.padding_free:
            # The check of a padding-free route looks at images and the head too. This route had no check.
            vision_check.require_sight(model, processor)
        return with_images(model, route)

    def plain_logits(self, model: Any, batch: Batch) -> Tensor:
        """Return logits `[tokens, vocabulary]` of a single sequence by the model's own code."""
        return plain_logits(model, batch)


TASK: Final = VisionLanguage()


def with_images(model: nn.Module, route: Route) -> Learner:
    """Return a causal language model whose hidden states are of images too."""
    return Learner(model, route, hidden=_hidden)


def _hidden(learner: Learner, batch: Batch) -> Tensor:
    lm = learner.lm
    if learner.route.padding_free:
        hidden = hidden_states(lm, batch, padding_free=True)
    else:
        # One at a time, and laid end to end again, as a packed batch has them.
        sequences = lone_sequences(batch)
        hidden = torch.cat([hidden_states(lm, alone, padding_free=False) for alone in sequences])
    return fsdp.reaching(lm, hidden)


def _freeze(model: nn.Module, frozen: str) -> None:
    """Freeze the parameters whose names the expression matches."""
    parameters = []
    for name, parameter in model.named_parameters():
        if re.fullmatch(frozen, name):
            parameter.requires_grad_(False)
            parameters.append(parameter)
    # The optimizer copies what learns. The rest would keep the file mapped, with all that was read of it.
    loading.let_go_of_files(parameters)


def frozen_modules(model: nn.Module, vision: VisionConfig) -> str | None:
    """Return an expression for the full names of what must not learn, or None where all may."""
    # By what is in the model at hand: families name their towers differently.
    names = [name for name, _ in model.named_modules()]
    has_tower = any(part in TOWERS for name in names for part in name.split("."))
    if vision.freeze_vision_tower and not has_tower:
        raise errors.ModelError(
            f"{type(model).__name__} has no vision tower under the names {', '.join(TOWERS)}; set "
            "vision.freeze_vision_tower to false and name what should learn in lora.target_modules"
        )
    return frozen_names(vision, names)
