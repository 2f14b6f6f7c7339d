"""`kubetune demo`: fine-tune the embedded model on the embedded data, offline, and show what it learned.

It writes a run file such as a user would write, trains as `kubetune train` does, and shows what the model answered in
the evaluations, before training and with the best checkpoint. `--task grpo` starts from a second embedded model, which
was trained on 72 examples and so half knows the commands, and learns by reward alone. `--task distill` trains the model
as the plain demo does, then lets a third embedded model, of a quarter of the size, learn from it; the same small model
is also trained without a teacher, and a paired test compares the two.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kubetune import cli, errors
from kubetune.base.files import write_atomic
from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import shell_word
from kubetune.base.processes import usable_cores
from kubetune.cli.program import program
from kubetune.rundir import metrics

# A model and data that are part of the package.
EMBEDDED = Path(__file__).parent / "embedded"

SHOWN = 3  # requests with their answers
NEXT_PROMPT = "Please bounce wallet in staging."

# Both ways of training the student of `--task distill`.
_OF_STUDENT = """\
evaluation:
  generate: {{metric: exact_match, max_new_tokens: 64, batch_size: 50}}
training:
  num_train_epochs: 6
  global_batch_size: 16
  per_device_train_batch_size: 16
  learning_rate: 4e-3        # a model this small bears more than the default
  metric_for_best_model: eval_exact_match
  logging_steps: 10
output: {output}
compute: {compute}
"""

RUN_FILES = {
    "causal_lm": """\
# What `kubetune demo` runs. `kubetune train` with this file does the same.
name: demo
model: {model}        # 0.8 M parameters; chats about services in prose
data:
  train: {train}      # 1,200 requests in English, answered by kubectl commands
  eval: {held_out}   # 100 more, which the former do not hold
  max_length: 128
lora: {{r: 16, dropout: 0.1}}
evaluation:
  generate: {{metric: exact_match, max_new_tokens: 64, batch_size: 50}}   # let it answer those, at each evaluation
training:
  num_train_epochs: 3
  global_batch_size: 16
  per_device_train_batch_size: 8
  learning_rate: 4e-3        # a model this small bears more than the default
  metric_for_best_model: eval_exact_match
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
evaluation:
  generate: {{metric: regex, pattern: '^Of course\\.', max_new_tokens: 64, batch_size: 50}}
training:
  global_batch_size: 16
  per_device_train_batch_size: 8
  learning_rate: 1e-3
  metric_for_best_model: accuracy
  logging_steps: 5
output: {output}
compute: {compute}
""",
    "distill": """\
# What `kubetune demo --task distill` runs. `kubetune train` with this file does the same.
name: demo-distill
task: distill
model: {model}        # 0.18 M parameters; chats about services in prose
data:
  train: {train}      # 1,200 requests in English, answered by kubectl commands
  eval: {held_out}   # 100 more, which the former do not hold
  max_length: 128
distill:
  teacher: {teacher}   # the model of the plain demo, trained; 0.79 M parameters
  lmbda: 0                   # at each token of the answers of the data
  beta: 0                    # KL(teacher ‖ student)
"""
    + _OF_STUDENT,
    "sft": """\
# What `kubetune demo --task distill` compares with: the same model, requests and steps without a teacher.
name: demo-distill-sft
model: {model}        # 0.18 M parameters; chats about services in prose
data:
  train: {train}      # 1,200 requests in English, answered by kubectl commands
  eval: {held_out}   # 100 more, which the former do not hold
  max_length: 128
"""
    + _OF_STUDENT,
    "grpo": """\
# What `kubetune demo --task grpo` runs. `kubetune train` with this file does the same.
name: demo-grpo
task: grpo
model: {model}        # 0.8 M parameters; was shown 72 commands, and mixes names and numbers up
data:
  train: {train}      # 1,200 requests; their commands are not shown to the model, but compared with its own
  eval: {held_out}   # 100 more, which the former do not hold
  max_length: 128
lora: {{r: 16}}
grpo:
  num_generations: 8         # answers to each request
  temperature: 0.7           # at 1 fewer answers are right, and it learns more slowly
  max_completion_length: 24
  generation_batch_size: 128   # each of two processes draws half of them
rewards:
  - exact_match
  - {{file: {rewards}, function: graded}}   # the right verb, and how much of the rest is right
evaluation:
  generate: {{metric: exact_match, max_new_tokens: 32, batch_size: 100, samples: 8}}
