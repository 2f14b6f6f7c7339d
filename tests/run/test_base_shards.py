"""A frozen base cut over the ranks in bytes: the same bits as the whole base on the same ranks, in a part of its memory."""

from __future__ import annotations

import gc
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kubetune import errors
from kubetune.batching.feed import Feed, rows_per_epoch
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.models import base_shards, fsdp, patches
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import backbone, own_attention
from kubetune.plan.forecast import forecast
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork
from kubetune.rundir import checkpoints
from kubetune.scoring.rewards.model_sources import source_of
from kubetune.scoring.rewards.models import load_teacher
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.tasks import causal_lm
from kubetune.training.rollouts.sampler import Decoder
from tests import reviews, toy
from tests.architectures import save_model
from tests.preferences import write_pairs
from tests.ranks import run_ranks
from tests.run import test_grpo

slow = pytest.mark.slow


def make_config(
    inputs: Path, parallelism: str, training: dict[str, Any] | None = None, **sections: Any
) -> Config:
    return toy.make_config(inputs, {"parallelism": parallelism, **(training or {})}, **sections)


def test_the_bits_are_those_of_the_whole_base(inputs: Path, tmp_path: Path) -> None:
    """A run that is stopped goes on with other bits nowhere, whether the base is cut before or after."""
    # The process has hardly any memory, so `auto` cuts the base.
    small = make_config(inputs, "auto", compute={"processes": 2, "memory": "1Mi"})
    ours = toy.finished(tmp_path / "auto", small, 2)
    theirs = toy.finished(tmp_path / "ddp", make_config(inputs, "ddp"), 2)
    assert toy.losses(ours) == toy.losses(theirs)
    assert toy.digests(ours) == toy.digests(theirs)
    assert "the base is cut over 2 ranks" in toy.log_of(ours)

    run_dir = toy.make_run(tmp_path / "stopped", make_config(inputs, "ddp"), 2)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:6"}
    assert toy.train(run_dir, 2, environ) == [errors.PREEMPTED] * 2
    assert checkpoints.steps(run_dir)[-1] == 6
    toy.make_run(run_dir, make_config(inputs, "shard_base"), 2)
    assert toy.train(run_dir, 2) == [0, 0]
    assert toy.digests(run_dir) == toy.digests(theirs)


