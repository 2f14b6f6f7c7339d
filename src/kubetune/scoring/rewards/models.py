"""Rewards by a frozen model that the rank itself holds: a reward model's score, or what a teacher says (teachers.py).

Both judge all answers to one prompt at a time, in batches that depend only on these answers. So an answer gets the
same reward on any rank and in any start. No gradient is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from kubetune.base import logs
from kubetune.config.schema import GrpoConfig, RewardConfig
from kubetune.data.reading.examples import Chat, Example, Pair
from kubetune.data.text.encode import Encoder
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.models import loading
from kubetune.models.classifier_pooling import name_padding, prepare_pooling, read_at_end
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.rundir import heartbeat
from kubetune.scoring.rewards import named_models
from kubetune.scoring.rewards.model_sources import ModelSource, source_of
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.scoring.rewards.request import Judgement, Request
from kubetune.scoring.rewards.teachers import TeacherJudge, batches_of, frozen, load_teacher
from kubetune.tasks import reward_model

if TYPE_CHECKING:
    from kubetune.data.prepared.rows import TrainedIds


class ModelJudge(Protocol):
    """A model that rewards answers."""

    @property
    def digest(self) -> str:
        """Return what tells its weights from others."""

    def judge(self, request: Request) -> Judgement:
        """Return the rewards of all answers to a prompt."""


def load_judge(
    reward: RewardConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    longest: int,
    *,
    local_files_only: bool,
) -> ModelJudge:
    """Return the model of a reward.

    `tokenizer`: of the model that learns. `longest`: most tokens of a prompt with its answer.
    Raise ConfigError or ModelError for a model of another kind or with other tokens.
    """
    named = NamedModel.of_reward(reward)
    source = source_of(named, local_files_only=local_files_only)
    if not named.is_teacher:
        return _reward_model(source, device)
    teacher = load_teacher(source, tokenizer, device, longest)
    logs.MODEL.info("answers are judged by the teacher %s", source.name)
    # The teacher's own probabilities, at no other temperature than 1.
    return TeacherJudge(replace(teacher, grpo=GrpoConfig()), source.digest)


@dataclass(frozen=True)
class RewardModelJudge:
    """Scores answers as `task: reward_model` does: the prompt and the answer by its own tokenizer and chat template."""

    learner: Learner
    encoder: Encoder
    limit: int | None  # tokens; what is longer is cut, as in training
    digest: str

    def judge(self, request: Request) -> Judgement:
        """Return the score of each answer; None if the chat template refuses the conversation."""
        heartbeat.beat("reward")
        examples = [_example(request.prompt, text) for text in request.texts]
        rows: list[TrainedIds] = []
        places = []  # of the answer that each row is of
        refusal = ""
        # A conversation that the chat template refuses has no row, and its answer no score.
        for place, encoded in enumerate(self.encoder.encode_batch(examples)):
            if isinstance(encoded, str):
                refusal = encoded
                continue
            ids = np.array(encoded.ids[: self.limit], np.uint32)
            # Only the score is computed, so no token is a label.
            rows.append((ids, np.zeros(len(ids), bool)))
            places.append(place)

        batches = batches_of(rows, self.learner)
        scores: list[float | None] = [None] * len(request.texts)
        for place, score in zip(places, reward_model.score(self.learner, batches), strict=True):
            scores[place] = score
        return Judgement(scores, refusal)


def _reward_model(source: ModelSource, device: torch.device) -> RewardModelJudge:
    tokenizer = load_tokenizer(source.spec.model)
    adds_special_tokens = True
    limit = tokenizer.max_length
    # A published model, or the result of a run with settings that say how it was trained.
    if source.data is None:
        learner = _classifier(source.spec, tokenizer, device)
    else:
        learner = source.checked(lambda: reward_model.TASK.load(source.spec, source.folder, device))
        adds_special_tokens = source.data.add_special_tokens
        limit = source.data.max_length
    logs.MODEL.info("answers are scored by %s", source.name)
    # As in training (data/text/encode_preferences).
    encoder = Encoder(tokenizer, add_special_tokens=adds_special_tokens, keeps_prompts=True)
    return RewardModelJudge(frozen(learner), encoder, limit, source.digest)


def _classifier(spec: ModelSpec, tokenizer: Tokenizer, device: torch.device) -> Learner:
    """Return a classifier with one output, as others publish reward models."""
    path = spec.model.path

    def refuse_new(_: Any, names: set[str]) -> None:
        if names:
            raise named_models.lacking_weights(path, ", ".join(sorted(names)[:3]))

    model: Any = loading.load_pretrained(
        AutoModelForSequenceClassification,
        spec,
        device,
        draw=refuse_new,
    )
    if model.config.num_labels != 1:
        raise named_models.other_outputs(path, model.config.num_labels)
    name_padding(model, tokenizer.pad_id)
    read_at_end(model, tokenizer.eos_id)
    return Learner(model.eval(), prepare_pooling(model, spec.model.attention), reward_model.REWARD)


def _example(prompt: Any, text: str) -> Example:
    """Return an answer with its prompt as the data of reward models have it."""
    if isinstance(prompt, str):
        return Pair(prompt, text)
    return Chat((*prompt, {"role": "assistant", "content": text}))
