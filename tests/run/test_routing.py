"""Routers that learn: their balance loss is plain transformers' for the whole global batch, however it is split."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kubetune.batching.batch import collate
from kubetune.batching.feed import Work
from kubetune.config.load import load_config
from kubetune.config.schema import Config, TrainingConfig
from kubetune.distributed.process_group import World
from kubetune.errors import ConfigError
from kubetune.models.acceleration import recompute_activations
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.mixtures.routing import watch
from kubetune.models.mixtures.tokens_by_expert import summary
from kubetune.models.padding_free import choose_attention, unwrap
from kubetune.models.prefix_sharing import why_not
from kubetune.reporting import write_report
from kubetune.reporting.expert_load import expert_load
from kubetune.rundir import metrics
from kubetune.rundir.status import progress
from kubetune.tasks import causal_lm
from tests import toy
from tests.architectures import (
    MIXTURE,
    PADDING_FREE,
    build_model,
    random_rows,
    relative_error,
    save_model,
    take_gradients,
)
from tests.hybrids import HYBRIDS
from tests.small_configs import settings

slow = pytest.mark.slow
FAMILIES = {
    **{name: PADDING_FREE[name] for name in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")},
    "granitemoe": {**MIXTURE, "num_experts_per_tok": 2},
    "qwen3_next": HYBRIDS["qwen3_next"],
    "deepseek_v4": settings("deepseek_v4"),  # whose first layer goes by a table of tokens
}
COEFFICIENT, Z = 0.3, 0.05
ROWS = random_rows((37, 5, 60, 21))
LABELS = sum(int(trained[1:].sum()) for _, trained in ROWS)


def of_transformers(model: Any) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return the loss, balance loss and gradients of one padded batch of all rows."""
    size = (len(ROWS), max(len(ids) for ids, _ in ROWS))
    inputs = torch.zeros(size).long()
    mask = torch.zeros(size).long()
    labels = torch.full(size, -100)
    for number, (ids, trained) in enumerate(ROWS):
        inputs[number, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        mask[number, : len(ids)] = 1
        labels[number, : len(ids)] = torch.where(
            torch.from_numpy(trained), inputs[number, : len(ids)], -100
        )
    model.set_attn_implementation("eager")
    model.router_aux_loss_coef = COEFFICIENT
    output = model(
        input_ids=inputs,
        attention_mask=mask,
        labels=labels,
        output_router_logits=True,
        use_cache=False,
    )
    kept = mask.bool().flatten()
    z = torch.cat([logits[kept] for logits in output.router_logits]).logsumexp(-1).square().mean()
    (output.loss + Z * z).backward()
    return (output.loss + Z * z).item(), output.aux_loss.item(), take_gradients(model)


def learner_of(model: Any, **settings: Any) -> Learner:
    learner = Learner(model, choose_attention(model))
    return replace(learner, routing=watch(unwrap(model), TrainingConfig(**settings)))


def a_step(
    learner: Learner, groups: list[list[int]]
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Return the loss, the measured numbers and the gradients of a step of these micro-batches."""
    batches = [collate([ROWS[row] for row in group]) for group in groups]
    work = Work(batches, LABELS, LABELS, sum(len(ids) for ids, _ in ROWS), len(ROWS))
    learner.routing.begin(work, World(), partial(causal_lm.TASK.evaluate, learner))
    loss = sum(float(causal_lm.TASK.backward(learner, batch, 1 / LABELS)) for batch in batches)
    return loss, learner.routing.measured(World()), take_gradients(learner.model)


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", *(pytest.param(name, marks=slow) for name in FAMILIES if name != "qwen3_moe")],
)
def test_the_balance_loss_is_that_of_transformers_for_any_split(name):
    model = build_model(name, FAMILIES[name], lora=False)
    expected, balance, gradients = of_transformers(model)
    learner = learner_of(model, router_aux_loss_coef=COEFFICIENT, router_z_loss_coef=Z)
    splits = [[[0, 1, 2, 3]], [[2, 0], [1, 3]], [[0], [1], [2], [3]]]
    for groups in splits if learner.route.padding_free else splits[2:]:
        loss, measured, actual = a_step(learner, groups)
        extra_loss = COEFFICIENT * measured["router_aux_loss"] + Z * measured["router_z_loss"]
        assert measured["router_aux_loss"] == pytest.approx(balance, rel=1e-6)
        assert loss + extra_loss == pytest.approx(expected, rel=1e-6)
        assert relative_error(actual, gradients) <= 2e-6


def test_without_the_balance_loss_the_gradient_is_another(monkeypatch):
    """The negative control: what is compared above depends on it, and on frequencies of the whole batch."""
    model = build_model("qwen3_moe", FAMILIES["qwen3_moe"], lora=False)
    _, _, gradients = of_transformers(model)
    _, measured, actual = a_step(learner_of(model, router_aux_loss_coef=0), [[0, 1], [2, 3]])
    assert "router_aux_loss" not in measured
    assert relative_error(actual, gradients) > 1e-3
    learner = learner_of(model, router_aux_loss_coef=COEFFICIENT, router_z_loss_coef=Z)
    monkeypatch.setattr(
        type(learner.routing), "begin", lambda *_: None
    )  # each by its own frequencies
    assert relative_error(a_step(learner, [[0], [1], [2], [3]])[2], gradients) > 1e-4


def test_recomputed_layers_and_rows_left_out_change_neither_loss_nor_load():
    model = build_model("qwen3_moe", FAMILIES["qwen3_moe"], lora=False)
    plain = a_step(learner_of(model, router_aux_loss_coef=COEFFICIENT), [[0, 1], [2, 3]])
    learner = learner_of(
        build_model("qwen3_moe", FAMILIES["qwen3_moe"], lora=False),
        router_aux_loss_coef=COEFFICIENT,
    )
    swap_forwards(learner.model, None, learner.undo)
    recompute_activations(learner.model)
    recomputed = a_step(learner, [[0, 1], [2, 3]])
    assert recomputed[:2] == (pytest.approx(plain[0], rel=1e-6), pytest.approx(plain[1], rel=1e-6))
    assert relative_error(recomputed[2], plain[2]) <= 2e-6


def test_the_start_names_the_z_loss(caplog):
    caplog.set_level("INFO", "kubetune")
    learner_of(build_model("qwen3_moe", FAMILIES["qwen3_moe"], lora=False), router_z_loss_coef=0.1)
    assert "balanced by a loss of weight 0.001; their z-loss has weight 0.1" in caplog.text


def test_a_frozen_router_is_not_balanced_and_may_not_be_asked_to(caplog):
    adapted = build_model("qwen3_moe", FAMILIES["qwen3_moe"])
    assert not learner_of(adapted).routing.balances
    with pytest.raises(
        ConfigError,
        match=r"_aux_loss_coef: found 0.1, but no router learns here; .*mlp.gate.weight",
    ):
        learner_of(adapted, router_aux_loss_coef=0.1)
    free = build_model("deepseek_v3", PADDING_FREE["deepseek_v3"], lora=False)
    assert not learner_of(free).routing.balances
    with pytest.raises(ConfigError, match=r"there is none for this family here; leave it out$"):
        learner_of(free, router_z_loss_coef=0.1)
    assert (
        watch(
            build_model("deepseek_v4", FAMILIES["deepseek_v4"], lora=False), TrainingConfig()
        ).routers
        == 3
    )
    jetmoe = build_model("jetmoe", settings("jetmoe"), lora=False)
    caplog.set_level("INFO", "kubetune")
    assert not watch(jetmoe, TrainingConfig()).balances
    assert "the routers learn, and nothing balances the load of the experts" in caplog.text
    trained = learner_of(build_model("qwen3_moe", FAMILIES["qwen3_moe"], lora=False))
    assert trained.routing.coefficients == (0.001, 0.0)
    assert "balance loss" in why_not(trained)


def test_the_load_is_summed_up():
    assert summary([[4, 4, 4, 4], [16, 0, 0, 0]]) == {
        "expert_load_max": 4.0,
        "expert_load_cv": pytest.approx(3**0.5 / 2),
        "experts_unused": 3 / 8,
        "dropped_tokens": 0,
    }


def test_a_page_tells_how_many_experts_got_how_much():
    layers = {"one": [0, 4, 4, 8], "idle": [0, 0]}
    load = expert_load({"steps": [3, 9], "layers": layers, "dropped_tokens": 5})
    assert load is not None
    assert (load.steps, load.dropped) == ((3, 9), 5)
    older = expert_load({"steps": [3, 9], "layers": layers})
    assert older is not None
    assert older.dropped is None
    assert load.rows == [
        ("one", [1, 0, 0, 0, 2, 1, 0], 3, 2.0),
        ("idle", [2, 0, 0, 0, 0, 0, 0], 0, 0.0),
    ]
    assert expert_load({}) is None


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    save_model(folder / "mixture", "qwen3_moe")
    return folder


def run_of(
    inputs: Path,
    run_dir: Path,
    world: int = 1,
    sections: dict[str, Any] | None = None,
    **training: Any,
) -> Any:
    settings = {
        "max_steps": 3,
        "eval_steps": 3,
        "save_steps": 3,
        "router_aux_loss_coef": 0.1,
        **training,
    }
    config = toy.make_config(
        inputs, settings, model=str(inputs / "mixture"), **{"lora": None, **(sections or {})}
    )
    return metrics.read_metrics(toy.finished(run_dir, config, world))


ADAPTERS = {"lora": {"r": 4, "target_parameters": ["mlp.gate.weight"]}}


@slow
@pytest.mark.parametrize(
    ("world", "sections", "training"),
    [
        pytest.param(1, {}, {"per_device_train_batch_size": 1}, id="smaller"),
        pytest.param(2, {}, {}, id="two ranks", marks=slow),
        pytest.param(2, {}, {"parallelism": "fsdp"}, id="fsdp", marks=slow),
        pytest.param(2, ADAPTERS, {}, id="adapters, two ranks", marks=slow),
        pytest.param(2, ADAPTERS, {"parallelism": "fsdp"}, id="adapters, fsdp", marks=slow),
    ],
)
def test_a_mixture_learns_the_same_however_its_steps_are_split(
    inputs, tmp_path, world, sections, training
):
    whole = run_of(inputs, tmp_path / "whole", 1, sections, per_device_train_batch_size=8)
    split = run_of(inputs, tmp_path / "split", world, sections, **training)
    assert {"router_aux_loss", "expert_load_max", "experts_unused", "dropped_tokens"} <= whole[
        0
    ].keys()
    for ours, theirs in zip(split, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    load = whole[-2]["expert_load_max"]
    assert progress(tmp_path / "whole")["experts"]["expert_load_max"] == load
    assert f"expert_load_max {load:.3g} " in toy.log_of(tmp_path / "whole")
    reports = [
        json.loads((tmp_path / name / metrics.EXPERTS).read_text()) for name in ("whole", "split")
    ]
    assert reports[0] == reports[1]
    assert reports[0]["steps"] == [1, 3]
    tokens = sum(line["tokens"] for line in whole if "loss" in line)
    assert {sum(counts) for counts in reports[0]["layers"].values()} == {2 * tokens}
    page = write_report([tmp_path / "whole"], tmp_path / "page.html").read_text()
    assert "<code>model.layers.1.mlp.experts</code>" in page
    (tmp_path / "whole" / metrics.EXPERTS).write_text('{"layers": 3}')
    assert (
        "experts.json is damaged (steps: Field required)"
        in write_report([tmp_path / "whole"], tmp_path / "page.html").read_text()
    )
    assert "Load of the experts" in page
    assert "Tokens dropped as an expert was full: 0; no expert has a capacity here" in page
    assert "Balance loss of the routers" in page


@slow
@pytest.mark.parametrize("sections", [{"lora": None}, ADAPTERS], ids=["full", "adapters"])
def test_a_killed_mixture_goes_on_bit_for_bit(inputs, tmp_path, sections):
    settings = {"max_steps": 6, "eval_steps": 3, "save_steps": 3, "router_aux_loss_coef": 0.1}
    config = toy.make_config(inputs, settings, model=str(inputs / "mixture"), **sections)
    whole = toy.digests(toy.finished(tmp_path / "whole", config))
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:step:5"}) == [-signal.SIGKILL]
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == whole


def test_a_loss_for_routers_that_cannot_learn_is_refused_by_the_config_alone(tmp_path):
    """Where names do not tell, the model decides when it is loaded."""

    def config(**lora: Any) -> Config:
        settings = {
            "model": "x",
            "data": {"train": "x"},
            "training": {"router_aux_loss_coef": 0.1},
            "lora": lora,
        }
        return Config.model_validate(settings)

    for plain in ({}, {"target_modules": ["q_proj", "gate_proj", "up_proj"]}):
        with pytest.raises(
            ValueError, match=r"_aux_loss_coef: found 0.1, but no router learns here; .*mlp.gate.w"
        ):
            config(**plain)
    file = tmp_path / "run.yaml"
    file.write_text("model: x\ndata: {train: x}\nlora: true\ntraining: {max_steps: 3}\n")
    with pytest.raises(ConfigError, match=r"^override: training.router_aux_loss_coef: found 0.1"):
        load_config(file, overrides=["training.router_aux_loss_coef=0.1"])
    for learning in (
        {"target_parameters": ["mlp.gate.weight"]},
        {"target_modules": ["q_proj", "router"]},
        {"target_modules": ".*gate"},
        {"modules_to_save": ["mlp"]},
    ):
        config(**learning)
