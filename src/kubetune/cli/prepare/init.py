"""`kubetune init`: a run file made for data that it looks at, or else a commented starter file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.files import write_atomic
from kubetune.base.humanize import visible
from kubetune.errors import ConfigError, KubetuneError

if TYPE_CHECKING:
    from kubetune.config.schema import Config

# What `--model` takes for the model of `kubetune demo`, which comes with the package.
DEMO_MODEL = "demo"

STARTER = """\
# One run of kubetune. `kubetune plan run.yaml` shows what it will take, `kubetune train run.yaml` runs it.
# Every key with its range and default: docs/config.md. On the command line: training.learning_rate=1e-4

name: my-run                    # lower case letters, digits and dashes
task: causal_lm
model: Qwen/Qwen3-0.6B          # hub id or folder; for more than that, a section:
# model:
#   path: Qwen/Qwen3-0.6B
#   dtype: auto                 # auto | bfloat16 | float16 | float32
#   local_files_only: false     # true: never ask the hub

data:
  train: train.jsonl            # .jsonl, .csv, .parquet …, a folder, a hub id; train.jsonl#500 takes 500 rows
  # train: [{path: a.jsonl, weight: 2}, {path: b.parquet}]    # several sources
  eval: 0.05                    # share held out, or a file; leave out: no evaluation
  max_length: 2048              # tokens; longer rows are dropped and counted (overlong: drop | truncate | error)
  packing: true                 # whole sequences share micro-batches, kept apart: same loss, no padding
  train_on: assistant           # loss on answers only, or: all

lora:                           # without this section every parameter is trained
  r: 16
  alpha: 32                     # default: 2 × r
  dropout: 0.0
  target_modules: all-linear    # or a list such as [q_proj, v_proj]
quantization: none              # none | 4bit | 8bit | auto: of the frozen base

training:
  num_train_epochs: 1           # or max_steps: 100
  global_batch_size: 32         # samples per step over all processes; accumulation follows from it
  per_device_train_batch_size: 1
  learning_rate: 2e-4           # default: 2e-4 for LoRA, 1e-5 for full training
  lr_scheduler_type: cosine     # cosine | linear | constant
  warmup_ratio: 0.03
  weight_decay: 0.0
  max_grad_norm: 1.0
  eval_steps: epoch             # a number of steps, or epoch
  save_steps: epoch
  save_total_limit: 3           # checkpoints kept, besides best and last
  # early_stopping_patience: 3  # evaluations without improvement
  gradient_checkpointing: auto
  seed: 42

tracking:
  tensorboard: false
  # mlflow: {uri: ./mlruns, experiment: kubetune}
output: outputs/my-run          # the run directory: the same command continues the run in it

compute:
  nodes: 1
  # gpus_per_node: 8            # default: all that are there
  # processes: 2                # without GPUs
# kubernetes: {image: registry.example/kubetune:1.0, namespace: finetune}    # for `kubetune render`
"""

# Lines of the starter that say what is trained.
TASKS = {
    "causal_lm": "task: causal_lm",
    "preference": """\
task: preference
preference:
  loss: dpo                     # dpo | ipo | hinge | robust | orpo | simpo | cpo | kto (answers with a `label`)
  beta: 0.1
