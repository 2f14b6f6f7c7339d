"""Write before_after.jsonl, for the report: answers to rows of the evaluation data, before and after training.

    python -m kubetune.result.inference.before_after RUN_DIR [N]

A process of its own, after the ranks have gone, so that it can change nothing of the training. The model before is the
same one with its adapters off, or the base loaded once more; the teacher of a distillation answers too. The rows are
those that the run keeps: its data may have gone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import counted
from kubetune.base.terminal import is_brief
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.data.prepared import kept_rows
from kubetune.data.prepared.kept_rows import KeptRows
from kubetune.data.prepared.prepare import prepare
from kubetune.data.spec import DataSpec
from kubetune.data.text.answer_targets import last_answer
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.inference.answering import EncodedPrompt, Sampling, answers, load_run
from kubetune.result.inference.teacher_answers import answers_of_teacher
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import folder_of, steps, verify
from kubetune.scoring.kept_questions import MOST_CHARACTERS, QUESTION_ROWS, choose

# Tokens of an answer. One that goes on is cut there, and so is what was expected.
MOST_TOKENS = 128


def main(argv: Sequence[str]) -> int:
    """Record the answers for a run that has ended. Return an exit code."""
    run_dir = Path(argv[0])
    logs.configure("INFO", brief=is_brief())
    try:
        # The number in the command comes before that of the run file.
        number = read_config(run_dir).logging.before_after
        if len(argv) > 1:
            number = int(argv[1])
        record(run_dir, number)
    except errors.KubetuneError as error:
        logs.ERROR.error("%s", error)
        return error.exit_code

    return errors.OK


def record(run_dir: Path, number: int) -> Path:
    """Let every kept checkpoint, and the model before them, answer `number` rows of the evaluation data.

    Raise ConfigError if there are no such rows, or the task writes no answers.
    """
    config = read_config(run_dir)
    if config.classifies:
        raise errors.ConfigError(
            f"{run_dir} is a run of task {config.task}, which writes nothing that could be shown"
        )

    # A row is a prompt up to its last answer, and what the answer was expected to be.
    kept = _questions(run_dir, config, number)
    prompts = []
    references = []  # ids, [rows]
    for row in kept.rows:
        place = last_answer(row.trained.tobytes())
        if place is None:
            raise kept_rows.damaged(run_dir / QUESTION_ROWS, f"row {row.number} has no answer")

        begin = place[0]
        prompts.append(EncodedPrompt(row.ids[:begin].tolist(), row.images))
        references.append(row.ids[begin : begin + MOST_TOKENS].tolist())

    answered = _ask(config, run_dir, prompts)
    decode = answered.tokenizer.decode
    lines = []
    for index, row in enumerate(kept.rows):
        by_step = []
        for step, texts in sorted(answered.after.items()):
            by_step.append({"step": step, "answer": texts[index]})
        line = {
            "prompt": decode(prompts[index].ids).strip()[-MOST_CHARACTERS:],
            "expected": decode(references[index]),
            "before": answered.before[index],
            "after": answered.after[answered.best][index],
            "step": answered.best,
            "answers": by_step,
        }
        if answered.teacher is not None:
            line["teacher"] = answered.teacher[index]
        # The page shows a conversation turn by turn, if the data have it.
        line |= kept.turns.get(str(row.number), {})
        lines.append(json.dumps(line, ensure_ascii=False, default=str))

    path = run_dir / metrics.BEFORE_AFTER
    files.write_atomic(path, "".join(f"{line}\n" for line in lines), within=run_dir)
    logs.RESULT.log(
        logs.NOTICE,
        "%s before and after training, at %s: %s",
        counted(len(lines), "row"), counted(len(answered.after), "checkpoint"), path,
    )  # fmt: skip
    return path


@dataclass(frozen=True)
class AnswersByStep:
    """Answers of every kept checkpoint, and of the model before training, to the same prompts."""

    best: int  # the step of the best checkpoint
    before: list[str]  # [rows]
    after: dict[int, list[str]]  # by step, [rows]
    teacher: list[str] | None  # [rows] of a distillation, None if there is none to ask
    tokenizer: Tokenizer


def _ask(config: Config, run_dir: Path, prompts: Sequence[EncodedPrompt]) -> AnswersByStep:
    """Ask one model after the other, so that one is in memory at a time."""
    # Greedy, so that two checkpoints differ only by their weights.
    sampling = Sampling(MOST_TOKENS)
    loaded = load_run(run_dir)
    best = int(loaded.result.checkpoint.resolve().name.removeprefix("step-"))
    tokenizer = loaded.tokenizer
    ids = [prompt.ids for prompt in prompts]
    kept_rows.require_vocabulary(run_dir / QUESTION_ROWS, ids, tokenizer.vocab_size)

    # The best checkpoint and the base share a model if adapters can be switched off.
    after = {best: list(answers(loaded, prompts, sampling))}
    with loaded.as_base() as base:
        before = list(answers(base, prompts, sampling))

    # Each further checkpoint, and the teacher, is loaded when the one before has been let go.
    without_model = replace(loaded, model=None)
    del loaded, base
    for step in steps(run_dir):
        if step != best and verify(folder_of(run_dir, step), thorough=False) is None:
            after[step] = list(answers(load_run(run_dir, str(step)), prompts, sampling))
    teacher = answers_of_teacher(config, run_dir, without_model, prompts, sampling)
    return AnswersByStep(best, before, after, teacher, tokenizer)


def _questions(
    run_dir: Path,
    config: Config,
    number: int,
) -> KeptRows:
    """Return the rows that the run keeps to be asked; if it has none, or fewer, choose rows of its data."""
    # The rows that the run kept come first: its data may have gone or changed since.
    kept = kept_rows.read(run_dir, QUESTION_ROWS)
    if kept is not None and number <= config.logging.before_after:
        return replace(kept, rows=kept.rows[:number])

    rows = prepare(config).eval
    if rows is None:
        raise errors.ConfigError(f"{run_dir} has no evaluation data to ask it about; set data.eval")
    return choose(DataSpec.of(config), rows, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
