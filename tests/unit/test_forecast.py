"""Forecasts of what a run takes: sizes that are known, the direction of every change, and what is advised."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.plan.cost import Bill, bill, flops_per_token, kind_of
from kubetune.plan.costs import RunWeights
from kubetune.plan.fitting import remedies
from kubetune.plan.forecast import GIB, MIB, Forecast, forecast
from kubetune.plan.linears import Trainable, adapter_parameters
from kubetune.plan.model_shapes import Weights, read_weights, shapes_of
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
WEIGHTS = Weights(shapes_of(QWEN3_8B), QWEN3_8B, stated=False)


def ahead(*overrides: str, gpus: int = 1, nodes: int = 1, gib: int | None = 80) -> Forecast:
    settings = [
        f"compute.gpus_per_node={gpus}",
        f"compute.nodes={nodes}",
        "data.max_length=2048",
        *overrides,
    ]
    config = load_config(None, overrides=["model=org/m", "data.train=org/d", *settings])
    memory = forecast(RankWork.of(config, make_plan(config)), WEIGHTS, gib and gib * GIB)
    assert memory is not None
    return memory


def bill_of(config: Config, tokens: int, gpu: str | None = None) -> Bill:
    plan = make_plan(config)
    shape = kind_of(RankWork.of(config, plan), plan, WEIGHTS, gpu)
    result = bill(shape, config.compute, plan.world_size, tokens)
    assert result is not None
    return result


def test_weights_of_a_known_model_are_counted() -> None:
    assert WEIGHTS.parameters == pytest.approx(8.19e9, rel=0.002)
    config = load_config(None, overrides=["model=m/m", "data.train=x/y", "lora.r=16"])
    assert adapter_parameters(Trainable(config.lora, config.sight), WEIGHTS) == 43_646_976, (
        "what PEFT prints for all linear modules"
    )
    some = load_config(
        None,
        overrides=[
            "model=m/m",
            "data.train=x/y",
            "lora.r=8",
            "lora.target_modules=[q_proj,v_proj]",
        ],
    )
    assert adapter_parameters(Trainable(some.lora, some.sight), WEIGHTS) == 8 * 36 * (
        2 * 4096 + 4096 + 1024
    )


# Measured on a CPU, six steps each; the models are those of benchmarks/memory.py.
SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1152,
         "vocab_size": 24_000, "head_dim": 64}  # fmt: skip
TOY = {"hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 172, "head_dim": 8,
       "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "length", "batch", "words", "mib"),
    [
        pytest.param(TOY, 64, 1, [], 402, id="toy"),
        pytest.param(SMALL | {"num_key_value_heads": 6}, 448, 2, [], 1271, id="llama"),
        pytest.param(SMALL | {"num_key_value_heads": 2}, 960, 2, [], 1593, id="qwen3"),
        pytest.param(SMALL | {"num_key_value_heads": 3}, 480, 5, [], 1721, id="mistral"),
        pytest.param(
            SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True},
            320, 6, ["lora.r=16"], 1022, id="qwen2, lora",
        ),
        pytest.param(
            SMALL | {"num_key_value_heads": 3}, 256, 5, ["lora.r=16", "model.dtype=bfloat16"], 800,
            id="mistral, lora, bf16",
        ),
    ],
)  # fmt: skip
def test_the_forecast_for_a_cpu_is_within_a_quarter(
    sizes: dict[str, Any], length: int, batch: int, words: list[str], mib: int
) -> None:
    facts = QWEN3_8B | sizes
    settings = [
        "model=org/m",
        "data.train=org/d",
        "compute.gpus_per_node=0",
        "model.dtype=float32",
        "training.compile=false",
        f"data.max_length={length}",
        f"training.per_device_train_batch_size={batch}",
        *words,
    ]
    config = load_config(None, overrides=settings)
    memory = forecast(
        RankWork.of(config, make_plan(config)), Weights(shapes_of(facts), facts, stated=False)
    )
    assert memory is not None
    assert memory.peak_bytes == pytest.approx(mib * MIB, rel=0.25)


def test_the_worked_examples_are_what_is_computed() -> None:
    """The examples at the top of plan/forecast.py and plan/activations.py: LoRA on 7B, batch 8 × 2,048."""
    facts = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18_944,
             "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}  # fmt: skip
    weights = Weights(shapes_of(facts), facts, stated=False)
    words = ["model=org/m", "data.train=org/d", "lora.r=16", "data.max_length=2048", "model.dtype=bfloat16",
             "training.per_device_train_batch_size=8", "compute.gpus_per_node=1"]  # fmt: skip
    config = load_config(None, overrides=words)
    plan = make_plan(config)
    whole = forecast(RankWork.of(config, plan), weights)
    fitted = forecast(RankWork.of(config, plan), weights, 80 * GIB)
    assert whole is not None
    assert fitted is not None

    def gib(memory: Forecast, part: str) -> float:
        return round(memory.parts[part] / GIB, 1)

    assert whole.trained_parameters == 40_370_176
    assert gib(whole, "activations") == 67.8
    assert gib(fitted, "weights") == 14.2
    assert round(sum(state_of(fitted)) / GIB, 1) == 0.6
    assert gib(fitted, "logits, a chunk at a time") == 1.5
    assert fitted.recomputed[True] == 6
    assert gib(fitted, "activations, 6 of 28 layers recomputed") == 53.3
    assert gib(fitted, "inputs of those layers") == 0.7
    assert fitted.fits


def test_the_bases_precision_and_the_method_decide_over_weights_and_state() -> None:
    bf16 = ahead("lora.r=16", "quantization=none")
    assert bf16.parts["weights"] == 2 * WEIGHTS.parameters
    assert state_of(bf16) == [4 * 43_646_976, 4 * 43_646_976, 8 * 43_646_976]
    assert ahead("lora.r=16", "quantization=4bit").parts["weights"] < 0.4 * bf16.parts["weights"]
    auto, eight_bit = (ahead("lora.r=16", f"quantization={kind}") for kind in ("auto", "8bit"))
    assert auto.parts == eight_bit.parts, "one GPU"
    full = ahead()
    assert sum(state_of(full)) == 16 * WEIGHTS.parameters
    eight = ahead("training.optim=adamw_8bit")
    assert sum(state_of(eight)) == 10 * WEIGHTS.parameters
    assert eight.peak_bytes < full.peak_bytes


def state_of(memory: Forecast) -> list[int]:
    """Return what is trained, its gradients, and AdamW's moments."""
    name = next(
        part for part in memory.parts if part in ("adapters, in fp32", "trained weights, in fp32")
    )
    return [memory.parts[part] for part in (name, "their gradients", "AdamW's two moments")]


