"""`kubetune demo`: fine-tune the embedded model on the embedded data, offline, and show what it learnt.

Writes a run file such as a user would write, goes the way of `kubetune train`, and asks the model before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kubetune import cli, errors
from kubetune.base.files import write_atomic
from kubetune.base.gpus import visible_gpus
from kubetune.rundir import metrics

EMBEDDED = Path(__file__).parent / "embedded"
HELD_OUT = EMBEDDED / "data" / "heldout.jsonl"
SHOWN = 3
NEXT_PROMPT = "Please bounce wallet in staging."

RUN_FILES = {
    "causal_lm": """\
# What `kubetune demo` runs. `kubetune train` with this file does the same.
name: demo
model: {model}        # 0.8 M parameters; chats about services in prose
data:
  train: {train}      # 1,200 requests in English, answered by kubectl commands
  eval: 0.05
  max_length: 128
lora: {{r: 16, dropout: 0.1}}
training:
  num_train_epochs: 3
  global_batch_size: 16
  per_device_train_batch_size: 8
  learning_rate: 4e-3        # a model this small bears more than the default
  logging_steps: 10
output: {output}
compute: {compute}
""",
    "preference": """\
# What `kubetune demo --task preference` runs. `kubetune train` with this file does the same.
name: demo-preference
task: preference
model: {model}        # 0.8 M parameters; chats about services in prose
data:
  train: {train}      # 480 requests, each with two answers that differ in how they open
  eval: 0.1
  max_length: 128
preference: {{loss: dpo, beta: 0.3, sft_weight: 1.0}}   # and keep to what the good answers say
lora: {{r: 16}}
training:
  global_batch_size: 16
  per_device_train_batch_size: 8
  learning_rate: 1e-3
  metric_for_best_model: accuracy
  logging_steps: 5
output: {output}
compute: {compute}
""",
}
DATA = {"causal_lm": "train.jsonl", "preference": "pairs.jsonl"}
PREFERRED = "Of course."


@dataclass(frozen=True)
class Answer:
    """A held-out request, the command it should become, and what the model said before and after."""

    prompt: str
    expected: str
    before: str
    after: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default: outputs/demo, or outputs/demo-preference"
    )
    parser.add_argument(
        "--task", choices=RUN_FILES, default="causal_lm", help="preference: flip its style by pairs of answers instead"
    )


def run(args: argparse.Namespace) -> int:
    """Train, or go on after a stop, and print the comparison. Raises ConfigError where something else lies in DIR."""
    began = time.monotonic()
    if args.output is None:
        args.output = Path("outputs/demo" if args.task == "causal_lm" else "outputs/demo-preference")
    run_file, run_dir = args.output / "run.yaml", args.output / "run"
    write_run_file(run_file, run_dir, args.task)
    # So small a model gains nothing from a second thread, and loses much where other programs want the cores too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"kubetune train {run_file}", flush=True)
    code = cli.main(["train", str(run_file)])
    if code:
        if code == errors.PREEMPTED:
            print(f"Stopped. The same command goes on from there; to start afresh, remove {args.output} first.")
        return code
    answers = compare(run_dir, args.task)
    lines = (json.dumps(asdict(row), ensure_ascii=False) for row in answers)
    write_atomic(run_dir / metrics.BEFORE_AFTER, "".join(f"{line}\n" for line in lines))
    show(answers, run_file, run_dir, time.monotonic() - began, args.task)
    return errors.OK


def write_run_file(run_file: Path, run_dir: Path, task: str = "causal_lm") -> None:
    """Write the demo's run file unless it is there. Raises ConfigError rather than overwrite another."""
    text = RUN_FILES[task].format(
        model=json.dumps(str(EMBEDDED / "model")),
        train=json.dumps(str(EMBEDDED / "data" / DATA[task])),
        output=json.dumps(str(run_dir)),
        # One process is enough for so small a model, and every machine then takes the same steps.
        compute=json.dumps({"gpus_per_node": 1} if visible_gpus(os.environ) else {"processes": 1}),
    )
    if not run_file.exists():
        write_atomic(run_file, text)
    elif run_file.read_text(encoding="utf-8") != text:
        raise errors.ConfigError(
            f"{run_file} exists and is not what this demo runs; expected no such file, or the demo's own. "
            "Choose another folder with --output, or remove this one. Nothing was written."
        )


def compare(run_dir: Path, task: str = "causal_lm") -> list[Answer]:
    """Ask the model of a run every held-out request, with its adapter and without."""
    from kubetune.inference.generate import Sampling, answer, load_run

    chats = [json.loads(line)["messages"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    prompts, expected = [chat[0]["content"] for chat in chats], [chat[1]["content"] for chat in chats]
    if task == "preference":
        expected = [PREFERRED] * len(chats)
    loaded, sampling = load_run(run_dir), Sampling(max_new_tokens=64)
    after = answer(loaded, prompts, sampling)
    with loaded.as_base() as base:
        before = answer(base, prompts, sampling)
    return [Answer(*row) for row in zip(prompts, expected, before, after, strict=True)]


def exact_match(expected: Sequence[str], answers: Sequence[str]) -> float:
    """Share of the answers that are what was expected, to the letter."""
    return sum(e == a.strip() for e, a in zip(expected, answers, strict=True)) / len(expected)


def opened_well(expected: Sequence[str], answers: Sequence[str]) -> float:
    """Share of the answers that open as expected."""
    return sum(a.startswith(e) for e, a in zip(expected, answers, strict=True)) / len(expected)


def show(answers: Sequence[Answer], run_file: Path, run_dir: Path, seconds: float, task: str = "causal_lm") -> None:
    """Print the comparison: how many answers are right, the first prompts with both, and what to do next."""
    expected = [row.expected for row in answers]
    title, share = ("exact match", exact_match) if task == "causal_lm" else (PREFERRED, opened_well)
    lines = [
        (title, f"on {len(answers)} requests that the training data do not hold"),
        ("  before", f"{share(expected, [row.before for row in answers]):.0%}"),
        ("  after", f"{share(expected, [row.after for row in answers]):.0%}"),
    ]
    for row in answers[:SHOWN]:
        lines += [("", ""), ("request", row.prompt), ("  before", row.before), ("  after", row.after)]
    lines += [
        ("", ""),
        ("adapter", str(run_dir / "checkpoints" / "best")),
        ("run file", str(run_file)),
        ("time", f"{seconds:.0f} s"),
        ("try next", f'{_command()} generate {run_dir} "{NEXT_PROMPT}"'),
        ("", f"{_command()} report {run_dir}"),
    ]
    print()
    for label, text in lines:
        print(f"{label:<12} {text}".rstrip())


def _command() -> str:
    """The words that call kubetune from where the user is: its name only when the shell would find it."""
    return "kubetune" if shutil.which("kubetune") else os.path.relpath(sys.argv[0])
