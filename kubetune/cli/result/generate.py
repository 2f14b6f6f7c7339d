"""`kubetune generate`: answer prompts with the result of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base.files import write_atomic, written_whole
from kubetune.base.humanize import counted, shown_on, unused_keys, visible
from kubetune.base.signals import stoppable
from kubetune.cli.result.export import add_result

if TYPE_CHECKING:
    from kubetune.result.inference.generate import EncodedPrompt, LoadedModel, Prompt, Sampling

_READ = {
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
"""Keys of a line of `--file` that mean something; the others are only repeated in the output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts; none: one a line from standard input"
    )
    parser.add_argument(
        "--file",
        type=Path,
        help="JSONL of prompts instead: `prompt` or `messages`, and `images`, in each line. For a classifier, records "
        "as it was trained on, in any of its formats",
    )
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an image that every prompt is about; may be repeated. Goes where a prompt has <image>, or before it",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write JSONL here instead of printing"
    )
    parser.add_argument(
        "--out", type=Path, dest="output", help=argparse.SUPPRESS
    )  # what it was called before
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument(
        "--compare", action="store_true", help="also show what the model said before fine-tuning"
    )
    add_sampling(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that lets a model speak."""
    add = parser.add_argument
    add_result(parser)
    add("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default 256)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 (the default) takes the likeliest token",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens of this share",
    )
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (default 0)")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling that the options ask for. Raises ConfigError for numbers that make no sense."""
    from kubetune.library.results import require_sampling

    require_sampling(
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        lambda name: f"--{name.replace('_', '-')}",
    )
    from kubetune.base import collector

    with collector.paused():
        from kubetune.result.inference.generate import Sampling
    return Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt, each as soon as it is known; one answer a line for several, bare for one."""
    if is_classifier(args.run_dir):
        return classify(args)
    questions = read_questions(args)
    sampling = sampling_of(args)
    from kubetune.base.progress_bar import Progress, is_wanted
    from kubetune.result.inference.generate import load_run

    loaded = load_run(args.run_dir, args.checkpoint, model=args.model, trust_code=args.trust_code)
    rows = answered(loaded, questions, encode(loaded, questions), sampling, compare=args.compare)
    if args.output is not None:
        with stoppable(), written_whole(args.output) as file, Progress(
            len(questions), enabled=is_wanted(0), label="answers"
        ) as bar:  # fmt: skip
            for number, row in enumerate(rows, 1):
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                bar.update(number)
    else:
        for row in rows:
            said = (
                f"base:  {row['base_answer']}\ntuned: {row['answer']}"
                if args.compare
                else row["answer"]
            )
            # What the model says is exact in a file or a pipe; a terminal must not obey it.
            text = (
                json.dumps(row, ensure_ascii=sys.stdout.isatty())
                if args.json
                else shown_on(sys.stdout, said)
            )
            print(text, flush=True)
    return errors.OK


@dataclass(frozen=True)
class Question:
    """A prompt, where it stands, and the images that it is about; `row` is what was given, and becomes the output."""

    where: str
    row: dict[str, Any]
    images: Sequence[str]


def encode(loaded: LoadedModel, questions: Sequence[Question]) -> list[EncodedPrompt]:
    """All questions as the model takes them. Raises DataError naming every one that cannot be asked."""
    from kubetune.data.reading.problems import Problems

    problems, encoded, unseen = Problems(), [], []
    for question in questions:
        tools = question.row.get("tools") or question.row.get("functions") or ()
        try:
            prompt = prompt_of(question.row)
            encoded.append(loaded.encode(prompt, question.images, tools))
            unseen += [f"{question.where}: {what}" for what in loaded.left_out(prompt, tools)[:1]]
        except ValueError as error:
            problems.add(question.where, str(error))
    problems.raise_if_any()
    if unseen:
        also = f"; so it does in {counted(len(unseen) - 1, 'other prompt')}" if unseen[1:] else ""
        note = f"kubetune: note: {unseen[0]}, which the model does not see{also}"
        print(visible(note, keep=""), file=sys.stderr)
    return encoded


def prompt_of(row: dict[str, Any]) -> Prompt:
    """A row's question: its messages, with the message of the system that stands beside them, or its plain text.

    Raises ValueError where that message has no place.
    """
    messages, system = row.get("messages"), row.get("system") or row.get("system_prompt")
    if not system:
        prompt: Prompt = messages or row["prompt"]
        return prompt
    if not isinstance(system, str):
        raise ValueError(f"system is {json.dumps(system)}; expected a text")
    messages = messages or [{"role": "user", "content": row["prompt"]}]
    first = messages[0] if isinstance(messages, list) and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise ValueError(
            "has `system` and another message of the system, which says something else; expected one"
        )
    return list(messages)


def answered(
    loaded: LoadedModel,
    questions: Sequence[Question],
    encoded: Sequence[EncodedPrompt],
    sampling: Sampling,
    *,
    compare: bool,
) -> Iterator[dict[str, Any]]:
    """The rows with their answers, in order; `compare`: with what the model said before fine-tuning, too."""
    from kubetune.result.inference.generate import WINDOW, answers

    for start in range(0, len(encoded), WINDOW):
        part = slice(start, start + WINDOW)
        drawn = replace(sampling, seed=sampling.seed + start)
        before: list[dict[str, str]] = [{}] * len(encoded[part])
        if compare:
            with loaded.as_base() as base:
                before = [{"base_answer": text} for text in answers(base, encoded[part], drawn)]
        for question, text, said in zip(
            questions[part], answers(loaded, encoded[part], drawn), before, strict=True
        ):
            given = {"given_answer": question.row["answer"]} if "answer" in question.row else {}
            yield {**question.row, **given, "answer": text, **said}


def is_classifier(run_dir: Path) -> bool:
    """The run's result tells texts apart instead of writing them."""
    from kubetune.config.load import read_config

    return read_config(run_dir).classifies


def _scores(run_dir: Path) -> bool:
    from kubetune.config.load import read_config

    return read_config(run_dir).task == "reward_model"


def classify(args: argparse.Namespace) -> int:
    """Print the label of every text and its probability; the two texts of a pair are given with a tab between.

    Of a reward model, the reward of every answer, which has its prompt before it and a tab between.
    """
    foreign = [
        f"--{name.replace('_', '-')}"
        for name in ("compare", "image", "max_new_tokens", "temperature", "top_p", "seed")
        if getattr(args, name) != args.parser.get_default(name)
    ]
    if foreign:
        raise errors.ConfigError(
            f"{' and '.join(foreign)}: {args.run_dir} is a classifier, which is told texts and writes none; leave "
            f"{'it' if len(foreign) == 1 else 'them'} out"
        )
    rows, verdicts = _scored(args) if _scores(args.run_dir) else _classified(args)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if args.output is not None:
        write_atomic(args.output, lines)
    elif args.json:
        print(lines, end="")
    else:
        for verdict in verdicts:
            print(*shown(verdict), sep="\t")
    return errors.OK


def _classified(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the output, and what a classifier says of each."""
    texts = read_texts(args)
    from kubetune.result.inference.classify import classify_texts

    verdicts = classify_texts(args.run_dir, args.checkpoint, texts, args.model, args.trust_code)
    rows = [
        {"text": text, "second": second} | said
        for (text, second), said in zip(texts, verdicts, strict=True)
    ]
    return rows, verdicts


def _scored(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the output, and the reward of each answer."""
    records = read_answers(args)
    from kubetune.result.inference.classify import score_answers

    found = score_answers(args.run_dir, args.checkpoint, records, args.model, args.trust_code)
    rows = [record | {"reward": reward} for (_, record), reward in zip(records, found, strict=True)]
    return rows, [{"predicted": reward} for reward in found]


def read_answers(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Answers to score, each with its prompt, and where they stand. Raises DataError naming bad lines."""
    from kubetune.config.load import read_config
    from kubetune.data.reading.problems import Problems
    from kubetune.data.reading.readers import READERS
    from kubetune.result.inference.classify import answer_record

    problems = Problems()
    if args.file is not None:
        found = READERS.get(args.file.suffix.lower(), READERS[".jsonl"])(args.file, problems)
        records = [(record.where, dict(record.value)) for record in found]
        problems.raise_if_any()
        return records
    name, answers = "prompt" if args.prompts else "standard input", []
    config = read_config(args.run_dir)
    for number, line in enumerate(
        args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()], 1
    ):
        prompt, tab, answer = line.partition("\t")
        if not tab or not prompt.strip() or not answer.strip():
            problems.add(
                f"{name}:{number}",
                f"is {line!r}; expected a prompt and its answer, with a tab between",
            )
        answers.append((f"{name}:{number}", answer_record(args.run_dir, config, prompt, answer)))
    problems.raise_if_any()
    return answers


def shown(verdict: dict[str, Any]) -> list[str]:
    """A verdict in columns: the label, or each of several, with its probability; of regression, the number."""
    said = verdict["predicted"]
    if isinstance(said, float):
        return [f"{said:.6g}"]
    names = said if isinstance(said, list) else [said]
    return [part for name in names for part in (name, f"{verdict['probabilities'][name]:.4f}")] or [
        "(none)"
    ]


def read_texts(args: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Texts to classify, from the command line, a file or standard input. Raises DataError naming bad lines."""
    from kubetune.config.load import read_config
    from kubetune.data.prepared.data_facts import known
    from kubetune.data.reading.formats import texts_of
    from kubetune.data.reading.problems import Problems
    from kubetune.data.reading.readers import read_file

    config, problems = read_config(args.run_dir), Problems()
    texts: list[tuple[str, str | None]] = []
    if args.file is None:
        name = "prompt" if args.prompts else "standard input"
        for number, line in enumerate(
            args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()], 1
        ):
            first, tab, second = line.partition("\t")
            texts.append((first, second if tab else None))
            if not first.strip() or (tab and not second.strip()):
                problems.add(
                    f"{name}:{number}",
                    f"holds an empty text, {line!r}; expected one text, or two and a tab",
                )
        problems.raise_if_any()
        _note_other_form(texts, known(args.run_dir, config).takes_pairs)
        return texts
    columns = {
        ours: theirs for source in config.data.train for ours, theirs in source.columns.items()
    }
    for record in read_file(args.file, problems):
        named = {
            ours: record.value[theirs] for ours, theirs in columns.items() if theirs in record.value
        }
        try:
            texts.append(texts_of(record.value | named))
        except ValueError as error:
            problems.add(record.where, str(error))
    problems.raise_if_any()
    return texts


def _note_other_form(texts: Sequence[tuple[str, str | None]], pairs: bool | None) -> None:
    """Say so where texts do not look as in training, which no answer would show: a table's tab is easily left in."""
    others = sum((second is not None) != pairs for _, second in texts)
    if pairs is None or not others:
        return
    found = "have a tab, which makes pairs of them; the run was trained on single ones, and a table is given as --file"
    if pairs:
        found = "have no tab; the run was trained on pairs"
    print(f"kubetune: note: {others:,} of {len(texts):,} texts {found}", file=sys.stderr)


def read_questions(args: argparse.Namespace) -> list[Question]:
    """Prompts from the command line, a JSONL file or standard input. Raises DataError naming the bad lines."""
    given = [str(image) for image in args.image]
    if args.file is None:
        name = "prompt" if args.prompts else "standard input"
        lines = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        return [
            Question(f"{name}:{number}", {"prompt": line}, given)
            for number, line in enumerate(lines, 1)
        ]
    from kubetune.data.reading.problems import Problems
    from kubetune.data.reading.strict_json import parse

    questions, problems = [], Problems()
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.DataError(f"{args.file}: cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{args.file}:{number}"
        try:
            value = _row(parse(line))
            own = value.get("images") or value.get("image") or []
            paths = [
                str(args.file.parent / path) for path in ([own] if isinstance(own, str) else own)
            ]
        except json.JSONDecodeError as error:
            problems.add(where, f"is not JSON: {error}")
        except (ValueError, TypeError) as error:
            problems.add(where, str(error))
        else:
            questions.append(Question(where, value, paths or given))
    problems.raise_if_any()
    counts = Counter(key for question in questions for key in question.row if key not in _READ)
    if unused := unused_keys(counts):
        print(
            f"kubetune: note: {args.file}: {unused}; how to answer is said by options alone",
            file=sys.stderr,
        )
    return questions


def _row(value: Any) -> dict[str, Any]:
    """A line of a file as a prompt. Raises ValueError for what is none."""
    from kubetune.data.reading.fields import Fields
    from kubetune.data.reading.refusals import require_readable

    if not isinstance(value, dict) or not (
        isinstance(value.get("prompt"), str) or value.get("messages")
    ):
        raise ValueError("expected an object with `prompt` or `messages`")
    if value.get("prompt") and value.get("messages"):
        raise ValueError("has `prompt` and `messages`; expected one of them")
    require_readable(Fields(value))
    messages = value.get("messages")
    if messages and not isinstance(messages, list):
        raise ValueError("expected a list of messages in `messages`")
    if messages and len(messages) > 1 and _is_answer(messages[-1]):
        return {
            **value,
            "messages": messages[:-1],
        }  # a row of training data: the model is to answer it itself
    return value


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
