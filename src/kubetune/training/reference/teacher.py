"""Find the teacher of `task: distill`: a frozen model beside the one that learns, servers, or what they once said."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import logs
from kubetune.config.schema.distill import ITSELF
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main, raise_first
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.models.loading import choose_dtype, config_of
from kubetune.rundir import heartbeat, metrics
from kubetune.scoring.rewards.model_sources import ModelSource, source_of
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.scoring.rewards.teachers import load_teacher
from kubetune.training.reference import server_meetings
from kubetune.training.reference.kept_teacher import (
    AskedForLabels,
    AskedOnServers,
    is_kept,
    keep,
)
from kubetune.training.reference.served_teacher import TeacherOnServers
from kubetune.training.rollouts.servers.connecting import servers_at
from kubetune.training.start.rank_start import RankStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kubetune.training.rollouts.servers.vllm_client import Server


def with_teacher(start: RankStart, learner: Learner) -> Learner:
    """Return the learner with the frozen model that it learns from, or with rows that know its numbers.

    All ranks call it. Raise ConfigError or ModelError for a teacher that cannot be used, or has another vocabulary.
    """
    if start.model.distill.teacher == ITSELF and start.model.lora is not None:
        return learner  # with its adapter off

    servers = servers_at(start.model.distill.urls)
    if servers:
        return _with_servers(start, learner, servers)

    source = _raised_together(start, partial(_source, start))
    tokens = _raised_together(start, partial(_compared_tokens, start, learner, source))
    learner = replace(learner, compared_tokens=tokens)

    load = partial(_raised_together, start, partial(_loaded, start, learner, source))
    same = partial(_require_same_teacher, start.run_dir, source.name, source.digest)
    on_main(same, start.world)
    number = _number_of_tokens(start, learner)

    if not is_kept(start.model.distill, number, start.data.train):
        return replace(learner, teacher=load())
    facts = {
        "teacher": source.digest,
        "dtype": str(choose_dtype(source.spec.model.dtype, start.world.device)),
        "attention": source.spec.model.attention,
        "quantization": source.spec.quantization,
        "temperature": start.model.distill.temperature,
        "tokens": tokens,
    }

    keep(start, AskedForLabels(source.name, learner, number), facts, load)
    return learner


def _with_servers(start: RankStart, learner: Learner, servers: Sequence[Server]) -> Learner:
    """Return the learner with a teacher on servers. Raise ConfigError, ModelError or EnvironmentFault without them."""
    settings = start.model.distill
    width = learner.lm.config.get_text_config().vocab_size
    number = _number_of_tokens(start, learner)
    logs.STEP.info("asking the teacher on %s", ", ".join(server.url for server in servers))
    tokenizer = start.data.tokenizer
    meet = partial(
        server_meetings.meet, servers, settings, number, width, _longest(start), tokenizer
    )

    met = on_main(meet, start.world)

    # A server may move, and nobody can ask it for its weights: its name and a probe tell it from others.
    digest = hashlib.sha256(met.model.encode()).hexdigest()
    same = partial(_require_same_teacher, start.run_dir, met.model, digest, met.probe)
    probe = on_main(same, start.world)
    learner = replace(learner, compared_tokens=met.tokens)

    teacher = TeacherOnServers(
        servers=servers,
        model=met.model,
        most_tokens=met.most_tokens,
        number=_number_of_tokens(start, learner),
        width=met.tokens or width,
        seconds=settings.timeout_seconds,
        rank=start.world.rank,
        of_student=settings.support == "student_k",
    )

    if is_kept(settings, teacher.number, start.data.train):
        facts = {"teacher": digest, "probe": probe, "tokens": met.tokens}
        keep(start, AskedOnServers(teacher, learner), facts, lambda: learner)
    teacher = replace(teacher, is_stopping=lambda: start.stop.requested)
    return replace(learner, served_teacher=teacher)


def _require_same_teacher(
    run_dir: Path, name: str, digest: str, probe: Sequence[float] = ()
) -> list[float]:
    """Note which teacher a start has, and return the probe of the first. Raise ConfigError if that had another one."""
    for event in reversed(metrics.read_events(run_dir)):
        if event["event"] == "teacher":
            if event["digest"] != digest or not server_meetings.alike(event["probe"], probe):
                raise errors.ConfigError(
                    f"distill.teacher: {name} is not the teacher that this run began with, {event['name']}: its "
                    "weights or settings are others; put that one back, or choose another `output`"
                )
            return list(event["probe"])
    metrics.record_event(run_dir, "teacher", name=name, digest=digest, probe=[*probe])
    return [*probe]


def _raised_together(start: RankStart, function: Any) -> Any:
    """Return what a function returns. Raise on all ranks what any of them met: others would wait for it."""
    failure = None
    result = None
    try:
        result = function()
    except errors.KubetuneError as error:
        failure = error
    raise_first(process_group.gather(failure, start.world))
    return result


def _source(start: RankStart) -> ModelSource:
    settings = start.model.distill
    if settings.teacher == ITSELF:
        # Where every weight is trained, the model before training is a second one.
        model = start.model.model
        settings = settings.model_copy(update={"teacher": model.path, "revision": model.revision})
    named = NamedModel.of_distillation(settings)
    return source_of(named, local_files_only=start.model.model.local_files_only)


def _compared_tokens(start: RankStart, learner: Learner, source: ModelSource) -> int | None:
    """Return how many tokens of the vocabulary are compared, None for all. Raise ModelError for other vocabularies.

    Models with the same tokenizer may have more rows than it has ids, each another number: Qwen2.5's have 151,936 or
    152,064 for 151,665 ids. What is after the ids is never an answer.
    """
    others = config_of(source.spec.model).get_text_config().vocab_size
    width = learner.lm.config.get_text_config().vocab_size
    if width == others:
        return None

    ids = start.data.tokenizer.vocab_size
    words = (
        f"the teacher {source.name} gives {others:,} probabilities for each token, the model {start.model.model.path} "
        f"{width:,}"
    )
    if min(width, others) < ids:
        raise errors.ModelError(
            f"{source.key}: {words}, and their tokenizer has {ids:,} ids; expected a teacher of the same vocabulary"
        )

    logs.MODEL.info("%s; they are compared over the %s ids of their tokenizer", words, f"{ids:,}")
    return ids


def _number_of_tokens(start: RankStart, learner: Learner) -> int:
    """Return how many tokens a teacher is asked for at each label: no more than are compared."""
    compared = learner.compared_tokens or learner.lm.config.get_text_config().vocab_size
    return min(start.model.distill.top_k, compared)


def _loaded(start: RankStart, learner: Learner, source: ModelSource) -> Learner:
    """Return the teacher. Raise ConfigError or ModelError for one that cannot be used."""
    data = start.data
    heartbeat.beat("loading")
    logs.STEP.info("loading the teacher %s", source.name)
    longest = _longest(start)

    if fsdp.is_sharded(learner.model):
        # It never learns, so it is cut as a frozen base is. All ranks run it for equally many micro-batches.
        spec = replace(source.spec, cut_over=start.world, copy_size=start.model.copy_size)
        source = replace(source, spec=spec)
    return load_teacher(source, data.tokenizer, start.world.device, longest)


def _longest(start: RankStart) -> int:
    """Return the tokens of the longest row that the teacher reads, but for prompts of its own."""
    if start.config.draws_answers:
        return start.data.longest + start.model.grpo.max_completion_length
    return start.data.longest
