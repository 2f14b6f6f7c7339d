"""What is said of models that do not fit the data or are damaged."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kubetune.config.schema import Config, ModelConfig
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import count_holding
from kubetune.data.reading.hub import check_model_folder
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.errors import ConfigError, ModelError
from kubetune.models.loading import check_positions, check_rows, load_pretrained
from kubetune.models.model_spec import ModelSpec
from kubetune.plan import model_shapes
from kubetune.training.start.start_log import log_padding
from tests.architectures import PADDING_FREE, PROMISED, build_model, save_model
from tests.tiny import train_tokenizer


def test_rows_beyond_a_learned_table_of_positions_are_refused():
    model = build_model("gpt2", PROMISED["gpt2"])
    check_positions(model, 512)
    with pytest.raises(
        ConfigError, match=r"512 positions, the longest row 513 tokens; set data\.max_length to 512"
    ):
        check_positions(model, 513)


def test_rows_beyond_rotary_positions_are_only_warned_of(caplog):
    check_positions(build_model("llama", PROMISED["llama"]), 513)
    assert "was trained on at most" in caplog.text


def test_a_damaged_weight_file_is_named_as_such(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = Config.model_validate({"model": str(folder), "data": {"train": "x.jsonl"}})
    with pytest.raises(ModelError, match="damaged or was not downloaded"):
        load_pretrained(AutoModelForCausalLM, ModelSpec.of(config), torch.device("cpu"))


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
        else (
            AutoModelForSequenceClassification,
            {"num_labels": 3, "ignore_mismatched_sizes": True},
        )
    )
    width = facts["hidden_size"]
    with pytest.raises(ModelError) as caught:
        load_pretrained(auto_class, ModelSpec.of(config), torch.device("cpu"), **settings)
    assert f"embed_tokens.weight is [{had}, {width}], expected [{had + 7}, {width}]" in str(
        caught.value
    )
    assert caught.value.exit_code == 2


def test_a_classifier_may_get_a_head_of_another_size(tmp_path, caplog):
    from transformers import AutoModelForSequenceClassification

    folder = save_model(tmp_path / "model")
    config = Config.model_validate({"model": str(folder), "data": {"train": "x.jsonl"}})
    model = load_pretrained(
        AutoModelForSequenceClassification, ModelSpec.of(config), torch.device("cpu"), num_labels=3
    )
    model.save_pretrained(folder)
    model = load_pretrained(
        AutoModelForSequenceClassification, ModelSpec.of(config), torch.device("cpu"), num_labels=5
    )
    assert model.score.out_features == 5


@pytest.mark.parametrize(
    ("pad_token", "rank", "lines"), [("<|endoftext|>", 0, 0), (None, 0, 1), (None, 1, 0)]
)
def test_a_missing_pad_token_is_told_once(tmp_path, caplog, pad_token, rank, lines):
    folder = train_tokenizer(tmp_path / "model")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"pad_token": pad_token}))
    with caplog.at_level("INFO", logger="kubetune"):
        log_padding(load_tokenizer(ModelConfig(path=str(folder))), World(rank=rank))
    assert caplog.text.count("no pad token is named") == lines


def rows_of(folder, model, **facts):
    """Prepare rows for a model, after `facts` have changed its config.json."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    data = folder / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"one two {n} three"}) + "\n" for n in range(4))
        + '{"text": "Paris"}\n'
    )
    sections = {
        "train": str(data),
        "eval": str(data),
        "cache": str(folder / "cache"),
        "num_proc": 1,
    }
    config = Config.model_validate({"model": str(model), "data": sections})
    return config, prepare(config)


def test_tokens_that_the_model_has_no_embedding_for_are_named_before_it_is_loaded(tmp_path):
    model = save_model(tmp_path / "model")
    (model / "model.safetensors").unlink()  # what would be read first thing
    config, data = rows_of(tmp_path, model)
    check_rows(AutoModelForCausalLM, config.model, data)
    ids = sorted({int(id) for n in range(len(data.train)) for id in data.train.row(n)[0]})
    assert data.train.largest_id == ids[-1]
    config, data = rows_of(tmp_path, model, vocab_size=ids[-1])
    holding = count_holding(data.train, ids[-1])
    assert 0 < holding < 5
    with pytest.raises(ConfigError) as caught:
        check_rows(AutoModelForCausalLM, config.model, data)
    text = repr(data.tokenizer.decode([ids[-1]]))
    assert (
        f"has embeddings for {ids[-1]} tokens, but {holding} of 5 rows hold ids beyond them, up to {ids[-1]} ({text}); "
        "the tokenizer is the model's own. Give a tokenizer whose tokens the model knows"
    ) in str(caught.value)


@pytest.mark.parametrize("shared", [3, 0])
def test_heads_that_cannot_share_keys_and_values_are_refused_before_the_model_is_loaded(
    tmp_path, shared
):
    config, data = rows_of(tmp_path, model := save_model(tmp_path / "model"))
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**facts, "num_key_value_heads": shared}))
    (model / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=rf"num_attention_heads 4 and num_key_value_heads {shared}; expected"
    ):
        check_rows(AutoModelForCausalLM, config.model, data)


