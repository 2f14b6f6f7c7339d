"""Sharded training: equal to copies of the model, never whole on one rank, resumable at any number of ranks."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from kubetune import errors
from kubetune.batching.feed import Feed, rows_per_epoch
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import make_plan
from kubetune.rundir import checkpoints
from kubetune.tasks import causal_lm
from kubetune.training.optimizer.adamw_sharded import make_optimizer
from tests import small_configs, toy
from tests.architectures import PADDING_FREE, build_model, save_model
from tests.hybrids import HYBRIDS
from tests.ranks import run_ranks
from tests.tiny import train_tokenizer

slow = pytest.mark.slow
FULL: dict[str, Any] = {"lora": None}
LORA: dict[str, Any] = {"lora": {"r": 4}}
TRAINING = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.4}


def make_config(
    inputs: Path, parallelism: str, training: dict[str, Any] | None = None, **sections: Any
) -> Config:
    return toy.make_config(
        inputs, {**TRAINING, "parallelism": parallelism, **(training or {})}, **sections
    )


def require_equal(ours: Path, theirs: Path) -> None:
    """Require the same losses of all steps, evaluations, and the same model."""
    assert toy.losses(ours) == pytest.approx(toy.losses(theirs), abs=1e-5)
    toy.require_like(ours, theirs, trained_weights)


def trained_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return what plain transformers and PEFT make of the last checkpoint."""
    last = run_dir / "checkpoints" / "last"
    if not (last / "adapter_config.json").exists():
        return dict(AutoModelForCausalLM.from_pretrained(last).state_dict())
    base = AutoModelForCausalLM.from_pretrained(run_dir.parent / "model")
    return {
        name: t
        for name, t in PeftModel.from_pretrained(base, last).state_dict().items()
        if "lora_" in name
    }


@pytest.mark.parametrize(
    ("sections", "training", "world_size"),
    [
        pytest.param(LORA, {}, 2, id="lora", marks=slow),
        pytest.param(FULL, {}, 2, id="full", marks=slow),
        pytest.param(
            FULL,
            {"gradient_checkpointing": True, "per_device_train_batch_size": 1},
            2,
            id="recomputed",
            marks=slow,
        ),
        # 64 rows do not part evenly, and the two samples of an epoch's last batch are too few.
        pytest.param(FULL, {}, 3, id="full, uneven", marks=slow),
        pytest.param(LORA, {"per_device_train_batch_size": 1}, 3, id="lora, uneven", marks=slow),
    ],
)
def test_shards_train_as_copies_do(
    tmp_path: Path,
    inputs: Path,
    sections: dict[str, Any],
    training: dict[str, Any],
    world_size: int,
) -> None:
    (tmp_path / "model").symlink_to(inputs / "model")
    ours, theirs = (
        toy.finished(tmp_path / kind, make_config(inputs, kind, training, **sections), world_size)
        for kind in ("fsdp", "ddp")
    )
    require_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param("qwen2", 3, marks=slow),
        pytest.param("gemma2", 2, marks=slow),
        pytest.param("gpt2", 2, marks=slow),
    ],
)
def test_tied_heads_and_other_architectures(
    tmp_path: Path, inputs: Path, name: str, world_size: int
) -> None:
    """A whole epoch: three ranks get its rows unevenly, and one of them none of its last batch."""
    model = save_model(tmp_path / "model", name, tie_word_embeddings=True)
    sections = {"model": str(model), **FULL}
    ours, theirs = (
        toy.finished(
            tmp_path / kind,
            make_config(inputs, kind, {"num_train_epochs": 1}, **sections),
            world_size,
        )
        for kind in ("fsdp", "ddp")
    )
    require_equal(ours, theirs)


