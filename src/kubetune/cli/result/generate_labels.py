"""`kubetune generate` of a classifier or a reward model: the label of each text, or the reward of each answer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base.files import write_atomic
from kubetune.base.humanize import visible
from kubetune.cli.busy import busy
from kubetune.cli.result.generate_input import read_answers, read_texts


def classify(args: argparse.Namespace) -> int:
    """Print the label of every text and its probability; a pair is two texts with a tab between.

    Of a reward model, print the reward of every answer; a prompt and a tab come before it.
    """
    # Before the imports that take seconds.
    from kubetune.result.inference.requirements import require_result

    _require_no_sampling(args)
    require_result(args.run_dir, args.checkpoint, args.model)
    if _is_reward_model(args.run_dir):
        rows, verdicts = _scored(args)
    else:
        rows, verdicts = _classified(args)

    # All verdicts are known at once, since texts of all lengths go in batches together.
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if args.output is not None:
        write_atomic(args.output, lines)
    elif args.json:
        print(lines, end="")
    else:
        for verdict in verdicts:
            print(*shown(verdict), sep="\t")
    return errors.OK


def _require_no_sampling(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that a classifier would ignore."""
    # An option that has another value than its default was typed.
    ignored = []
    for name in ("compare", "image", "max_new_tokens", "temperature", "top_p", "seed"):
        if getattr(args, name) != args.parser.get_default(name):
            ignored.append(f"--{name.replace('_', '-')}")
    if ignored:
        pronoun = "them"
        if len(ignored) == 1:
            pronoun = "it"
        raise errors.ConfigError(
            f"{' and '.join(ignored)}: {args.run_dir} is a classifier, which reads texts and writes none; leave "
            f"{pronoun} out"
        )


def _classified(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the output, and the verdict of a classifier on each."""
    texts = read_texts(args)
    with busy(f"asking the model of {visible(str(args.run_dir))}"):
        from kubetune.result.inference.classify import classify_texts

        verdicts = classify_texts(args.run_dir, args.checkpoint, texts, args.model, args.trust_code)
    rows = []
    for (text, second), verdict in zip(texts, verdicts, strict=True):
        rows.append({"text": text, "second": second} | verdict)
    return rows, verdicts


def _scored(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the output, and the reward of each answer."""
    records = read_answers(args)
    with busy(f"asking the model of {visible(str(args.run_dir))}"):
        from kubetune.result.inference.classify import score_answers

        rewards = score_answers(args.run_dir, args.checkpoint, records, args.model, args.trust_code)
    rows = []
    for (_, record), reward in zip(records, rewards, strict=True):
        rows.append(record | {"reward": reward})
    return rows, [{"predicted": reward} for reward in rewards]


def shown(verdict: dict[str, Any]) -> list[str]:
    """Return the columns of a verdict: the number of a regression, else each label with its probability."""
    predicted = verdict["predicted"]
    if isinstance(predicted, float):
        return [f"{predicted:.6g}"]
    # A classifier of several labels may choose none of them.
    labels = predicted
    if not isinstance(predicted, list):
        labels = [predicted]
    columns = []
    for label in labels:
        columns += [label, f"{verdict['probabilities'][label]:.4f}"]
    return columns or ["(none)"]


def _is_reward_model(run_dir: Path) -> bool:
    """True if the result of the run scores answers."""
    from kubetune.config.resolved import read_config

    return read_config(run_dir).task == "reward_model"
