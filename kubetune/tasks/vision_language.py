"""Vision-language modelling: a causal language model with a vision tower. It differs from causal_lm in what goes in.

Sequences with and without images share a packed batch: the vision tower sees all images of a micro-batch at once, and
each sequence has its own positions. A packed batch without any image skips the tower on that rank alone; ranks meet
only once per step, so none waits for another.
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
from kubetune.models import fsdp, loading, quantization
from kubetune.models.acceleration import Workload, tune, without_compiler
from kubetune.models.adapters import lora
from kubetune.models.learner import Learner, lone_sequences
from kubetune.models.padding_free import Route, choose_attention
from kubetune.plan.linears import frozen_names
from kubetune.plan.model_shapes import TOWERS
from kubetune.tasks import vision_check
from kubetune.tasks.causal_lm import CausalLM
from kubetune.tasks.vision_forward import hidden_states, plain_logits

if TYPE_CHECKING:
    from kubetune.config.schema import Config, VisionConfig


class VisionLanguage(CausalLM):
    """Train a language model that sees images."""

    auto_class = "AutoModelForImageTextToText"

    def build(self, config: Config, world: World, workload: Workload) -> Learner:
        """Load the model, freeze what is not to learn, add adapters, and choose and prove the attention."""
        from transformers import AutoModelForImageTextToText

        config = quantization.decide(config, world)
        vision = config.vision
        model = fsdp.load(
            AutoModelForImageTextToText, config, world, lambda lm: frozen_modules(lm, vision)
        )
        frozen = frozen_modules(model, vision)
        if config.lora is not None:
            seed = config.training.seed
            model = lora.add_lora(
                model, config.lora, task_type="CAUSAL_LM", seed=seed, frozen=frozen
            )
        elif frozen is not None:
            _freeze(model, frozen)
        learner = self.learner_of(model.train(), config)
        if config.training.compile == "auto":
            config = without_compiler(config)  # what it gains here has not been measured
        return tune(learner, config, workload, world.device)

    def learner_of(self, model: nn.Module, config: Config) -> Learner:
        """Choose how sequences go through a loaded model."""
        processor = load_image_processor(config, load_tokenizer(config.model))
        assert processor is not None, "this task has one"
        route = choose_attention(
            model,
            config.model.attention,
            lambda m: vision_check.check_packed(m, processor),
        )
        if not route.padding_free:
            # The check of a padding-free route looks at images and the head too; this route had none.
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
        sequences = lone_sequences(batch)
        hidden = torch.cat([hidden_states(lm, alone, padding_free=False) for alone in sequences])
    return fsdp.reaching(lm, hidden)


def _freeze(model: nn.Module, frozen: str) -> None:
    """Keep the parameters whose names the expression matches from learning."""
    parameters = []
    for name, parameter in model.named_parameters():
        if re.fullmatch(frozen, name):
            parameter.requires_grad_(False)
            parameters.append(parameter)
    # The optimizer copies what learns. The rest alone would keep the file mapped, and all that was read of it.
    loading.let_go_of_files(parameters)


def frozen_modules(model: nn.Module, vision: VisionConfig) -> str | None:
    """Return an expression for the full names of what must not learn, or None where all may."""
    names = [name for name, _ in model.named_modules()]
    has_tower = any(part in TOWERS for name in names for part in name.split("."))
    if vision.freeze_vision_tower and not has_tower:
        raise errors.ModelError(
            f"{type(model).__name__} has no vision tower under the names {', '.join(TOWERS)}; set "
            "vision.freeze_vision_tower to false and name what should learn in lora.target_modules"
        )
    return frozen_names(vision, names)
