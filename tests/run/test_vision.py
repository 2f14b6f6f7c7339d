"""Models that see: what they learn, that ranks and restarts change nothing, and that others can use the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetune import metrics
from tests import toy
from tests.pictures import save_seeing_model, write_questions

TRAINING = {
    "global_batch_size": 16,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 1,
    "eval_steps": 6,
    "save_steps": 6,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, and questions with and without images."""
    folder = tmp_path_factory.mktemp("vision")
    save_seeing_model(folder / "model")
    write_questions(folder, "train", 176, 1, text_rows=16)
    write_questions(folder, "eval", 32, 2)
    return folder


def make_config(inputs: Path, training: dict[str, Any] | None = None, **sections: Any) -> Any:
    settings = {"data": {"max_length": 128}, "lora": {"r": 16}, **sections}
    return toy.make_config(inputs, {**TRAINING, **(training or {})}, task="vision_language", **settings)


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Path:
    """A run that has learnt the colours."""
    return toy.finished(inputs / "run", make_config(inputs))


def accuracies(run_dir: Path) -> list[float]:
    return [line["eval_token_accuracy"] for line in metrics.read_metrics(run_dir) if "eval_loss" in line]


def test_learns_to_tell_colours(trained: Path) -> None:
    assert accuracies(trained)[-1] > 0.9
    log = (trained / "logs" / "rank-0.log").read_text()
    assert "padding-free streams" in log
