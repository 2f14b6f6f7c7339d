"""The rows that `kubetune evaluate` measures on: the run's evaluation data, or other data, with remarks on them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kubetune import errors
from kubetune.config.schema import Config, DataConfig
from kubetune.data.findings.checked import findings_of
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.sentences import find
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.data.spec import DataSpec
from kubetune.rundir import checkpoints


class EvaluatedRows(NamedTuple):
    """Rows to evaluate on."""

    rows: Rows
    forget: Rows | None  # rows of `evaluation.forget`
    remarks: tuple[str, ...]  # on both


def rows_of(config: Config, checkpoint: Path, *, is_other: bool) -> EvaluatedRows:
    """Return the rows on which a checkpoint is evaluated.

    `is_other`: `--data` names them, and they stand in `data.train`; nothing else is measured then.
    """
    try:
        prepared = prepare(config)
    except errors.DataError as error:
        if not is_other:
            raise
        # The user knows these data by the option. Keys below it, such as data.train.columns, are the run's.
        problems = []
        for problem in error.problems:
            problems.append(re.sub(r"data\.train(?!\.)", "--data", problem))
        raise errors.DataError(problems) from None

    if is_other:
        names = {"train": "--data"}
        findings = find(DataSpec.of(config), prepared.stats, prepared.tokenizer, names=names)
        return EvaluatedRows(prepared.train, None, _remarks(findings, {"train"}))

    assert prepared.eval is not None
    remarks = _remarks(findings_of(prepared), {"eval", "forget"})
    trained_on = checkpoints.load_state(checkpoint).data_fingerprint
    if trained_on not in ("", prepared.fingerprint):
        remarks = (_of_changed_data(config.data), *remarks)
    return EvaluatedRows(prepared.eval, prepared.forget, remarks)


def _of_changed_data(data: DataConfig) -> str:
    """Return the remark on data that are no longer those that the model was trained on."""
    changed = "warning: the data, or the tokenizer, have changed since the model was trained, so"
    if isinstance(data.eval, float):
        return (
            f"{changed} data.eval: {data.eval:g} holds out other rows now, and the model may have been trained on them. "
            "Give rows that it has not seen by --data"
        )
    return f"{changed} these numbers may be of other rows than those of the run"


def _remarks(findings: Iterable[Finding], splits: set[str]) -> tuple[str, ...]:
    """Return the findings about some splits, in lines."""
    return tuple([finding.line for finding in findings if finding.split in splits])
