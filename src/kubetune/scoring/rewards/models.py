"""Rewards by a frozen model that the rank itself holds: a reward model's score, or what a teacher says of the tokens.

Both judge all answers to one prompt at a time, in batches that follow from these answers alone. So an answer gets the
same reward on any rank and in any start. No gradient is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.files import require_plain
from kubetune.batching.batch import collate
from kubetune.config.load import read_config
from kubetune.config.naming import OF_TRACKERS, RESOLVED
from kubetune.config.schema import Config, GrpoConfig, ModelConfig, RewardConfig
from kubetune.data.prepared import identity
from kubetune.data.prepared.micro_batches import pack
from kubetune.data.reading.formats import Chat, Example, Pair
from kubetune.data.reading.hub import find_files, is_local
from kubetune.data.text.encode import Encoder
from kubetune.data.text.tokenizer import Tokenizer, cache_folder, load_tokenizer
from kubetune.models import loading, quantization
from kubetune.models.classifier_pooling import name_padding, prepare_pooling, read_at_end
from kubetune.models.learner import Learner
from kubetune.models.spec import ModelSpec
from kubetune.rundir import checkpoints, heartbeat
from kubetune.scoring.rewards.request import Judgement, Request
from kubetune.tasks import causal_lm, reward_model
from kubetune.tasks.grpo.task import log_probabilities

# Tokens that are run at a time.
TOKENS_AT_ONCE: Final = 16_384
# Tasks whose result says how likely a text is.
LANGUAGE_TASKS: Final = ("causal_lm", "grpo", "preference")


class ModelJudge(Protocol):
    """A model that rewards answers."""

    @property
    def digest(self) -> str:
        """Return what tells its weights from others."""

    def judge(self, request: Request) -> Judgement:
        """Return the rewards of all answers to a prompt."""


@dataclass(frozen=True)
class _Source:
    """A model as a run file names it: a run directory, or else a folder or a name on the hub."""

    spec: ModelSpec
    config: Config | None  # of the run
    run_dir: Path
    folder: Path  # of the checkpoint, or of the model
    digest: str


def load_judge(
    reward: RewardConfig, tokenizer: Tokenizer, device: torch.device, *, local_files_only: bool
) -> ModelJudge:
    """Return the model of a reward. `tokenizer`: of the model that learns.

    Raise ConfigError or ModelError for a model of another kind or with other tokens.
    """
    source = _source(reward, local_files_only)
    if reward.reward_model is not None:
        return _reward_model(source, device)
    return _teacher(source, tokenizer, device)


# Reward models.


@dataclass(frozen=True)
class RewardModelJudge:
    """Scores answers as `task: reward_model` does: the prompt and the answer by its own tokenizer and chat template."""

    learner: Learner
    encoder: Encoder
    limit: int | None  # tokens; what is longer is cut, as in training
    digest: str

    def judge(self, request: Request) -> Judgement:
        """Return the score of each answer; None where the chat template refuses the conversation."""
        heartbeat.beat("reward")
        examples = [_example(request.prompt, text) for text in request.texts]
        rows: list[NDArray[np.uint32]] = []
        places = []
        refusal = ""
        for place, encoded in enumerate(self.encoder.encode_batch(examples)):
            if isinstance(encoded, str):
                refusal = encoded
                continue
            rows.append(np.array(encoded.ids[: self.limit], np.uint32))
            places.append(place)
        batches = []
        for numbers in _groups([len(row) for row in rows], self.learner):
            # Only the score is computed, so no token is a label.
            of_batch = [(rows[number], np.zeros(len(rows[number]), bool)) for number in numbers]
            batches.append(collate(of_batch, numbers).to(_device(self.learner)))
        scores: list[float | None] = [None] * len(request.texts)
        if batches:
            for place, score in zip(places, reward_model.score(self.learner, batches), strict=True):
                scores[place] = score
        return Judgement(scores, refusal)


def _reward_model(source: _Source, device: torch.device) -> RewardModelJudge:
    name = source.spec.model.path
    tokenizer = load_tokenizer(source.spec.model)
    config = source.config
    if config is not None:
        _require_task(source, config.task_name, ("reward_model",))
        learner = _checked(
            source, lambda: reward_model.TASK.load(source.spec, source.folder, device)
        )
        adds = config.data.add_special_tokens
        limit: int | None = config.data.max_length
    else:
        learner = _classifier(source.spec, tokenizer, device)
        adds = True
        limit = tokenizer.max_length
    logs.MODEL.info("answers are scored by %s", name if config is None else source.folder)
    # As in training (data/text/encode_preferences).
    encoder = Encoder(tokenizer, add_special_tokens=adds, keeps_prompts=True)
    return RewardModelJudge(_frozen(learner), encoder, limit, source.digest)


def _classifier(spec: ModelSpec, tokenizer: Tokenizer, device: torch.device) -> Learner:
    """Return a classifier with one output, as others publish reward models."""
    path = spec.model.path

    def refuse_new(_: Any, names: set[str]) -> None:
        if names:
            raise errors.ModelError(
                f"rewards: {path} lacks weights ({', '.join(sorted(names)[:3])}), so it is no reward model; expected a "
                "classifier with one output, or a run of `task: reward_model`"
            )

    model: Any = loading.load_pretrained(
        AutoModelForSequenceClassification, spec, device, draw=refuse_new
    )
    if model.config.num_labels != 1:
        raise errors.ModelError(
            f"rewards: {path} has {model.config.num_labels} outputs; expected a reward model, which has one"
        )
    name_padding(model, tokenizer.pad_id)
    read_at_end(model, tokenizer.eos_id)
    return Learner(model.eval(), prepare_pooling(model, spec.model.attention), reward_model.REWARD)


def _example(prompt: Any, text: str) -> Example:
    """Return an answer with its prompt as the data of reward models have it."""
    if isinstance(prompt, str):
        return Pair(prompt, text)
    return Chat((*prompt, {"role": "assistant", "content": text}))


# Teachers.


@dataclass(frozen=True)
class TeacherJudge:
    """Rewards an answer by the mean log-probability that a teacher gives its tokens, in nats."""

    learner: Learner
    digest: str

    def judge(self, request: Request) -> Judgement:
        """Return the mean log-probability of each answer's tokens, of which each answer has at least one."""
        heartbeat.beat("reward")
        rows = []
        for ids in request.ids:
            whole = np.array([*request.prompt_ids, *ids], np.uint32)
            rows.append((whole, np.arange(len(whole)) >= len(request.prompt_ids)))
        means = [0.0] * len(rows)
        for numbers in _groups([len(ids) for ids, _ in rows], self.learner):
            batch = collate([rows[number] for number in numbers], numbers)
            logps = log_probabilities(self.learner, batch.to(_device(self.learner)))
            lengths = [len(request.ids[number]) for number in numbers]
            for number, of_answer in zip(numbers, logps.split(lengths), strict=True):
                means[number] = float(of_answer.double().mean())
        return Judgement(list(means))


