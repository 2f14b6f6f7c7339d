"""A task that learns from the data of `causal_lm` is one file and two lines: here one is added to a copy of the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.rundir import metrics
from tests import toy
from tests.package_copy import copy_package, put_before

TASK = '''
"""Unlearning (arXiv 2209.15189 has it): the loss of the answers goes up."""

from torch import Tensor

from kubetune.batching.batch import Batch
from kubetune.models.learner import Learner
from kubetune.tasks.causal_lm import CausalLM


class Unlearning(CausalLM):
    """Gradient ascent on the answers of the data."""

    def backward(self, learner: Learner, batch: Batch, scale: float) -> Tensor:
        """Add the gradient of a micro-batch, turned round, to the parameters, and return its loss."""
        return -super().backward(learner, batch, -scale)


TASK = Unlearning()
'''


@pytest.mark.slow
def test_a_new_task_is_one_file_and_two_lines(tmp_path: Path, inputs: Path) -> None:
    package = copy_package(tmp_path)
    (package / "tasks/unlearning.py").write_text(TASK)
    put_before(
        package / "tasks/__init__.py",
        '    "grpo": "kubetune.tasks.grpo.task",',
        '    "unlearning": "kubetune.tasks.unlearning",\n',
    )
    put_before(
        package / "config/schema/run_sections.py",
        '        "reward_model",\n',
        '        "unlearning",\n',
    )

    learning = toy.make_config(
        inputs, {"max_steps": 6, "eval_steps": 3, "save_steps": 6}, lora={"r": 4}
    )
    text = learning.model_dump_json(exclude_unset=True)
    unlearning = text.replace("{", '{"task": "unlearning", ', 1)
    (tmp_path / "run.yaml").write_text(unlearning)

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for words in (
        ["plan", "run.yaml"],
        ["train", "run.yaml", "output=run"],
        ["evaluate", "run"],
        ["export", "run", "-o", "exported"],
        ["report", "run"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kubetune", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    losses = []
    for line in metrics.read_metrics(tmp_path / "run"):
        if "eval_loss" in line:
            losses.append(line["eval_loss"])
    assert losses == sorted(losses)
    assert losses[-1] > losses[0] + 0.01
    assert "pipeline_tag: text-generation" in (tmp_path / "exported" / "README.md").read_text()