def differing(world: World, config: Config) -> list[str]:
    """Return the names of weights and buffers that a model cut over the ranks has otherwise than one that is whole."""
    sharded = fsdp.load(AutoModelForCausalLM, ModelSpec.of(config), config.training, world)
    whole = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    ours, theirs = (
        {**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (sharded, whole)
    )
    held: dict[str, Any] = {
        name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in ours.items()
    }
    return [name for name, tensor in theirs.items() if not torch.equal(held[name], tensor)]


def refusal(world: World, config: Config) -> str:
    """Return the words by which this rank refuses to load a model, empty if it does not."""
    try:
        fsdp.load(AutoModelForCausalLM, ModelSpec.of(config), config.training, world)
    except errors.ModelError as error:
        return str(error)
    return ""


@slow
@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
@pytest.mark.parametrize("row", [0, -1])
def test_all_ranks_refuse_what_is_not_finite_in_the_slice_of_one(
    inputs: Path, tmp_path: Path, row: int, parallelism: str
) -> None:
    """A rank that went on alone would wait for the other in the first message between them."""
    shutil.copytree(inputs / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][row] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    config = make_config(inputs, parallelism, model={"path": str(tmp_path / "model")}, **FULL)
    first, second = run_ranks(refusal, 2, config)
    assert "model.layers.0.mlp.up_proj.weight has numbers that are not finite" in first
    assert first == second


# Families with weights that are joined or parted when they are read, or with values that no file has.
READ_OTHERWISE = (
    "kimi_linear",
    "olmo_hybrid",
    "bailing_hybrid",
    "hrm_text",
    "falcon_h1",
    "rwkv",
    "hy_v4",
    "gpt_oss",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "kimi_linear" else slow) for name in READ_OTHERWISE],
)
def test_slices_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    (known,) = [table[name] for table in (HYBRIDS, PADDING_FREE) if name in table] or [
        small_configs.settings(name)
    ]
    build_model(name, known, lora=False).save_pretrained(tmp_path / "model")
    settings = {
        "model": str(tmp_path / "model"),
        "data": {"train": "x"},
        "training": {"parallelism": "fsdp"},
    }
    assert run_ranks(differing, 2, Config.model_validate(settings)) == [[], []]


@slow
@pytest.mark.parametrize("name", ["zamba2", "hrm_text"])
def test_shared_weights_and_values_that_never_learn_are_saved_as_by_copies(
    tmp_path: Path, inputs: Path, name: str
) -> None:
    """Zamba's layers share weights, which are cut with what is around them; HRM has a first state that is no weight."""
    train_tokenizer(tmp_path / "model")
    settings = {
        **(HYBRIDS[name] if name in HYBRIDS else small_configs.settings(name)),
        "vocab_size": 512,
    }
    build_model(name, settings, lora=False).save_pretrained(tmp_path / "model")
    training = {"max_steps": 3, "per_device_train_batch_size": 1}
    ours, theirs = (
        toy.finished(
            tmp_path / kind,
            make_config(inputs, kind, training, model=str(tmp_path / "model"), **FULL),
            2,
        )
        for kind in ("fsdp", "ddp")
    )
    require_equal(ours, theirs)


def first_losses(world: World, config: Config) -> list[float]:
    """Return the losses of three steps on this rank."""
    from kubetune.models.acceleration import Workload

    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    optimizer = make_optimizer(learner.model, config.training)
    rows = prepare(config).train
    feed = Feed(
        rows, make_plan(config, rows_per_epoch(rows), world_size=world.size), 0, world, even=True
    )
    losses = []
    for step in range(3):
        work = feed.step(step)
        losses += [
            float(causal_lm.TASK.backward(learner, batch, 1.0 / work.labels))
            for batch in work.batches
        ]
        optimizer.reduce_gradient(world)
        optimizer.update(1e-3)
    return losses


@slow
@pytest.mark.parametrize("sections", [LORA, FULL], ids=["lora", "full"])
def test_arithmetic_in_bf16_is_that_of_copies(inputs: Path, sections: dict[str, Any]) -> None:
    model = {"path": str(inputs / "model"), "dtype": "bfloat16"}
    ours, theirs = (
        run_ranks(first_losses, 2, make_config(inputs, kind, model=model, **sections))
        for kind in ("fsdp", "ddp")
    )
    assert ours[0] == pytest.approx(theirs[0], rel=5e-3)
    assert ours[1] == pytest.approx(theirs[1], rel=5e-3)


def summed_gradients(
    world: World, config: Config, is_kept: bool
) -> tuple[int, list[int], torch.Tensor]:
    """Return of one step its micro-batches, how many collectives had summed gradients after each, and this rank's slices."""
    from kubetune.models.acceleration import Workload

    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    model: Any = learner.model
    assert learner.sums_once_per_step  # the toy is small enough for any device
    learner = replace(learner, sums_once_per_step=is_kept)
    optimizer = make_optimizer(model, config.training)
    rows = prepare(config).train
    work = Feed(
        rows, make_plan(config, rows_per_epoch(rows), world_size=world.size), 0, world, even=True
    ).step(0)  # fmt: skip
    counts = [0]
    scatter = torch.distributed.reduce_scatter_tensor

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return scatter(*args, **kwargs)

    torch.distributed.reduce_scatter_tensor = counting
    for micro, batch in enumerate(work.batches):
        learner.expect_backward(is_last=micro == len(work.batches) - 1)
        causal_lm.TASK.backward(learner, batch, 1.0 / work.labels)
        counts.append(counts[-1])
    return len(work.batches), counts[:-1], optimizer.gradient.clone()


