"""Weights that anybody may have made: damaged, incomplete or foreign weights are refused in words, and answer nothing."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.config.schema import ModelConfig
from kubetune.models import loading
from kubetune.models.model_spec import ModelSpec
from kubetune.training.optimizer.shards import Buffers
from tests import toy

NAME = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("inputs")) / "model"


@pytest.fixture
def base(base_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_folder)


@pytest.fixture
def adapter(base_folder: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(**facts: Any) -> bytes:
    facts = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **facts}
    return header(json.dumps({"x": facts}).encode()) + bytes(4)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"abc", id="three bytes"),
        pytest.param(header(b"{}", 2**63), id="2^63"),
        pytest.param(header(b"{}", 2**64 - 1), id="2^64-1"),
        pytest.param(header(b"{}", 100 << 20), id="longer than the file"),
        pytest.param(header(b""), id="no header"),
        pytest.param(header(b"not JSON"), id="no JSON"),
        pytest.param(header(b"[]"), id="array"),
        pytest.param(header(b"[" * 100_000), id="deep"),
        pytest.param(header(bytes(100)), id="NULs"),
        pytest.param(tensor(shape=[2**62]), id="large shape"),
        pytest.param(tensor(shape=[-1]), id="negative shape"),
        pytest.param(tensor(shape=[1.5]), id="broken shape"),
        pytest.param(tensor(dtype="F128"), id="dtype"),
        pytest.param(tensor(data_offsets=[0, 400]), id="beyond"),
        pytest.param(tensor(data_offsets=[4, 0]), id="reversed"),
        pytest.param(b"\x80\x04N.", id="pickle"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="zip"),
        pytest.param(b"GGUF" + bytes(100), id="GGUF"),
    ],
)
def test_what_is_no_file_of_weights_is_refused_in_words(
    base: Any, adapter: Path, content: bytes
) -> None:
    (adapter / NAME).write_bytes(content)
    with pytest.raises(errors.ModelError, match="is no whole file of safetensors"):
        loading.with_adapter(base, adapter)
    (adapter / "optimizer.safetensors").write_bytes(content)
    with pytest.raises(errors.EnvironmentFault, match="is no whole file of safetensors"):
        Buffers(adapter)


def test_a_whole_adapter_is_loaded(base: Any, adapter: Path) -> None:
    tensors = load_file(adapter / NAME)
    with torch.no_grad():
        for number, weights in enumerate(tensors.values(), 1):
            weights.fill_(number)
    save_file(tensors, adapter / NAME)
    loaded = loading.with_adapter(base, adapter)
    values = {float(p.flatten()[0]) for n, p in loaded.named_parameters() if "lora_" in n}
    assert values == {float(number) for number in range(1, len(tensors) + 1)}


def test_an_adapter_with_other_tensors_answers_nothing(base_folder: Path, adapter: Path) -> None:
    tensors = load_file(adapter / NAME)
    first = min(tensors)
    rest = {name: value for name, value in tensors.items() if name != first}
    for content, message in (
        (rest, "its weights lack .*lora_A"),
        (rest | {"../../etc/x": tensors[first]}, "its weights lack .*lora_A"),
        (tensors | {"another": torch.ones(1)}, "have the foreign 'another'"),
        (tensors | {first: tensors[first] * torch.nan}, "numbers that are not finite"),
        (tensors | {first: tensors[first] + torch.inf}, "numbers that are not finite"),
    ):
        save_file(content, adapter / NAME)
        base = AutoModelForCausalLM.from_pretrained(base_folder)
        with pytest.raises(errors.ModelError, match=message):
            loading.with_adapter(base, adapter)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_whose_weights_are_not_finite_answers_nothing(
    base_folder: Path, tmp_path: Path, wrong: float, dtype: str
) -> None:
    """Of a base, and of a checkpoint that was trained whole."""
    folder = tmp_path / "model"
    shutil.copytree(base_folder, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = max(tensors)
    tensors[last].view(-1)[-1] = wrong
    save_file(tensors, file, {"format": "pt"})
    device = torch.device("cpu")
    spec = ModelSpec(ModelConfig(path=str(folder), dtype=dtype))
    message = f"{re.escape(last)} has numbers that are not finite"
    with pytest.raises(errors.ModelError, match=message):
        loading.load_pretrained(AutoModelForCausalLM, spec, device)
    whole = ModelSpec(ModelConfig(path=str(base_folder), dtype=dtype))
    loading.load_pretrained(AutoModelForCausalLM, whole, device)
    with pytest.raises(errors.ModelError, match=message):
        loading.load_trained(AutoModelForCausalLM, whole, folder, device)


def test_a_model_without_some_of_its_layers_is_not_loaded(
    tmp_path: Path, base_folder: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers + 1}))
    message = rf"its weights lack 1 layer that config.json asks for: model\.layers\.{layers}"
    with pytest.raises(errors.ModelError, match=message):
        loading.load_pretrained(
            AutoModelForCausalLM, ModelSpec(ModelConfig(path=str(folder))), torch.device("cpu")
        )
