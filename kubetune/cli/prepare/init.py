"""`kubetune init`: a commented starter file, on the terminal or in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kubetune.base.files import write_atomic
from kubetune.base.humanize import shell_word, visible
from kubetune.errors import ConfigError

STARTER = """\
# One run of kubetune. `kubetune plan run.yaml` shows what it comes to, `kubetune train run.yaml` runs it.
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
# output: outputs/my-run        # default: outputs/MODEL/METHOD-lenN-TIME

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
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it there instead of printing it"
    )
    parser.add_argument(
        "--task", choices=TASKS, default="causal_lm", help="kind of run (default causal_lm)"
    )
    parser.add_argument(
        "--schema", action="store_true", help="the JSON Schema of run files for editors instead"
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the starter file. Raise ConfigError rather than overwrite anything."""
    text = _schema_text() if args.schema else starter(args.task)
    if args.output is None:
        print(text, end="")
        return 0
    if args.output.exists():
        raise ConfigError(
            f"{args.output} exists already; choose another name, or remove it. Nothing was written."
        )
    write_atomic(args.output, text)
    print(visible(f"wrote {args.output}"))
    if not args.schema:
        print(f"edit it, then: kubetune plan {shell_word(args.output)}")
    return 0


def starter(task: str) -> str:
    """Return the starter file of a task."""
    text = STARTER.replace(TASKS["causal_lm"], TASKS[task])
    if task != "causal_lm":
        from kubetune.config.schema import LEARNING_RATES

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