def test_gradients_are_summed_once_per_step_where_memory_allows(inputs: Path) -> None:
    config = make_config(inputs, "fsdp", {"per_device_train_batch_size": 1}, **FULL)
    for kept, summed in zip(
        run_ranks(summed_gradients, 2, config, True),
        run_ranks(summed_gradients, 2, config, False),
        strict=True,
    ):
        (micro_batches, once, gradient), (_, each_time, same_gradient) = kept, summed
        assert micro_batches > 1
        assert once[:-1] == [0] * (micro_batches - 1)
        assert each_time == [once[-1] * (n + 1) for n in range(micro_batches)]
        torch.testing.assert_close(gradient, same_gradient, atol=1e-6, rtol=1e-5)


def test_every_rank_gets_equally_many_micro_batches(inputs: Path) -> None:
    config = make_config(inputs, "fsdp", {"per_device_train_batch_size": 1})
    rows = prepare(config).train
    plan = make_plan(config, rows_per_epoch(rows), world_size=3)
    feeds = [Feed(rows, plan, 0, World(rank, rank, 3), even=True) for rank in range(3)]
    plain = [Feed(rows, plan, 0, World(rank, rank, 3)) for rank in range(3)]
    uneven = 0
    for step in range(toy.STEPS_PER_EPOCH):
        counts = {len(feed.step(step).batches) for feed in feeds}
        uneven += len({len(feed.step(step).batches) for feed in plain}) > 1
        assert len(counts) == 1
        samples = sorted(
            s for feed in feeds for batch in feed.step(step).batches for s in batch.samples
        )
        assert samples == sorted(feeds[0].samples(step).tolist())
    assert uneven


@cache
def uninterrupted(inputs: Path, folder: Path) -> list[float]:
    return toy.losses(toy.finished(folder, make_config(inputs, "ddp", **FULL)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(1, 2, marks=slow),
        pytest.param(2, 4, marks=slow),
        pytest.param(3, 2, marks=slow),
    ],
)
def test_another_number_of_ranks_goes_on(
    inputs: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, before: int, after: int
) -> None:
    config = make_config(inputs, "fsdp", **FULL)
    run_dir = toy.make_run(tmp_path / "run", config, before)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:6:{before - 1}"}
    assert toy.train(run_dir, before, environ) == [errors.PREEMPTED] * before
    assert checkpoints.steps(run_dir)[-1] == 6
    toy.make_run(run_dir, config, after)
    assert toy.train(run_dir, after) == [0] * after
    whole = uninterrupted(inputs, tmp_path_factory.getbasetemp() / "whole")
    assert toy.losses(run_dir) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize(
    ("sections", "before", "after"),
    [
        pytest.param(FULL, ("ddp", 1), ("fsdp", 2), id="full, copies to slices", marks=slow),
        pytest.param(FULL, ("fsdp", 2), ("ddp", 2), id="full, slices to copies", marks=slow),
        pytest.param(LORA, ("ddp", 2), ("fsdp", 2), id="lora, copies to slices", marks=slow),
        pytest.param(LORA, ("fsdp", 2), ("ddp", 1), id="lora, slices to copies", marks=slow),
    ],
)
def test_copies_go_on_as_slices_and_back(
    inputs: Path,
    tmp_path: Path,
    sections: dict[str, Any],
    before: tuple[str, int],
    after: tuple[str, int],
) -> None:
    run_dir = toy.make_run(tmp_path / "run", make_config(inputs, before[0], **sections), before[1])
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:6"}
    assert toy.train(run_dir, before[1], environ) == [errors.PREEMPTED] * before[1]
    toy.make_run(run_dir, make_config(inputs, after[0], **sections), after[1])
    assert toy.train(run_dir, after[1]) == [0] * after[1]
    whole = toy.finished(tmp_path / "whole", make_config(inputs, "ddp", **sections))
    assert toy.losses(run_dir) == pytest.approx(toy.losses(whole), abs=1e-5)


