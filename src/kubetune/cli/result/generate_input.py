"""The input of `kubetune generate`: prompts, texts to classify, answers to score, typed or from a file.

Each has its place for messages, such as prompts.jsonl:3.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base.humanize import unused_keys

# Keys of a line of `--file` that mean something. The others are only repeated in the output.
KEYS_READ = {
    "prompt",
    "messages",
    "system",
    "system_prompt",
    "tools",
    "functions",
    "images",
    "image",
    "answer",
}


@dataclass(frozen=True)
class PromptRow:
    """A prompt with its images."""

    where: str  # its place for messages, such as prompts.jsonl:3
    row: dict[str, Any]  # the line of the file, or {"prompt": …}; the output repeats it
    images: Sequence[str]  # paths


def _typed_lines(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the prompts of the command line, or the lines of standard input, each with its place."""
    name = "prompt"
    lines = args.prompts
    if not lines and sys.stdin.isatty():
        return [("prompt:1", _asked_for())]
    if not lines:
        name = "standard input"
        lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not lines:
        raise errors.ConfigError(
            "no prompt was given, and standard input is empty; type one after RUN_DIR, or name a file with --file"
        )
    return [(f"{name}:{number}", line) for number, line in enumerate(lines, 1)]


def _asked_for() -> str:
    """Return the prompt that somebody at a terminal types. Raise ConfigError for none."""
    # Answers go to standard output, which may be a file.
    print("prompt> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline().rstrip("\n")
    if not line.strip():
        raise errors.ConfigError("no prompt was given; type one, or name a file with --file")
    return line


def read_answers(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the answers to score with their prompts, each with its place. Raise DataError naming bad lines."""
    from kubetune.config.resolved import read_config
    from kubetune.data.reading.readers import read_file
    from kubetune.data.reading.record_problems import Problems
    from kubetune.result.inference.classify import answer_record

    problems = Problems()
    answers: list[tuple[str, dict[str, Any]]] = []

    # Records have columns for the prompt and its answer. A line has a tab between them.
    if args.file is not None:
        for record in read_file(args.file, problems):
            answers.append((record.where, dict(record.value)))
        problems.raise_if_any()
        return answers

    config = read_config(args.run_dir)
    for where, line in _typed_lines(args):
        # "What is 2 + 2?<tab>4"
        prompt, tab, answer = line.partition("\t")
        if not tab or not prompt.strip() or not answer.strip():
            problems.add(where, f"is {line!r}; expected a prompt, a tab and its answer")
        source = config.data.train[0]
        made = answer_record(args.run_dir, source, config.record_kind, prompt, answer)
        answers.append((where, made))
    problems.raise_if_any()
    return answers


def read_texts(args: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Return the texts to classify, and the second one of pairs. Raise DataError naming bad lines."""
    if args.file is not None:
        return _texts_of_file(args.run_dir, args.file)
    from kubetune.config.resolved import read_config
    from kubetune.data.prepared.data_facts import known
    from kubetune.data.reading.record_problems import Problems

    config = read_config(args.run_dir)
    problems = Problems()
    texts: list[tuple[str, str | None]] = []
    for where, line in _typed_lines(args):
        first, tab, second = line.partition("\t")
        texts.append((first, second if tab else None))
        # An empty second text is no pair of texts as in training.
        if not first.strip() or (tab and not second.strip()):
            problems.add(
                where, f"holds an empty text, {line!r}; expected one text, or two and a tab"
            )
    problems.raise_if_any()
    facts = known(args.run_dir, config.data.train[0], config.record_kind)
    _note_other_form(texts, facts.takes_pairs)
    return texts


def _texts_of_file(run_dir: Path, file: Path) -> list[tuple[str, str | None]]:
    """Return the texts of records, whose columns have the names that the run's data have."""
    from kubetune.config.resolved import read_config
    from kubetune.data.reading.labelled import texts_of
    from kubetune.data.reading.readers import read_file
    from kubetune.data.reading.record_problems import Problems

    # `data.train[].columns`: {"text": "review"} says that the text is in the column `review`.
    columns: dict[str, str] = {}
    for source in read_config(run_dir).data.train:
        columns |= source.columns
    problems = Problems()
    texts: list[tuple[str, str | None]] = []
    for record in read_file(file, problems):
        # As if the file had the usual names.
        value = dict(record.value)
        for name, column in columns.items():
            if column in record.value:
                value[name] = record.value[column]
        try:
            texts.append(texts_of(value))
        except ValueError as error:
            problems.add(record.where, str(error))
    problems.raise_if_any()
    return texts


def _note_other_form(texts: Sequence[tuple[str, str | None]], takes_pairs: bool | None) -> None:
    """Warn of texts that are pairs if training had none, or the other way round; no answer would show it.

    It happens with lines that were copied from a table with its tabs.
    """
    if takes_pairs is None:
        return
    count = 0
    for _, second in texts:
        if (second is not None) != takes_pairs:
            count += 1
    if count == 0:
        return
    mistake = "have no tab; the run was trained on pairs"
    if not takes_pairs:
        mistake = "have a tab, which makes pairs of them; the run was trained on single texts. Give a table as --file"
    print(f"kubetune: note: {count:,} of {len(texts):,} texts {mistake}", file=sys.stderr)


def read_questions(args: argparse.Namespace) -> list[PromptRow]:
    """Return the prompts to answer. Raise DataError naming bad lines."""
    images = [str(image) for image in args.image]
    if args.file is not None:
        return _questions_of_file(args.file, images)
    return [PromptRow(where, {"prompt": line}, images) for where, line in _typed_lines(args)]


def _questions_of_file(file: Path, images: Sequence[str]) -> list[PromptRow]:
    """Return the prompts of a file of records; those that name no images are about `images`."""
    from kubetune.data.reading.readers import read_file
    from kubetune.data.reading.record_problems import Problems

    problems = Problems()
    questions: list[PromptRow] = []
    for record in read_file(file, problems):
        try:
            row = _row(dict(record.value))
            row_images = _images(row, file.parent)
        except (ValueError, TypeError) as error:
            problems.add(record.where, str(error))
        else:
            questions.append(PromptRow(record.where, row, row_images or images))
    problems.raise_if_any()

    # Lines may have `temperature` and the like, of other tools' files, which do nothing here.
    ignored: Counter[str] = Counter()
    for question in questions:
        for key in question.row:
            if key not in KEYS_READ:
                ignored[key] += 1
    if ignored:
        keys = unused_keys(ignored)
        print(f"kubetune: note: {file}: {keys}; only options set how to answer", file=sys.stderr)
    return questions


def _images(row: dict[str, Any], folder: Path) -> list[str]:
    """Return the paths of a row's images, which are relative to the folder of the file."""
    # `image` may be one path, as in data sets of one image a row.
    paths = row.get("images") or row.get("image") or []
    if isinstance(paths, str):
        paths = [paths]
    return [str(folder / path) for path in paths]


def _row(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record as a prompt. Raise ValueError for one without a prompt."""
    from kubetune.data.reading.fields import Fields
    from kubetune.data.reading.refusals import require_readable

    messages = value.get("messages")
    if not messages and not isinstance(value.get("prompt"), str):
        raise ValueError("expected an object with `prompt` or `messages`")
    if messages and value.get("prompt"):
        raise ValueError("has `prompt` and `messages`; expected one of them")

    # What a record of training data is refused for, a question is refused for too.
    require_readable(Fields(value))
    if messages and not isinstance(messages, list):
        raise ValueError("expected a list of messages in `messages`")
    if messages and len(messages) > 1 and _is_answer(messages[-1]):
        # A row of training data: the model is to answer it itself.
        return {**value, "messages": messages[:-1]}
    return value


def _is_answer(message: Any) -> bool:
    """True for a turn of the model."""
    return isinstance(message, dict) and message.get("role") == "assistant"