def test_sharding_divides_what_is_held_and_recomputing_what_is_kept() -> None:
    single = ahead(gpus=8)
    eight = ahead("training.parallelism=fsdp", gpus=8)
    assert state_of(eight) == [part // 8 for part in state_of(single)]
    assert "weights" not in eight.parts, "slices are fp32, the optimizer's own"
    assert "weights, gathered: two layers and what lies around them" in eight.parts
    single = ahead("lora.r=16", gpus=8)
    eight = ahead("lora.r=16", "training.parallelism=fsdp", gpus=8)
    assert eight.parts["weights"] == single.parts["weights"] // 8
    assert state_of(eight) == state_of(single), "adapters stay whole on every rank"
    kept = ahead("lora.r=16")
    again = ahead("lora.r=16", "training.gradient_checkpointing=true")
    assert again.peak_bytes < kept.peak_bytes
    assert again.parts["inputs of those layers"] == 36 * 2048 * 4096 * 2


def test_auto_recomputes_only_where_the_device_asks_for_it() -> None:
    assert "activations" in ahead("lora.r=16", gib=80).parts
    for gib in (24, 32, 48):
        memory = ahead(
            "lora.r=16", "quantization=none", "training.per_device_train_batch_size=2", gib=gib
        )
        assert memory.fits, "as many layers as it takes"
    small = ahead(
        "lora.r=16", "quantization=none", "training.per_device_train_batch_size=8", gib=24
    ).parts
    assert any("of 36 layers recomputed" in part for part in small)


def test_the_logits_do_not_grow_with_the_batch() -> None:
    small = ahead("lora.r=16")
    large = ahead("lora.r=16", "training.per_device_train_batch_size=16")
    name = "logits, a chunk at a time"
    assert small.parts[name] == large.parts[name] < 2 * GIB


def test_gradients_of_a_layer_take_the_room_that_the_logits_had() -> None:
    """4 f + 3 h elements of bf16 for a token, when the chunk of logits is gone."""
    name, logits = "gradients of one layer's activations", "logits, a chunk at a time"
    assert name not in ahead("lora.r=16").parts, "they fit into it"
    large = ahead("lora.r=16", "training.per_device_train_batch_size=16", gib=None)
    assert large.parts[name] + large.parts[logits] == 16 * 2048 * 2 * (4 * 12288 + 3 * 4096)


def test_slices_come_with_what_is_borrowed_and_what_is_on_its_way() -> None:
    layer = sum(
        a * b
        for name, (a, *rest) in WEIGHTS.shapes.items()
        if ".layers.0." in name and rest
        for b in rest
    )
    around = WEIGHTS.parameters - 36 * layer
    full = ahead("training.parallelism=fsdp", gpus=8)
    assert full.parts["weights, gathered: two layers and what lies around them"] == 2 * (
        2 * layer + around
    )
    assert full.parts["a layer on its way between the ranks"] == layer * (2 + 8)
    assert full.parts["gradient of the head, whole"] == 4 * 151_936 * 4096
    embeddings = around - 151_936 * 4096
    assert full.parts["gradients of what lies around, on their way"] == 2 * embeddings + 4 * around
    summed = "gradients before they are summed"
    assert summed not in full.parts, "one micro-batch a step has nothing to wait for"
    twice = (
        "training.parallelism=fsdp",
        "training.global_batch_size=16",
        "training.per_device_train_batch_size=1",
    )
    assert ahead(*twice, gpus=8, gib=800).parts[summed] == 4 * WEIGHTS.parameters
    assert summed not in ahead(*twice, gpus=8, gib=80).parts, "too much of such a device"
    lora = ahead("lora.r=16", "training.parallelism=shard_base", gpus=8).parts
    assert "gradient of the head, whole" not in lora
    borrowed = lora["weights, borrowed: two layers, or one and a table of tokens"]
    assert borrowed == 2 * (layer + 151_936 * 4096), "the head is larger than a layer"


def test_modules_that_learn_whole_are_not_cut() -> None:
    settings = ["lora.r=16", "training.parallelism=shard_base"]
    cut = ahead(*settings, gpus=8).parts["weights"]
    learning = ahead(*settings, "lora.modules_to_save=[lm_head, embed_tokens]", gpus=8)
    tables = 2 * 2 * 151_936 * 4096
    # What they began with, and what they are.
    assert learning.parts["weights"] == pytest.approx(cut + tables * 7 / 8 + tables, abs=8)
    exact = ("model.dtype=float32", "lora.modules_to_save=[lm_head, embed_tokens]")
    in_fp32 = ahead(*settings, *exact, gpus=8).parts["weights"]
    alone = ahead(*settings, "model.dtype=float32", gpus=8).parts["weights"]
    assert in_fp32 == pytest.approx(alone + 2 * tables * 7 / 8, abs=8)


def test_modules_that_learn_whole_are_counted_by_the_ends_of_their_names() -> None:
    norms = ahead("lora.r=16", "lora.modules_to_save=[norm]").trained_parameters
    # Two of each layer, and the last one.
    assert norms - ahead("lora.r=16").trained_parameters == 36 * 2 * 4096 + 4096


def test_a_classifiers_head_counts_for_nothing() -> None:
    writes = ahead()
    classifies = ahead("task=sequence_classification")
    assert set(writes.parts) - set(classifies.parts) == {"logits, a chunk at a time"}
    assert writes.parameters - classifies.parameters == 151_936 * 4096
    assert writes.trained_parameters - classifies.trained_parameters == 151_936 * 4096
    config = load_config(
        None, overrides=["model=m/m", "data.train=x/y", "task=sequence_classification"]
    )
    work = RankWork.of(config, make_plan(config))
    as_writer = flops_per_token(replace(work, classifies=False), WEIGHTS) or 0.0
    assert as_writer - (flops_per_token(work, WEIGHTS) or 0.0) == 6 * 151_936 * 4096


def test_what_does_not_fit_gets_changes_that_do() -> None:
    overrides = [
        "model=org/m",
        "data.train=org/d",
        "compute.gpus_per_node=8",
        "data.max_length=2048",
    ]
    config = load_config(None, overrides=overrides)
    plan = make_plan(config)
    assert ahead(gpus=8).fits is False
    fitting = dict(remedies(config, plan, RunWeights(WEIGHTS), 80 * GIB))
    assert {"training.parallelism: fsdp", "lora: {r: 16}"} <= set(fitting)
    assert all(then.fits for then in fitting.values())
    assert "training.gradient_checkpointing: true" not in fitting, "the state alone is too large"
    assert ahead(gib=None).fits is None


def test_hours_and_price_follow_from_a_rate_and_are_not_made_up() -> None:
    words = ["model=org/m", "data.train=org/d", "lora.r=16", "compute.gpus_per_node=2"]
    config = load_config(None, overrides=words)
    nothing = bill_of(config, 10**9)
    assert nothing.hours is None
    assert nothing.price is None
    rated = load_config(
        None, overrides=[*words, "compute.tokens_per_second=5000", "compute.price_per_gpu_hour=3"]
    )
    priced = bill_of(rated, 36 * 10**6)
    assert priced.hours == pytest.approx(1.0)
    assert priced.price == pytest.approx(6.0)
    assert (priced.low_hours, priced.high_hours) == (priced.hours, priced.hours)


def save_header(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file without its numbers: nothing but the header is ever read."""
    header = {
        name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))


def test_headers_are_read_and_only_a_config_is_enough(tmp_path: Path) -> None:
    save_header(tmp_path / "a", {"x.weight": (4, 5), "y.bias": (7,)})
    weights = read_weights(str(tmp_path / "a"), {})
    assert weights is not None
    assert (weights.parameters, weights.stated) == (27, True)
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / "abc"
    save_header(snapshot, {})
    (snapshot / "model.safetensors").unlink()
    cached = read_weights("org/m", {"HF_HUB_CACHE": str(tmp_path / "hub")})
    assert cached == WEIGHTS
    assert read_weights("org/other", {"HF_HUB_CACHE": str(tmp_path / "hub")}) is None
    (tmp_path / "a" / "model.safetensors").write_bytes(b"\xff" * 20)
    assert read_weights(str(tmp_path / "a"), {}) is None, (
        "a damaged file is no reason to fail a plan"
    )


def test_plan_says_it_and_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_header(tmp_path / "m", dict(WEIGHTS.shapes))
    data = tmp_path / "x.jsonl"
    data.write_text('{"text": "hello"}\n' * 8)
    words = [
        "plan",
        f"model={tmp_path / 'm'}",
        f"data.train={data}",
        "compute.gpus_per_node=8",
        "model.tokenizer=org/none",
        "kubernetes.image=registry.example/image:1",  # whose pods fetch the tokenizer
    ]
    # The folder is not in the pods, which is a problem at the end of the plan.
    assert cli.main([*words, "compute.gpu_memory=80Gi"]) == 2
    printed = capsys.readouterr().out
    assert "does not fit into 80 GiB" in printed
    assert "would fit with    training.parallelism: fsdp" in printed
    assert cli.main([*words, "lora.r=16", "compute.gpu_memory=80Gi", "--json"]) == 2
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["fits"] is True
    assert sum(memory["parts"].values()) == memory["peak_bytes"]


def on_a_cpu(*overrides: str, weights: Weights = WEIGHTS, longest: int | None = None) -> Forecast:
    settings = ["compute.gpus_per_node=0", "data.max_length=1024", *overrides]
    config = load_config(None, overrides=["model=org/m", "data.train=org/d", *settings])
    plan = make_plan(config, rows=64, device="cpu")
    memory = forecast(RankWork.of(config, plan, longest), weights)
    assert memory is not None
    return memory


def test_rows_that_are_short_fill_no_micro_batch_meant_for_long_ones() -> None:
    whole = on_a_cpu("lora.r=16")
    short = on_a_cpu("lora.r=16", longest=140)
    assert short.parts["activations"] == pytest.approx(
        whole.parts["activations"] * 140 / 1024, rel=0.01
    )
    assert on_a_cpu("lora.r=16", longest=1024) == on_a_cpu("lora.r=16", longest=4000) == whole
    # Packed, all eight rows of a step share one micro-batch, as far as its tokens reach.
    eight = ("lora.r=16", "training.global_batch_size=8")
    assert on_a_cpu(*eight, longest=64).parts["activations"] == pytest.approx(
        whole.parts["activations"] / 2, rel=0.01
    )
    assert on_a_cpu(*eight, longest=512).parts["activations"] == whole.parts["activations"]


def test_beginnings_that_rows_share_fill_no_micro_batch() -> None:
    config = load_config(
        None,
        overrides=[
            "model=org/m", "data.train=org/d", "compute.gpus_per_node=0", "data.max_length=768", "lora.r=16",
            "training.per_device_train_batch_size=8", "training.global_batch_size=8",
        ],
    )  # fmt: skip
    shared = 7 / 8 * 2 / 3  # of eight rows with 512 tokens of 768 in common
    with_sharing, whole = (
        forecast(
            RankWork.of(
                config,
                make_plan(config, rows=64, device="cpu", tokens=64 * 768, saved_share=s),
                768,
            ),
            WEIGHTS,
        )
        for s in (shared, 0.0)
    )
    assert with_sharing is not None
    assert whole is not None
    tokens = 512 + 8 * 256
    assert with_sharing.parts["activations"] / whole.parts["activations"] == pytest.approx(
        tokens / (8 * 768), rel=0.01
    )
    small = config.model_copy(
        update={"training": config.training.model_copy(update={"per_device_train_batch_size": 1})}
    )
    numbers = [
        make_plan(small, rows=64, device="cpu", tokens=64 * 768, saved_share=s).accumulation
        for s in (shared, 0)
    ]
    assert numbers == [4, 8]


def test_layers_without_a_gate_keep_less() -> None:
    sizes = {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    }
    layer = "bert.encoder.layer.0"
    shapes = {
        f"{layer}.intermediate.dense.weight": (2048, 512),
        f"{layer}.output.LayerNorm.bias": (512,),
    }
    exact, bent = (
        Weights(shapes, {**sizes, "hidden_act": act}, stated=True)
        for act in ("gelu_pytorch_tanh", "gelu_new")
    )
    classifies = "task=sequence_classification"
    kept = on_a_cpu(classifies, weights=exact).parts["activations"]
    assert kept == 1024 * 6 * 4 * (4 * 512 + 4 * 512 + 2 * 2048)
    assert kept < 0.7 * on_a_cpu(classifies, weights=bent).parts["activations"]


@pytest.mark.parametrize("gate", [False, True])
def test_activations_keep_what_autograd_does(gate: bool) -> None:
    import torch
    from transformers.activations import ACT2FN

    wide = torch.randn(3, 8, requires_grad=True)
    weights = {
        act: like({"hidden_act": act}, ("", "") if gate else ("gate_proj", "other_proj"))
        for act in ACT2FN
    }
    of_gelu = on_a_cpu(weights=weights["gelu"]).parts["activations"]
    copy_bytes = 1024 * QWEN3_8B["num_hidden_layers"] * QWEN3_8B["intermediate_size"] * 4
    for act, of_model in weights.items():
        kept: dict[int, torch.Tensor] = {}

        def pack(saved: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[saved.data_ptr()] = saved
            return saved

        function = ACT2FN[act]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            output = function(wide * 1.0)
            output = output * (wide * 1.0) if gate else output
            output @ torch.ones(8, 8, requires_grad=True)
        copies = sum(
            saved.shape == wide.shape and saved.dtype == wide.dtype for saved in kept.values()
        )
        activations = on_a_cpu(weights=of_model).parts["activations"]
        assert (activations - of_gelu) / copy_bytes == copies - (4 if gate else 2), act


def test_what_takes_one_sequence_at_a_time_keeps_no_others_and_no_probabilities() -> None:
    four = ("lora.r=16", "training.per_device_train_batch_size=4")
    packed = on_a_cpu(*four).parts
    alone, eager = (on_a_cpu(*four, f"model.attention={name}").parts for name in ("sdpa", "eager"))
    assert alone["activations"] == eager["activations"] == packed["activations"] / 4
    assert "attention" not in alone
    assert eager["attention"] == 36 * 32 * 1024 * 1024 * 4
    windowed = on_a_cpu(*four, "model.attention=sdpa", weights=like({"sliding_window": 512})).parts
    assert windowed["attention"] == 36 * 1024 * 1024 * 4, "a mask in each layer"
    assert windowed["activations"] - alone["activations"] == 1024 * 36 * 2 * (32 - 8) * 128 * 4, (
        "keys of every head"
    )


def test_what_dropout_drew_is_kept() -> None:
    dropping = on_a_cpu("model.attention=eager", weights=like({"attention_dropout": 0.1}))
    assert dropping.parts["attention"] == 3 * 36 * 32 * 1024 * 1024 * 4


def like(changes: dict[str, Any], rename: tuple[str, str] = ("", "")) -> Weights:
    """Return the weights of WEIGHTS with another config, and other names."""
    shapes = {name.replace(*rename): shape for name, shape in WEIGHTS.shapes.items()}
    return Weights(shapes, {**QWEN3_8B, **changes}, stated=False)


def test_caps_and_factors_keep_the_logits_that_they_change() -> None:
    chunk = "logits, a chunk at a time"
    values = 1024 * 151_936  # 1,024 rows on an H100, and the whole vocabulary
    for changes, value_bytes in (
        ({}, 2 + 8),
        ({"final_logit_softcapping": 30.0}, 2 + 8 + 8),
        ({"logits_scaling": 8.0}, 2 + 8 + 4),
    ):
        config = load_config(
            None, overrides=["model=m/m", "data.train=x/y", "compute.gpus_per_node=1"]
        )
        memory = forecast(RankWork.of(config, make_plan(config)), like(changes), 80 * GIB)
        assert memory is not None
        assert memory.parts[chunk] == values * value_bytes
    assert on_a_cpu().parts[chunk] == 220 * 151_936 * 4, "in fp32, in place"
    eager = [
        on_a_cpu("model.attention=eager", weights=like(changes)).parts["attention"]
        for changes in ({}, {"attn_logit_softcapping": 50.0})
    ]
    assert eager[1] == 2 * eager[0]


def test_relu_keeps_half_of_what_gelu_does_and_fused_products_stay_whole() -> None:
    def kept(act: str, rename: tuple[str, str] = ("gate_proj", "other_proj")) -> int:
        return on_a_cpu(weights=like({"activation_function": act}, rename)).parts["activations"]

    wide = QWEN3_8B["intermediate_size"] * QWEN3_8B["num_hidden_layers"] * 4
    tokens, rest = divmod(kept("gelu") - kept("relu"), wide)
    assert (tokens % 1024, rest) == (0, 0)
    fused = on_a_cpu(weights=like({}, ("q_proj", "qkv_proj"))).parts["activations"]
    queries_and_keys = (32 + 8) * 128 * QWEN3_8B["num_hidden_layers"] * 4
    assert fused - on_a_cpu().parts["activations"] == tokens * queries_and_keys
