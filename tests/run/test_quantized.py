"""LoRA on a quantised base, trained on the CPU: its gradient is that of the weights the codes mean."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kubetune.batching.batch import collate
from kubetune.batching.feed import Feed, rows_per_epoch
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.distributed.process_group import World
from kubetune.models import quantization
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.models.quantization import count
from kubetune.plan.forecast import Forecast, forecast
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork
from kubetune.result.inference.evaluate_run import evaluate_run
from kubetune.rundir import checkpoints, metrics
from kubetune.tasks import causal_lm, preference, sequence_classification
from kubetune.tasks.task import Task
from kubetune.training.reference.scores import AskedForAnswers, scores
from tests import reviews, toy
from tests.architectures import (
    random_rows,
    randomize_lora,
    relative_error,
    save_model,
    take_gradients,
)
from tests.preferences import write_pairs

bitsandbytes = pytest.importorskip("bitsandbytes")

LORA = {"r": 8, "dropout": 0.0, "target_modules": "all-linear"}
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # whole blocks of 64 codes


def make_classifier(folder: Path, quantization: str, **training: Any) -> Config:
    if not (folder / "model").exists():
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        reviews.make_inputs(folder, **WIDE, **dropout)
    return reviews.make_config(folder, training, lora=LORA, quantization=quantization)


def make_causal_lm(folder: Path, quantization: str, **training: Any) -> Config:
    if not (folder / "model").exists():
        toy.make_inputs(folder)
        save_model(
            folder / "wide", "qwen2", **WIDE, head_dim=32
        )  # its queries, keys and values have biases
    return toy.make_config(
        folder, training, lora=LORA, quantization=quantization, model=str(folder / "wide")
    )


def make_preference(folder: Path, quantization: str, **training: Any) -> Config:
    make_causal_lm(folder, quantization)
    sections: dict[str, Any] = {
        "lora": LORA,
        "quantization": quantization,
        "model": str(folder / "wide"),
    }
    return toy.make_config(
        folder, training, task="preference", data=write_pairs(folder), **sections
    )


TASKS: dict[str, tuple[Callable[..., Config], Task]] = {
    "classifier": (make_classifier, sequence_classification.TASK),
    "causal_lm": (make_causal_lm, causal_lm.TASK),
}

# Learning rates at which losses fall evenly. At 5e-3 the classifier's first losses jump, and its rounding errors with them.
RATES = {"classifier": 1e-3, "causal_lm": 1e-2}


def dequantize(model: nn.Module) -> None:
    """Put in the place of every quantised layer a plain one with the weights that its codes stand for."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, bitsandbytes.nn.Linear4bit):
                codes = layer.weight
                weight = bitsandbytes.functional.dequantize_4bit(
                    codes.data, codes.quant_state
                ).float()
            elif isinstance(layer, bitsandbytes.nn.Linear8bitLt):
                weight = layer.state.CB.float() * layer.state.SCB[:, None] / 127
            else:
                continue
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            if layer.bias is not None:
                plain.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)
            setattr(parent, name, plain)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("quantization", "near"),
    [("4bit", 1e-5), pytest.param("fp4", 1e-5, marks=pytest.mark.slow), ("8bit", 3e-2)],
)
def test_the_gradient_is_that_of_the_weights_the_codes_stand_for(
    task: str, quantization: str, near: float, tmp_path: Path
) -> None:
    """8-bit layers also round their inputs to 8 bits, so there it is near and not equal."""
    make, module = TASKS[task]
    config = make(tmp_path, quantization)
    data = prepare(config)
    world = World()
    learner = module.build(ModelSpec.of(config), config.training, world, Workload(0, data.labels))
    assert learner.route.padding_free, learner.route.why_not
    plain = module.build(
        ModelSpec.of(make(tmp_path, "none")),
        make(tmp_path, "none").training,
        world,
        Workload(0, data.labels),
    )
    parameters = [sum(map(count, loaded.model.parameters())) for loaded in (learner, plain)]
    assert parameters[0] == parameters[1]
    randomize_lora(learner.model)
    batches = (
        Feed(data.train, make_plan(config, rows_per_epoch(data.train)), 0, world).step(0).batches
    )
    learner.model.eval()
    module.evaluate(learner, batches[0])  # an evaluation must leave the layers fit for training
    learner.model.train()

    def gradient() -> tuple[float, dict[str, torch.Tensor]]:
        loss = sum(float(module.backward(learner, batch, 1.0).view(-1)[0]) for batch in batches)
        return loss, take_gradients(learner.model)

    loss, gradients = gradient()
    dequantize(learner.model)
    wanted_loss, wanted = gradient()
    assert loss == pytest.approx(wanted_loss, rel=near)
    assert gradients.keys() == wanted.keys()
    assert relative_error(gradients, wanted) <= near


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_layers_give_what_pefts_give(bits: str, dtype: str, tmp_path: Path) -> None:
    """Without PEFT's copies of what they give, in training and in the gradients."""
    config = make_causal_lm(tmp_path, bits)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    learner = causal_lm.TASK.build(
        ModelSpec.of(config), config.training, World(), Workload(0, prepare(config).labels)
    )
    randomize_lora(learner.model)
    layers = [m for m in learner.model.modules() if type(m).__module__ == "peft.tuners.lora.bnb"]
    assert layers
    for layer in layers:
        assert layer.forward.__module__ == "kubetune.models.fused_forwards", layer.forward
        x = torch.randn(2, 5, layer.in_features, dtype=learner.lm.dtype, requires_grad=True)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        weights = torch.randn(2, 5, layer.out_features)
        theirs = type(layer).forward(layer, x)
        wanted = [theirs, *torch.autograd.grad((theirs * weights).sum(), leaves)]
        ours = layer(x)
        assert ours.grad_fn.name() == "_LoraLinearBackward"
        results = [ours, *torch.autograd.grad((ours * weights).sum(), leaves)]
        for ours_of_leaf, other in zip(results, wanted, strict=True):
            assert (ours_of_leaf - other).norm() <= (
                1e-5 if dtype == "float32" else 1e-2
            ) * other.norm()


