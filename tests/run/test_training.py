"""Training for real against plain transformers and torch: gradients, losses, evaluation, checkpoints, resuming."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.batching.feed import Feed, rows_per_epoch, tokens_per_epoch
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload
from kubetune.models.adapters.lora import add_lora
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import make_plan
from kubetune.result.inference.evaluate_run import evaluate_run
from kubetune.rundir import checkpoints, metrics
from kubetune.supervisor.run_folder import check_run_dir
from kubetune.tasks import causal_lm
from kubetune.training.epochs.epoch_log import EpochLog
from kubetune.training.evaluation import evaluate
from kubetune.training.learner_flops import flops_of
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW, decays
from kubetune.training.start.feeding import make_feed
from tests import toy
from tests.architectures import randomize_lora, reference_gradients
from tests.ranks import run_ranks, started, wait_all

FULL = {"lora": None}
NO_WORK = Workload(total_tokens=0)


@pytest.fixture(scope="module")
def lora_run(inputs: Path) -> Path:
    return toy.finished(inputs / "lora", toy.make_config(inputs))


@pytest.mark.parametrize("quantization", ["none", pytest.param("4bit", marks=pytest.mark.slow)])
def test_modules_learn_whole_in_half_precision_too(
    inputs: Path, tmp_path: Path, quantization: str
) -> None:
    """Near the losses of fp32, and what is read afterwards is what was evaluated."""
    runs = []
    for dtype in ("bfloat16", "float32"):
        config = toy.make_config(
            inputs,
            {"max_steps": 6},
            model={"path": str(inputs / "model"), "dtype": dtype},
            lora={"r": 4, "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
            quantization=quantization,
        )
        runs.append(toy.finished(tmp_path / dtype, config))
    half, single = runs
    losses = toy.losses(half)
    assert losses == pytest.approx(toy.losses(single), rel=0.01)
    assert losses[-1] < 0.9 * losses[0]
    evaluated = [line for line in metrics.read_metrics(half) if "eval_loss" in line][-1]
    again = evaluate_run(half, "last").metrics
    assert again["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-3)


def split(inputs: Path, batch: int, packing: bool = False) -> Config:
    return toy.make_config(
        inputs, {"per_device_train_batch_size": batch}, data={"packing": packing}
    )


def first_gradient(world: World, config: Config) -> tuple[np.ndarray, int]:
    """Return the gradient of the first global batch over all ranks, and how many micro-batches this rank had."""
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, NO_WORK)
    randomize_lora(learner.model)
    optimizer = FlatAdamW(learner.model.named_parameters(), AdamSettings())
    rows = prepare(config).train
    plan = make_plan(config, rows_per_epoch(rows), world_size=world.size)
    work = Feed(rows, plan, config.training.seed, world).step(0)
    for batch in work.batches:
        causal_lm.TASK.backward(learner, batch, 1.0 / work.labels)
    return process_group.sum_(optimizer.gradient, world).numpy(), len(work.batches)


@pytest.fixture(scope="module")
def whole_batch_gradient(inputs: Path) -> np.ndarray:
    gradient, micro_batches = run_ranks(first_gradient, 1, split(inputs, toy.BATCH))[0]
    assert micro_batches == 1
    return np.asarray(gradient)


@pytest.mark.parametrize(
    ("world_size", "batch", "micro_batches"),
    [(1, 4, 2), (1, 2, 4), (1, 1, 8), (2, 4, 1), (2, 2, 2), (4, 1, 2)],
)
def test_the_gradient_does_not_depend_on_the_split(
    inputs: Path, whole_batch_gradient: np.ndarray, world_size: int, batch: int, micro_batches: int
) -> None:
    for gradient, counted in run_ranks(first_gradient, world_size, split(inputs, batch)):
        assert counted == micro_batches
        assert np.linalg.norm(gradient - whole_batch_gradient) <= 1e-6 * np.linalg.norm(
            whole_batch_gradient
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_gradient_does_not_depend_on_packing(
    inputs: Path, whole_batch_gradient: np.ndarray, world_size: int
) -> None:
    for gradient, _ in run_ranks(first_gradient, world_size, split(inputs, 1, packing=True)):
        assert np.linalg.norm(gradient - whole_batch_gradient) <= 1e-6 * np.linalg.norm(
            whole_batch_gradient
        )


@pytest.mark.parametrize("packing", [True, False])
def test_steps_of_so_many_tokens_are_the_same_at_every_world_size(
    inputs: Path, packing: bool
) -> None:
    sizes = {
        "global_batch_size": None,
        "global_batch_tokens": 200,
        "per_device_train_batch_size": 2,
    }
    config = toy.make_config(inputs, sizes, data={"packing": packing, "max_length": 64})
    rows = prepare(config).train
    tokens = tokens_per_epoch(rows)
    assert tokens == rows.lengths.sum()
    plan = make_plan(config, rows_per_epoch(rows), world_size=1, tokens=tokens)
    assert plan.steps_per_epoch == -(-tokens // 200) > 2
    for step in range(2 * plan.steps_per_epoch):
        whole = Feed(rows, plan, 0, World()).step(step)
        assert abs(whole.tokens - tokens / plan.steps_per_epoch) <= rows.lengths.max()
        shares = [Feed(rows, plan, 0, World(rank, rank, 3)).step(step) for rank in range(3)]
        held = [
            sorted(s for batch in batches for s in batch.samples)
            for batches in (whole.batches, [batch for share in shares for batch in share.batches])
        ]
        assert held[0] == held[1]
        assert {(share.labels, share.tokens) for share in shares} == {(whole.labels, whole.tokens)}
    seen = [
        s
        for step in range(plan.steps_per_epoch)
        for s in Feed(rows, plan, 0, World()).samples(step).tolist()
    ]
    assert sorted(seen) == list(range(len(rows)))
    assert Feed(rows, plan, 0, World()).largest().num_tokens >= rows.lengths.max()


def test_ranks_have_equally_much_to_compute(inputs: Path) -> None:
    config = toy.make_config(inputs, data={"share_prefixes": False})
    data = prepare(config)
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, World(), NO_WORK)
    flops = flops_of(learner, data.train)
    assert flops is not None
    plan = make_plan(config, rows_per_epoch(data.train), world_size=2)

    def uneven(feeds: list[Feed]) -> float:
        """Return by how much one rank has more to compute than another, over the whole."""
        steps = [[feed.step(step) for feed in feeds] for step in range(plan.num_steps)]
        loads = [
            [sum(flops[[*b.samples]].sum() for b in work.batches) for work in works]
            for works in steps
        ]
        return sum(abs(ours - theirs) for ours, theirs in loads) / sum(map(sum, loads))

    ranks = [World(rank, rank, 2) for rank in range(2)]
    by_tokens = uneven([Feed(data.train, plan, config.training.seed, world) for world in ranks])
    assert (
        uneven(
            [
                make_feed(plan, config.training.seed, data, world, learner, may_share=False)[0]
                for world in ranks
            ]
        )
        < 0.8 * by_tokens
    )


def row_copy(rows: Rows, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a row that torch may share without a warning: the prepared ones cannot be written to."""
    ids, trained = rows.row(index)
    return ids.copy(), trained.copy()


