"""Encoders of many families as classifiers, texts and pairs of texts, against plain transformers one text at a time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from kubetune.batching.feed import Feed, rows_per_epoch
from kubetune.data.prepared.prepare import prepare
from kubetune.distributed.process_group import World
from kubetune.errors import ModelError
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import make_plan
from kubetune.tasks import sequence_classification as task
from tests import reviews

SIZES = {
    "vocab_size": 24,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
BARE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    **SIZES,
}
BERT = {**BARE, "classifier_dropout": 0.0, "classifier_dropout_prob": 0.0}
ROBERTA = {**BERT, "type_vocab_size": 1, "pad_token_id": 1}
XLM = {
    "vocab_size": 24,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_position_embeddings": 80,
    "summary_first_dropout": 0.0,
    "pad_token_id": 0,
}
DEBERTA = {
    **BERT,
    "type_vocab_size": 0,
    "relative_attention": True,
    "max_relative_positions": 16,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "pooler_dropout": 0.0,
}

# Families whose texts run in one packed batch.
PADDING_FREE: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "electra": {**BERT, "embedding_size": 16},
    "ernie": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "xlm-roberta-xl": ROBERTA,
    "camembert": ROBERTA,
    "data2vec-text": ROBERTA,
    "roberta-prelayernorm": ROBERTA,
    "xmod": {**ROBERTA, "languages": ["en_XX"], "default_language": "en_XX"},
    "gte": BERT,
    "nomic_bert": BERT,
    "modernbert": {  # its first layer sees all of a text, the second at most 4 tokens to each side
        **BARE,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "classifier_pooling": "cls",
    },
}

# Families that pool or attend otherwise: each text is run alone.
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "eurobert": {**BARE, "num_key_value_heads": 2},
    "deberta": DEBERTA,
    "deberta-v2": {
        **DEBERTA,
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "mpnet": {**BERT, "pad_token_id": 1},
    "xlnet": {
        "vocab_size": 24,
        "d_model": 32,
        "n_layer": 2,
        "n_head": 2,
        "d_inner": 64,
        "dropout": 0.0,
        "summary_last_dropout": 0.0,
        "pad_token_id": 0,
    },
    "xlm": XLM,
    "flaubert": XLM,
    "longformer": {**ROBERTA, "attention_window": [8, 8]},
    "big_bird": {**BERT, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    "funnel": {
        "vocab_size": 24,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": 32,
        "n_head": 2,
        "d_head": 16,
        "d_inner": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
    },
    "squeezebert": {
        **BERT,
        "embedding_size": 32,
        "q_groups": 1,
        "k_groups": 1,
        "v_groups": 1,
        "post_attention_groups": 1,
        "intermediate_groups": 1,
        "output_groups": 1,
    },
    "mobilebert": {
        **BERT,
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "true_hidden_size": 16,
    },
    "megatron-bert": BERT,
    "roformer": {**BERT, "embedding_size": 32},
    "rembert": {**BERT, "input_embedding_size": 16, "output_embedding_size": 16},
    "convbert": {**BERT, "embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3},
    "nystromformer": {**BERT, "num_landmarks": 4, "segment_means_seq_len": 4},
    "yoso": BERT,
    "ibert": ROBERTA,
    "luke": {**ROBERTA, "entity_vocab_size": 5, "entity_emb_size": 8},
    "fnet": BERT,
    "canine": BERT,
    "ctrl": {
        "vocab_size": 24,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "dff": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "n_positions": 80,
    },
    "bart": {
        "vocab_size": 24,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "pad_token_id": 0,
        "max_position_embeddings": 80,
        "eos_token_id": 3,
        "dropout": 0.0,
        "decoder_start_token_id": 3,
    },
    "t5": {
        "vocab_size": 24,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 3,
        "decoder_start_token_id": 0,
    },
}

QUICK = ("roberta", "eurobert", "xlnet", "ctrl", "modernbert")
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted({*PADDING_FREE, *ONE_BY_ONE})
]


def make_inputs(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """Return a tiny model with a head, and pairs among the texts it is to tell apart."""
    reviews.save_model(folder / "model")
    (folder / "model" / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, num_labels=2, **settings)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    with (folder / "train.jsonl").open("w") as file:
        for number in range(8):
            row = {"text": reviews.review(draw, number % 2), "label": number % 2}
            if number % 3:
                row["text_pair"] = reviews.review(draw, number % 2)
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradient_are_those_of_plain_transformers(name: str, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, name, {**PADDING_FREE, **ONE_BY_ONE}[name])
    data = {"train": str(inputs / "train.jsonl"), "eval": None}
    config = reviews.make_config(
        inputs, {"global_batch_size": 8, "per_device_train_batch_size": 8}, data=data
    )
    data = prepare(config)
    world = World()
    learner = task.TASK.build(
        ModelSpec.of(config), config.training, world, Workload(0, data.labels)
    )
    padding_free = learner.route.padding_free
    assert padding_free == (name in PADDING_FREE), learner.route.why_not
    plan = make_plan(config, rows_per_epoch(data.train))
    batches = Feed(data.train, plan, 0, world, padding_free=padding_free).step(0).batches
    actual = sum(float(task.TASK.backward(learner, batch, 0.125)[0]) for batch in batches)

    plain: Any = AutoModelForSequenceClassification.from_pretrained(
        inputs / "model", num_labels=2, attn_implementation="eager"
    )
    plain.train().load_state_dict(learner.model.state_dict())
    has_types = name == "xlnet" or getattr(plain.config, "type_vocab_size", 0) > 1
    targets = torch.cat([batch.labels[:, 0].long() for batch in batches])
    wanted = 0.0
    for place, sample in enumerate(sample for batch in batches for sample in batch.samples):
        ids = torch.from_numpy(data.train.row(sample)[0].astype(np.int64))[None]
        types = torch.from_numpy(data.train.segments(sample).astype(np.int64))[None]
        logits = plain(input_ids=ids, **({"token_type_ids": types} if has_types else {})).logits
        loss = 0.125 * F.cross_entropy(logits.float(), targets[place : place + 1])
        loss.backward()
        wanted += float(loss.detach())
    assert sum(bool(data.train.segments(i).any()) for i in range(8)) == 5
    assert actual == pytest.approx(wanted, rel=1e-5)
    ours = {key: p.grad for key, p in learner.model.named_parameters() if p.grad is not None}
    for key, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[key], parameter.grad, rtol=1e-3, atol=2e-6, msg=key)


def test_a_model_that_wants_more_than_a_text_is_refused_in_plain_words(tmp_path: Path) -> None:
    shape = {
        "axial_pos_shape": [4, 20],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local"],
        "hidden_size": 32,
    }
    heads = {
        "num_attention_heads": 2,
        "attention_head_size": 16,
        "feed_forward_size": 64,
        "is_decoder": False,
    }
    settings = {
        "vocab_size": 24,
        "max_position_embeddings": 80,
        "pad_token_id": 0,
        "eos_token_id": 3,
    }
    inputs = make_inputs(tmp_path, "reformer", {**shape, **heads, **settings})
    data = {"train": str(inputs / "train.jsonl"), "eval": None}
    config = reviews.make_config(inputs, data=data)
    message = r"ReformerForSequenceClassification cannot classify a text of 19 tokens by itself \(.*axial_pos_shape"
    with pytest.raises(ModelError, match=message):
        task.TASK.build(
            ModelSpec.of(config), config.training, World(), Workload(0, prepare(config).labels)
        )
