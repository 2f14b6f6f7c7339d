"""The evaluation loss of each source, where the evaluated rows are of several: exact on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from kubetune.config.schema import Config, SourceConfig
from kubetune.data.prepared.prepare import prepare
from kubetune.data.reading.sources import names_of
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import make_plan
from kubetune.reporting import write_report
from kubetune.reporting.page import charts_of
from kubetune.reporting.reading import read_run
from kubetune.rundir import metrics
from kubetune.tasks import task_of
from kubetune.training.evaluation import evaluate
from tests import toy
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp("toy"))
    rows = (folder / "eval.jsonl").read_text().splitlines()
    for name, part in (("first", rows[:4]), ("second", rows[4:])):
        (folder / name).mkdir()
        (folder / name / "held-out.jsonl").write_text("\n".join(part) + "\n")
    return folder


def mixed(inputs: Path, **training: Any) -> Config:
    sources = [str(inputs / name / "held-out.jsonl") for name in ("first", "second")]
    return toy.make_config(inputs, training, data={"eval": sources})


def first_evaluation(world: World, config: Config) -> dict[str, float]:
    data = prepare(config)
    task = task_of(config.task_name)
    assert data.eval is not None
    learner = task.build(ModelSpec.of(config), config.training, world, Workload(0, data.labels))
    return evaluate(task, learner, data.eval, make_plan(config, world_size=world.size), world) or {}


def plain_losses(inputs: Path, config: Config) -> dict[str, float]:
    """Return the loss a token of each source by transformers and torch alone, a row at a time."""
    rows = prepare(config).eval
    assert rows is not None
    model = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
    sums = {name: [0.0, 0] for name in rows.names}
    for index in range(len(rows)):
        ids, trained = (torch.from_numpy(array.copy()) for array in rows.row(index))
        labels = ids.long().masked_fill(~trained.bool(), -100)[1:]
        with torch.no_grad():
            logits = model(input_ids=ids.long()[None]).logits[0, :-1]
        entry = sums[rows.names[rows.source[index]]]
        entry[0] += float(cross_entropy(logits.double(), labels, reduction="sum"))
        entry[1] += int((labels >= 0).sum())
    return {f"eval_loss/{name}": loss / count for name, (loss, count) in sums.items()}


@pytest.mark.slow
def test_each_source_has_the_loss_that_plain_torch_finds_on_any_number_of_ranks(
    inputs: Path,
) -> None:
    config = mixed(inputs)
    wanted = plain_losses(inputs, config)
    assert list(wanted) == ["eval_loss/first/held-out.jsonl", "eval_loss/second/held-out.jsonl"]
    for world_size in (1, 2, 3):
        for values in run_ranks(first_evaluation, world_size, config):
            assert {key: values[key] for key in wanted} == pytest.approx(wanted, rel=1e-6)


def test_a_run_records_and_shows_the_loss_of_each_source(inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.finished(tmp_path / "run", mixed(inputs, max_steps=4))
    lines = [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line]
    keys = ["eval_loss/first/held-out.jsonl", "eval_loss/second/held-out.jsonl"]
    assert all([key for key in line if "/" in key] == keys for line in lines)
    assert all(
        min(line[k] for k in keys) < line["eval_loss"] < max(line[k] for k in keys)
        for line in lines
    )
    assert "eval_loss by source: first/held-out.jsonl " in toy.log_of(run_dir)
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    assert "Held-out loss by source" in page
    assert "loss of first/held-out.jsonl" in page
    record = read_run(run_dir)
    classifier = replace(
        record, config=record.config.model_copy(update={"task": "sequence_classification"})
    )
    for run, axis in ((record, "loss a token"), (classifier, "loss a sample")):
        charts = {chart.name: chart for chart in charts_of([run])}
        assert {charts[name].axis for name in ("loss", "sources")} == {axis}
        assert [line.label for line in charts["sources"].lines] == [
            "first/held-out.jsonl",
            "second/held-out.jsonl",
        ]


def test_a_run_of_one_source_says_nothing_of_sources(inputs: Path) -> None:
    [values] = run_ranks(first_evaluation, 1, toy.make_config(inputs))
    assert not [key for key in values if "/" in key]


def test_a_classifier_has_losses_by_source_too(inputs: Path, tmp_path: Path) -> None:
    for name, offset in (("a", 0), ("b", 1)):
        rows = [
            {"text": f"fox {i} {name}", "label": ("yes", "no")[(i + offset) % 2]}
            for i in range(6 + offset)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sources = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    config = toy.make_config(
        inputs, task="sequence_classification", data={"train": sources, "eval": sources}
    )
    [values] = run_ranks(first_evaluation, 1, config)
    of_sources = [values["eval_loss/a.jsonl"] * 6, values["eval_loss/b.jsonl"] * 7]
    assert sum(of_sources) / 13 == pytest.approx(values["eval_loss"], rel=1e-12)


def test_names_are_as_long_as_it_takes_to_tell_sources_apart() -> None:
    def named(*sources: dict[str, Any]) -> tuple[str, ...]:
        return names_of([SourceConfig(**source) for source in sources])

    assert named({"path": "data/a.jsonl#50"}, {"path": "/x/b c:d.jsonl"}) == (
        "a.jsonl",
        "b c_d.jsonl",
    )
    assert named({"path": "glue", "subset": "sst2"}, {"path": "glue", "subset": "cola"}) == (
        "sst2",
        "cola",
    )
    assert named({"path": "a.jsonl", "range": (0, 5)}, {"path": "a.jsonl", "range": (5, 9)}) == (
        "a.jsonl 1",
        "a.jsonl 2",
    )
