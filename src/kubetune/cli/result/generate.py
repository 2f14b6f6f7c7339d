"""`kubetune generate`: answer prompts with the result of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base.files import written_whole
from kubetune.base.humanize import counted, shown_on, visible
from kubetune.base.signals import stoppable
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import add_json
from kubetune.cli.result.export import add_result
from kubetune.cli.result.generate_input import PromptRow, read_questions
from kubetune.cli.result.generate_labels import classify

if TYPE_CHECKING:
    from kubetune.result.inference.answering import EncodedPrompt, LoadedModel, Prompt, Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="prompts; left out: a prompt for each line of standard input",
    )
    parser.add_argument(
        "--file",
        type=Path,
        help="a file of prompts instead, JSON lines or a table: `prompt` or `messages`, and `images`, in each record. "
        "For a classifier, records that it can be trained on",
    )
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an image that every prompt is about; may be repeated. It replaces <image> in a prompt, or comes first",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write JSONL here instead of printing"
    )
    add_json(parser, "JSON lines")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show the answers of the model before fine-tuning too",
    )
    add_sampling(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of every verb that lets a model generate."""
    add_result(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default 256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 (the default) takes the likeliest token",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens whose probabilities add up to P",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the samples (default 0)"
    )


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return the sampling that the options ask for. Raise ConfigError for numbers that make no sense."""
    from kubetune.library.results import require_sampling

    require_sampling(
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        lambda name: f"--{name.replace('_', '-')}",
    )
    from kubetune.base import collector

    with collector.paused():
        from kubetune.result.inference.answering import Sampling
    return Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt, and print each answer as soon as it is known."""
    if is_classifier(args.run_dir):
        return classify(args)
    # Questions and options are checked before the model is loaded, and before the imports that take seconds.
    from kubetune.result.inference.requirements import require_result

    questions = read_questions(args)
    require_result(args.run_dir, args.checkpoint, args.model)
    with busy(f"loading the model of {visible(str(args.run_dir))}"):
        sampling = sampling_of(args)
        from kubetune.result.inference.answering import load_run

        loaded = load_run(
            args.run_dir, args.checkpoint, model=args.model, trust_code=args.trust_code
        )
    encoded = encode(loaded, questions)

    # An iterator: each answer is printed, or written, when it is known.
    rows = answered(loaded, questions, encoded, sampling, compare=args.compare)
    if args.output is not None:
        _write(args.output, rows, len(questions))
        return errors.OK
    for row in _awaited(rows, len(questions)):
        print(_line(row, as_json=args.json, compare=args.compare), flush=True)
    return errors.OK


def _line(row: dict[str, Any], *, as_json: bool, compare: bool) -> str:
    """Return an answer for standard output: exact in a file or a pipe, escaped on a terminal, which would obey it."""
    if as_json:
        return json.dumps(row, ensure_ascii=sys.stdout.isatty())
    text = row["answer"]
    if compare:
        text = f"base:  {row['base_answer']}\ntuned: {text}"
    return shown_on(sys.stdout, text)


def _awaited(rows: Iterator[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """Yield so many rows. While the model writes the answer of one, a terminal shows that, and nothing after the last."""
    for _ in range(count):
        # Nothing is shown while the caller prints, which would be mixed with it.
        with busy("answering"):
            row = next(rows)
        yield row


def _write(output: Path, rows: Iterable[dict[str, Any]], count: int) -> None:
    """Write the answers to a file, which appears when it is whole."""
    # A file shows no answers while they come, so a bar says how far it is.
    with stoppable(), written_whole(output) as file, busy("answering") as work:
        for number, row in enumerate(rows, 1):
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            work.count("answering", count, number)


def encode(loaded: LoadedModel, questions: Sequence[PromptRow]) -> list[EncodedPrompt]:
    """Return all questions as the model takes them. Raise DataError naming every one that cannot be asked."""
    from kubetune.data.reading.record_problems import Problems

    problems = Problems()
    encoded: list[EncodedPrompt] = []
    left_out: list[str] = []
    for question in questions:
        tools = question.row.get("tools") or question.row.get("functions") or ()
        try:
            prompt = prompt_of(question.row)
            encoded.append(loaded.encode(prompt, question.images, tools))
            parts = loaded.left_out(prompt, tools)
        except ValueError as error:
            problems.add(question.where, str(error))
            continue
        if parts:
            left_out.append(f"{question.where}: {parts[0]}")
    problems.raise_if_any()

    # One note for all prompts: a template leaves the same out of each.
    if left_out:
        note = f"kubetune: note: {left_out[0]}, which the model does not see"
        if len(left_out) > 1:
            note += f"; the same holds for {counted(len(left_out) - 1, 'other prompt')}"
        print(visible(note, keep=""), file=sys.stderr)
    return encoded


def prompt_of(row: dict[str, Any]) -> Prompt:
    """Return a row's question: its plain text, or its messages, the system message first.

    Raise ValueError if the row has two system messages that differ.
    """
    messages = row.get("messages")
    system = row.get("system") or row.get("system_prompt")
    if not system:
        prompt: Prompt = messages or row["prompt"]
        return prompt

    # The system message becomes the first one, unless it is that already.
    if not isinstance(system, str):
        raise ValueError(f"system is {json.dumps(system)}; expected a text")
    if not messages:
        messages = [{"role": "user", "content": row["prompt"]}]
    first: dict[str, Any] = {}
    if isinstance(messages, list) and isinstance(messages[0], dict):
        first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise ValueError("has `system` and a different system message in `messages`; expected one")
    return list(messages)


def answered(
    loaded: LoadedModel,
    questions: Sequence[PromptRow],
    encoded: Sequence[EncodedPrompt],
    sampling: Sampling,
    *,
    compare: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the rows with their answers, in order; with `compare`, also those of the model before fine-tuning."""
    from kubetune.result.inference.answering import WINDOW, answers

    for start in range(0, len(encoded), WINDOW):
        window = encoded[start : start + WINDOW]
        # With one seed for all, each window would draw the same numbers.
        window_sampling = replace(sampling, seed=sampling.seed + start)

        # The adapter is switched off for the whole window at once, so that no time goes in switching it.
        base_answers: list[str] = []
        if compare:
            with loaded.as_base() as base:
                base_answers = list(answers(base, window, window_sampling))
        for index, answer in enumerate(answers(loaded, window, window_sampling)):
            row = dict(questions[start + index].row)
            # The answer that a row of data has is what the model was to learn.
            if "answer" in row:
                row["given_answer"] = row["answer"]
            row["answer"] = answer
            if compare:
                row["base_answer"] = base_answers[index]
            yield row


def is_classifier(run_dir: Path) -> bool:
    """True if the result of the run labels texts, or scores them, instead of writing them."""
    from kubetune.config.resolved import read_config

    return read_config(run_dir).classifies
