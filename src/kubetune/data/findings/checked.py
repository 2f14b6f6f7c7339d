"""Prepare the data of a run that is to be trained: what a check calls an error ends the run before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kubetune.config.schema import Config
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.references import References, unanswered, without_answers
from kubetune.data.findings.reward_columns import without_columns
from kubetune.data.findings.sentences import find
from kubetune.data.findings.teacher_texts import of_distillation
from kubetune.data.prepared.prepare import Prepared, prepare
from kubetune.data.prepared.rows import Rows
from kubetune.errors import DataError


def findings_of(prepared: Prepared) -> tuple[Finding, ...]:
    """Return what a person should know about prepared data."""
    return find(prepared.spec, prepared.stats, prepared.tokenizer)


def prepare_run(config: Config, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Return the prepared data of a run that is to be trained. Raise DataError for what a check calls an error, too."""
    prepared = prepare(config, progress=progress)
    errors = [finding.line for finding in findings_of(prepared) if finding.severity == "error"]
    # References are no part of the fingerprint: the same rows serve any metric and any reward.
    errors = errors or [finding.line for finding in missing_references(config, prepared)]
    if errors:
        raise DataError(errors)
    return prepared


def missing_references(config: Config, prepared: Prepared) -> Iterator[Finding]:
    """Yield an error for what metrics and rewards compare answers with, where no prepared row has it."""
    references = References(config.evaluation.generate, prepared.tokenizer)
    if prepared.eval is not None and not references.is_complete:
        references.add_rows(prepared.eval)
        yield from references.findings()
    if prepared.eval is not None and config.record_kind == "prompt":
        best_metric = config.training.metric_for_best_model
        yield from without_answers(
            len(prepared.eval), _without_answer(prepared.eval), config.evaluation, best_metric
        )
    yield from unanswered(config.data.train, config.rewards, config.training.seed)
    yield from without_columns(config.data.train, config.rewards, config.training.seed)
    yield from of_distillation(config, len(prepared.train), _without_answer(prepared.train))


def _without_answer(rows: Rows) -> int:
    """Return how many rows have no right answer: the only label of such a row is the token that ends one."""
    return int((rows.trained_counts <= 1).sum())