def peaks(world: World, config: Config, small: Config) -> tuple[int, int, int, int]:
    """Return the bytes by which a rank's memory rose: by copies while loading, after every weight was looked at, with
    the optimizer; and the bytes of weights it holds then."""
    # The first collectives and DTensors cost some 50 to 90 MB whatever the size of the model.
    warm: Any = fsdp.load(AutoModelForCausalLM, ModelSpec.of(small), small.training, world)
    warm(torch.zeros(1, 8, dtype=torch.int64))
    del warm
    status = Path("/proc/self/status")

    def value(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is lowered to what is used now
    before = value("VmRSS")
    copied_before = value("RssAnon")
    model = fsdp.load(AutoModelForCausalLM, ModelSpec.of(config), config.training, world)
    # Each weight is looked at once, and then pages of the mapped file count: here it is what is no file's.
    copied = value("RssAnon") - copied_before
    for parameter in model.parameters():
        process_group.local(parameter).sum()  # the file is mapped: pages count when they are used
    seen = value("VmHWM") - before
    optimizer = make_optimizer(model, config.training)
    return copied, seen, value("VmHWM") - before, optimizer.master.nbytes


def test_no_rank_ever_holds_the_whole_model(inputs: Path, tmp_path: Path) -> None:
    shape = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        vocab_size=12_000,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    size = sum(p.nbytes for p in model.parameters())
    assert size > 250e6
    model.save_pretrained(tmp_path)
    del model
    small = make_config(inputs, "fsdp", **FULL)
    config = make_config(inputs, "fsdp", model=str(tmp_path), **FULL)
    copies = make_config(inputs, "ddp", model=str(tmp_path), **FULL)
    for shards, copy in zip(
        run_ranks(peaks, 2, config, small), run_ranks(peaks, 2, copies, small), strict=True
    ):
        print(
            f"model of {size:,} bytes; loading, seen, with optimizer, weights: shards {shards}, copies {copy}"
        )
        assert shards[0] < 0.2 * size  # nothing is copied but what is needed
        # A kernel maps pages beside those that are read, and takes back pages at any time: neither mark is exact.
        assert shards[1] < 0.85 * size < copy[1]
        assert shards[2] < 0.65 * copy[2]
        assert shards[3] == pytest.approx(size / 2, rel=0.01)
        assert copy[3] == size


def test_what_cannot_be_sharded_is_refused_at_once(inputs: Path) -> None:
    training = {"compile": True, "optim": "adamw_8bit"}
    with pytest.raises(
        ValueError, match=r"fsdp does not work with training.compile: true or layers in full"
    ) as error:
        make_config(inputs, "fsdp", training, **FULL)
    assert "training.optim: adamw_8bit for full fine-tuning" in str(error.value)


@slow
def test_two_copies_in_slices_train_as_one_does(tmp_path: Path, inputs: Path) -> None:
    one = make_config(inputs, "fsdp", **FULL)
    two = make_config(inputs, "fsdp", {"fsdp_size": 2}, **FULL)
    of_one = toy.finished(tmp_path / "one", one, 4)
    of_two = toy.finished(tmp_path / "two", two, 4)
    shutil.copytree(inputs / "model", tmp_path / "model", dirs_exist_ok=True)
    require_equal(of_two, of_one)
    parts = (of_two / "checkpoints" / "last").resolve().glob("optimizer-*")
    assert sorted(part.name for part in parts) == [
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
    ]

    for number, (first, then) in enumerate(((one, two), (two, one))):
        run_dir = toy.make_run(tmp_path / f"across-{number}", first, 4)
        environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:6:1"}
        assert toy.train(run_dir, 4, environ) == [errors.PREEMPTED] * 4
        toy.make_run(run_dir, then, 4)
        assert toy.train(run_dir, 4) == [0] * 4
        require_equal(run_dir, of_one)


def test_copies_that_do_not_share_the_ranks_alike_are_refused(inputs: Path) -> None:
    config = make_config(inputs, "fsdp", {"fsdp_size": 2}, **FULL)
    with pytest.raises(errors.ConfigError, match="found 2 with 3 processes"):
        make_plan(config, world_size=3)
    assert make_plan(config, world_size=1).world_size == 1
    with pytest.raises(ValueError, match="fsdp_size: means nothing but to parallelism: fsdp"):
        make_config(inputs, "ddp", {"fsdp_size": 2}, **LORA)


def steps_of(world: World, configs: list[Config]) -> list[tuple[list[float], list[float]]]:
    """Return the losses of a rank's micro-batches in three steps, and the norms of the steps, by each config."""
    from kubetune.models.acceleration import Workload

    results = []
    for config in configs:
        learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
        optimizer = make_optimizer(learner.model, config.training)
        rows = prepare(config).train
        plan = make_plan(config, rows_per_epoch(rows), world_size=world.size)
        feed = Feed(rows, plan, 0, world, even=True)
        losses = []
        norms = []
        for step in range(3):
            work = feed.step(step)
            for micro, batch in enumerate(work.batches):
                learner.expect_backward(is_last=micro == len(work.batches) - 1)
                losses.append(float(causal_lm.TASK.backward(learner, batch, 1.0 / work.labels)))
            norms.append(optimizer.reduce_gradient(world))
            optimizer.update(1e-3)
        results.append((losses, norms))
    return results


@slow
def test_copies_in_slices_sum_their_gradients(inputs: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"fsdp_size": 2}, {"parallelism": "ddp"}]
    configs = [
        make_config(inputs, "fsdp", {"per_device_train_batch_size": 1, **kind}, **FULL)
        for kind in kinds
    ]
    for one, two, copies in run_ranks(steps_of, 4, configs):
        for (losses, norms), (their_losses, their_norms) in ((two, one), (two, copies)):
            assert losses == pytest.approx(their_losses, abs=1e-5)
            assert norms == pytest.approx(their_norms, rel=1e-5)