def forecast_of(config: Config) -> Forecast | None:
    weights = read_weights(config.model.path, {})
    assert weights is not None
    return forecast(RankWork.of(config, make_plan(config)), weights)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_file_that_was_quantised_before_learns_as_one_that_is_now(
    bits: str, tmp_path: Path
) -> None:
    now = make_causal_lm(tmp_path, bits)
    settings = quantization.settings(bits, now.lora, torch.float32)
    lm = AutoModelForCausalLM.from_pretrained(now.model.path, quantization_config=settings)
    lm.save_pretrained(tmp_path / "file")
    for file in (tmp_path / "wide").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "file")
    before = make_causal_lm(tmp_path, "none")
    model = before.model.model_copy(update={"path": str(tmp_path / "file")})
    before = before.model_copy(update={"model": model})

    # A plan counts both alike.
    assert forecast_of(before) == forecast_of(now)

    batch = collate(random_rows((37, 5)))
    gradients = []
    for config in (now, before):
        spec = ModelSpec.of(config)
        learner = causal_lm.TASK.build(spec, config.training, World(), Workload(0))
        randomize_lora(learner.model)
        # An evaluation must not change how the codes lie.
        learner.model.eval()
        with torch.no_grad():
            causal_lm.TASK.evaluate(learner, batch)
        learner.model.train()
        causal_lm.TASK.backward(learner, batch, 1.0)
        gradients.append(take_gradients(learner.model))
    of_now, of_before = gradients
    assert of_now.keys() == of_before.keys()
    for name, gradient in of_now.items():
        torch.testing.assert_close(of_before[name], gradient)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_the_reference_is_what_the_base_says_in_training(bits: str, tmp_path: Path) -> None:
    config = make_preference(tmp_path, bits)
    world = World()
    rows = prepare(config).train
    learner = preference.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    plan = make_plan(config, len(rows))
    rows.reference = scores(AskedForAnswers(), learner, {"train": rows}, plan, world)["train"]
    work = preference.TASK.with_batch_totals(learner, Feed(rows, plan, 0, world).step(0), world)
    loss = sum(
        float(preference.TASK.backward(learner, batch, 1 / work.divisor)[0])
        for batch in work.batches
    )
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    randomize_lora(learner.model)
    again = scores(AskedForAnswers(), learner, {"train": rows}, plan, world)["train"]
    np.testing.assert_array_equal(again, rows.reference)  # the adapter is off
    learner.model.eval()
    assert (
        preference.TASK.metrics(
            learner, [preference.TASK.evaluate(learner, work.batches[0])], world
        )["eval_loss"]
        != loss
    )


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantised_base_learns_preferences(bits: str, tmp_path: Path) -> None:
    settings = {"max_steps": 8, "eval_steps": 8}
    run_dir = toy.finished(tmp_path / "run", make_preference(tmp_path, bits, **settings))
    losses = toy.losses(run_dir)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.9 * losses[0]
    last = [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line][-1]
    assert evaluate_run(run_dir, "last").metrics["eval_loss"] == pytest.approx(
        last["eval_loss"], rel=1e-4
    )


