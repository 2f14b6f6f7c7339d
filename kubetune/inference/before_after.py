"""Answers of a run's model to rows it was not trained on, before training and at each checkpoint that was kept:
before_after.jsonl, for its report.

    python -m kubetune.inference.before_after RUN_DIR [N]

A process of its own, after the ranks have gone, so that it can change nothing of the training. The model before is the
same one with its adapters off, or the base loaded once more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import counted
from kubetune.config.load import read_config
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.formats import Chat, convert
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.reading.splits import split_sources
from kubetune.data.text.encode import learnt_messages
from kubetune.inference.generate import EncodedPrompt, LoadedModel, Sampling, answers, load_run
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import folder_of, steps, verify
from kubetune.scoring.questions import drawn

MOST_TOKENS = 128
"""Of an answer; one that goes on is cut there, and so is what was expected."""
_MOST_CHARACTERS = 4000
"""Of a prompt, whose end is shown."""


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
        raise errors.ConfigError(f"{run_dir} is a run of task {config.task}, which writes nothing that could be shown")
    rows = prepare(config).eval
    if rows is None:
        raise errors.ConfigError(f"{run_dir} has no evaluation data to ask it about; set data.eval")
    questions, before, best, after = _ask_best(run_dir, rows, number)
    said = {best: after}
    for step in steps(run_dir):
        if step != best and verify(folder_of(run_dir, step), thorough=False) is None:
            said[step] = _ask(run_dir, step, questions)
    turns = _turns(config, rows, [question.row for question in questions])
    lines = [
        {
            "prompt": question.prompt,
            "expected": question.expected,
            "before": before[i],
            "after": after[i],
            "step": best,
            "answers": [{"step": step, "answer": said[step][i]} for step in sorted(said)],
            **turns.get(question.row, {}),
        }
        for i, question in enumerate(questions)
    ]
    path = run_dir / metrics.BEFORE_AFTER
    text = "".join(f"{json.dumps(line, ensure_ascii=False, default=str)}\n" for line in lines)
    files.write_atomic(path, text, within=run_dir)
    kept = counted(len(said), "checkpoint")
    logs.RESULT.info("%s before and after training, at %s: %s", counted(len(lines), "row"), kept, path)
    return path


class _Question(NamedTuple):
    """A row of the evaluation data without its last answer, which is what is `expected`."""

    row: int
    encoded: EncodedPrompt
    prompt: str
    expected: str


def _ask_best(run_dir: Path, rows: Rows, number: int) -> tuple[list[_Question], list[str], int, list[str]]:
    """Questions, what the model says before training, the step of the best checkpoint, and what that says."""
    loaded, sampling = load_run(run_dir), Sampling(MOST_TOKENS)
    questions = _questions(loaded, rows, number)
    prompts = [question.encoded for question in questions]
    after = list(answers(loaded, prompts, sampling))
    with loaded.as_base() as base:
        before = list(answers(base, prompts, sampling))
    return questions, before, int(loaded.result.checkpoint.resolve().name.removeprefix("step-")), after


def _ask(run_dir: Path, step: int, questions: Sequence[_Question]) -> list[str]:
    """Answers of the checkpoint of a step; its model is gone again when this returns."""
    prompts = [question.encoded for question in questions]
    return list(answers(load_run(run_dir, str(step)), prompts, Sampling(MOST_TOKENS)))


def _questions(loaded: LoadedModel, rows: Rows, number: int) -> list[_Question]:
    """Rows drawn the same way each time: what the model is given, and what is expected of it."""
    return [
        _Question(
            asked.row,
            EncodedPrompt(list(asked.ids), asked.images),
            loaded.tokenizer.decode(asked.ids).strip()[-_MOST_CHARACTERS:],
            loaded.tokenizer.decode(asked.answer[:MOST_TOKENS]),
        )
        for asked in islice(drawn(rows), number)
    ]


def _turns(config: Config, rows: Rows, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """`messages` before the last answer, and the names of `tools`, of the rows that are conversations.

    A row that may have lost its last answer to `data.max_length`, or is learnt whole, is shown as the template has it.
    """
    found: dict[int, dict[str, Any]] = {}
    by_source: dict[int, dict[int, int]] = {}
    for index in ids if config.data.train_on == "assistant" else ():
        if config.data.overlong != "truncate" or rows.lengths[index] < config.data.max_length:
            by_source.setdefault(int(rows.source[index]), {})[int(rows.record[index])] = index
    for source, wanted in by_source.items():
        given = split_sources(config)["eval"][source]
        for number, record in enumerate(islice(read_source(given, Problems()), max(wanted) + 1)):
            example = convert(record.value, given.format, given.columns) if number in wanted else None
            if isinstance(example, Chat) and (answered := learnt_messages(example)):
                found[wanted[number]] = {"messages": [_shortened(turn) for turn in example.messages[: answered[-1]]]}
                if example.tools:
                    found[wanted[number]]["tools"] = [_name(tool) for tool in example.tools]
    return found


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    is_long = isinstance(content, str) and len(content) > _MOST_CHARACTERS
    return {**message, "content": f"{content[:_MOST_CHARACTERS]} …"} if is_long and content else message


def _name(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    return str(inner.get("name", "?")) if isinstance(inner, dict) else str(inner)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
