"""Prepare the data of a run that is to be trained: what a check calls an error ends the run before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kubetune.config.schema import Config, EvaluationConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.references import (
    References,
    read_in_part,
    unanswered,
    without_answers,
)
from kubetune.data.findings.reward_columns import without_columns
from kubetune.data.findings.sentences import find
from kubetune.data.findings.teacher_texts import of_distillation
from kubetune.data.prepared import identity
from kubetune.data.prepared.prepare import Prepared, prepare
from kubetune.data.prepared.rows import Rows
from kubetune.data.text.tokenizer import cache_folder
from kubetune.errors import ConfigError, DataError
from kubetune.rundir import checkpoints


def findings_of(prepared: Prepared) -> tuple[Finding, ...]:
    """Return what a person should know about prepared data."""
    return find(prepared.spec, prepared.stats, prepared.tokenizer)


def prepare_run(config: Config, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Return the prepared data of a run that is to be trained. Raise DataError for what a check calls an error, too."""
    prepared = prepare(config, progress=progress)
    errors = [finding.line for finding in findings_of(prepared) if finding.severity == "error"]
    # References are no part of the fingerprint: the same rows serve any metric and any reward.
    best_metric = config.training.metric_for_best_model
    missing = missing_references(prepared, config.evaluation, best_metric)
    errors = errors or [finding.line for finding in missing if finding.severity == "error"]
    if errors:
        raise DataError(errors)
    return prepared


def prepare_start(config: Config, run_dir: Path) -> Prepared:
    """Return the prepared data of a start of the run in `run_dir`.

    Raise as `prepare_run` does, and ConfigError where the run has been trained on others: samples would be repeated or
    skipped. That is said before anything in the directory describes the new data.
    """
    prepared = prepare_run(config)
    before = checkpoints.trained_on(run_dir)
    if before is not None and before[1] != prepared.fingerprint:
        # Another tokenizer makes other data of the same records: its files are named.
        cache = cache_folder(config.data.cache)
        identity.Check(config.model, cache, run_dir, only=("tokenizer",)).require_same()
        raise ConfigError(
            f"{run_dir} was trained up to step {before[0]} on other data, or with another tokenizer (fingerprint "
            f"{before[1][:12]}, now {prepared.fingerprint[:12]}): going on would repeat or skip samples. Choose another "
            "`output`, or put back what changed"
        )
    return prepared


def missing_references(
    prepared: Prepared, evaluation: EvaluationConfig, best_metric: str
) -> Iterator[Finding]:
    """Yield an error for what metrics and rewards compare answers with, where no prepared row has it.

    Warnings come last: of what is compared in part.

    `best_metric`: training.metric_for_best_model.
    """
    spec = prepared.spec
    references = References(evaluation.generate, prepared.tokenizer)
    if prepared.eval is not None and not references.is_complete:
        references.add_rows(prepared.eval)
        yield from references.findings()
    if prepared.eval is not None and spec.record_kind == "prompt":
        yield from without_answers(
            len(prepared.eval), _without_answer(prepared.eval), evaluation, best_metric
        )
    yield from unanswered(spec.data.train, spec.rewards, spec.seed)
    yield from without_columns(spec.data.train, spec.rewards, spec.seed)
    yield from of_distillation(spec, len(prepared.train), _without_answer(prepared.train))
    yield from references.warnings()
    yield from read_in_part(spec.data.train, spec.rewards, spec.seed)


def _without_answer(rows: Rows) -> int:
    """Return how many rows have no right answer: the only label of such a row is the token that ends one."""
    return int((rows.trained_counts <= 1).sum())
