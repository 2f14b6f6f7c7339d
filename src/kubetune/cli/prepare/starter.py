"""The commented run file that `kubetune init` writes for a task, where it has no data to look at."""

from __future__ import annotations

import json
from string import Template
from typing import Final

from kubetune.config.starting_values import VISION_MODEL

_TEMPLATE: Final = Template(
    """\
# One run of kubetune. `kubetune plan run.yaml` shows what it will take, `kubetune train run.yaml` runs it.
# Every key with its range and default: docs/config.md. On the command line: training.learning_rate=1e-4

name: my-run                    # lower case letters, digits and dashes
$task
model: $model          # hub id or folder; for more than that, a section:
# model:
#   path: $model
#   dtype: auto                 # auto | bfloat16 | float16 | float32
#   local_files_only: false     # true: never ask the hub

data:
  train: train.jsonl            # .jsonl, .csv, .parquet …, a folder, a hub id; train.jsonl#500 takes 500 rows
  # train: [{path: a.jsonl, weight: 2}, {path: b.parquet}]    # several sources
  eval: 0.05                    # share held out, or a file; leave out: no evaluation
  max_length: 2048              # tokens; longer rows are dropped and counted (overlong: drop | truncate | error)
  packing: true                 # whole sequences share micro-batches, kept apart: same loss, no padding
$train_on
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
  learning_rate: $learning_rate
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
)

# What the file says first of each task.
TASKS: Final = {
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
    "distill": """\
task: distill                   # learn the probabilities of a teacher: docs/distillation.md
distill:
  teacher: Qwen/Qwen3-4B        # of the same tokenizer: hub id, folder, run directory, or http://… of vLLM
  lmbda: 1.0                    # share of steps that learn from drawn answers; 0: from those of the data
  beta: 1.0                     # 0: forward divergence, 1: reverse, between: Jensen-Shannon
# train.jsonl: {"prompt": …, "completion": …}, or conversations""",
    "sequence_classification": """\
task: sequence_classification
# classification: {labels: [bad, good]}      # default: the labels of the data
# train.jsonl: {"text": "A fine film.", "label": "good"}, or a table with these columns: docs/classification.md""",
    "vision_language": """\
task: vision_language
# train.jsonl: {"image": "cat.png", "prompt": "What is this?", "completion": "A cat."}: docs/vision.md""",
}
_MODEL: Final = "Qwen/Qwen3-0.6B"
# Tasks whose model writes answers that the data have. Others compare answers, score them, draw them or tell labels apart.
_LEARNS_ANSWERS: Final = ("causal_lm", "distill", "vision_language")
_USUAL_RATES: Final = ("causal_lm", "distill", "sequence_classification", "vision_language")


def starter(task: str, model: str | None = None) -> str:
    """Return the starter file of a task. `model`: its hub id or folder; left out: one that suits the task."""
    if not model:
        model = VISION_MODEL if task == "vision_language" else _MODEL
    train_on = ""
    if task in _LEARNS_ANSWERS:
        train_on = "  train_on: assistant           # loss on answers only, or: all\n"
    return _TEMPLATE.substitute(
        task=TASKS[task],
        model=json.dumps(model, ensure_ascii=False).strip('"'),
        train_on=train_on,
        learning_rate=_learning_rate(task),
    )


def _learning_rate(task: str) -> str:
    """Return the learning rate of LoRA, with the defaults of the task as a comment."""
    rates = (2e-4, 1e-5)
    if task not in _USUAL_RATES:
        # Importing the schema takes longer than all the rest of `init`.
        from kubetune.config.schema.run_facts import LEARNING_RATES

        rates = LEARNING_RATES[task]
    of_adapters, of_all = (f"{rate:.0e}".replace("e-0", "e-") for rate in rates)
    return f"{of_adapters:<15}# default: {of_adapters} for LoRA, {of_all} for full training"