def test_the_gradient_is_that_of_plain_transformers(
    inputs: Path, whole_batch_gradient: np.ndarray
) -> None:
    config = split(inputs, toy.BATCH)
    rows = prepare(config).train
    ids = Feed(
        rows, make_plan(config, len(rows), world_size=1), config.training.seed, World()
    ).samples(0)
    assert config.lora is not None
    model = add_lora(
        AutoModelForCausalLM.from_pretrained(inputs / "model"),
        config.lora,
        task_type="CAUSAL_LM",
        seed=42,
    )
    randomize_lora(model)
    layout = FlatAdamW(model.named_parameters(), AdamSettings())
    _, gradients = reference_gradients(model, [row_copy(rows, i) for i in ids.tolist()])
    plain = torch.cat([gradients[name].flatten() for name in layout.layout]).numpy()
    assert np.linalg.norm(plain - whole_batch_gradient) <= 1e-5 * np.linalg.norm(plain)


def padded_loss(model: Any, rows: Rows, ids: list[int]) -> tuple[Tensor, int]:
    """Return (summed cross-entropy, labels) as most people would compute it: right padding, mask, -100."""
    sequences = [torch.from_numpy(row_copy(rows, i)[0].astype(np.int64)) for i in ids]
    trained = [torch.from_numpy(row_copy(rows, i)[1]) for i in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(
        [torch.where(t, s, -100) for s, t in zip(sequences, trained, strict=True)], True, -100
    )[:, 1:]
    mask = pad([torch.ones_like(s) for s in sequences], True)
    logits = model(input_ids=pad(sequences, True), attention_mask=mask).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return loss, int((labels >= 0).sum())


@pytest.mark.parametrize("sections", [{}, FULL], ids=["lora", "full"])
def test_losses_are_those_of_plain_torch(
    inputs: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Two epochs with clipping, weight decay and a last batch of two samples, in the plainest code there is."""
    rate, decay, clip = 3e-3, 0.1, 0.4
    training = {"learning_rate": rate, "lr_scheduler_type": "constant", "warmup_steps": 0}
    config = toy.make_config(
        inputs, {**training, "weight_decay": decay, "max_grad_norm": clip}, **sections
    )
    losses = toy.losses(toy.finished(tmp_path / "run", config))
    rows = prepare(config).train
    feed = Feed(rows, make_plan(config, len(rows), world_size=1), config.training.seed, World())
    model: Any = AutoModelForCausalLM.from_pretrained(
        inputs / "model", attn_implementation="eager"
    ).train()
    if config.lora is not None:
        model = add_lora(model, config.lora, task_type="CAUSAL_LM", seed=config.training.seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for name, p in named if decays(name, p) is wanted],
            "weight_decay": decay * wanted,
        }
        for wanted in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    for step, ours in enumerate(losses):
        ids = feed.samples(step).tolist()
        loss, labels = padded_loss(model, rows, ids)
        (loss / labels).backward()
        assert ours == pytest.approx(float(loss.detach()) / labels, abs=1e-4), f"step {step + 1}"
        torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
        optimizer.step()
        optimizer.zero_grad()
    assert [len(feed.samples(step)) for step in (6, 13)] == [2, 2]
    assert len(losses) == 2 * toy.STEPS_PER_EPOCH


@pytest.mark.parametrize(
    "sections", [{}, pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"]
)
def test_two_ranks_train_as_one_process(
    inputs: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = toy.make_config(inputs, {"learning_rate": 1e-3}, **sections)
    alone, two = (toy.finished(tmp_path / str(world), config, world) for world in (1, 2))
    assert toy.losses(two) == pytest.approx(toy.losses(alone), abs=1e-5)
    for ours, theirs in zip(metrics.read_metrics(two), metrics.read_metrics(alone), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)


def initial_evaluation(world: World, config: Config) -> dict[str, float]:
    data = prepare(config)
    assert data.eval is not None
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, NO_WORK)
    values = evaluate(
        causal_lm.TASK, learner, data.eval, make_plan(config, world_size=world.size), world
    )
    assert values is not None
    return values


def test_evaluation_counts_every_sample_once_at_any_world_size(inputs: Path) -> None:
    config = toy.make_config(inputs)
    rows = prepare(config).eval
    assert rows is not None
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
        loss, labels = padded_loss(model, rows, list(range(len(rows))))
    for world_size in (1, 2, 3):
        for values in run_ranks(initial_evaluation, world_size, config):
            assert values["eval_loss"] == pytest.approx(float(loss) / labels, rel=1e-6)
            assert values["eval_token_accuracy"] * labels == pytest.approx(
                round(values["eval_token_accuracy"] * labels)
            )


def plain_evaluation(model: Any, rows: Rows | None) -> float:
    assert rows is not None
    with torch.no_grad():
        loss, labels = padded_loss(model.eval(), rows, list(range(len(rows))))
    return float(loss) / labels


def test_the_adapter_is_pefts_and_does_what_the_run_measured(inputs: Path, lora_run: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    last = metrics.read_metrics(lora_run)[-1]
    rows = prepare(toy.make_config(inputs)).eval
    before = plain_evaluation(base, rows)
    model = PeftModel.from_pretrained(base, lora_run / "checkpoints" / "last")
    assert plain_evaluation(model, rows) == pytest.approx(last["eval_loss"], abs=1e-5)
    assert last["eval_loss"] < before - 0.1


def test_full_fine_tuning_leaves_a_model_that_transformers_loads(
    inputs: Path, tmp_path: Path
) -> None:
    run_dir = toy.finished(
        tmp_path / "run", toy.make_config(inputs, {"learning_rate": 1e-3}, **FULL)
    )
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "last")
    rows = prepare(toy.make_config(inputs)).eval
    assert plain_evaluation(model, rows) == pytest.approx(
        metrics.read_metrics(run_dir)[-1]["eval_loss"], abs=1e-5
    )


def test_bf16_weights_follow_an_fp32_master(inputs: Path, tmp_path: Path) -> None:
    model = {"path": str(inputs / "model"), "dtype": "bfloat16"}
    config = toy.make_config(inputs, {"learning_rate": 1e-5, "max_steps": 4}, model=model, **FULL)
    last = toy.finished(tmp_path / "run", config) / "checkpoints" / "last"
    master = load_file(last / "optimizer.safetensors")["master"]
    assert master.dtype == torch.float32
    assert not torch.equal(
        master, master.bfloat16().float()
    )  # what bf16 alone would have rounded away
    trained = AutoModelForCausalLM.from_pretrained(last, dtype="auto")
    layout = FlatAdamW(trained.named_parameters(), AdamSettings())
    assert trained.dtype == torch.bfloat16
    assert torch.equal(layout.master, master.bfloat16().float())


def stopped(run_dir: Path, config: Config, world_size: int, number: int, rank: int) -> int:
    """Send a signal to one rank in the middle of a run; returns the step it stopped after."""
    toy.make_run(run_dir, config, world_size)
    environ = {"KUBETUNE_FAULT": f"signal {number}:step:6:{rank}"}
    assert toy.train(run_dir, world_size, environ) == [errors.PREEMPTED] * world_size
    return checkpoints.steps(run_dir)[-1]


def epoch_lines(run_dir: Path) -> list[str]:
    """Return what the log says of each epoch; its mean loss is that of the numbers in metrics.jsonl, whoever wrote them."""
    log = toy.log_of(run_dir)
    lines = [line.partition("[EPOCH] ")[2] for line in log.splitlines() if "[EPOCH]" in line]
    steps = [line for line in metrics.read_metrics(run_dir) if "loss" in line]
    evaluations = {
        e["step"]: e["eval_loss"] for e in metrics.read_metrics(run_dir) if "eval_loss" in e
    }
    for number, line in enumerate(lines, start=1):
        held = steps[(number - 1) * toy.STEPS_PER_EPOCH : number * toy.STEPS_PER_EPOCH]
        mean = np.average([s["loss"] for s in held], weights=[s["trained_tokens"] for s in held])
        end = held[-1]["step"]
        evaluated = max(step for step in evaluations if step <= end)
        where = "" if evaluated == end else f" at step {evaluated}"
        assert line == (
            f"epoch {number} done: mean loss {mean:.4f}, step {end}; eval_loss {evaluations[evaluated]:.4f}{where}"
        )
    assert len(lines) == 2
    return lines


@pytest.mark.parametrize(
    ("world_size", "number"),
    [
        pytest.param(1, signal.SIGINT, id="Ctrl-C"),
        pytest.param(2, signal.SIGTERM, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(
    inputs: Path, tmp_path: Path, world_size: int, number: int
) -> None:
    """Of full fine-tuning; LoRA is stopped in tests/crash/test_stop.py."""
    config = toy.make_config(inputs, **FULL)
    whole = toy.finished(tmp_path / "whole", config, world_size)
    cut = tmp_path / "cut"
    assert stopped(cut, config, world_size, number, rank=world_size - 1) == 6
    assert toy.train(cut, world_size) == [0] * world_size
    assert toy.digests(cut) == toy.digests(whole)
    assert epoch_lines(cut) == epoch_lines(whole)


def test_best_last_early_stopping_and_retention(inputs: Path, tmp_path: Path) -> None:
    training = {"learning_rate": 0.3, "eval_steps": 2, "save_steps": 2, "save_total_limit": 1}
    config = toy.make_config(
        inputs, {**training, "early_stopping_patience": 2, "num_train_epochs": 8}
    )
    run_dir = toy.finished(tmp_path / "run", config)
    evaluations = [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line]
    best = min(evaluations, key=lambda line: line["eval_loss"])["step"]
    last = evaluations[-1]["step"]
    assert last == best + 4 < 8 * toy.STEPS_PER_EPOCH
    assert len(toy.losses(run_dir)) == last
    assert os.readlink(run_dir / "checkpoints" / "best") == f"step-{best:06d}"
    assert os.readlink(run_dir / "checkpoints" / "last") == f"step-{last:06d}"
    assert checkpoints.steps(run_dir) == [best, last]
    assert toy.train(run_dir) == [0]  # and stays ended
    assert len(toy.losses(run_dir)) == last


def test_an_epoch_whose_losses_are_lost_in_part_says_so(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = toy.make_config(inputs)
    plan = make_plan(config, toy.ROWS, world_size=1)
    values = {"learning_rate": 0.1, "grad_norm": 1.0}
    lines = [
        {"step": step, "loss": float(step), "trained_tokens": 10, **values}
        for step in (7, 8, 10, 12, 13, 14)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    epochs = EpochLog(plan.steps_per_epoch, config.training.metric_for_best_model)
    epochs.remember(tmp_path, 13)
    with caplog.at_level("INFO", logger="kubetune"):
        epochs.step(14, lines[-1], is_evaluated=False)
    message = "epoch 2 done: mean loss 11.4000 of 5 of its 7 steps, as metrics.jsonl lacks the others, step 14"
    assert message in caplog.text


def test_a_batch_of_so_many_tokens_is_kept_by_more_processes_and_a_packed_one_is_refused(
    inputs: Path, tmp_path: Path
) -> None:
    for number, tokens in enumerate((320, "packed")):
        sizes = {"global_batch_size": None, "global_batch_tokens": tokens}
        config = toy.make_config(inputs, sizes).model_copy(
            update={"output": str(tmp_path / str(number))}
        )
        run_dir = toy.make_run(tmp_path / str(number), config)
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        with pytest.raises(errors.ConfigError) if tokens == "packed" else nullcontext() as caught:
            check_run_dir(config, run_dir, make_plan(config, world_size=2))
        if caught is not None:
            assert "training.global_batch_tokens was 128, now is 256" in str(caught.value)


def test_other_data_under_the_same_run_are_refused(inputs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "train.jsonl"
    copy.write_bytes((inputs / "train.jsonl").read_bytes())
    config = toy.make_config(inputs, {"max_steps": 1}, data={"train": str(copy), "eval": 0.2})
    run_dir = toy.finished(tmp_path / "run", config)
    described = (run_dir / "data.json").read_bytes()
    text = copy.read_text()
    copy.write_text("".join(text.splitlines(keepends=True)[1:]))
    with started(toy.worker.main, 1, [str(run_dir)]) as processes:
        assert wait_all(processes) == [errors.USER]
    assert "on other data, or with another tokenizer" in toy.log_of(run_dir)
    assert "going on would repeat or skip samples" in toy.log_of(run_dir)
    assert (run_dir / "data.json").read_bytes() == described, "the data of the run that is there"
    # No rank is forked after this, since this process has threads of torch then.
    changed = "data.eval: 0.2 holds out other rows now"
    assert changed in " ".join(evaluate_run(run_dir, "last").remarks)
    copy.write_text(text)
    assert changed not in " ".join(evaluate_run(run_dir, "last").remarks)


def test_the_log_says_what_became_of_the_records(inputs: Path, tmp_path: Path) -> None:
    config = toy.make_config(
        inputs, {"max_steps": 1}, data={"max_length": 16, "overlong": "truncate"}
    )
    log = (toy.finished(tmp_path / "run", config) / "logs" / "rank-0.log").read_text()
    assert re.search(r"\[DATA\] WARNING: \d+ of 50 records of train truncated", log), log
