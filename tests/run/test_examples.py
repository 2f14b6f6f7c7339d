"""Every example trains, with a tiny model in place of the one it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetune import cli
from kubetune.metrics import read_metrics
from tests.architectures import save_model

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    p for p in (ROOT / "examples").glob("*.yaml") if "causal_lm" in p.read_text() or "task:" not in p.read_text()
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_trains(example, model, tmp_path):
    output, cache = tmp_path / "out", tmp_path / "cache"
    overrides = [f"model={model}", f"output={output}", f"data.cache={cache}", "training.max_steps=2"]
    assert cli.main(["train", str(example), *overrides, "training.save_steps=2"]) == 0
    assert [line["step"] for line in read_metrics(output) if "loss" in line] == [1, 2]
    assert (output / "checkpoints" / "last" / "manifest.json").is_file()
