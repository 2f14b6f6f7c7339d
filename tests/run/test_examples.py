"""Every example trains, with a tiny model in place of the one it names."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.plan.plan import make_plan
from kubetune.rundir.metrics import read_metrics
from tests import hub, reviews, toy
from tests.architectures import save_model
from tests.pictures import save_seeing_model, write_questions

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
# What they show is trained by other tests too.
SLOW = (
    "fire-qwen3vl-32b",
    "mixture",
    "other-spellings",
    "preference-images",
    "several-processes",
    "shard-base",
    "sst2-distilbert-full",
    "volcano-qwen2.5vl-7b",
)
SENTENCES = ROOT / "examples" / "data" / "sst2.tsv"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save a tiny model for each task, and of each kind for classification."""
    folder = tmp_path_factory.mktemp("models")
    classifiers = {kind: reviews.save_model(folder / kind, kind) for kind in ("bert", "distilbert")}
    seeing = {name: save_seeing_model(folder / name, name) for name in ("qwen2_5_vl", "qwen3_vl")}
    write_questions(folder, "questions", 12, text_rows=4)
    return {
        "causal_lm": save_model(folder / "qwen3", "qwen3"),
        **classifiers,
        **seeing,
        "folder": folder,
    }


def offline(example, models, folder):
    """Return overrides for two steps in a folder, on this machine alone."""
    short = ["training.max_steps=2", "training.save_steps=2"]
    return [
        f"output={folder / 'out'}",
        f"data.cache={folder / 'cache'}",
        *short,
        *substitutes(example, models),
    ]


def substitutes(example, models):
    """Put local inputs in the place of what an example has from the hub, and of GPUs and nodes."""
    config = load_config(example)
    if config.preference.images:
        return [f"model={models['qwen2_5_vl']}"]
    if config.task == "distill":
        return [f"model={models['causal_lm']}", f"distill.teacher={models['causal_lm']}"]
    if config.task in ("causal_lm", "grpo", "preference", "reward_model"):
        here = (
            ["compute.gpus_per_node=0", "compute.processes=2"]
            if config.compute.gpus_per_node
            else []
        )
        return [f"model={models['causal_lm']}", *here]
    if config.task == "vision_language":
        name = "qwen3_vl" if "Qwen3" in config.model.path else "qwen2_5_vl"
        questions = models["folder"] / "questions.jsonl"
        here = [
            "compute.gpus_per_node=0",
            "quantization=none",
            "training.gradient_accumulation_steps=null",
        ]
        size = [
            "training.global_batch_size=4",
            "compute.processes=2" if name == "qwen3_vl" else "compute.processes=1",
        ]
        return [
            f"model={models[name]}",
            f"data.train={questions}",
            f"data.eval={questions}",
            *here,
            *size,
        ]
    kind = "distilbert" if "distilbert" in config.model.path else "bert"
    local = (
        ["compute.nodes=1", "compute.gpus_per_node=0", "compute.processes=2"]
        if config.compute.nodes > 1
        else []
    )
    return [f"model={models[kind]}", f"data.train={SENTENCES}", f"data.eval={SENTENCES}", *local]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else [])
        for p in EXAMPLES
    ],
)
def test_the_example_trains(example, models, tmp_path):
    config = load_config(example, overrides=offline(example, models, tmp_path))
    require_trained(toy.finished(tmp_path / "out", config, make_plan(config).world_size), config)


@pytest.mark.slow
@pytest.mark.parametrize("example", [pytest.param(p, id=p.stem) for p in EXAMPLES])
def test_the_example_trains_by_the_command(example, models, tmp_path):
    assert cli.main(["train", str(example), *offline(example, models, tmp_path)]) == 0
    require_trained(tmp_path / "out", load_config(example))


def require_trained(run_dir, config):
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert (run_dir / "checkpoints" / "last" / "manifest.json").is_file()
    if config.task == "sequence_classification":
        assert 0 <= lines[-1]["eval_accuracy"] <= 1


CARD = b"""---
configs:
- config_name: sst2
  data_files:
  - {split: train, path: sst2/train-*}
  - {split: validation, path: sst2/validation-*}
---
"""


def parquet(lines):
    """Write rows of SENTENCES as the hub's GLUE has them."""
    rows = [line.rpartition("\t")[::2] for line in lines]
    columns = {"sentence": [text for text, _ in rows], "label": [int(label) for _, label in rows]}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({**columns, "idx": list(range(len(rows)))}), buffer)
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        ("sst2-bert-lora", []),
        ("sst2-distilbert-full", []),
        (
            "sst2-bert-lora",
            ["data.train=glue/sst2#20", "data.eval={path: glue/sst2, split: validation}"],
        ),
    ],
)
def test_the_example_works_from_a_hub(name, spelt, models, tmp_path):
    example = ROOT / "examples" / f"{name}.yaml"
    model = load_config(example).model.path
    folder = models["distilbert" if "distilbert" in model else "bert"]
    lines = SENTENCES.read_text().splitlines()[1:]
    data = {"README.md": CARD} | {f"sst2/{split}-00000-of-00001.parquet": parquet(lines)
                                  for split in ("train", "validation")}  # fmt: skip
    held = {
        model: {path.name: path.read_bytes() for path in folder.iterdir()},
        "datasets/nyu-mll/glue": data,
    }
    local = ["compute.nodes=1", "compute.gpus_per_node=0", "training.max_steps=2"]
    with hub.serving(held) as endpoint:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environ |= {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-m", "kubetune", "train", str(example), *local, *spelt]
        command.append(f"output={tmp_path / 'out'}")
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert 0 <= read_metrics(tmp_path / "out")[-1]["eval_accuracy"] <= 1
