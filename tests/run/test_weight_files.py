"""Weights that anybody may have made: damaged, incomplete or foreign weights are refused in words, and answer nothing."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.config.schema import ModelConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.models import loading
from kubetune.models.adapters import on_base
from kubetune.models.model_spec import ModelSpec
from kubetune.scoring.generation import generate, greedy
from kubetune.training.optimizer.shards import Buffers
from tests import toy

NAME = "adapter_model.safetensors"
BASE = "base_model.model.model"
SETTINGS = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("inputs")) / "model"


@pytest.fixture
def base(base_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_folder)


@pytest.fixture
def adapter(base_folder: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    adapted = get_peft_model(model, SETTINGS)
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
        on_base.with_adapter(base, adapter)
    (adapter / "optimizer.safetensors").write_bytes(content)
    with pytest.raises(errors.EnvironmentFault, match="is no whole file of safetensors"):
        Buffers(adapter)


def test_a_whole_adapter_is_loaded(base: Any, adapter: Path) -> None:
    tensors = load_file(adapter / NAME)
    with torch.no_grad():
        for number, weights in enumerate(tensors.values(), 1):
            weights.fill_(number)
    save_file(tensors, adapter / NAME)
    loaded = on_base.with_adapter(base, adapter)
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
        (tensors | {first: tensors[first] - 1e30}, r"numbers up to 1e\+30, which no trained model"),
        # Names that the base has, and PEFT would put there.
        (
            tensors | {f"{BASE}.norm.weight": torch.zeros(1)},
            f"have the foreign '{BASE}.norm.weight",
        ),
        (tensors | {f"{BASE}.embed_tokens.weight": torch.zeros(1)}, "have the foreign"),
    ):
        save_file(content, adapter / NAME)
        base = AutoModelForCausalLM.from_pretrained(base_folder)
        with pytest.raises(errors.ModelError, match=message):
            on_base.with_adapter(base, adapter)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lora_alpha": float("nan")}, "lora_alpha: nan; expected a finite number"),
        ({"lora_alpha": float("inf")}, "lora_alpha: inf; expected a finite number"),
        ({"lora_alpha": 1e30}, r"lora_alpha: 1e\+30; expected less than or equal to 65536"),
        ({"lora_alpha": 0}, "lora_alpha: 0; expected greater than 0"),
        ({"lora_alpha": [1]}, r"lora_alpha: \[1\]; expected a valid number"),
        ({"lora_alpha": None}, "lora_alpha: None; expected a valid number"),
        ({"r": "2"}, "r: '2'; expected a valid integer"),
        ({"r": True}, "r: True; expected a valid integer"),
        ({"r": 0}, "r: 0; expected greater than or equal to 1"),
        ({"r": 10**30}, "r: 10*; expected less than or equal to 4096"),
        ({"lora_dropout": "x"}, "lora_dropout: 'x'; expected a valid number"),
        ({"rank_pattern": [1]}, r"rank_pattern: \[1\]; expected a valid dictionary"),
        ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern: .*which should match pattern"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern: nan; expected a finite"),
        ({"modules_to_save": ["(a+)+$"]}, "modules_to_save: .*which should match pattern"),
        ({"target_modules": 5}, "target_modules: 5; expected"),
        ({"target_modules": ["(a+)+$"]}, "target_modules: "),
        ({"use_dora": "no"}, "use_dora: 'no'; expected a valid boolean"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3'; expected 'LORA'"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type: "),
        ({"base_model_name_or_path": {"a": 1}}, "base_model_name_or_path: .*valid string"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa'; expected a valid boolean"),
        ({"bias": "all"}, "bias: 'all', which no run writes"),
        ({"layer_replication": [[0, 9]]}, "layer_replication: .*, which no run writes"),
        ({"megatron_config": {"a": 1}}, "megatron_config: .*, which no run writes"),
        ({"auto_mapping": {"parent_library": "os"}}, "auto_mapping: .*, which no run writes"),
        ({"of_a_later_peft": 1}, "of_a_later_peft: 1, which no run writes"),
    ],
)
def test_settings_of_an_adapter_that_no_run_writes(
    adapter: Path, change: dict[str, Any], problem: str
) -> None:
    set_in(adapter, **change)
    with pytest.raises(errors.ModelError, match=f"its adapter_config.json has {problem}"):
        on_base.require_plain_adapter(adapter)


def set_in(adapter: Path, **change: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


@pytest.mark.parametrize("key", ["r", "lora_alpha", "peft_type"])
def test_settings_of_an_adapter_that_lack_a_key(adapter: Path, key: str) -> None:
    path = adapter / "adapter_config.json"
    facts = json.loads(path.read_text())
    del facts[key]
    path.write_text(json.dumps(facts))
    with pytest.raises(errors.ModelError, match=f"has no {key}; expected one"):
        on_base.require_plain_adapter(adapter)


@pytest.mark.parametrize(
    ("settings", "change", "problem"),
    [
        ({}, lambda a, b: (a.T, b), r"lora_A.* has the shape \[64, 2\]; expected 2 rows"),
        ({}, lambda a, b: (a, b.T), r"lora_B.* has the shape \[2, 64\]; expected 2 columns"),
        ({}, lambda a, b: (a[0], b), r"lora_A.* has the shape \[64\]; expected 2 rows"),
        ({}, lambda a, b: (a.int(), b), "lora_A.* holds I32; expected floats"),
        ({}, lambda a, b: (a, b.bool()), "lora_B.* holds BOOL; expected floats"),
        ({"r": 8}, lambda a, b: (a, b), r"expected 8 (rows|columns), the rank in adapter_config"),
        (
            {"rank_pattern": {"q_proj": 1}},
            lambda a, b: (a, b),
            "q_proj.* expected 1 (rows|columns)",
        ),
    ],
    ids=["A turned", "B turned", "A is a row", "A of integers", "B of truths", "r", "rank_pattern"],
)
def test_tensors_that_are_none_of_such_an_adapter(
    adapter: Path,
    settings: dict[str, Any],
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    problem: str,
) -> None:
    set_in(adapter, **settings)
    tensors = load_file(adapter / NAME)
    first = min(name for name in tensors if "lora_A" in name)
    second = first.replace("lora_A", "lora_B")
    tensors[first], tensors[second] = change(tensors[first], tensors[second])
    save_file({name: value.contiguous() for name, value in tensors.items()}, adapter / NAME)
    with pytest.raises(errors.ModelError, match=problem):
        on_base.require_plain_adapter(adapter)


def test_an_adapter_of_another_base_is_refused_in_words(base: Any, adapter: Path) -> None:
    tensors = load_file(adapter / NAME)
    for name, value in tensors.items():
        if "lora_A" in name:
            tensors[name] = torch.ones(2, value.shape[1] + 8)
    save_file(tensors, adapter / NAME)
    with pytest.raises(errors.ModelError, match=r"PEFT cannot put it on this model \(RuntimeError"):
        on_base.with_adapter(base, adapter)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"target_modules": "(((.+)+)+)+$x"}, "soon has an answer"),
        ({"target_modules": "(("}, "expected a regular expression"),
        ({"target_modules": "(a+)+$"}, r"expected an expression that matches .*q_proj, which has"),
        ({"exclude_modules": "(((.+)+)+)+$x"}, "exclude_modules: .* soon has an answer"),
    ],
)
def test_expressions_of_an_adapter_that_never_end_or_match_nothing(
    base: Any, adapter: Path, change: dict[str, Any], problem: str
) -> None:
    set_in(adapter, **change)
    with pytest.raises(errors.ModelError, match=problem):
        on_base.with_adapter(base, adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True, "use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"q_proj": 1}},
        {"target_parameters": ["mlp.down_proj.weight"]},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_forms_of_adapters_that_runs_write_are_loaded(
    base_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = LoraConfig(**{**SETTINGS.to_dict(), "peft_type": None, **settings})
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base_folder), config)
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    on_base.with_adapter(AutoModelForCausalLM.from_pretrained(base_folder), tmp_path / "adapter")


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


def test_logits_that_are_no_numbers_are_not_answered_from(base: Any, base_folder: Path) -> None:
    """Weights that are finite one by one may overflow together."""
    tokenizer = load_tokenizer(ModelConfig(path=str(base_folder)))
    assert generate(base, tokenizer, [[5, 6, 7]], greedy(2))
    base.get_output_embeddings().weight.data.fill_(3e38)
    with pytest.raises(errors.ModelError, match=r"its logits are not finite.*range of float32"):
        generate(base, tokenizer, [[5, 6, 7]], greedy(2))


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


def test_a_model_whose_layers_lack_weights_is_not_loaded(tmp_path: Path, base_folder: Path) -> None:
    """They would be drawn at random."""
    folder = tmp_path / "model"
    shutil.copytree(base_folder, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if "layers.1." in name and "norm" in name)
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    message = rf"its weights lack 1 weight of its layers that config.json asks for: {lost}"
    with pytest.raises(errors.ModelError, match=message):
        loading.load_pretrained(
            AutoModelForCausalLM, ModelSpec(ModelConfig(path=str(folder))), torch.device("cpu")
        )
