"""Answers that the model draws itself, and what training asks of answers before it learns from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kubetune.batching.batch import collate
from kubetune.batching.drawn_answers import answer_sequence
from kubetune.config.schema import GrpoConfig
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.distributed.process_group import World
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.models.loading import load_pretrained
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import backbone, own_attention
from kubetune.scoring.counted_draws import uniforms
from kubetune.tasks import causal_lm
from kubetune.tasks.grpo.task import log_probabilities
from kubetune.training.rollouts.sampler import Decoder, DrawnTokens, draw


@dataclass(frozen=True)
class Slot:
    """A prompt that is to be answered."""

    number: int  # its place among those that are drawn together
    row: int  # of the training data
    ids: list[int]  # of the prompt


@dataclass(frozen=True)
class EarlierLogps:
    """Log-probabilities of a group's tokens, a list for each answer; None where the loss does not ask for them."""

    # as training has them, under the weights that drew the answers
    old: list[list[float]] | None = None
    reference: list[list[float]] | None = None  # under the model before training


@dataclass(frozen=True)
class ModelAnswers:
    """The model as it is, and as it was before training."""

    learner: Learner
    reference: Learner | None  # the model before training; None where nothing is compared with it
    tokenizer: Tokenizer
    settings: GrpoConfig
    seed: int
    device: torch.device

    @property
    def asks_model(self) -> bool:
        """True if training asks for log-probabilities of the answers before it learns from them."""
        return self.settings.window > 1 or self.reference is not None

    def draw(self, step: int, unit: Sequence[Slot]) -> list[list[DrawnTokens]]:
        """Return the answers that the sampler draws to the prompts of a unit, a list for each prompt."""
        settings = self.settings
        number = settings.num_generations
        numbers = []
        for slot in unit:
            for answer in range(number):
                place = (self.seed, step, slot.number, answer)
                numbers.append(uniforms(settings.max_completion_length, *place))

        lm = self.learner.lm
        # Packed attention knows no cache.
        with own_attention(lm):
            drawn = draw(
                lm,
                [slot.ids for slot in unit],
                np.stack(numbers),
                settings,
                self.tokenizer.eos_ids,
                self.tokenizer.pad_id,
            )
        return [drawn[first : first + number] for first in range(0, len(drawn), number)]

    @torch.no_grad()
    def along(self) -> None:
        """Run the model as drawing does, on one token, for other ranks' sake."""
        pad = self.tokenizer.pad_id
        with self.learner.without_dropout(), own_attention(self.learner.lm):
            Decoder(self.learner.lm, [[pad]], 1, pad)

    @contextmanager
    def drawing(self, world: World) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Let each rank draw its own answers while the block runs. Yield what is around a rank's turn."""
        lm = self.learner.lm
        with fsdp.drawing(lm, backbone(lm), self.along, world) as apart:
            if self.reference is None or self.reference is self.learner:
                yield apart
                return
            # Where there are two models, the first is not frozen, so it is whole meanwhile.
            second = self.reference.lm
            with fsdp.drawing(second, backbone(second), self.compare_along, world) as apart:
                yield apart

    def compare_along(self) -> None:
        """Run the model before training on one token, for other ranks' sake."""
        assert self.reference is not None
        pad = self.tokenizer.pad_id
        log_probabilities(self.reference, collate([answer_sequence([pad], [pad])]).to(self.device))

    def earlier(self, slot: Slot, answers: Sequence[DrawnTokens]) -> EarlierLogps:
        """Return log-probabilities of a group's tokens that are asked for before training: see `EarlierLogps`."""
        if not self.asks_model:
            return EarlierLogps()

        sequences = [answer_sequence(slot.ids, answer.ids) for answer in answers]
        batch = collate(sequences, [slot.row] * len(answers)).to(self.device)
        lengths = [len(answer.ids) for answer in answers]
        old = None
        if self.settings.window > 1:
            old = _cut(log_probabilities(self.learner, batch), lengths)
        reference = None
        if self.reference is not None:
            # Either the same model with its adapter off, or a second one.
            is_same = self.reference is self.learner
            logps = log_probabilities(self.reference, batch, without_adapter=is_same)
            reference = _cut(logps, lengths)
        return EarlierLogps(old, reference)


def _cut(logps: torch.Tensor, lengths: Sequence[int]) -> list[list[float]]:
    """Return numbers of tokens, a list for each answer.

    1 2 3 4 5 of answers with 2 and 3 tokens    [[1, 2], [3, 4, 5]]
    """
    return [part.tolist() for part in logps.split(list(lengths))]


def reference_of(spec: ModelSpec, world: World, learner: Learner) -> Learner | None:
    """Return the model before training; None where the loss does not compare with it.

    Where every weight is trained it is loaded as a second model, also by a run that goes on. It is frozen, and cut if
    the model that learns is.
    """
    if not spec.grpo.beta:
        return None
    if spec.lora is not None:
        return learner
    spec = spec.decided_for(world)
    if fsdp.is_sharded(learner.model):
        spec = replace(spec, cut_over=world)
    model = load_pretrained(AutoModelForCausalLM, spec, world.device)
    model.eval().requires_grad_(False)
    return replace(causal_lm.TASK.learner_of(model, spec), grpo=spec.grpo)
