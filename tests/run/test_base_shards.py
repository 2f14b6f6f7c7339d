"""A frozen base cut over the ranks in bytes: the same bits as the whole base on the same ranks, in a part of its memory."""

from __future__ import annotations

import gc
import json
import math
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.quantizers import quantizer_mxfp4

import kubetune
from kubetune import errors
from kubetune.batching.batch import collate
from kubetune.batching.feed import Feed, rows_per_epoch
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.kernels.pointwise import Kernels
from kubetune.models import compiled_layers, fsdp, loading, patches
from kubetune.models.acceleration import Workload
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import backbone, own_attention
from kubetune.models.sharded_base import base_shards, cutting, units
from kubetune.plan.forecast import forecast
from kubetune.plan.linears import stacks
from kubetune.plan.model_shapes import Weights, read_weights, shapes_of
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork
from kubetune.rundir import checkpoints
from kubetune.scoring.rewards.model_sources import source_of
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.scoring.rewards.teachers import load_teacher
from kubetune.tasks import causal_lm
from kubetune.training.rollouts.model_answers import reference_of
from kubetune.training.rollouts.sampler import Decoder
from tests import reviews, toy
from tests.architectures import random_rows, save_model, take_gradients
from tests.preferences import write_pairs
from tests.ranks import run_ranks
from tests.run import test_grpo

slow = pytest.mark.slow
# Seconds for a run that compiles: on a crowded machine the C++ compiler alone takes minutes.
PATIENCE = 900.0


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
    merged = []
    for run_dir in (ours, theirs):
        exported = kubetune.export(run_dir, out=tmp_path / f"{run_dir.name}-merged", merged=True)
        merged.append((exported.path / "model.safetensors").read_bytes())
    assert merged[0] == merged[1]

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
    "whole tables, bf16": {
        "dtype": "bfloat16",
        "lora": {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"]},
    },
    "nf4": {"quantization": "4bit"},
    "fp4, dora": {"quantization": "fp4", "lora": {"r": 4, "use_dora": True}},
    "8bit": {"quantization": "8bit"},
    "nf4, bf16, recomputed": {"quantization": "4bit", "dtype": "bfloat16", "recomputed": True},
    "compiled": {"compile": True},
    "compiled layers": {"compile": "layers"},
    "compiled layers, nf4, recomputed": {
        "compile": "layers",
        "quantization": "4bit",
        "recomputed": True,
    },
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "nf4" else slow) for kind in KINDS]
)
def test_every_kind_of_base_and_adapter_has_the_same_bits(
    inputs: Path, tmp_path: Path, kind: str
) -> None:
    sections = dict(KINDS[kind])
    compiled = sections.pop("compile", False)
    training = {
        "max_steps": 4,
        "gradient_checkpointing": sections.pop("recomputed", False),
        "compile": compiled,
    }
    model = inputs / "model"
    if sections.pop("tied", False):
        model = save_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    sections["model"] = {"path": str(model), "dtype": sections.pop("dtype", "auto")}
    ours, theirs = (
        toy.finished(
            tmp_path / parallelism,
            make_config(inputs, parallelism, training, **sections),
            2,
            seconds=PATIENCE,
        )
        for parallelism in ("shard_base", "ddp")
    )
    assert toy.digests(ours) == toy.digests(theirs)
    log = toy.log_of(ours)
    assert "the base is cut over 2 ranks" in log
    assert "without torch.compile" not in log
    assert ("layers compiled: " in log) == (compiled == "layers")


def learned_by_compiled_layers(
    world: World, config: Config, failing: int | None
) -> tuple[bool, tuple[float, float]]:
    """Return if this rank's layers are compiled, and the loss and the gradient's norm by these.

    `failing`: the rank whose compiler fails in the backward of a layer.
    """

    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    def fail(*_: Any) -> None:
        raise ValueError("it makes no backward")

    backward = fail if world.rank == failing else nop
    backend = aot_autograd(fw_compiler=nop, bw_compiler=backward)
    torch.compile = partial(torch.compile, backend=backend)
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    layers = compiled_layers.compile_layers(learner.model)
    assert layers is not None

    def learn() -> tuple[float, float]:
        batch = collate(random_rows((37, 5)))
        loss = float(causal_lm.TASK.backward(learner, batch, 1.0))
        gradients = take_gradients(learner.model).values()
        return loss, float(torch.cat([gradient.flatten() for gradient in gradients]).norm())

    compiled_layers.warm_up(layers, learn, may_leave=False)
    return layers.is_on, learn()