@pytest.mark.parametrize(
    ("name", "facts", "limit"),
    [
        ("gpt2", {"n_positions": 4}, 4),
        ("opt", {"max_position_embeddings": 4}, 4),
        ("llama", {"max_position_embeddings": 4}, None),
    ],
)
def test_rows_longer_than_a_table_of_positions_are_refused_before_the_model_is_loaded(
    tmp_path, name, facts, limit
):
    folder = save_model(tmp_path / "llama")  # for its tokenizer
    model = AutoConfig.for_model(
        name, **{**{**PROMISED, **PADDING_FREE}[name], "vocab_size": 512, **facts}
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    config, data = rows_of(tmp_path, folder)
    if limit is None:
        check_rows(AutoModelForCausalLM, config.model, data)
        return
    message = f"has {limit} positions, the longest row {data.longest} tokens; set data.max_length to {limit} or less"
    with pytest.raises(ConfigError, match=message):
        check_rows(AutoModelForCausalLM, config.model, data)


def test_positions_that_begin_behind_the_padding_are_not_counted():
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    model = AutoModel.from_config(
        AutoConfig.for_model("roberta", max_position_embeddings=20, pad_token_id=1, **shape)
    )
    check_positions(model, 18)
    model(input_ids=torch.full((1, 18), 5))
    with pytest.raises(ConfigError, match=r"18 positions, the longest row 19 tokens"):
        check_positions(model, 19)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        model(input_ids=torch.full((1, 19), 5))


def config_of(folder, **model):
    return Config.model_validate(
        {"model": {"path": str(folder), **model}, "data": {"train": "x.jsonl"}}
    )


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "model.bin", 5, None]
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, name):
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "other.safetensors").write_bytes(b"weights")
    (folder / model_shapes.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})
    )
    config = config_of(folder)
    for read in (lambda: check_model_folder(config.model), lambda: model_shapes.files_of(folder)):
        with pytest.raises(
            ModelError, match=r"index\.json names .*; expected names of \*\.safetensors files"
        ):
            read()
    with pytest.raises(ModelError, match=r"index\.json names"):
        load_pretrained(AutoModelForCausalLM, ModelSpec.of(config), torch.device("cpu"))
    (folder / model_shapes.INDEX).write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read"):
        check_model_folder(config.model)


ODD = [
    ("attn_implementation", "kernels-community/flash-attn"),
    ("_attn_implementation", {"": "owner/name:function"}),
    ("text_config", {"attn_implementation": "owner/name@main"}),
    ("num_hidden_layers", 2**62),
    ("num_hidden_layers", -1),
    ("hidden_size", "x"),
    ("head_dim", -1),
    ("num_attention_heads", 0),
    ("rms_norm_eps", []),
    ("vocab_size", 2**62),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("quantization_config", [1]),
    ("layer_types", 5),
    ("architectures", {"a": 1}),
    ("rope_parameters", "x"),
    ("text_config", 1.5),
    ("model_type", ["llama"]),
    ("model_type", "whisper"),
    ("sub_configs", 1),
]


@pytest.mark.parametrize(
    ("key", "value"), ODD, ids=[f"{key} {str(value)[:20]}" for key, value in ODD]
)
def test_an_odd_config_of_a_model_is_no_bug(tmp_path, key, value):
    folder = save_model(tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, key: value}))
    model_shapes.read_weights(str(folder), {})
    is_ignored = key == "architectures"  # transformers does not look at it
    message = re.escape(str(folder))
    if key == "num_hidden_layers":
        message += rf".*: its config\.json has num_hidden_layers: {value}; expected 1 to 10000; .* Nothing was loaded\."
    with nullcontext() if is_ignored else pytest.raises(ModelError, match=message):
        load_pretrained(AutoModelForCausalLM, ModelSpec.of(config_of(folder)), torch.device("cpu"))


def test_code_of_a_folder_is_pinned_by_its_content(tmp_path):
    folder = save_model(tmp_path / "model")
    (folder / "modeling_own.py").write_text("x = 1\n")
    made_up = config_of(folder, trust_remote_code=True, revision="a" * 40)
    with pytest.raises(
        ModelError, match=r"have the digest [0-9a-f]{40}\. Read the code, then"
    ) as caught:
        load_pretrained(AutoModelForCausalLM, ModelSpec.of(made_up), torch.device("cpu"))
    digest = str(caught.value).split("the digest ")[1][:40]
    check_model_folder(config_of(folder, trust_remote_code=True, revision=digest).model)
    (folder / "modeling_own.py").write_text("x = 2\n")
    with pytest.raises(ModelError, match="Nothing was run"):
        check_model_folder(config_of(folder, trust_remote_code=True, revision=digest).model)
