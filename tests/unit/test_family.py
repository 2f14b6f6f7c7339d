"""Weights of another family than their config.json: known by the names in their headers, before anything is loaded."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from kubetune.errors import ModelError
from kubetune.library.verdict import family
from kubetune.library.verdict.family import require_family
from kubetune.plan.model_shapes import Weights, read_weights
from tests.architectures import build_model
from tests.families import FAMILIES, OURS, SEEING
from tests.pictures import ARCHITECTURES, save_family_model, save_seeing_model
from tests.run.test_classifier_families import ONE_BY_ONE, PADDING_FREE
from tests.small_configs import settings

CLASSIFIERS = {**PADDING_FREE, **ONE_BY_ONE}


@cache
def saved(name: str) -> Weights:
    """Return the names and shapes in the files of a tiny model of a family."""
    with TemporaryDirectory() as folder:
        build_model(
            name, OURS[name] if name in OURS else settings(name), lora=False
        ).save_pretrained(folder)
        weights = read_weights(folder, {})
    assert weights is not None
    return weights


def says(weights: Weights, config: Weights) -> str:
    """Return what is said of the weights of one model beside the config.json of another."""
    try:
        require_family("m", Weights(weights.shapes, config.config, stated=True))
    except ModelError as error:
        return str(error)
    return ""


QUICK = ("llama", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "opt", "mixtral", "falcon", "mamba")


@pytest.mark.parametrize("name", QUICK)
def test_a_family_fits_itself(name: str) -> None:
    assert not says(saved(name), saved(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(QUICK)))
def test_each_family_fits_itself(name: str) -> None:
    assert not says(saved(name), saved(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEING)
def test_each_family_that_sees_fits_itself(name: str, tmp_path: Path) -> None:
    save = save_seeing_model if name in ARCHITECTURES else save_family_model
    weights = read_weights(str(save(tmp_path, name)), {})
    assert weights is not None
    assert not says(weights, weights)


@pytest.mark.parametrize("name", ["modernbert", "roberta"])
def test_a_classifier_fits_itself(name: str, tmp_path: Path) -> None:
    _require_own(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_each_classifier_fits_itself(name: str, tmp_path: Path) -> None:
    _require_own(name, tmp_path)


def _require_own(name: str, folder: Path) -> None:
    config = AutoConfig.for_model(name, num_labels=2, **CLASSIFIERS[name])
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    weights = read_weights(str(folder), {})
    assert weights is not None
    assert not says(weights, weights)


@pytest.mark.parametrize(
    ("weights", "config", "sentence"),
    [
        ("gpt2", "llama", "most layers have attn.c_attn, which such a model does not have"),
        ("llama", "gpt2", "most layers have .*, which such a model does not have"),
        (
            "qwen3",
            "llama",
            "most layers have self_attn.[kq]_norm, which such a model does not have",
        ),
        ("llama", "qwen3", "no layer has self_attn.q_norm, which such a model has"),
        (
            "qwen2",
            "llama",
            "most layers have self_attn.q_proj.bias, which such a model does not have",
        ),
        ("llama", "qwen2", "no layer has self_attn.q_proj.bias, which such a model has"),
        ("llama", "gemma2", "no layer has pre_feedforward_layernorm, which such a model has"),
        ("phi3", "qwen2", "most layers have .*, which such a model does not have"),
        ("mixtral", "llama", "most layers have .*, which such a model does not have"),
    ],
)
def test_another_family_is_named(weights: str, config: str, sentence: str) -> None:
    text = says(saved(weights), saved(config))
    assert text.startswith("model m: its weights are of another kind of model than its config.json")
    assert re.search(sentence, text), text


def test_old_names_of_norms_are_known() -> None:
    """Files of BERT's first years have them."""
    bert: Any = AutoConfig.for_model("bert", num_labels=2, **CLASSIFIERS["bert"])
    model = AutoModelForSequenceClassification.from_config(bert)
    shapes = {}
    for name, tensor in model.named_parameters():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        shapes[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tuple(tensor.shape)
    assert any("gamma" in name for name in shapes)
    require_family("m", Weights(shapes, bert.to_dict(), stated=True))


def test_code_that_is_not_found_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release may keep its code elsewhere."""
    foreign = Weights(saved("gpt2").shapes, saved("llama").config, stated=True)
    for change in ("_folder", "find_spec"):
        family._code.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(family, change, lambda name: None)
            require_family("m", foreign)
    family._code.cache_clear()
    with pytest.raises(ModelError):
        require_family("m", foreign)


def test_quantised_weights_may_have_more_tensors() -> None:
    """GPTQ adds a bias to each layer."""
    shapes = dict(saved("llama").shapes)
    shapes |= {name.replace(".weight", ".bias"): (8,) for name in shapes if "_proj" in name}
    config = saved("llama").config
    assert says(Weights(shapes, config, stated=True), saved("llama"))
    quantised = {**config, "quantization_config": {"quant_method": "gptq"}}
    require_family("m", Weights(shapes, quantised, stated=True))


def test_the_same_weights_in_another_form_beside_them_are_not_counted(tmp_path: Path) -> None:
    """Mistral's repositories hold them twice, and a folder may hold an adapter too."""
    (tmp_path / "config.json").write_text(json.dumps(saved("mistral").config))
    tensor = torch.zeros(2, 2)
    save_file({"layers.0.attention.wq.weight": tensor}, tmp_path / "consolidated.safetensors")
    save_file({"model.layers.0.mlp.up_proj.weight": tensor}, tmp_path / "model.safetensors")
    weights = read_weights(str(tmp_path), {})
    assert weights is not None
    assert list(weights.shapes) == ["model.layers.0.mlp.up_proj.weight"]