# What is trained, over every quantiser and kind of adapter.
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"lora": {"r": 4, "use_dora": True}},
    "rslora, recomputed": {"lora": {"r": 4, "use_rslora": True}, "recomputed": True},
    "whole head": {"lora": {"r": 4, "modules_to_save": ["lm_head"]}},
    "tied": {"tied": True},
    "tied whole head": {"lora": {"r": 4, "modules_to_save": ["lm_head"]}, "tied": True},
    "bf16": {"dtype": "bfloat16"},
    "nf4": {"quantization": "4bit"},
    "fp4, dora": {"quantization": "fp4", "lora": {"r": 4, "use_dora": True}},
    "8bit": {"quantization": "8bit"},
    "nf4, bf16, recomputed": {"quantization": "4bit", "dtype": "bfloat16", "recomputed": True},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "nf4" else slow) for kind in KINDS]
)
def test_every_kind_of_base_and_adapter_has_the_same_bits(
    inputs: Path, tmp_path: Path, kind: str
) -> None:
    sections = dict(KINDS[kind])
    training = {"max_steps": 4, "gradient_checkpointing": sections.pop("recomputed", False)}
    model = inputs / "model"
    if sections.pop("tied", False):
        model = save_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    sections["model"] = {"path": str(model), "dtype": sections.pop("dtype", "auto")}
    ours, theirs = (
        toy.finished(
            tmp_path / parallelism, make_config(inputs, parallelism, training, **sections), 2
        )
        for parallelism in ("shard_base", "ddp")
    )
    assert toy.digests(ours) == toy.digests(theirs)
    assert "the base is cut over 2 ranks" in toy.log_of(ours)


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors of this process."""
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and not value.is_meta:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory_of_reading(world: World, config: Config) -> tuple[int, int, int]:
    """Return the most bytes that a rank held while it read a model, those that it keeps, and all that are cut."""
    most = 0
    give_back = base_shards.Unit.give_back

    def measuring(unit: base_shards.Unit) -> None:
        nonlocal most
        most = max(most, bytes_of_tensors())
        give_back(unit)

    base_shards.Unit.give_back = measuring  # type: ignore[method-assign, assignment]
    before = bytes_of_tensors()
    model = fsdp.load(AutoModelForCausalLM, ModelSpec.of(config), config.training, world)
    shards = base_shards.of(model)
    assert shards is not None
    assert sum(unit.part.nbytes for unit in shards.units) == shards.held_bytes
    return most - before, shards.held_bytes, shards.nbytes


@pytest.mark.parametrize(
    "quantization", ["none", pytest.param("4bit", marks=slow), pytest.param("8bit", marks=slow)]
)
def test_no_rank_ever_holds_the_whole_base(inputs: Path, tmp_path: Path, quantization: str) -> None:
    shape = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        vocab_size=4_000,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    # Read in another dtype than the file has: else what is read is pages of the file.
    model = {"path": str(tmp_path), "dtype": "bfloat16"}
    config = make_config(inputs, "shard_base", model=model, quantization=quantization)
    for most, held, whole in run_ranks(memory_of_reading, 2, config):
        print(
            f"{quantization}: {whole:,} bytes are cut, {held:,} held, {most:,} at most while reading"
        )
        assert held == pytest.approx(whole / 2, rel=0.01)
        # Half of the base, a layer that is read, and the tables, which are cut last.
        assert most < held + 2 * whole / 16 + 2 * 2 * 4_000 * 512


def config_of_task(task: str, inputs: Path, folder: Path, training: dict[str, Any]) -> Config:
    """Return the config of a few steps of a task."""
    sections: dict[str, Any] = {"task": task, "lora": {"r": 4}}
    if task == "preference" or task == "reward_model":
        return toy.make_config(inputs, training, data=write_pairs(folder), **sections)
    if task == "distill":
        teacher = save_model(folder / "teacher", hidden_size=96, intermediate_size=128)
        sections["distill"] = {"teacher": str(teacher)}
        return toy.make_config(inputs, training, **sections)
    if task.startswith("grpo"):
        compared = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.05}
        return test_grpo.config_of(inputs, training, **(compared if "compared" in task else {}))
    kind = task.removeprefix("classifier, ")
    read = reviews.make_inputs(folder, kind)
    return reviews.make_config(read, training, lora={"r": 4})


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("preference", marks=slow),
        "reward_model",
        pytest.param("distill", marks=slow),
        pytest.param("grpo", marks=slow),
        pytest.param("grpo, compared", marks=slow),
        pytest.param("classifier, bert", marks=slow),
        pytest.param("classifier, qwen3", marks=slow),
    ],
)
def test_every_task_has_the_same_bits(inputs: Path, tmp_path: Path, task: str) -> None:
    runs = []
    for parallelism in ("shard_base", "ddp"):
        training = {"max_steps": 3, "eval_steps": 3, "save_steps": 3, "parallelism": parallelism}
        config = config_of_task(task, inputs, tmp_path, training)
        runs.append(toy.finished(tmp_path / parallelism, config, 2))
    ours, theirs = runs
    assert toy.losses(ours) == toy.losses(theirs)
    checkpoint = checkpoints.steps(ours)[-1]
    assert checkpoint == 3
    same = toy.digests(ours)
    others = toy.digests(theirs)
    assert same.pop("adapter_model.safetensors") == others.pop("adapter_model.safetensors")
    num_cut = toy.log_of(ours).count("the base is cut over 2 ranks")
    assert num_cut == (2 if task == "distill" else 1), "a teacher is cut too"


def memory_of_a_teacher(world: World, config: Config) -> tuple[int, int, int]:
    """Return what `memory_of_reading` does, of a teacher that is an adapter on a base."""
    most = 0
    give_back = base_shards.Unit.give_back

    def measuring(unit: base_shards.Unit) -> None:
        nonlocal most
        most = max(most, bytes_of_tensors())
        give_back(unit)

    base_shards.Unit.give_back = measuring  # type: ignore[method-assign, assignment]
    source = source_of(NamedModel.of_distillation(config.distill), local_files_only=True)
    before = bytes_of_tensors()
    with base_shards.Reader(world, ()).reading():
        teacher = load_teacher(source, load_tokenizer(config.model), world.device, 8)
    shards = base_shards.of(teacher.lm)
    assert shards is not None
    return most - before, shards.held_bytes, shards.nbytes


@slow
@pytest.mark.parametrize("use_dora", [False, True])
def test_no_rank_ever_holds_a_whole_teacher(inputs: Path, tmp_path: Path, use_dora: bool) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    base = save_model(tmp_path / "base", **wide)
    lora = {"r": 4, "use_dora": use_dora}
    teacher = toy.finished(
        tmp_path / "run", toy.make_config(inputs, {"max_steps": 1}, model=str(base), lora=lora)
    )
    config = toy.make_config(inputs, task="distill", distill={"teacher": str(teacher)})
    for most, held, whole in run_ranks(memory_of_a_teacher, 2, config):
        assert held == pytest.approx(whole / 2, rel=0.01)
        # Half of the base, a layer that is read, and the tables, which are cut last; adapters, some of them in fp32.
        assert most < held + 2 * whole / 16 + 2 * 4 * 512 * 512 + whole / 16


def drawn_apart(world: World, config: Config) -> tuple[list[float], list[float], int, int]:
    """Return logits of forwards that ranks run a different number of times, and of as many with the whole base.

    Then the most bytes of units that were whole meanwhile, and those of the two largest units.
    """
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    learner.model.eval()
    shards = base_shards.of(learner.lm)
    assert shards is not None
    most = 0
    ask = base_shards.Unit.ask

    def counting(unit: base_shards.Unit) -> None:
        nonlocal most
        ask(unit)
        most = max(most, sum(each.nbytes for each in shards.units if each.is_asked_for))

    base_shards.Unit.ask = counting  # type: ignore[method-assign, assignment]

    @torch.no_grad()
    def forward(token: int = 1) -> float:
        with own_attention(learner.lm):
            return float(Decoder(learner.lm, [[token, 2, 3], [4]], 2, 0).logits.sum())

    turns = (0, 3, 1) if world.is_main else (2, 0, 1)
    apart = []
    with fsdp.drawing(learner.lm, backbone(learner.lm), forward, world) as turn:
        for number in turns:
            with turn():
                apart += [forward(5 + number) for _ in range(number)]
    sizes = sorted(unit.nbytes for unit in shards.units)
    most_apart = most
    with fsdp.whole(learner.lm):
        whole = [forward(5 + number) for number in turns for _ in range(number)]
    assert shards.held_bytes == sum(unit.part.nbytes for unit in shards.units)
    return apart, whole, most_apart, sizes[-1] + sizes[-2]


def test_ranks_that_draw_answers_of_their_own_length_borrow_layer_by_layer(inputs: Path) -> None:
    config = make_config(inputs, "shard_base")
    for apart, whole, most, two in run_ranks(drawn_apart, 2, config):
        assert apart == whole
        assert most <= two


FAMILIES = (
    "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "olmo2", "granite",
)  # fmt: skip


@slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_same_bits(
    inputs: Path, tmp_path: Path, name: str, recomputed: bool
) -> None:
    model = save_model(tmp_path / "model", name)
    training = {"max_steps": 3, "gradient_checkpointing": recomputed}
    ours, theirs = (
        toy.finished(
            tmp_path / parallelism,
            make_config(inputs, parallelism, training, model=str(model)),
            2,
        )
        for parallelism in ("shard_base", "ddp")
    )
    assert toy.digests(ours) == toy.digests(theirs)


@slow
@pytest.mark.parametrize("after", [1, 4])
def test_another_number_of_ranks_goes_on(inputs: Path, tmp_path: Path, after: int) -> None:
    run_dir = toy.make_run(tmp_path / "run", make_config(inputs, "shard_base"), 2)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:6:1"}
    assert toy.train(run_dir, 2, environ) == [errors.PREEMPTED] * 2
    toy.make_run(run_dir, make_config(inputs, "shard_base"), after)
    assert toy.train(run_dir, after) == [0] * after
    whole = toy.finished(tmp_path / "whole", make_config(inputs, "ddp"))
    assert toy.losses(run_dir) == pytest.approx(toy.losses(whole), abs=1e-5)


def bytes_of_a_step(world: World, config: Config) -> tuple[int, int, int, int, int, int]:
    """Return bytes gathered in a step of one micro-batch, and held at most; of layers, the last layer, tables, parts."""
    spec = ModelSpec.of(config)
    learner = causal_lm.TASK.build(spec, config.training, world, Workload(0))
    shards = base_shards.of(learner.model)
    assert shards is not None
    gathered = 0
    most = 0
    ask = base_shards.Unit.ask

    def counting(unit: base_shards.Unit) -> None:
        nonlocal gathered, most
        before = unit.is_asked_for
        ask(unit)
        gathered += 0 if before else unit.nbytes
        most = max(most, sum(each.nbytes for each in shards.units if each.is_asked_for))

    base_shards.Unit.ask = counting  # type: ignore[method-assign, assignment]
    rows = prepare(config).train
    plan = make_plan(config, rows_per_epoch(rows), world_size=world.size)
    batch = Feed(rows, plan, 0, world, even=True).step(0).batches[0]
    shards.close()
    causal_lm.TASK.backward(learner, batch, 1.0)
    sizes = [unit.nbytes for unit in shards.units]
    embeddings, *layers, head = sizes
    parts = sum(unit.part.nbytes for unit in shards.units)
    return gathered, most, sum(layers), layers[-1], embeddings + head, parts


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow)])
def test_bytes_that_are_moved_and_held_follow_the_formula(
    inputs: Path, tmp_path: Path, ranks: int
) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=5)
    for recomputed in (False, True):
        config = make_config(
            inputs, "shard_base", {"gradient_checkpointing": recomputed}, model=str(model)
        )
        for gathered, most, layers, layer, tables, parts in run_ranks(
            bytes_of_a_step, ranks, config
        ):
            # Each layer twice, but for the last one, which stays; tables once.
            assert gathered == 2 * layers - layer + tables
            assert most == max(2 * layer, layer + tables // 2)
            assert parts == (layers + tables) // ranks


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "qwen2": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 8, "head_dim": 64},
    "gemma2": {"num_hidden_layers": 4},
    "phi3": {"num_hidden_layers": 4},
    "olmo2": {"num_hidden_layers": 5},
    "granite": {"num_hidden_layers": 4, "vocab_size": 2048},
    "mixtral": {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_plan_says_what_a_rank_of_up_to_64_holds(tmp_path: Path, name: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 704}
    model = save_model(tmp_path, name, **{**wide, **SHAPES[name]})
    weights = read_weights(str(model), {})
    assert weights is not None
    settings: dict[str, Any] = {"model": str(model), "data": {"train": "x"}, "lora": {"r": 4}}
    config = Config.model_validate({**settings, "training": {"parallelism": "shard_base"}})
    for ranks in (2, 8, 64):
        plan = make_plan(config, world_size=ranks)
        memory = forecast(RankWork.of(config, plan), weights)
        assert memory is not None
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        whole = sum(parameter.nbytes for parameter in lm.parameters())
        base_shards.cut(lm, World(size=ranks))
        shards = base_shards.of(lm)
        assert shards is not None
        # Norms are whole on each rank, where the plan divides them too.
        norms = sum(p.nbytes for p in lm.parameters() if p.dim() == 1)
        assert memory.parts["weights"] == pytest.approx(shards.held_bytes, rel=0.05, abs=norms)
        sizes = sorted(unit.nbytes for unit in shards.units)
        most = memory.parts["weights, borrowed: two layers, or one and a table of tokens"]
        assert most == pytest.approx(sizes[-1] + sizes[-2], rel=0.05)
        assert shards.nbytes == pytest.approx(whole - norms, rel=0.05)


def adapters_of(world: World, config: Config, is_known: bool) -> tuple[dict[str, Any], int]:
    """Return the adapters of a new model on this rank, and the bytes that it holds of the base."""
    if not is_known:
        for name in ("SET_WEIGHT", "READ_BY_DORA"):
            setattr(patches, name, replace(getattr(patches, name), name="of_another_release"))
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    shards = base_shards.of(learner.model)
    assert shards is not None
    shards.close()
    learnt = {}
    for name, parameter in learner.model.named_parameters():
        if parameter.requires_grad:
            learnt[name] = parameter.detach().numpy()
    return learnt, shards.held_bytes


def test_a_release_with_other_names_reads_and_measures_the_whole_base(inputs: Path) -> None:
    config = make_config(inputs, "shard_base", lora={"r": 4, "use_dora": True})
    known = run_ranks(adapters_of, 2, config, True)
    unknown = run_ranks(adapters_of, 2, config, False)
    for (ours, held), (theirs, held_without) in zip(known, unknown, strict=True):
        assert held == held_without
        assert ours.keys() == theirs.keys()
        assert any("magnitude" in name for name in ours)
        assert all((ours[name] == theirs[name]).all() for name in ours)
