"""What is said of models that do not fit the data or are damaged."""

from __future__ import annotations

import pytest
import torch

from kubetune.config.schema import Config
from kubetune.errors import ConfigError, ModelError
from kubetune.models import check_positions, load_pretrained
from tests.architectures import PROMISED, build_model, save_model


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