def test_the_log_says_how_8_bits_are_multiplied_in_training_and_in_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_causal_lm(tmp_path, "8bit")
    data = prepare(config)
    world = World()
    with caplog.at_level("INFO", logger="kubetune"):
        learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    assert (
        "trains with products in float32, but evaluates with inputs rounded to 8 bits"
        in caplog.text
    )
    learner.model.eval()
    batch = (
        Feed(data.train, make_plan(config, rows_per_epoch(data.train)), 0, world).step(0).batches[0]
    )
    evaluated = float(causal_lm.TASK.backward(learner, batch, 1.0 / batch.num_labels))
    learner.model.train()
    trained = float(causal_lm.TASK.backward(learner, batch, 1.0 / batch.num_labels))
    assert 1e-7 < abs(evaluated / trained - 1) < 1e-2


def test_the_log_says_that_4_bits_are_quantised_doubly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_causal_lm(tmp_path, "4bit")
    with caplog.at_level("INFO", logger="kubetune"):
        learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, World(), Workload(0))
    assert (
        "stored in 4 bits (nf4), its scales in 8 (double quantisation); products in float32"
        in caplog.text
    )
    layers = [m for m in learner.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert layers
    assert all(layer.weight.quant_state.nested for layer in layers)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), (
        "the file of the weights as they were stays mapped"
    )


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("quantization", "near"), [("4bit", 0.15), ("fp4", 0.3), ("8bit", 0.03)])
def test_it_trains_much_as_the_base_does_and_is_evaluated_as_it_was_trained(
    task: str, quantization: str, near: float, tmp_path: Path
) -> None:
    make, module = TASKS[task]
    rate = RATES[task]
    config = make(tmp_path, quantization, learning_rate=rate)
    whole = toy.finished(tmp_path / "whole", make(tmp_path, "none", learning_rate=rate))
    run_dir = toy.finished(tmp_path / "run", config)
    losses = toy.losses(run_dir)
    assert losses == pytest.approx(toy.losses(whole), abs=near)
    assert losses != toy.losses(whole)
    assert losses[-1] < 0.9 * losses[0]
    last = [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line][-1]
    for name, value in evaluate_run(run_dir, "last").metrics.items():
        assert value == pytest.approx(last[name], rel=1e-5), name
    learner = module.load(
        ModelSpec.of(config), checkpoints.choose(run_dir, "last"), torch.device("cpu")
    )
    heads = [
        m
        for name, m in learner.model.named_modules()
        if name.endswith(("modules_to_save.default", "lm_head"))
    ]
    assert {type(head) for head in heads} == {nn.Linear}
