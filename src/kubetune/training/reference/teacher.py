"""The teacher of `task: distill`: a frozen model beside the one that learns, or what it once said of the rows.

With `lmbda: 0` and `support: teacher_k` the rows are given and few numbers of each label are needed, so they are kept
beside the prepared data as the reference of preferences is, and later starts do not load the teacher. A label's line:

    ids of the k likeliest tokens, as bits of fp32    their k log-probabilities    that of all others
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import size
from kubetune.batching.feed import batch_of
from kubetune.config.schema.distill import ITSELF
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main, raise_first
from kubetune.kernels.divergence import kept_numbers
from kubetune.models import base_shards, fsdp
from kubetune.models.learner import Learner
from kubetune.models.loading import choose_dtype, config_of
from kubetune.rundir import heartbeat, metrics
from kubetune.scoring.rewards.model_sources import ModelSource, source_of
from kubetune.scoring.rewards.models import load_teacher
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.tasks import distill
from kubetune.training.reference import server_meetings
from kubetune.training.reference.attached import Place, tables_of
from kubetune.training.reference.scores import Asked, scores
from kubetune.training.reference.served_teacher import TeacherOnServers
from kubetune.training.rollouts.servers.connecting import servers_at
from kubetune.training.start.rank_start import RankStart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kubetune.batching.batch import Batch
    from kubetune.data.prepared.rows import Rows
    from kubetune.training.reference.logp_tables import Tables
    from kubetune.training.rollouts.servers.vllm_client import Server

# Raise it when the same rows would give other numbers, or when the form of the files changes.
FORMAT: Final = 1
# Of the numbers that are kept: each rank holds them in memory.
MOST_BYTES: Final = 4 << 30
# Weights that servers had one after the other under the same name.
_MOST_VERSIONS: Final = 100


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
    if not _is_kept(start):
        return replace(learner, teacher=load())

    def ask(*args: Any, **keys: Any) -> Any:
        return scores(load(), *args, **keys)

    facts = {
        "teacher": source.digest,
        "dtype": str(choose_dtype(source.spec.model.dtype, start.world.device)),
        "attention": source.spec.model.attention,
        "quantization": source.spec.quantization,
        "temperature": start.model.distill.temperature,
        "tokens": tokens,
    }
    _keep(start, source.name, facts, partial(_numbers, learner), ask)
    return learner


def _with_servers(start: RankStart, learner: Learner, servers: Sequence[Server]) -> Learner:
    """Return the learner with a teacher on servers. Raise ConfigError, ModelError or EnvironmentFault without them."""
    settings = start.model.distill
    width = learner.lm.config.get_text_config().vocab_size
    number = min(settings.top_k, width)
    logs.STEP.info("asking the teacher on %s", ", ".join(server.url for server in servers))
    tokenizer = start.data.tokenizer
    meet = partial(
        server_meetings.meet, servers, settings, number, width, _longest(start), tokenizer
    )
    met = on_main(meet, start.world)
    # A server may move, and nobody can ask it for its weights: its name and a probe tell it from others.
    digest = hashlib.sha256(met.model.encode()).hexdigest()
    on_main(
        partial(_require_same_teacher, start.run_dir, met.model, digest, met.probe), start.world
    )
    teacher = TeacherOnServers(
        servers=servers,
        model=met.model,
        most_tokens=met.most_tokens,
        number=min(number, met.tokens or width),
        width=met.tokens or width,
        seconds=settings.timeout_seconds,
        rank=start.world.rank,
        of_student=settings.support == "student_k",
    )
    if _is_kept(start):
        _keep_of_servers(start, learner, teacher, {"teacher": digest, "tokens": met.tokens})
    teacher = replace(teacher, is_stopping=lambda: start.stop.requested)
    return replace(learner, served_teacher=teacher, compared_tokens=met.tokens)


def _keep_of_servers(
    start: RankStart, learner: Learner, teacher: TeacherOnServers, facts: dict[str, Any]
) -> None:
    """Give the rows what servers say of them, unless what is kept under the name is of other weights."""

    def numbers(_: Learner, batch: Batch) -> Any:
        wait = teacher.ask(batch, None)
        return lambda: wait().numpy()

    for version in range(_MOST_VERSIONS):
        # The model that learns is only there to be asked in units of its batches.
        served = {**facts, "served": version}
        _keep(start, teacher.model, served, numbers, partial(scores, learner))
        if on_main(partial(_is_as_kept, start.data.train, teacher), start.world):
            return
    raise errors.EnvironmentFault(
        f"distill.teacher: {teacher.model} says other things of row 0 each time that it is asked; expected the same"
    )


def _is_as_kept(rows: Rows, teacher: TeacherOnServers) -> bool:
    """True if a server says of the first row what is kept of it."""
    first = np.zeros(1, np.int64)
    batch = batch_of(rows, first, None, share_prefixes=False)
    assert rows.teacher is not None, "it was kept just now"
    logps = slice(teacher.number, -1)
    kept = rows.teacher[rows.label_places(first)]
    return server_meetings.alike(teacher.ask(batch, None)()[:, logps], kept[:, logps])


def _keep(
    start: RankStart,
    name: str,
    facts: dict[str, Any],
    of_batch: Callable[[Learner, Batch], Any],
    ask: Callable[..., Tables],
) -> None:
    """Give the rows what a teacher says of them. `facts`: what decides it besides the rows."""
    key = _fingerprint(start, facts) if start.world.is_main else None
    place = Place(start, "teacher_numbers", key, f"the teacher {name}")
    asked = Asked(
        of_batch,
        lambda rows, ids: rows.label_places(ids),
        lambda rows: (int(rows.trained_counts.sum()), _width(start)),
        np.float32,
        place.whose,
        phase="teacher",
    )
    splits = {"train": start.data.train}
    if start.data.eval is not None:
        splits["eval"] = start.data.eval
    tables = tables_of(place, splits, asked, ask)
    for split, rows in splits.items():
        rows.teacher = tables[split]


def _require_same_teacher(
    run_dir: Path, name: str, digest: str, probe: Sequence[float] = ()
) -> None:
    """Note which teacher a start has. Raise ConfigError if an earlier start had another one."""
    for event in reversed(metrics.read_events(run_dir)):
        if event["event"] == "teacher":
            if event["digest"] != digest or not server_meetings.alike(event["probe"], probe):
                raise errors.ConfigError(
                    f"distill.teacher: {name} is not the teacher that this run began with, {event['name']}: its "
                    "weights or settings are others; put that one back, or choose another `output`"
                )
            return
    metrics.record_event(run_dir, "teacher", name=name, digest=digest, probe=[*probe])


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


def _loaded(start: RankStart, learner: Learner, source: ModelSource) -> Learner:
    """Return the teacher. Raise ConfigError or ModelError for one that cannot be used."""
    data = start.data
    heartbeat.beat("loading")
    logs.STEP.info("loading the teacher %s", source.name)
    longest = _longest(start)
    reading: AbstractContextManager[None] = nullcontext()
    if fsdp.is_sharded(learner.model):
        # It never learns, so it is cut as a frozen base is. All ranks run it for equally many micro-batches.
        whole = source.spec.lora.modules_to_save if source.spec.lora else ()
        reading = base_shards.Reader(start.world, whole).reading()
    with reading:
        return load_teacher(source, data.tokenizer, start.world.device, longest)


def _longest(start: RankStart) -> int:
    """Return the tokens of the longest row that the teacher reads, but for prompts of its own."""
    if start.config.draws_answers:
        return start.data.longest + start.model.grpo.max_completion_length
    return start.data.longest


def _width(start: RankStart) -> int:
    """Return how many numbers are kept of a label."""
    return 2 * start.model.distill.top_k + 1


def _is_kept(start: RankStart) -> bool:
    """True if the teacher is asked once, and what it said is kept."""
    settings = start.model.distill
    if not settings.keeps_teacher:
        return False
    num_bytes = 4 * _width(start) * int(start.data.train.trained_counts.sum())
    if num_bytes > MOST_BYTES:
        logs.MODEL.info(
            "the teacher is asked at each step, since its numbers would take %s, more than %s; a smaller top_k takes less",
            size(num_bytes),
            size(MOST_BYTES),
        )
        return False
    return True


def _numbers(learner: Learner, teacher: Learner, batch: Batch) -> Any:
    """Return what is kept of each label of a batch, fp32 `[labels, 2 k + 1]`."""
    settings = distill.settings_of(learner)
    if not batch.num_labels:
        return np.empty((0, 2 * settings.top_k + 1), np.float32)
    with torch.no_grad():
        of_batch = distill.teacher_of(replace(learner, teacher=teacher), batch)
        return kept_numbers(of_batch, batch.num_labels, settings.top_k).cpu().numpy()


def _fingerprint(start: RankStart, facts: dict[str, Any]) -> str:
    """Return the SHA-256 of all that decides the numbers."""
    facts = {
        **facts,
        "format": FORMAT,
        "data": start.data.fingerprint,
        "top_k": start.model.distill.top_k,
        # A model of other outputs is compared with the teacher anew.
        "outputs": start.model.model.path,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