@slow
def test_ranks_gather_alike_where_the_compiler_of_one_fails_in_a_backward(inputs: Path) -> None:
    cut = run_ranks(learned_by_compiled_layers, 2, make_config(inputs, "shard_base"), 1)
    whole = run_ranks(learned_by_compiled_layers, 2, make_config(inputs, "ddp"), None)
    assert [is_on for is_on, _ in cut] == [True, False]
    for (_, ours), (is_on, theirs) in zip(cut, whole, strict=True):
        assert is_on
        assert ours == pytest.approx(theirs, rel=1e-6)


def swapped_forwards(world: World, config: Config) -> Counter[str]:
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    return swap_forwards(learner.model, Kernels(), learner.undo)


@pytest.mark.parametrize("quantization", ["none", "4bit", pytest.param("8bit", marks=slow)])
def test_forwards_are_tried_where_weights_are_cut(inputs: Path, quantization: str) -> None:
    settings = {"fused_forwards": False}
    config = make_config(inputs, "shard_base", settings, quantization=quantization)
    for counts in run_ranks(swapped_forwards, 2, config):
        assert counts["swiglu"] == 2


def save_quantised(folder: Path, method: str) -> Path:
    """Save a model whose file is in FP8 with a scale for each block, or whose experts are in MXFP4."""
    name = "llama" if method == "fp8" else "gpt_oss"
    save_model(folder, name)
    saved: dict[str, torch.Tensor] = {}
    for path, weight in load_file(folder / "model.safetensors").items():
        if method == "fp8" and "proj" in path:
            rows, columns = weight.shape
            blocks = weight.reshape(rows // 32, 32, columns // 32, 32)
            scales = blocks.abs().amax((1, 3)) / 448
            saved[path] = (blocks / scales[:, None, :, None]).reshape(rows, columns)
            saved[path] = saved[path].to(torch.float8_e4m3fn)
            saved[f"{path}_scale_inv"] = scales
        elif method == "mxfp4" and path.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inside, outside = weight.shape
            size = (experts, outside, inside // 32)
            saved[f"{path}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8)
            saved[f"{path}_scales"] = torch.randint(118, 124, size, dtype=torch.uint8)
        else:
            saved[path] = weight
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": method}
    if method == "fp8":
        settings["quantization_config"]["weight_block_size"] = [32, 32]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@slow
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_base_that_was_quantised_before_has_the_same_bits(
    inputs: Path, tmp_path: Path, method: str
) -> None:
    model = save_quantised(tmp_path / "model", method)
    ours, theirs = (
        toy.finished(
            tmp_path / parallelism,
            make_config(inputs, parallelism, {"max_steps": 3}, model=str(model)),
            2,
        )
        for parallelism in ("shard_base", "ddp")
    )
    assert toy.losses(ours) == toy.losses(theirs)
    assert toy.digests(ours) == toy.digests(theirs)
    assert "the base is cut over 2 ranks" in toy.log_of(ours)


def every_pattern(world: World, dtype: torch.dtype) -> bool:
    """True if all bytes of a weight in 8 bits, codes of NaN too, are there again after they were gathered."""
    codes = torch.arange(1024).to(torch.uint8).reshape(32, 32)
    weight = torch.nn.Parameter(codes.view(dtype), requires_grad=False)
    unit = units.Unit([[weight]], world)
    unit.give_back()
    assert not weight.untyped_storage().nbytes()
    unit.borrow()
    return torch.equal(weight.view(torch.uint8), codes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_bytes_are_never_seen_as_numbers(dtype: torch.dtype) -> None:
    assert all(run_ranks(every_pattern, 2, dtype))


def test_what_is_not_cut_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    for layer in lm.model.layers:
        # As GPTQ keeps its weights.
        layer.mlp.register_buffer("qweight", torch.zeros(64, 64, dtype=torch.int32))
    # As Gemma 3n keeps what each layer adds to a token, which has fewer tokens than the vocabulary.
    lm.model.embed_tokens_per_layer = torch.nn.Embedding(256, 64)
    cutting.cut(lm, World(size=2))
    assert "97.3 KiB of the base stay whole on each" in caplog.text


@pytest.mark.parametrize(("method", "name"), [("fp8", "llama"), ("mxfp4", "gpt_oss")])
def test_a_plan_counts_the_numbers_that_codes_of_a_file_stand_for(
    tmp_path: Path, method: str, name: str
) -> None:
    codes = read_weights(str(save_quantised(tmp_path / method, method)), {})
    numbers = read_weights(str(save_model(tmp_path / name, name)), {})
    assert codes is not None
    assert numbers is not None
    assert codes.shapes == numbers.shapes


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_codes_that_nothing_can_train_on_are_read_as_numbers(
    inputs: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(inputs, "ddp", model=str(save_quantised(tmp_path, method)))
    # As on a GPU that transformers takes for one with kernels for these codes.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("is_kernels_available", "is_triton_available"):
        monkeypatch.setattr(quantizer_mxfp4, name, lambda *_: True)
    cuda = torch.device("cuda")
    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda *_: cuda)
    model = loading.load_pretrained(AutoModelForCausalLM, ModelSpec.of(config), torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors of this process."""
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and not value.is_meta:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def watched_bytes() -> list[int]:
    """Return the bytes that tensors hold now, and from now on before each layer is given back: the list grows."""
    seen = [bytes_of_tensors()]
    give_back = units.Unit.give_back

    def measuring(unit: units.Unit) -> None:
        seen.append(bytes_of_tensors())
        give_back(unit)

    units.Unit.give_back = measuring  # type: ignore[method-assign, assignment]
    return seen


def memory_of_reading(world: World, config: Config) -> tuple[int, int, int]:
    """Return the most bytes that a rank held while it read a model, those that it keeps, and all that are cut."""
    seen = watched_bytes()
    model = fsdp.load(AutoModelForCausalLM, ModelSpec.of(config), config.training, world)
    shards = base_shards.of(model)
    assert shards is not None
    assert sum(unit.part.nbytes for unit in shards.units) == shards.held_bytes
    return max(seen) - seen[0], shards.held_bytes, shards.nbytes


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
        # Short: each token of an answer moves all layers to each rank.
        sections["distill"] = {"teacher": str(teacher), "max_completion_length": 16}
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
    source = source_of(NamedModel.of_distillation(config.distill), local_files_only=True)
    seen = watched_bytes()
    source = replace(source, spec=replace(source.spec, cut_over=world))
    teacher = load_teacher(source, load_tokenizer(config.model), world.device, 8)
    shards = base_shards.of(teacher.lm)
    assert shards is not None
    return max(seen) - seen[0], shards.held_bytes, shards.nbytes


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


def reference_beside(world: World, config: Config) -> tuple[float, bool]:
    """Return logits of the model before training, beside one that learns in full, and if it is in parts."""
    spec = ModelSpec.of(config)
    learner = causal_lm.TASK.build(spec, config.training, world, Workload(0))
    reference = reference_of(spec, world, learner)
    assert reference is not None
    with torch.no_grad(), own_attention(reference.lm):
        logits = Decoder(reference.lm, [[1, 2, 3], [4]], 2, 0).logits
    shards = base_shards.of(reference.lm)
    if shards is not None:
        shards.close()
        assert shards.held_bytes == pytest.approx(shards.nbytes / 2, rel=0.01)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    return float(logits.sum()), shards is not None


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow)])
def test_the_model_before_training_is_cut_beside_one_that_learns_in_full(
    inputs: Path, ranks: int
) -> None:
    results = []
    for training in ({"parallelism": "fsdp", "fsdp_size": 2}, {"parallelism": "ddp"}):
        config = test_grpo.config_of(inputs, training, beta=0.05)
        config = config.model_copy(update={"lora": None})
        results.append(run_ranks(reference_beside, ranks, config)[0])
    (ours, is_cut), (theirs, is_cut_too) = results
    assert (is_cut, is_cut_too) == (True, False)
    assert ours == theirs


@slow
def test_a_teacher_has_as_many_copies_as_the_base(inputs: Path, tmp_path: Path) -> None:
    training = {"max_steps": 1, "parallelism": "shard_base", "fsdp_size": 2}
    config = config_of_task("distill", inputs, tmp_path, training)
    run_dir = toy.finished(tmp_path / "run", config, 4)
    assert toy.log_of(run_dir).count("the base is cut over 2 ranks") == 2


def drawn_apart(world: World, config: Config) -> tuple[list[float], list[float], int, int]:
    """Return logits of forwards that ranks run a different number of times, and of as many with the whole base.

    Then the most bytes of units that were whole meanwhile, and those of the two largest units.
    """
    learner = causal_lm.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    learner.model.eval()
    shards = base_shards.of(learner.lm)
    assert shards is not None
    most = 0
    ask = units.Unit.ask

    def counting(unit: units.Unit) -> None:
        nonlocal most
        ask(unit)
        most = max(most, sum(each.nbytes for each in shards.units if each.is_asked_for))

    units.Unit.ask = counting  # type: ignore[method-assign, assignment]

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
    ask = units.Unit.ask

    def counting(unit: units.Unit) -> None:
        nonlocal gathered, most
        before = unit.is_asked_for
        ask(unit)
        gathered += 0 if before else unit.nbytes
        most = max(most, sum(each.nbytes for each in shards.units if each.is_asked_for))

    units.Unit.ask = counting  # type: ignore[method-assign, assignment]
    rows = prepare(config).train
    plan = make_plan(config, rows_per_epoch(rows), world_size=world.size)
    batch = Feed(rows, plan, 0, world, even=True).step(0).batches[0]
    shards.close()
    causal_lm.TASK.backward(learner, batch, 1.0)
    sizes = [unit.nbytes for unit in shards.units]
    embeddings, *layers, head = sizes
    parts = sum(unit.part.nbytes for unit in shards.units)
    return gathered, most, sum(layers), layers[-1], embeddings + head, parts


@pytest.mark.parametrize(
    ("ranks", "sharing"), [(2, 2), pytest.param(4, 4, marks=slow), pytest.param(4, 2, marks=slow)]
)
def test_bytes_that_are_moved_and_held_follow_the_formula(
    inputs: Path, tmp_path: Path, ranks: int, sharing: int
) -> None:
    model = save_model(tmp_path / "model", num_hidden_layers=5)
    for recomputed in (False, True):
        settings = {"gradient_checkpointing": recomputed, "fsdp_size": sharing}
        config = make_config(inputs, "shard_base", settings, model=str(model))
        for gathered, most, layers, layer, tables, parts in run_ranks(
            bytes_of_a_step, ranks, config
        ):
            # Each layer twice, but for the last one, which stays; tables once.
            assert gathered == 2 * layers - layer + tables
            assert most == max(2 * layer, layer + tables // 2)
            assert parts == (layers + tables) // sharing


@slow
def test_copies_of_a_base_have_the_same_bits(inputs: Path, tmp_path: Path) -> None:
    whole = toy.finished(tmp_path / "ddp", make_config(inputs, "ddp"), 4)
    two = make_config(inputs, "shard_base", {"fsdp_size": 2})
    copies = toy.finished(tmp_path / "copies", two, 4)
    assert toy.losses(copies) == toy.losses(whole)
    assert toy.digests(copies) == toy.digests(whole)
    assert "the base is cut over 2 ranks" in toy.log_of(copies, rank=3)

    run_dir = toy.make_run(tmp_path / "across", two, 4)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:6:1"}
    assert toy.train(run_dir, 4, environ) == [errors.PREEMPTED] * 4
    toy.make_run(run_dir, make_config(inputs, "shard_base"), 4)
    assert toy.train(run_dir, 4) == [0] * 4
    assert toy.digests(run_dir) == toy.digests(whole)


def sizes(hidden: int, intermediate: int, layers: int) -> dict[str, int]:
    """Return the sizes of a decoder, or of one with experts."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
    }


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SMALL = {**HEADS, "num_attention_heads": 16, "vocab_size": 151_936}
QWEN3 = {**HEADS, "vocab_size": 151_936}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
# Families, in the sizes of published models.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", {**SMALL, **sizes(1024, 3072, 28), "tie_word_embeddings": True}),
    "Qwen3-8B": ("qwen3", {**QWEN3, **sizes(4096, 12_288, 36)}),
    "Qwen3-30B-A3B": ("qwen3_moe", {**QWEN3, **EXPERTS, **sizes(2048, 768, 48)}),
    "Qwen3-235B-A22B": ("qwen3_moe", {**QWEN3, **EXPERTS, **sizes(4096, 1536, 94)}),
    "Llama-3.3-70B": ("llama", {**HEADS, **sizes(8192, 28_672, 80), "vocab_size": 128_256}),
    "gemma-2-9b": ("gemma2", {**SMALL, **sizes(3584, 14_336, 42), "vocab_size": 256_000}),
    "OLMo-2-7B": ("olmo2", {**HEADS, **sizes(4096, 11_008, 32), "vocab_size": 100_352}),
    "Mixtral-8x7B": ("mixtral", {**HEADS, **sizes(4096, 14_336, 32), "vocab_size": 32_000}),
}


@pytest.mark.parametrize("name", [*SIZES, "gpt-oss-20b"])
def test_a_config_alone_says_what_a_model_holds(name: str) -> None:
    family, settings = SIZES.get(name, ("gpt_oss", {}))
    shape = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(shape)
    derived = Weights(shapes_of(shape.to_dict()), shape.to_dict(), stated=False)
    exact = {path: tuple(parameter.shape) for path, parameter in lm.named_parameters()}
    stated = Weights(exact, derived.config, stated=True)
    assert derived.parameters == pytest.approx(stated.parameters, rel=0.002)
    in_experts, wanted = (
        sum(math.prod(stack[1:]) for stack in stacks(weights)) for weights in (derived, stated)
    )
    assert in_experts == wanted


class Arrived:
    """What arrives at once, as nothing is sent."""

    def wait(self) -> None:
        """Wait for nothing."""


def moved_and_held(
    lm: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, list[int]]:
    """Return bytes that a rank of a fake world receives in a micro-batch, those held at most, and those of all units.

    Tensors have no numbers, and layers do not compute: the units are asked for, and given back, as in a run.
    """
    moved = 0
    most = 0

    def gather(whole: torch.Tensor, part: torch.Tensor, **_: Any) -> Arrived:
        nonlocal moved, most
        moved += whole.nbytes - part.nbytes
        here = [unit.nbytes for unit in shards.units if unit.is_asked_for or unit._whole is whole]
        most = max(most, sum(here) + sum(unit.part.nbytes for unit in shards.units))
        return Arrived()

    # Without numbers no weight has an address, by which the same ones are known.
    monkeypatch.setattr(torch.nn.Parameter, "data_ptr", lambda p: p.untyped_storage()._cdata)
    monkeypatch.setattr(units, "_ALL_GATHER", gather)
    cutting.cut(lm, World(size=ranks, device=torch.device("meta")))
    shards = base_shards.of(lm)
    assert shards is not None
    modules, _ = cutting.cut_modules(lm)
    hidden = torch.zeros(1)
    for module in modules:
        module.forward = lambda x: 2 * x
        hidden = module(hidden)
        # Adapters begin behind the embeddings, which have no backward.
        hidden.requires_grad_()
    hidden.backward()
    shards.close()
    return moved, most, [unit.nbytes for unit in shards.units]


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("name", SIZES)
def test_a_fake_world_holds_and_moves_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    family, settings = SIZES[name]
    shape = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    shapes = {path: tuple(parameter.shape) for path, parameter in lm.named_parameters()}
    weights = Weights(shapes, shape.to_dict(), stated=True)
    run: dict[str, Any] = {"model": name, "data": {"train": "x"}, "lora": {"r": 4}}
    config = Config.model_validate({**run, "training": {"parallelism": "shard_base"}})
    plan = make_plan(config, world_size=ranks, device="cuda")
    memory = forecast(RankWork.of(config, plan), weights)
    assert memory is not None

    moved, most, of_units = moved_and_held(lm, ranks, monkeypatch)
    borrowed = memory.parts["weights, borrowed: two layers, or one and a table of tokens"]
    assert most == pytest.approx(memory.parts["weights"] + borrowed, rel=0.05)
    # docs/models.md: all layers twice but for the last one, each table once for each use.
    table = 2 * shape.vocab_size * shape.hidden_size
    layers = 2 * weights.parameters - table * (1 if shape.tie_word_embeddings else 2)
    formula = 2 * layers - layers / shape.num_hidden_layers + 2 * table
    assert moved == pytest.approx((ranks - 1) / ranks * formula, rel=0.05)
    assert sum(of_units) == pytest.approx(2 * weights.parameters, rel=0.05)


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
