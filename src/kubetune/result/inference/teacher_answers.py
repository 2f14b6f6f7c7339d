"""Answers of the teacher of `task: distill`, to be set beside those of the model that learnt from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.config import consent
from kubetune.config.schema import Config, DistillConfig
from kubetune.config.schema.distill import ITSELF
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.models.padding_free import own_attention
from kubetune.result.inference.answering import EncodedPrompt, LoadedModel, Sampling, answers
from kubetune.result.inference.result import default_device
from kubetune.scoring.generation import until_end
from kubetune.scoring.rewards.model_sources import source_of
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.scoring.rewards.teachers import load_teacher
from kubetune.training.reference.served_teacher import collected
from kubetune.training.rollouts.servers.calls import Calls
from kubetune.training.rollouts.servers.completions import answers_in, request_for
from kubetune.training.rollouts.servers.connecting import servers_at
from kubetune.training.rollouts.servers.vllm_client import Server

# Servers may have gone with the run, and what is only shown is not worth waiting longer for.
_SECONDS: Final = 60.0
# A model may give ids that its tokenizer has no text for.
_ANY_VOCABULARY: Final = 2**31


@dataclass(frozen=True)
class PromptQuestion:
    """A prompt that a server answers."""

    number: int
    ids: list[int]


def answers_of_teacher(
    config: Config,
    run_dir: Path,
    loaded: LoadedModel,
    prompts: Sequence[EncodedPrompt],
    sampling: Sampling,
) -> list[str] | None:
    """Return what the teacher answers greedily; None without a teacher but the model itself, or if it cannot be asked.

    `loaded`: the result of the run, whose model is not needed any more.
    """
    if config.task != "distill" or config.distill.teacher == ITSELF:
        return None
    try:
        servers = servers_at(config.distill.urls)
        if servers:
            sent = consent.effects_of(config, ["distill.teacher"])
            consent.require(sent, run_dir, instead="start the run here")
            return _served(servers, config.distill, loaded.tokenizer, prompts, sampling)
        longest = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
        named = NamedModel.of_distillation(config.distill)
        source = source_of(named, local_files_only=config.model.local_files_only)
        teacher = load_teacher(source, loaded.tokenizer, default_device(), longest)
        with own_attention(teacher.lm):
            return list(answers(replace(loaded, model=teacher.lm), prompts, sampling))
    # A teacher may have been cut over more devices than one.
    except (errors.KubetuneError, torch.OutOfMemoryError) as error:
        logs.RESULT.warning("no answers of the teacher: %s", error)
        return None


def _served(
    servers: Sequence[Server],
    settings: DistillConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[EncodedPrompt],
    sampling: Sampling,
) -> list[str]:
    """Return the answers of servers. Raise EnvironmentFault if one does not answer in time."""
    questions = []
    for number, prompt in enumerate(prompts):
        questions.append(PromptQuestion(number, prompt.ids))
    by_number = {}
    for question, text in collected(Answers(servers, settings, tokenizer, questions, sampling)):
        by_number[question.number] = text
    return [by_number[number] for number in range(len(prompts))]


class Answers(Calls[PromptQuestion, str]):
    """What servers are asked to answer."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: DistillConfig,
        tokenizer: Tokenizer,
        questions: Sequence[PromptQuestion],
        sampling: Sampling,
    ) -> None:
        self._tokenizer = tokenizer
        changes = {
            "temperature": sampling.temperature,
            "num_generations": 1,
            "max_completion_length": sampling.max_new_tokens,
        }
        self._settings = settings.drawing.model_copy(update=changes)
        seconds = min(settings.timeout_seconds, _SECONDS)
        # Last, since it begins to ask.
        super().__init__(servers, seconds, questions)

    def _ask(self, item: PromptQuestion, server: Server, deadline: float) -> str:
        model = str(server.card(deadline)["id"])
        eos_ids = self._tokenizer.eos_ids
        request = request_for(item.ids, model, 0, self._settings, eos_ids)
        reply = server.complete(request, deadline)
        [drawn] = answers_in(reply, item.ids, self._settings, eos_ids, _ANY_VOCABULARY)
        return self._tokenizer.decode(until_end(drawn.ids, eos_ids))

    def _missing(self, item: PromptQuestion, server: Server) -> str:
        return f"distill.teacher: server {server.url} did not answer row {item.number}"

    _ADVICE = "The other answers are kept"