training:
  max_steps: 120
  global_batch_size: 32      # requests, so 256 answers
  per_device_train_batch_size: 128
  learning_rate: 3e-3        # a model this small bears more than the default
  lr_scheduler_type: linear
  warmup_steps: 10
  seed: 7                    # of what is drawn in training; evaluations have numbers of their own
  eval_steps: 60
  metric_for_best_model: exact_match
  logging_steps: 10
output: {output}
compute: {compute}
""",
}

# Folders, models, files of training data, and what the share of right answers is called, by task.
FOLDERS = {
    "causal_lm": "outputs/demo",
    "preference": "outputs/demo-preference",
    "distill": "outputs/demo-distill",
    "grpo": "outputs/demo-grpo",
}
MODELS = {
    "causal_lm": "model",
    "preference": "model",
    "distill": "student",
    "sft": "student",
    "grpo": "half_taught",
}
DATA = {**dict.fromkeys(RUN_FILES, "train.jsonl"), "preference": "pairs.jsonl"}
TITLES = {**dict.fromkeys(RUN_FILES, "exact match"), "preference": "Of course."}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="default: outputs/demo, outputs/demo-preference, outputs/demo-distill or outputs/demo-grpo",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show every log line on a terminal"
    )
    parser.add_argument(
        "--task",
        choices=FOLDERS,
        default="causal_lm",
        help="preference: learn another style from pairs of answers; distill: let a smaller model learn from the trained "
        "one; grpo: learn from rewards, with a half-trained model",
    )


def run(args: argparse.Namespace) -> int:
    """Train, or go on after a stop, and print what the model says before and after.

    Raise ConfigError where something else lies in DIR.
    """
    began = time.monotonic()
    folder = args.output
    if folder is None:
        folder = Path(FOLDERS[args.task])
    # Folders of what is trained, by task.
    folders = {args.task: folder}
    if args.task == "distill":
        # The trained model of the plain demo teaches, and the same student learns without it too.
        teacher = folder / "teacher"
        if args.output is None:
            teacher = Path(FOLDERS["causal_lm"])
        folders = {"causal_lm": teacher, "sft": folder / "sft", "distill": folder}
    for task, place in folders.items():
        write_run_file(place, task, teacher=folders.get("causal_lm", folder) / "run")

    # So small a model gains nothing from a second thread, and loses much where other programs want the cores too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for place in folders.values():
        code = _train(place, verbose=args.verbose)
        if code:
            return code
    show(folders, args.task, time.monotonic() - began)
    return errors.OK


def _train(folder: Path, *, verbose: bool) -> int:
    """Train by the run file in a folder. Return the exit code."""
    run_file = folder / "run.yaml"
    print(f"kubetune train {shell_word(run_file)}", flush=True)
    command = ["train", str(run_file)]
    if verbose:
        command.append("--verbose")
    code = cli.main(command)
    if code == errors.PREEMPTED:
        print(
            f"Stopped. The same command goes on from there; to start afresh, remove {folder} first."
        )
    return code


def write_run_file(folder: Path, task: str, teacher: Path) -> None:
    """Write the demo's run file unless it is there. Raise ConfigError rather than overwrite another.

    `teacher`: the run whose model teaches, if one does.
    """
    run_file = folder / "run.yaml"
    # One process is enough for so small a model, and every machine then takes the same steps.
    compute = {"processes": 1}
    if task == "grpo":
        # Drawing is most of the work. Two processes draw the same answers in about half of the time.
        compute = {"processes": min(2, usable_cores())}
    if visible_gpus(os.environ):
        compute = {"gpus_per_node": 1}
    data = EMBEDDED / "data"
    # JSON, which is YAML too, quotes what a path may hold.
    text = RUN_FILES[task].format(
        model=json.dumps(str(EMBEDDED / MODELS[task])),
        train=json.dumps(str(data / DATA[task])),
        held_out=json.dumps(str(data / "heldout.jsonl")),
        rewards=json.dumps(str(data / "rewards.py")),
        output=json.dumps(str(folder / "run")),
        teacher=json.dumps(str(teacher)),
        compute=json.dumps(compute),
    )
    if not run_file.exists():
        write_atomic(run_file, text)
    elif run_file.read_text(encoding="utf-8") != text:
        raise errors.ConfigError(
            f"{run_file} exists and is not what this demo runs; expected no such file, or the demo's own. "
            "Choose another folder with --output, or remove this one. Nothing was written."
        )


def show(folders: Mapping[str, Path], task: str, seconds: float) -> None:
    """Print how many answers are right, the first of them before and after, and what to do next.

    `folders`: those of all that was trained, by task.
    """
    run_dir = folders[task] / "run"
    verdict = metrics.read_verdict(run_dir)
    by_name = {line["metric"]: line for line in verdict["answers"]}
    reward = by_name.pop("reward", None)
    measured, *of_drawn = by_name.values()
    lines = [
        (
            TITLES[task],
            f"on {measured['rows']} requests that the training data do not hold, greedy answers",
        ),
        ("  before", f"{measured['before']:.0%}"),
        ("  after", f"{measured['after']:.0%}"),
    ]
    for drawn in of_drawn:
        # exact_match_pass_at_8: drawn answers, in place of the likeliest one
        title = f"pass@{drawn['metric'].rpartition('_')[2]}"
        how = drawn.get("how", "drawn")
        lines.append((title, f"{drawn['before']:.0%} → {drawn['after']:.0%}, {how}"))
    if reward is not None:
        lines.append(("reward", f"{reward['before']:.2f} → {reward['after']:.2f}"))
    if task == "grpo":
        lines += in_training(run_dir)
    if task == "distill":
        lines += against_sft(folders)

    lines += shown_answers(run_dir, verdict["step"])
    lines += [
        ("", ""),
        ("model" if task == "distill" else "adapter", str(run_dir / "checkpoints" / "best")),
        ("run file", str(folders[task] / "run.yaml")),
        ("time", f"{seconds:.0f} s"),
        ("try next", f'{program()} generate {shell_word(run_dir)} "{NEXT_PROMPT}"'),
        ("", f"{program()} report {shell_word(run_dir)}"),
    ]
    if task == "distill":
        sft = shell_word(folders["sft"] / "run")
        lines.append(("", f"{program()} evaluate {shell_word(run_dir)} --compare {sft}"))
    print()
    for label, text in lines:
        print(f"{label:<12} {text}".rstrip())


def shown_answers(run_dir: Path, step: int) -> list[tuple[str, str]]:
    """Return some of the requests, with the answers before training (step 0) and of the best checkpoint."""
    before = answers(run_dir, 0)
    after = answers(run_dir, step)
    lines = []
    for asked in metrics.read_lines(run_dir / metrics.ANSWERS / "questions.jsonl")[:SHOWN]:
        # The built-in model's template has names of roles around what is asked.
        request = asked["prompt"].removeprefix("user\n").partition("\n")[0]
        lines += [
            ("", ""),
            ("request", request),
            ("  before", before[asked["row"]]),
            ("  after", after[asked["row"]]),
        ]
    return lines


def in_training(run_dir: Path) -> list[tuple[str, str]]:
    """Return how the answers that the model learnt from changed, from the first to the last step."""
    steps = [line for line in metrics.read_metrics(run_dir) if "reward" in line]
    first = steps[0]
    last = steps[-1]
    entropy = f"{first['entropy']:.2f} → {last['entropy']:.2f} nats a token"
    length = f"{first['completion_length']:.1f} → {last['completion_length']:.1f} tokens an answer"
    return [("entropy", entropy), ("length", length)]


def against_sft(folders: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Return what the teacher knows, what the student learns without it, and whether that differs by more than chance."""
    from kubetune.result.inference.compare import compare_runs

    run_dirs = {task: folder / "run" for task, folder in folders.items()}
    of_teacher = metrics.read_verdict(run_dirs["causal_lm"])["answers"][0]["after"]
    measured, *_ = compare_runs(run_dirs["distill"], str(run_dirs["sft"]))
    paired = measured.paired
    if paired.p_value > 0.05:
        result = "which may be chance"
    elif paired.difference > 0:
        result = "so the teacher helps"
    else:
        result = "so the teacher does harm"
    counts = f"{paired.gained} gained, {paired.lost} lost by the teacher"
    return [
        ("  teacher", f"{of_teacher:.0%}, 4.3 times as large"),
        (
            "  alone",
            f"{measured.before:.0%}, the same student by supervised fine-tuning on the same requests",
        ),
        ("  test", f"{counts}: p {paired.p_value:.2g} ({paired.test}), {result}"),
    ]


def answers(run_dir: Path, step: int) -> dict[int, str]:
    """Return the answers of the evaluation after `step` steps, by row."""
    lines = metrics.read_lines(run_dir / metrics.ANSWERS / f"step-{step:06d}.jsonl")
    return {line["row"]: line["answer"] for line in lines}
