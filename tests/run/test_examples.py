"""Every example trains, with a tiny model in place of the one it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.metrics import read_metrics
from tests import reviews
from tests.architectures import save_model

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if not path.stem.endswith("-cluster"))
SLOW = "sst2-distilbert-full"  # two ranks, as several-processes has them too
SENTENCES = ROOT / "examples" / "data" / "sst2.tsv"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model for each task, and of each kind for classification."""
    folder = tmp_path_factory.mktemp("models")
    classifiers = {kind: reviews.save_model(folder / kind, kind) for kind in ("bert", "distilbert")}
    return {"causal_lm": save_model(folder / "qwen3", "qwen3"), **classifiers}


def offline(example, models):
    """Overrides that take the place of what an example has from the hub, and of GPUs and nodes."""
    config = load_config(example)
    if config.task == "causal_lm":
        return [f"model={models['causal_lm']}"]
    kind = "distilbert" if "distilbert" in config.model.path else "bert"
    local = ["compute.nodes=1", "compute.gpus_per_node=0", "compute.processes=2"] if config.compute.nodes > 1 else []
    return [f"model={models[kind]}", f"data.train={SENTENCES}", f"data.eval={SENTENCES}", *local]


@pytest.mark.parametrize(
    "example", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem == SLOW else []) for p in EXAMPLES]
)
def test_the_example_trains(example, models, tmp_path):
    output, cache = tmp_path / "out", tmp_path / "cache"
    overrides = [*offline(example, models), f"output={output}", f"data.cache={cache}", "training.max_steps=2"]
    assert cli.main(["train", str(example), *overrides, "training.save_steps=2"]) == 0
    lines = read_metrics(output)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert (output / "checkpoints" / "last" / "manifest.json").is_file()
    if load_config(example).task == "sequence_classification":
        assert 0 <= lines[-1]["eval_accuracy"] <= 1