def _teacher(source: _Source, tokenizer: Tokenizer, device: torch.device) -> TeacherJudge:
    path = source.spec.model.path
    config = source.config
    of_teacher = load_tokenizer(source.spec.model)
    if of_teacher.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise errors.ModelError(
            f"rewards: the teacher {path} has other tokens than the model that learns ({of_teacher.name}, not "
            f"{tokenizer.name}), so it can say nothing of them; expected a teacher with the same tokenizer"
        )
    if config is not None:
        _require_task(source, config.task_name, LANGUAGE_TASKS)
        learner = _checked(source, lambda: causal_lm.TASK.load(source.spec, source.folder, device))
    else:
        model = loading.load_pretrained(AutoModelForCausalLM, source.spec, device).eval()
        learner = causal_lm.TASK.learner_of(model, source.spec)
    logs.MODEL.info(
        "answers are judged by the teacher %s", path if config is None else source.folder
    )
    # The teacher's own probabilities, at no other temperature than 1.
    learner = replace(learner, grpo=GrpoConfig())
    return TeacherJudge(_frozen(learner), source.digest)


# Both.


def _source(reward: RewardConfig, local_files_only: bool) -> _Source:
    path = reward.reward_model or reward.teacher
    assert path is not None, "the config has checked that the reward is by a model"
    place = Path(path).expanduser()
    if (place / RESOLVED).is_file():
        return _of_run(place)
    model = ModelConfig(path=path, revision=reward.revision, local_files_only=local_files_only)
    spec = ModelSpec(model)
    paths = find_files(model, path, ("config.json",))
    if "config.json" not in paths:
        raise errors.ModelError(
            f"rewards: {path} has no config.json; expected a run directory, or a model in Hugging Face form"
        )
    folder = paths["config.json"].parent
    return _Source(spec, None, place, folder, _digest_of(path, folder))


def _of_run(run_dir: Path) -> _Source:
    """Return the best checkpoint of a run, with the model that it was trained on."""
    config = read_config(run_dir)
    require_plain(run_dir, but=OF_TRACKERS)
    if config.model.trust_remote_code:
        raise errors.ConfigError(
            f"rewards: {run_dir}: its model brings Python code, which no reward runs; take another model"
        )
    folder = checkpoints.choose(run_dir)
    cache = cache_folder()
    damage = checkpoints.verify(
        folder, but="optimizer*", digest=lambda path: identity.content_of(path, cache)[0].sha256
    )
    if damage:
        raise errors.EnvironmentFault(f"rewards: {folder} {damage}")
    model = identity.pinned(config.model, run_dir)
    chosen = quantization.as_trained(run_dir, config.quantization, config.lora)
    spec = replace(ModelSpec.of(config), model=model, quantization=chosen)
    # The manifest has the checksums of all files.
    digest = files.sha256_file(folder / checkpoints.MANIFEST)
    return _Source(spec, config, run_dir, folder, digest)


def _digest_of(path: str, folder: Path) -> str:
    """Return what tells the weights of a model from others: the commit of the hub, or checksums."""
    if not is_local(path):
        return folder.name
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        content, _ = identity.content_of(file, cache_folder())
        digest.update(f"{file.name} {content.sha256}\n".encode())
    return digest.hexdigest()


def _require_task(source: _Source, task: str, tasks: Sequence[str]) -> None:
    if task not in tasks:
        raise errors.ConfigError(
            f"rewards: {source.run_dir} is a run of `task: {task}`; expected one of {', '.join(tasks)}"
        )


def _checked(source: _Source, load: Callable[[], Learner]) -> Learner:
    """Return what is loaded of a run. Raise ConfigError where the base is another one than that of the run."""
    if source.config is None or source.spec.lora is None:
        return load()
    config = source.config.model_copy(update={"model": source.spec.model})
    check = identity.Check(config, source.run_dir, "rewards", ("model",))
    with identity.checked(check):
        return load()


def _frozen(learner: Learner) -> Learner:
    for parameter in learner.model.parameters():
        parameter.requires_grad_(False)
    learner.model.eval()
    return learner


def _groups(lengths: Sequence[int], learner: Learner) -> list[list[int]]:
    """Return the numbers of the rows that are run together; each alone where the model knows no packed batches."""
    if not lengths:
        return []
    budget = TOKENS_AT_ONCE if learner.route.padding_free else 1
    return [
        numbers.tolist() for numbers in pack(np.arange(len(lengths)), np.array(lengths), budget)
    ]


def _device(learner: Learner) -> torch.device:
    return next(learner.model.parameters()).device
