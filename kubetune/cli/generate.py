"""`kubetune generate`: answer prompts with the result of a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.files import write_atomic

if TYPE_CHECKING:
    from kubetune.generate import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; none: one a line from standard input")
    parser.add_argument(
        "--file", type=Path, help="JSONL of prompts instead: `prompt` or `messages`, and `images`, in each line"
    )
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an image that every prompt is about; may be repeated. Goes where a prompt has <image>, or before it",
    )
    parser.add_argument("--out", type=Path, help="write JSONL here instead of printing")
    parser.add_argument("--compare", action="store_true", help="also show what the model said before fine-tuning")
    add_sampling(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that lets a model speak."""
    parser.add_argument("--checkpoint", default="best", help="best, last or a step (default best)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this share")
    parser.add_argument("--seed", type=int, default=0)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling that the options ask for. Raises ConfigError for numbers that make no sense."""
    problems = []
    if args.max_new_tokens < 1:
        problems.append(f"--max-new-tokens is {args.max_new_tokens}; expected at least 1")
    if args.temperature < 0:
        problems.append(f"--temperature is {args.temperature:g}; expected 0 or more")
    if not 0 < args.top_p <= 1:
        problems.append(f"--top-p is {args.top_p:g}; expected more than 0 and at most 1")
    if problems:
        raise errors.ConfigError(problems)
    from kubetune.generate import Sampling

    return Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt; one answer a line for several, bare for one."""
    if is_classifier(args.run_dir):
        return classify(args)
    prompts = read_prompts(args)
    sampling = sampling_of(args)
    from kubetune.generate import answer, load_run

    speaker = load_run(args.run_dir, args.checkpoint)
    asked = [prompt.get("messages") or prompt["prompt"] for prompt in prompts]
    images = [images_of(prompt, args) for prompt in prompts]
    rows: list[dict[str, Any]] = [
        {**prompt, "answer": text}
        for prompt, text in zip(prompts, answer(speaker, asked, sampling, images=images), strict=True)
    ]
    if args.compare:
        with speaker.as_base() as base:
            for row, text in zip(rows, answer(base, asked, sampling, images=images), strict=True):
                row["base_answer"] = text
    if args.out is not None:
        write_atomic(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        for row in rows:
            print(f"base:  {row['base_answer']}\ntuned: {row['answer']}" if args.compare else row["answer"])
    return errors.OK


def images_of(prompt: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The images that a prompt is about; those of a file lie as seen from its folder."""
    own = prompt.get("images") or []
    own = [own] if isinstance(own, str) else own
    return [str(args.file.parent / path) for path in own] if args.file is not None and own else [*map(str, args.image)]


def is_classifier(run_dir: Path) -> bool:
    """Whether a run's result tells texts apart instead of writing them."""
    from kubetune.config.load import read_config

    return read_config(run_dir).task == "sequence_classification"


def classify(args: argparse.Namespace) -> int:
    """Print the label of every text and its probability; the two texts of a pair are given with a tab between."""
    texts = read_texts(args)
    from kubetune.classify import classify_texts

    verdicts = classify_texts(args.run_dir, args.checkpoint, texts)
    if args.out is not None:
        rows = (
            {"text": text, "second": second} | verdict for (text, second), verdict in zip(texts, verdicts, strict=True)
        )
        write_atomic(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return errors.OK
    for verdict in verdicts:
        print(*shown(verdict), sep="\t")
    return errors.OK


def shown(verdict: dict[str, Any]) -> list[str]:
    """A verdict in columns: the label, or each of several, with its probability; of regression, the number."""
    said = verdict["predicted"]
    if isinstance(said, float):
        return [f"{said:.6g}"]
    names = said if isinstance(said, list) else [said]
    return [part for name in names for part in (name, f"{verdict['probabilities'][name]:.4f}")] or ["(none)"]


def read_texts(args: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Texts to classify, from the command line, a JSONL file or standard input. Raises DataError naming bad lines."""
    if args.file is None:
        lines = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        return [(first, second if tab else None) for first, tab, second in (line.partition("\t") for line in lines)]
    from kubetune.data.formats import texts_of
    from kubetune.data.problems import Problems
    from kubetune.data.readers import READERS

    problems, texts = Problems(), []
    for record in READERS[".jsonl"](args.file, problems):
        try:
            texts.append(texts_of(record.value))
        except ValueError as error:
            problems.add(record.where, str(error))
    problems.raise_if_any()
    return texts


def read_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts from the command line, a JSONL file or standard input. Raises DataError naming the bad lines."""
    if args.file is None:
        lines = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        return [{"prompt": line} for line in lines]
    prompts, problems = [], []
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.DataError(f"{args.file}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            problems.append(f"{args.file}:{number}: not JSON: {error}")
            continue
        if not isinstance(value, dict) or not (isinstance(value.get("prompt"), str) or value.get("messages")):
            problems.append(f"{args.file}:{number}: expected an object with `prompt` or `messages`")
            continue
        messages = value.get("messages")
        if isinstance(messages, list) and len(messages) > 1 and _is_answer(messages[-1]):
            value = {**value, "messages": messages[:-1]}  # a row of training data: the model is to answer it itself
        prompts.append(value)
    if problems:
        raise errors.DataError([*problems[:20], f"{len(problems)} problems. Nothing was written."])
    return prompts


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
