"""What is said of models that do not fit the data or are damaged."""

from __future__ import annotations

import json

import pytest
import torch

from kubetune.config.schema import Config, ModelConfig
from kubetune.data.tokenizer import load_tokenizer
from kubetune.errors import ConfigError, ModelError
from kubetune.models import check_positions, load_pretrained
from kubetune.parallel import World
from kubetune.train import _log_padding
from tests.architectures import PROMISED, build_model, save_model
from tests.tiny import train_tokenizer


def test_rows_beyond_a_learned_table_of_positions_are_refused():
    model = build_model("gpt2", PROMISED["gpt2"])
    check_positions(model, 512)
    with pytest.raises(ConfigError, match=r"512 positions, the longest row 513 tokens; set data\.max_length to 512"):
        check_positions(model, 513)


def test_rows_beyond_rotary_positions_are_only_warned_of(caplog):
    check_positions(build_model("llama", PROMISED["llama"]), 513)
    assert "never trained" in caplog.text


def test_a_damaged_weight_file_is_named_as_such(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = Config.model_validate({"model": str(folder), "data": {"train": "x.jsonl"}})
    with pytest.raises(ModelError, match="damaged or was not downloaded"):
        load_pretrained(AutoModelForCausalLM, config, torch.device("cpu"))


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_weights_of_other_shapes_than_the_config_are_named_with_both(tmp_path, task):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = save_model(tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    had = facts["vocab_size"]
    (folder / "config.json").write_text(json.dumps(facts | {"vocab_size": had + 7}))
    config = Config.model_validate({"model": str(folder), "data": {"train": "x.jsonl"}})
    auto_class, settings = (
        (AutoModelForCausalLM, {})
        if task == "causal_lm"
        else (AutoModelForSequenceClassification, {"num_labels": 3, "ignore_mismatched_sizes": True})
    )
    width = facts["hidden_size"]
    with pytest.raises(ModelError) as caught:
        load_pretrained(auto_class, config, torch.device("cpu"), **settings)
    assert f"embed_tokens.weight is [{had}, {width}], expected [{had + 7}, {width}]" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_classifier_may_get_a_head_of_another_size(tmp_path, caplog):
    from transformers import AutoModelForSequenceClassification

    folder = save_model(tmp_path / "model")
    config = Config.model_validate({"model": str(folder), "data": {"train": "x.jsonl"}})
    model = load_pretrained(AutoModelForSequenceClassification, config, torch.device("cpu"), num_labels=3)
    model.save_pretrained(folder)
    model = load_pretrained(AutoModelForSequenceClassification, config, torch.device("cpu"), num_labels=5)
    assert model.score.out_features == 5


@pytest.mark.parametrize(("pad_token", "rank", "lines"), [("<|endoftext|>", 0, 0), (None, 0, 1), (None, 1, 0)])
def test_a_missing_pad_token_is_told_once(tmp_path, caplog, pad_token, rank, lines):
    folder = train_tokenizer(tmp_path / "model")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"pad_token": pad_token}))
    with caplog.at_level("INFO", logger="kubetune"):
        _log_padding(load_tokenizer(ModelConfig(path=str(folder))), World(rank=rank))
    assert caplog.text.count("no pad token is named") == lines
