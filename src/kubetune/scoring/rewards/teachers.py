"""A frozen language model that says how likely the tokens of another one are: a teacher, or a reward by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.batching.batch import Batch, collate
from kubetune.batching.drawn_answers import answer_sequence
from kubetune.data.prepared.micro_batches import pack
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.models import loading
from kubetune.models.learner import Learner
from kubetune.rundir import heartbeat
from kubetune.scoring.rewards import named_models
from kubetune.scoring.rewards.model_sources import ModelSource
from kubetune.scoring.rewards.request import Judgement, Request
from kubetune.tasks import causal_lm
from kubetune.tasks.grpo.task import log_probabilities

if TYPE_CHECKING:
    from kubetune.data.prepared.rows import TrainedIds

# Tokens that are run at a time.
TOKENS_AT_ONCE: Final = 16_384


@dataclass(frozen=True)
class TeacherJudge:
    """Rewards an answer by the mean log-probability that a teacher gives its tokens, in nats."""

    learner: Learner
    digest: str

    def judge(self, request: Request) -> Judgement:
        """Return the mean log-probability of each answer's tokens, of which each answer has at least one."""
        heartbeat.beat("reward")
        rows = [answer_sequence(request.prompt_ids, answer_ids) for answer_ids in request.ids]
        # For 2 answers with 2 and 3 tokens: logps -1 -3 | -2 -2 -5, means -2 and -3.
        means: list[float | None] = [None] * len(rows)
        for batch in batches_of(rows, self.learner):
            logps = log_probabilities(self.learner, batch)
            # Tokens lie end to end, answer after answer.
            lengths = [len(request.ids[number]) for number in batch.samples]
            for number, of_answer in zip(batch.samples, logps.split(lengths), strict=True):
                means[number] = float(of_answer.double().mean())
        return Judgement(means)


def load_teacher(
    source: ModelSource,
    tokenizer: Tokenizer,
    device: torch.device,
    longest: int,
) -> Learner:
    """Return a frozen language model that says how likely the tokens of another one are.

    Raise ConfigError or ModelError for one that has other tokens, or reads fewer than `longest`.
    """
    of_teacher = load_tokenizer(source.spec.model)
    if of_teacher.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise named_models.other_tokens(source.key, source.name, of_teacher.name, tokenizer.name)
    if source.data is None:
        model = loading.load_pretrained(AutoModelForCausalLM, source.spec, device).eval()
        learner = causal_lm.TASK.learner_of(model, source.spec)
    else:
        learner = source.checked(lambda: causal_lm.TASK.load(source.spec, source.folder, device))
    try:
        loading.check_positions(learner.lm, longest)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{source.key}: the teacher {source.name}: {error}") from None
    return frozen(learner)


def frozen(learner: Learner) -> Learner:
    """Return a model that keeps no gradient and drops nothing out."""
    for parameter in learner.model.parameters():
        parameter.requires_grad_(False)
    learner.model.eval()
    return learner


def batches_of(rows: Sequence[TrainedIds], learner: Learner) -> list[Batch]:
    """Return rows as batches on the model's device; one row a batch if the model knows no packed batches.

    The samples of a batch are the numbers of its rows.
    """
    if not rows:
        return []
    device = next(learner.model.parameters()).device
    # One token is less than any row has, so that each row is a batch.
    budget = 1
    if learner.route.padding_free:
        budget = TOKENS_AT_ONCE
    lengths = np.array([len(ids) for ids, _ in rows])
    batches = []
    for numbers in pack(np.arange(len(rows)), lengths, budget):
        of_batch = [rows[number] for number in numbers]
        batches.append(collate(of_batch, numbers.tolist()).to(device))
    return batches
