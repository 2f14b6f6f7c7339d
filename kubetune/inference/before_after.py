"""Answers of a run's model to rows it was not trained on, before and after training: samples.jsonl, for its report.

    python -m kubetune.inference.before_after RUN_DIR [N]

A process of its own, after the ranks have gone, so that it can change nothing of the training. The model before is the
same one with its adapters off, or the base loaded once more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kubetune import errors
from kubetune.base import files, logs
from kubetune.config.load import read_config
from kubetune.data.prepared.order import hash_ids
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.inference.generate import Asked, Sampling, Speaker, answers, load_run
from kubetune.rundir import metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_TOKENS = 128
"""Of an answer; one that goes on is cut there, and so is what was expected."""
_MOST_CHARACTERS = 4000
"""Of a prompt, whose end is shown."""


def main(argv: Sequence[str]) -> int:
    """Record the samples of a run that has ended; returns an exit code."""
    run_dir = Path(argv[0])
    logs.configure("INFO")
    try:
        number = int(argv[1]) if len(argv) > 1 else read_config(run_dir).logging.samples
        record(run_dir, number)
    except errors.KubetuneError as error:
        logs.ERROR.error("%s", error)
        return error.exit_code
    return errors.OK


def record(run_dir: Path, number: int) -> Path:
    """Let the best checkpoint, and the model before it, answer `number` rows of the evaluation data.

    Raises ConfigError where there are none, or the task has no answers.
    """
    config = read_config(run_dir)
    if config.task == "sequence_classification":
        raise errors.ConfigError(f"{run_dir} is a run of task {config.task}, which writes nothing that could be shown")
    rows = prepare(config).eval
    if rows is None:
        raise errors.ConfigError(f"{run_dir} has no evaluation data to take samples from; set data.eval")
    speaker, sampling = load_run(run_dir), Sampling(MOST_TOKENS)
    asked, expected = _questions(speaker, rows, number)
    after = list(answers(speaker, asked, sampling))
    with speaker.as_base() as base:
        before = list(answers(base, asked, sampling))
    prompts = [speaker.tokenizer.decode(question.ids).strip()[-_MOST_CHARACTERS:] for question in asked]
    lines = [
        json.dumps(dict(zip(("prompt", "expected", "before", "after"), found, strict=True)), ensure_ascii=False)
        for found in zip(prompts, expected, before, after, strict=True)
    ]
    path = run_dir / metrics.SAMPLES
    files.write_atomic(path, "".join(f"{line}\n" for line in lines), within=run_dir)
    logs.RESULT.info("%d samples before and after training: %s", len(lines), path)
    return path


def _questions(speaker: Speaker, rows: Rows, number: int) -> tuple[list[Asked], list[str]]:
    """Rows drawn the same way each time: what the model is given, and what is expected of it."""
    ids = np.arange(len(rows), dtype=np.int64)
    asked: list[Asked] = []
    expected: list[str] = []
    for index in ids[np.argsort(hash_ids(ids, "sample"), kind="stable")].tolist():
        row, trained = rows.row(index)
        begin = cut(trained)
        if begin is None or len(asked) == number:
            continue
        images = rows.images(index) if rows.processor is not None else ()
        asked.append(Asked(row[:begin].tolist(), images))
        expected.append(speaker.tokenizer.decode(row[begin : begin + MOST_TOKENS].tolist()))
    return asked, expected


def cut(trained: NDArray[np.bool_]) -> int | None:
    """Where the last answer of a row begins; in the middle of a text that is learnt whole; None where none is."""
    places = np.flatnonzero(trained)
    if not len(places):
        return None
    breaks = np.flatnonzero(np.diff(places) > 1)
    begin = int(places[breaks[-1] + 1] if len(breaks) else places[0])
    return begin if begin > 1 else max(1, (int(places[-1]) + 1) // 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
