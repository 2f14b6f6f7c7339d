"""Answers of a run's model to rows it was not trained on, before training and at each checkpoint that was kept:
before_after.jsonl, for its report.

    python -m kubetune.result.inference.before_after RUN_DIR [N]

A process of its own, after the ranks have gone, so that it can change nothing of the training. The model before is the
same one with its adapters off, or the base loaded once more. The rows are those that the run keeps: its data may have
gone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import counted
from kubetune.config.load import read_config
from kubetune.config.schema import Config
from kubetune.data.prepared import kept_rows
from kubetune.data.prepared.kept_rows import KeptRows
from kubetune.data.prepared.prepare import prepare
from kubetune.result.inference.generate import EncodedPrompt, Sampling, answers, load_run
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import folder_of, steps, verify
from kubetune.scoring.kept_questions import MOST_CHARACTERS, QUESTION_ROWS, choose
from kubetune.scoring.questions import cut

MOST_TOKENS = 128
"""Of an answer; one that goes on is cut there, and so is what was expected."""


def main(argv: Sequence[str]) -> int:
    """Record the answers for a run that has ended; returns an exit code."""
    run_dir = Path(argv[0])
    logs.configure("INFO")
    try:
        number = int(argv[1]) if len(argv) > 1 else read_config(run_dir).logging.before_after
        record(run_dir, number)
    except errors.KubetuneError as error:
        logs.ERROR.error("%s", error)
        return error.exit_code
    return errors.OK


def record(run_dir: Path, number: int) -> Path:
    """Let every kept checkpoint, and the model before them, answer `number` rows of the evaluation data.

    Raises ConfigError where there are none, or the task has no answers.
    """
    config = read_config(run_dir)
    if config.classifies:
        raise errors.ConfigError(
            f"{run_dir} is a run of task {config.task}, which writes nothing that could be shown"
        )
    kept = _questions(run_dir, config, number)
    loaded, sampling = load_run(run_dir), Sampling(MOST_TOKENS)
    begins = [found[0] for row in kept.rows if (found := cut(row.trained)) is not None]
    prompts = [
        EncodedPrompt(row.ids[:at].tolist(), row.images)
        for row, at in zip(kept.rows, begins, strict=True)
    ]
    after = list(answers(loaded, prompts, sampling))
    with loaded.as_base() as base:
        before = list(answers(base, prompts, sampling))
    best, decode = (
        int(loaded.result.checkpoint.resolve().name.removeprefix("step-")),
        loaded.tokenizer.decode,
    )
    del loaded, base
    said = {best: after}
    for step in steps(run_dir):
        if step != best and verify(folder_of(run_dir, step), thorough=False) is None:
            said[step] = list(answers(load_run(run_dir, str(step)), prompts, sampling))
    lines = [
        {
            "prompt": decode(prompts[i].ids).strip()[-MOST_CHARACTERS:],
            "expected": decode(row.ids[begins[i] : begins[i] + MOST_TOKENS].tolist()),
            "before": before[i],
            "after": after[i],
            "step": best,
            "answers": [{"step": step, "answer": said[step][i]} for step in sorted(said)],
            **kept.turns.get(str(row.number), {}),
        }
        for i, row in enumerate(kept.rows)
    ]
    path = run_dir / metrics.BEFORE_AFTER
    text = "".join(f"{json.dumps(line, ensure_ascii=False, default=str)}\n" for line in lines)
    files.write_atomic(path, text, within=run_dir)
    asked = counted(len(said), "checkpoint")
    logs.RESULT.info(
        "%s before and after training, at %s: %s", counted(len(lines), "row"), asked, path
    )
    return path


def _questions(run_dir: Path, config: Config, number: int) -> KeptRows:
    """The rows that the run keeps to be asked; where it has none, or fewer, rows of its data."""
    kept = kept_rows.read(run_dir, QUESTION_ROWS)
    if kept is not None and number <= config.logging.before_after:
        return replace(kept, rows=kept.rows[:number])
    rows = prepare(config).eval
    if rows is None:
        raise errors.ConfigError(f"{run_dir} has no evaluation data to ask it about; set data.eval")
    return choose(config, rows, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