# train.jsonl: {"prompt": …, "chosen": …, "rejected": …}, or what other tools read: docs/preference.md""",
    "reward_model": """\
task: reward_model              # a score for each answer, trained on pairs
# preference: {center_coefficient: 0.01}    # pull of the scores towards a mean of zero
# train.jsonl: {"prompt": …, "chosen": …, "rejected": …}, or what other tools read: docs/preference.md""",
    "grpo": """\
task: grpo                      # learn by reward from answers of its own: docs/grpo.md
rewards: [exact_match]          # or numeric, contains, functions of yours
# train.jsonl: {"prompt": …, "solution": …}""",
    "sequence_classification": """\
task: sequence_classification
# classification: {labels: [bad, good]}      # default: the labels of the data
# train.jsonl: {"text": "A fine film.", "label": "good"}, or a table with these columns: docs/classification.md""",
    "vision_language": """\
task: vision_language
# train.jsonl: {"image": "cat.png", "prompt": "What is this?", "completion": "A cat."}: docs/vision.md""",
}
# Models to start from, of tasks that need another kind.
MODELS = {"vision_language": "Qwen/Qwen2.5-VL-3B-Instruct"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="file, folder or hub data set to make the run for"
    )
    parser.add_argument(
        "--model",
        metavar="ID",
        help="hub id or folder of the model; demo: the one that comes with kubetune (0.8 M parameters), to try things",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the run file here; left out: print it",
    )
    parser.add_argument(
        "--task", choices=TASKS, help="kind of run; left out: what suits DATA, or causal_lm"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="EXPECTED=NAME",
        help="columns of other names, such as prompt=question completion=solution",
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON Schema of run files instead, for editors",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the run file. Raise ConfigError rather than overwrite anything, DataError for unusable data."""
    if args.output is not None and args.output.exists():
        raise ConfigError(
            f"{args.output} exists already; choose another name, or remove it. Nothing was written."
        )
    if args.data is None and args.columns:
        raise ConfigError("command line: --columns names columns of DATA, which is missing")
    purpose = ""
    made: _Made | None = None
    if args.model == DEMO_MODEL:
        from kubetune.cli.local.demo import EMBEDDED

        args.model = str(EMBEDDED / "model")
    if args.schema:
        text = _schema_text()
    elif args.data is None:
        text = starter(args.task or "causal_lm", args.model)
    else:
        made = _for_data(args)
        text = made.text
        purpose = made.purpose

    if args.output is None:
        print(text, end="")
    else:
        write_atomic(args.output, text)
        print(visible(f"wrote {args.output}{purpose}"))
        for sentence in made.unused if made is not None else ():
            print(visible(sentence))
    if made is not None and made.problems:
        # The file is a start, and the problems say what to change in it.
        raise ConfigError(made.problems)
    if args.output is not None and not args.schema:
        from kubetune.cli.program import next_commands

        verb = "data check" if args.data is None else "plan"
        print(next_commands((verb, "train"), args.output))
    return 0


@dataclass(frozen=True)
class _Made:
    """A run file for data."""

    text: str
    purpose: str  # what it is for, in a few words
    unused: Sequence[str]  # sentences on what it leaves out of the data
    problems: Sequence[str]  # what keeps the run from training


def _for_data(args: argparse.Namespace) -> _Made:
    """Return the run file for data that are looked at."""
    from kubetune.base.yaml_reader import FileText
    from kubetune.cli.busy import busy
    from kubetune.cli.prepare.run_file import run_file
    from kubetune.config.load import load_config
    from kubetune.config.schema import SourceConfig
    from kubetune.data.inspect.proposal import propose
    from kubetune.data.inspect.proposed_values import model_facts
    from kubetune.supervisor.command_line import columns_of

    source = SourceConfig(path=args.data, columns=columns_of(args.columns or ()))
    with busy(f"looking at {visible(args.data)}"):
        proposal = propose(source, args.task)
        facts = model_facts(args.model, proposal.task.value, os.environ)
    text = run_file(proposal, args.model, facts)
    # A mistake of ours in the text is found before anything is written.
    config = load_config(FileText(args.output or Path("run.yaml"), text))
    with busy("judging the run"):
        problems = _problems(config, has_model=args.model is not None)
    purpose = f" ({proposal.task.value}: {proposal.task.reason})"
    return _Made(text, purpose, proposal.unused, problems)


def _problems(config: Config, *, has_model: bool) -> list[str]:
    """Return what keeps the run from training. `has_model`: False for an example that is to be replaced by a model."""
    if not has_model:
        return []
    from kubetune.library.plan_forecast import forecast_run
    from kubetune.library.verdict import sentences

    try:
        return list(forecast_run(config, os.environ).problems)
    except KubetuneError as error:
        return sentences([error])


def starter(task: str, model: str | None = None) -> str:
    """Return the starter file of a task."""
    text = STARTER.replace(TASKS["causal_lm"], TASKS[task])
    model = model or MODELS.get(task)
    if model:
        text = text.replace("Qwen/Qwen3-0.6B", json.dumps(model, ensure_ascii=False).strip('"'))
    if task in ("sequence_classification", "vision_language"):
        # Nothing of an answer is chosen to train on: a classifier has labels.
        if task == "sequence_classification":
            text = "".join(
                line for line in text.splitlines(keepends=True) if "train_on:" not in line
            )
    elif task != "causal_lm":
        from kubetune.config.schema.run_facts import LEARNING_RATES

        # These tasks compare answers, so `train_on` means nothing; and their learning rates are lower.
        lines = [line for line in text.splitlines(keepends=True) if "train_on:" not in line]
        of_adapters, of_all = (f"{rate:.0e}".replace("e-0", "e-") for rate in LEARNING_RATES[task])
        rates = f"{of_adapters}{' ' * (15 - len(of_adapters))}# default: {of_adapters} for LoRA, {of_all} for full"
        text = "".join(lines).replace(
            "2e-4           # default: 2e-4 for LoRA, 1e-5 for full", rates
        )
    return text


def _schema_text() -> str:
    from kubetune.config.json_schema import editor_schema

    return json.dumps(editor_schema(), indent=2, ensure_ascii=False) + "\n"
