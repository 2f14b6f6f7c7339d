"""Preference tuning: each loss that of plain torch at any split, the reference asked once, runs resumable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kubetune import cli
from kubetune.config.metric_names import PREFERENCE_MEASURES
from kubetune.config.schema import Config, ModelConfig, PreferenceConfig
from kubetune.distributed.process_group import World
from kubetune.models.model_spec import ModelSpec
from kubetune.reporting.page import charts_of
from kubetune.reporting.reading import read_run
from kubetune.result.inference.evaluate_run import evaluate_run
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.checkpoints import State
from kubetune.rundir.status import read_status
from kubetune.tasks import causal_lm, preference
from kubetune.training.start import warm_up
from tests import toy
from tests.preferences import (
    LOSSES,
    Row,
    draw,
    logp,
    plain_loss,
    work_of,
    write_judged,
    write_pairs,
)
from tests.push_hub import TOKEN, serving

slow = pytest.mark.slow
EIGHT = draw(8)
ONE = World()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    ).train()


def measured(
    model: Any, folder: Path, settings: PreferenceConfig, size: int, rows: Sequence[Row] = EIGHT
) -> tuple[list[float], torch.Tensor]:
    """Return the loss and metrics of a step in micro-batches of `size`, and the whole gradient."""
    learner = causal_lm.TASK.learner_of(model, ModelSpec(ModelConfig(path=str(folder / "model"))))
    learner = replace(learner, preference=settings)
    assert learner.route.padding_free
    work = preference.TASK.with_batch_totals(learner, work_of(rows, size, settings), ONE)
    model.zero_grad()
    parts = [preference.TASK.backward(learner, batch, 1 / work.divisor) for batch in work.batches]
    return torch.stack(parts).sum(0).tolist(), gradient_of(model)


def of_loss(name: str) -> PreferenceConfig:
    return PreferenceConfig.model_validate({"loss": name, **LOSSES[name]})


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_plain_torch_however_the_batch_is_split(
    folder: Path, name: str
) -> None:
    settings = of_loss(name)
    model = loaded(folder)
    expected = plain_loss(model, EIGHT, settings)
    expected.backward()
    gradient = gradient_of(model)
    assert gradient.norm() > 0.1
    for size in (8, 4, 2, 1):
        (loss, *_), actual = measured(loaded(folder), folder, settings, size)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert float((actual - gradient).norm()) <= 1e-6 * float(gradient.norm())


def test_a_model_that_takes_one_sequence_at_a_time_learns_the_same(folder: Path) -> None:
    settings = PreferenceConfig.model_validate({"loss": "dpo"})
    model = loaded(folder)
    expected = plain_loss(model, EIGHT, settings)
    place = {"path": str(folder / "model"), "attention": "eager"}
    config = Config.model_validate({"model": place, "data": {"train": "none"}})
    learner = replace(
        causal_lm.TASK.learner_of(loaded(folder), ModelSpec.of(config)), preference=settings
    )
    assert not learner.route.padding_free
    work = preference.TASK.with_batch_totals(learner, work_of(EIGHT, 1, settings), ONE)
    loss = sum(
        preference.TASK.backward(learner, batch, 1 / work.divisor)[0].item()
        for batch in work.batches
    )
    assert loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_largest_batch_is_tried_as_a_step_of_its_own(folder: Path, name: str) -> None:
    settings = of_loss(name)
    model = loaded(folder)
    learner = causal_lm.TASK.learner_of(model, ModelSpec(ModelConfig(path=str(folder / "model"))))
    optimizer = SimpleNamespace(
        gradient_norm=lambda: float(gradient_of(model).norm()), clear_gradient=model.zero_grad
    )
    run: Any = SimpleNamespace(
        learner=replace(learner, preference=settings), task=preference.TASK, world=ONE, optimizer=optimizer,
        feed=SimpleNamespace(largest=lambda: work_of(EIGHT, 8, settings).batches[0]),
    )  # fmt: skip
    loss, norm = warm_up._learn_ahead(run, State())
    (expected, *_), gradient = measured(loaded(folder), folder, settings, 8)
    assert (loss, norm) == pytest.approx((expected, float(gradient.norm())), rel=1e-6)


# Whole runs.


def run_config(
    folder: Path,
    cache: Path,
    loss: str = "dpo",
    training: dict[str, Any] | None = None,
    **sections: Any,
) -> Config:
    data = (write_judged if loss == "kto" else write_pairs)(folder)
    return toy.make_config(
        folder,
        {"max_steps": 4, "eval_steps": 2, "save_steps": 2, **(training or {})},
        task="preference",
        preference={"loss": loss, **LOSSES[loss]},
        data={**data, "cache": str(cache)},
        **sections,
    )


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in metrics.read_events(run_dir) if event["event"] == name]


def require_alike(ours: Path, theirs: Path) -> None:
    for line, other in zip(metrics.read_metrics(ours), metrics.read_metrics(theirs), strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5)


REWARDS = ("reward chosen", "reward rejected")
FULL: dict[str, Any] = {"lora": None, "training": {"learning_rate": 1e-3}}


KL: dict[str, Any] = {"training": {"metric_for_best_model": "kl"}}


@pytest.mark.parametrize(
    ("loss", "sections"),
    [
        pytest.param("dpo+sft", {}, marks=pytest.mark.slow),
        pytest.param("kto", KL, marks=pytest.mark.slow),
        ("dpo", FULL),
    ],
)
def test_two_ranks_train_as_one_and_a_later_run_finds_the_reference(
    folder: Path, tmp_path: Path, loss: str, sections: dict[str, Any]
) -> None:
    config = run_config(folder, tmp_path / "cache", loss, **sections)
    two = toy.finished(tmp_path / "two", config, 2)
    alone = toy.finished(tmp_path / "one", config)
    require_alike(alone, two)
    assert [events(run, "reference")[0]["reused"] for run in (two, alone)] == [False, True]
    first, *_, last = (line for line in metrics.read_metrics(alone) if "loss" in line)
    assert {
        "accuracy",
        "margin",
        "reward_chosen",
        "reward_rejected",
        "logp_chosen",
        "logp_rejected",
    } <= first.keys()
    assert ("kl" in last) is (loss == "kto")
    if loss == "dpo":
        assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
        assert first["margin"] == pytest.approx(0, abs=1e-5)
    # The model before training is the reference, which prefers nothing to itself.
    base = json.loads((alone / metrics.BASE).read_text())["metrics"]
    if loss != "kto":
        assert base["eval_margin"] == pytest.approx(0, abs=1e-5)
    assert f"margin {base['eval_margin']:.4g} → " in toy.log_of(alone)
    shown = read_status(alone)["progress"]
    assert shown["measures"] == {name: last[name] for name in PREFERENCE_MEASURES if name in last}
    assert (
        f"loss {last['loss']:.4f} accuracy {last['accuracy']:.3g} margin"
        in (alone / "logs/rank-0.log").read_text()
    )
    charts = {chart.title: chart for chart in charts_of([read_run(alone)])}
    names = [line.label for line in charts["Rewards"].lines]
    assert names == [f"{kind}{name}" for name in REWARDS for kind in ("", "held-out ")]
    assert {"Accuracy", "Margin", "Log-probabilities of answers"} <= charts.keys()
    assert ("KL" in charts) is (loss == "kto")
    assert charts["Loss"].axis == ("loss an answer" if loss == "kto" else "loss a pair")
    evaluated = [line["eval_loss"] for line in metrics.read_metrics(alone) if "eval_loss" in line]
    assert evaluated == sorted(evaluated, reverse=True)
    if sections is KL:
        best = min(
            (line for line in metrics.read_metrics(alone) if "eval_kl" in line),
            key=lambda line: line["eval_kl"],
        )
        assert checkpoints.choose(alone, "best").resolve().name == f"step-{best['step']:06d}"
    by_hand, *_, noted = evaluate_run(alone, "last").metrics, *metrics.read_metrics(alone)
    assert by_hand == pytest.approx(
        {name: value for name, value in noted.items() if name.startswith("eval_")}
    )
    assert len(by_hand) >= 7


@slow
def test_a_kill_in_the_reference_or_in_training_changes_no_bit(
    folder: Path, tmp_path: Path
) -> None:
    whole = toy.finished(tmp_path / "whole", run_config(folder, tmp_path / "other-cache"))
    run_dir = toy.make_run(tmp_path / "killed", run_config(folder, tmp_path / "cache"))
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:reference:4"}) == [-9]
    assert len(list((tmp_path / "cache").rglob("*.parts/*.npz"))) == 3
    assert toy.train(run_dir, 2, environ={"KUBETUNE_FAULT": "signal 9:reference:3:1"})[1] == -9
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:micro-batch:6"}) == [-9]
    assert toy.train(run_dir) == [0]
    assert [event["reused"] for event in events(run_dir, "reference")] == [False, True]
    assert not list((tmp_path / "cache").rglob("*.parts"))
    assert toy.digests(run_dir) == toy.digests(whole)


PEERS = Path(__file__).parents[2] / "benchmarks" / ".venv-peers" / "bin" / "python"


@slow
@pytest.mark.skipif(
    not PEERS.exists(), reason="TRL has an environment of its own: benchmarks/peers/venv makes it"
)
def test_losses_and_gradients_are_those_of_trl(folder: Path, tmp_path: Path) -> None:
    # Two of ours TRL has not. Its ORPO learns the prompt as well, which is none where it has one token.
    rows = {name: EIGHT for name in LOSSES if name not in ("cdpo", "free")}
    rows["orpo"] = [row._replace(prompt=row.prompt[:1]) for row in EIGHT]
    cases = [
        {"name": name, "rows": rows[name], "settings": of_loss(name).model_dump()} for name in rows
    ]
    order = tmp_path / "order.json"
    order.write_text(
        json.dumps({"model": str(folder / "model"), "out": str(tmp_path), "cases": cases})
    )
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": ""}
    subprocess.run(
        [PEERS, "-m", "tests.peers.trl_losses", order], check=True, cwd=root, env=environ
    )
    losses = json.loads((tmp_path / "losses.json").read_text())
    for name in rows:
        model = loaded(folder)
        (loss, *_), _ = measured(model, folder, of_loss(name), 4, rows[name])
        assert loss == pytest.approx(losses[name], rel=1e-6), name
        theirs = load_file(tmp_path / f"{name}.safetensors")
        ours = {key: p.grad for key, p in model.named_parameters() if key in theirs}
        assert ours.keys() == theirs.keys()
        difference = (
            sum(float((ours[key] - theirs[key]).double().square().sum()) for key in theirs) ** 0.5
        )
        assert (
            difference
            <= 1e-6 * sum(float(g.double().square().sum()) for g in theirs.values()) ** 0.5
        ), name


@slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_compiled_run_learns_as_a_plain_one(folder: Path, tmp_path: Path, loss: str) -> None:
    plain, compiled = (
        toy.finished(
            tmp_path / str(compile),
            run_config(folder, tmp_path / "cache", loss, {"compile": compile}),
        )
        for compile in (False, True)
    )
    assert toy.losses(compiled) == pytest.approx(toy.losses(plain), rel=1e-4)


@slow
@pytest.mark.parametrize("sections", [{}, {"lora": None}], ids=["lora", "full"])
def test_a_sharded_model_learns_as_copies_do(
    folder: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    runs = [
        toy.finished(
            tmp_path / kind,
            run_config(
                folder,
                tmp_path / "cache",
                "dpo+sft",
                {"learning_rate": 1e-3, "parallelism": kind},
                **sections,
            ),
            2,
        )
        for kind in ("ddp", "fsdp")
    ]
    assert toy.losses(runs[1]) == pytest.approx(toy.losses(runs[0]), abs=1e-5)


@slow
def test_a_stopped_run_goes_on_and_its_result_goes_where_others_go(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(folder, tmp_path / "cache")
    whole = toy.finished(tmp_path / "whole", config)
    run_dir = toy.make_run(tmp_path / "cut", config)
    assert toy.train(
        run_dir, environ={"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:2:0"}
    ) == [143]
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(whole)
    for verb, *words in (["export"], ["export", "--merge"], ["serve", "--render", "--merged"]):
        assert cli.main([verb, str(run_dir), *words]) == 0
    assert "vllm" in capsys.readouterr().out
    merged = next(run_dir.glob("exports/*-merged"))
    assert "ollama create tuned" in (merged / "README.md").read_text()
    assert (merged / "Modelfile").read_text().startswith("# ollama create")
    row = draw(1)[0]
    after, before = (logp(AutoModelForCausalLM.from_pretrained(path), row.prompt, row.answers[0])
                    for path in (merged, folder / "model"))  # fmt: skip
    assert abs(after - before) > 0.01  # the export itself proved what it says
    with serving() as hub:
        environ = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
        }
        environ.pop("HF_HUB_OFFLINE", None)
        command = [
            sys.executable,
            "-m",
            "kubetune",
            "push",
            str(run_dir),
            "org/preferring",
            "--merge",
        ]
        pushed = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert pushed.returncode == 0, pushed.stderr
        assert "preference" in hub.files("org/preferring")["README.md"].decode()


@slow
def test_a_run_goes_on_with_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    config = run_config(folder, tmp_path / "cache")
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert toy.train(run_dir, 2, environ={"KUBETUNE_FAULT": "signal 9:micro-batch:4:1"})[1] == -9
    assert toy.train(run_dir) == [0]
    assert toy.losses(run_dir) == pytest.approx(
        toy.losses(toy.finished(tmp_path / "one", config)), abs=1e-5
    )
