"""Threads beside the loop touch nothing that it computes with: steps here last until a checkpoint is written.

The toy model's steps take less time than a write, so that a thread is mostly done before the next forward. These ranks
wait in the middle of each forward until the checkpoint that was begun after the step before is on disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from kubetune.config.schema import LoraConfig
from kubetune.models.adapters.lora import add_lora
from kubetune.training import worker
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.saving import checkpoint_copies, saved_model
from kubetune.training.saving.checkpoint_copies import CheckpointCopies
from kubetune.training.saving.checkpointer import Checkpointer
from kubetune.training.start import parts
from tests import toy
from tests.architectures import ONE_BY_ONE, PADDING_FREE, PROMISED, build_model
from tests.hybrids import HYBRIDS
from tests.ranks import SECONDS, started, wait_all
from tests.run.test_async_checkpoint import FULL, LORA, all_digests

slow = pytest.mark.slow

# What a checkpoint's thread must not call on what the loop computes with.
FORBIDDEN = ("state_dict", "_call_impl", "__setattr__", "__delattr__", "reshard", "unshard")


def slow_rank(run_dir: str, pretends: bool) -> int:
    """Be a rank whose steps last longer than a write. Print what a thread called that it must not, and return 99.

    `pretends`: the device is a GPU, and rank 0's part of a checkpoint large, which is all that `async_save: auto` asks for.
    """
    writing: list[Future[Any]] = []
    waited: set[int] = set()  # numbers of saves that a forward has waited for
    live: set[int] = set()
    calls: list[str] = []

    def submit(pool: Any, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if function.__name__ == "_attempt" and not live:
            checkpointer: Checkpointer = function.__self__  # type: ignore[attr-defined]
            parts = parts_of(checkpointer.model)
            live.update(id(part) for part in parts)
            for owner in {type(part) for part in parts}:
                for name in FORBIDDEN:
                    if hasattr(owner, name):
                        setattr(owner, name, watched(owner, name))
        future = plain_submit(pool, function, *args)
        if function.__name__ == "_attempt":
            writing.append(future)
        return future

    def wait(module: nn.Module, _: object) -> None:
        # Within a layer: FSDP has gathered its weights, and those of the group around the layers.
        if type(module).__name__.endswith("Attention") and writing:
            done, _ = wait_for([writing[-1]], SECONDS / 2)
            assert done, "the checkpoint was not written while the forward waited for it"
            waited.add(len(writing))

    def watched(owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(subject: Any, *args: Any, **kwargs: Any) -> Any:
            if id(subject) in live and threading.current_thread().name.startswith("checkpoint"):
                calls.append(f"{type(subject).__name__}.{name}{args[:1]}")
            return original(subject, *args, **kwargs)

        return call

    def decide(setting: bool | str, optimizer: FlatAdamW, _: str) -> bool:
        """Decide as on a GPU, where rank 0's slices are just large enough and those of rank 1 are not."""
        assert setting == "auto"
        size = sum(tensor.nbytes for tensor in optimizer.state().values())
        threshold = size + int(os.environ["RANK"])
        with patch.object(checkpoint_copies, "WORTH_BACKGROUND_BYTES", threshold):
            return checkpoint_copies.writes_in_background(setting, optimizer, "cuda")

    if pretends:
        parts.writes_in_background = decide
    plain_submit = ThreadPoolExecutor.submit
    register_module_forward_pre_hook(wait)
    with patch.object(ThreadPoolExecutor, "submit", submit):
        code = worker.main([run_dir])
    print("\n".join(calls))
    assert bool(writing) == pretends
    if code == 0 and writing:
        assert waited == set(range(1, len(writing))), "not every save met a forward"
    return code or (99 if calls else 0)


def parts_of(model: Any) -> list[Any]:
    """Return a model's modules and settings."""
    parts = [*model.modules(), model.config, model.generation_config]
    return [*parts, *getattr(model, "peft_config", {}).values()]


@pytest.mark.parametrize(
    ("parallelism", "sections"),
    [
        pytest.param("fsdp", FULL, id="full, sharded"),
        pytest.param("ddp", LORA, id="lora", marks=slow),
        pytest.param("fsdp", LORA, id="lora, sharded", marks=slow),
        pytest.param("ddp", FULL, id="full", marks=slow),
    ],
)
def test_steps_may_last_longer_than_a_write(
    inputs: Path, tmp_path: Path, parallelism: str, sections: dict[str, Any]
) -> None:
    """As `async_save: auto` has it on GPUs. Sharded, a forward holds whole weights that a state dict would take from it."""
    digests = []
    for pretends in (True, False):
        training = {
            "parallelism": parallelism,
            "num_train_epochs": 1,
            "save_steps": 1,
            "save_total_limit": 9,
        }
        config = toy.make_config(inputs, training, **sections)
        run_dir = toy.make_run(tmp_path / str(pretends), config, 2)
        with started(slow_rank, 2, str(run_dir), pretends) as ranks:
            assert wait_all(ranks) == [0, 0], toy.log_of(run_dir)
        digests.append(all_digests(run_dir))
    beside, between = digests
    assert len(beside) == toy.STEPS_PER_EPOCH
    assert beside == between


ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"use_dora": True, "modules_to_save": ("lm_head",)}),
    ("gpt2", {}),
    ("mixtral", {"target_parameters": ("mlp.experts.down_proj",)}),
    ("zamba", {}),  # two layers share a module
]


@pytest.mark.parametrize(("name", "settings"), ADAPTERS)
def test_an_adapter_is_saved_as_peft_saves_it(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    config = (PROMISED | PADDING_FREE | ONE_BY_ONE | HYBRIDS)[name]
    model = build_model(name, config, lora=False)
    model = add_lora(model, LoraConfig(r=4, **settings), task_type="CAUSAL_LM", seed=0)
    ours = tmp_path / "ours"
    ours.mkdir()
    tensors = saved_model.adapter_tensors(model)
    saved_model.adapter_with(model, tensors).write(ours)
    model.save_pretrained(tmp_path / "theirs")
    require_same_files(ours, tmp_path / "theirs", but="README.md")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_whole_model_is_saved_as_transformers_saves_it(tmp_path: Path, name: str) -> None:
    model = build_model(name, (PROMISED | PADDING_FREE | ONE_BY_ONE)[name], lora=False)
    before = model.config.to_json_string()
    saved_model.whole_with(model, model.state_dict()).write(tmp_path / "ours")
    assert model.config.to_json_string() == before
    assert model.config.dtype is torch.float32
    model.save_pretrained(tmp_path / "theirs")
    require_same_files(tmp_path / "ours", tmp_path / "theirs")


def require_same_files(ours: Path, theirs: Path, but: str = "") -> None:
    """Require that two folders have the same files."""
    wanted = {path.name: path.read_bytes() for path in theirs.iterdir() if path.name != but}
    assert {path.name: path.read_bytes() for path in ours.iterdir()} == wanted


@pytest.mark.parametrize("lora", [True, False])
def test_copies_share_no_memory_with_what_is_trained(lora: bool) -> None:
    model = build_model("llama", PROMISED["llama"], lora=lora)
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    trained = {optimizer.master.untyped_storage().data_ptr()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained.add(parameter.untyped_storage().data_ptr())
    for tensor in optimizer.state().values():
        trained.add(tensor.untyped_storage().data_ptr())

    copies = CheckpointCopies(background=True)
    taken = copies.take(model, optimizer, is_whole=True, labelled=False, is_main=True)
    saved: Any = taken.model
    tensors = [*taken.optimizer.values(), *(saved.tensors if lora else saved.weights).values()]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors}.isdisjoint(trained)
