"""GGUF files, read back by the library that defines them: keys, tokenizer, weights, adapters, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kubetune import errors
from kubetune.config.schema import LoraConfig, ModelConfig
from kubetune.data.text.tokenizer import load_tokenizer
from tests.architectures import save_model
from tests.tiny import CHATML, train_tokenizer

gguf = pytest.importorskip("gguf")

from kubetune.result.forms import gguf_words, llama_proof  # noqa: E402
from kubetune.result.forms.gguf import require_loadable  # noqa: E402
from kubetune.result.gguf_files import llama_cpp  # noqa: E402
from kubetune.result.gguf_files.families import FAMILIES, family_of, keys_of  # noqa: E402
from kubetune.result.gguf_files.lora_file import write_adapter  # noqa: E402
from kubetune.result.gguf_files.model_file import facts_of, name_for_llama_cpp, write_model  # noqa: E402
from kubetune.result.gguf_files.vocabulary import read_vocabulary  # noqa: E402

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


def fields(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(path: Path) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }


def test_keys_tokenizer_and_weights_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    written = write_model(
        folder, tmp_path / "m.gguf", "f32", {"name": "bot", "license": "apache-2.0"}, [2, 0]
    )
    keys = fields(written.path)
    assert (keys["general.architecture"], keys["general.name"], keys["general.license"]) == (
        "llama",
        "bot",
        "apache-2.0",
    )
    assert (keys["llama.block_count"], keys["llama.attention.head_count_kv"]) == (2, 2)
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    assert all(
        keys["tokenizer.ggml.tokens"][number] == token for token, number in vocabulary.items()
    )
    assert len(keys["tokenizer.ggml.merges"]) == len(described["model"]["merges"])
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1], "special tokens are control"
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (2, 0)
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.chat_template"]) == (
        False,
        CHATML,
    )

    weights = load_file(folder / "model.safetensors")
    blocks = tensors(written.path)
    assert np.array_equal(blocks["token_embd.weight"], weights["model.embed_tokens.weight"].numpy())
    up = weights["model.layers.1.mlp.up_proj.weight"].numpy()
    assert np.array_equal(blocks["blk.1.ffn_up.weight"], up)
    # Heads of 16 rows: row 1 of llama.cpp is row 8 of transformers, row 2 is row 1.
    queries = weights["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(blocks["blk.0.attn_q.weight"][:4], queries[[0, 8, 1, 9]])
    values = weights["model.layers.0.self_attn.v_proj.weight"].numpy()
    assert np.array_equal(blocks["blk.0.attn_v.weight"], values)
    assert blocks["output.weight"].shape == (512, 64)


@pytest.mark.parametrize(
    ("kind", "most"), [("bf16", 4e-3), ("q8_0", 1e-2), ("q5_1", 5e-2), ("q4_0", 0.15)]
)
def test_weights_of_fewer_bits_are_near(
    folder: Path, tmp_path: Path, kind: str, most: float
) -> None:
    path = write_model(folder, tmp_path / "m.gguf", kind, {}).path
    up = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].numpy()
    difference = tensors(path)["blk.1.ffn_up.weight"] - up
    assert np.linalg.norm(difference) / np.linalg.norm(up) < most
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.1.ffn_up.weight"] == kind.upper()
    assert types["blk.1.ffn_norm.weight"] == "F32"
    assert types["token_embd.weight"] == ("BF16" if kind == "bf16" else "Q8_0")


def test_rows_that_fill_no_block_keep_16_bits(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", intermediate_size=72)
    written = write_model(folder, tmp_path / "m.gguf", "q8_0", {})
    assert written.wider == ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")


def test_what_lies_beside_the_weights_of_transformers_is_not_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "gemma")
    weights = load_file(folder / "model.safetensors")
    # A tied head beside its embedding, and the same weights under the names of another program.
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    save_file({"tok_embeddings.weight": head}, folder / "consolidated.safetensors")
    written = write_model(folder, tmp_path / "m.gguf", "f32", {})
    assert "output.weight" not in tensors(written.path)
    norm = weights["model.layers.0.input_layernorm.weight"].numpy()
    assert np.array_equal(tensors(written.path)["blk.0.attn_norm.weight"], norm + 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "mamba is not written as GGUF"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "qwen2_5_vl sees or hears"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        (
            {"model_type": "phi", "qk_layernorm": True, "hidden_act": "gelu_new"},
            "qk_layernorm: True",
        ),
        ({"model_type": "olmoe", "num_experts": 4}, "2 heads of keys for 4"),
        (
            {
                "model_type": "gemma2",
                "hidden_act": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 99,
            },
            "query_pre_attn_scalar: 99",
        ),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.ModelError, match=reason):
        family_of({**LLAMA, **changes})


def test_rotary_embeddings_of_another_kind_are_refused() -> None:
    facts = {**LLAMA, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}
    with pytest.raises(errors.ModelError, match="kind longrope"):
        keys_of(facts, FAMILIES["llama"])


def test_frequencies_of_llama_3_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    facts = {**LLAMA, "hidden_size": 512, "rope_parameters": scaling}
    _, extra = keys_of(facts, FAMILIES["llama"])
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 128, 2) / 128)
    assert torch.allclose(plain / extra["rope_freqs.weight"], expected, rtol=1e-5)


def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path: Path) -> None:
    train_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
            described["pre_tokenizer"],
        ],
    }
    path.write_text(json.dumps(described))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(
        errors.ModelError, match=r"cuts text into words by a rule .* that llama.cpp is not known"
    ):
        read_vocabulary(tmp_path, 512)
    with pytest.raises(errors.ModelError, match="rows for 100"):
        read_vocabulary(tmp_path, 100)


def test_a_name_with_phi_3_in_it_is_written_otherwise() -> None:
    assert name_for_llama_cpp("my-Phi-3-bot", strips=False) == "my-Phi 3-bot"
    assert name_for_llama_cpp("Phi-3-mini", strips=True) == "Phi-3-mini"
    assert name_for_llama_cpp("bot", strips=True) == "bot (phi-3)"


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_is_scaled_as_peft_scales_it(
    folder: Path, tmp_path: Path, use_rslora: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for module, rank, out in (("q_proj", 4, 64), ("v_proj", 2, 32)):
        stem = f"base_model.model.model.layers.0.self_attn.{module}"
        weights[f"{stem}.lora_A.weight"] = torch.randn(rank, 64, generator=generator)
        weights[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {"v_proj": 2},
        "lora_alpha": 8,
        "alpha_pattern": {"v_proj": 6},
        "use_rslora": use_rslora,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert write_adapter(tmp_path, facts_of(folder), tmp_path / "a.gguf", {}) == 2

    keys = fields(tmp_path / "a.gguf")
    assert (keys["general.type"], keys["adapter.type"]) == ("adapter", "lora")
    blocks = tensors(tmp_path / "a.gguf")
    for name, module, rank, alpha in (("attn_q", "q_proj", 4, 8), ("attn_v", "v_proj", 2, 6)):
        a = blocks[f"blk.0.{name}.weight.lora_a"]
        b = blocks[f"blk.0.{name}.weight.lora_b"]
        by_llama_cpp = keys["adapter.lora.alpha"] / rank * (b @ a)
        stem = f"base_model.model.model.layers.0.self_attn.{module}.lora_"
        expected = weights[f"{stem}B.weight"] @ weights[f"{stem}A.weight"]
        expected *= alpha / (rank**0.5 if use_rslora else rank)
        if name == "attn_q":
            order = torch.arange(64).reshape(4, 2, 8).swapaxes(1, 2).reshape(-1)
            expected = expected[order]
        assert np.allclose(by_llama_cpp, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (None, "no adapter"),
        (LoraConfig(use_dora=True), "DoRA"),
        (LoraConfig(modules_to_save=["lm_head"]), "lm_head"),
    ],
)
def test_adapters_that_llama_cpp_does_not_load_are_refused(
    lora: LoraConfig | None, reason: str
) -> None:
    with pytest.raises(errors.ModelError, match=reason):
        require_loadable(lora)


def test_a_llama_cpp_that_does_not_load_is_no_fault_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("import a_package_that_is_not_there")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    reason = llama_cpp.missing()
    assert reason is not None
    assert "does not load (ModuleNotFoundError: No module named" in reason


@pytest.mark.parametrize("asks", [True, False])
def test_a_template_that_llama_cpp_asks_to_think_is_run_without(tmp_path: Path, asks: bool) -> None:
    template = CHATML
    if asks:
        template = "{%- if enable_thinking %}{{- '<think>' }}{% endif %}" + CHATML
    train_tokenizer(tmp_path, template)
    prompts = llama_proof.asked_to_think(load_tokenizer(ModelConfig(path=str(tmp_path))))
    if not asks:
        assert prompts is None
        return
    assert prompts is not None
    assert prompts["by_llama_cpp"] == "<think>" + prompts["as_trained"]
    shown = gguf_words.how_to_run({"file": "m.gguf", "type": "q8_0", "asked_to_think": prompts})
    assert (
        """llama-cli -m m.gguf --jinja --chat-template-kwargs '{"enable_thinking": false}'"""
        in shown
    )


def test_an_answer_ends_where_transformers_ends_it() -> None:
    steps = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.5]])
    assert llama_proof.partings([steps], [[1, 0, 2, 2]]) == [None]
    assert llama_proof.partings([steps], [[1, 2, 0, 0]]) == [llama_proof.Parting(1, 0.5)]


@pytest.mark.parametrize("kinds", [["bf16"], ["bf16", "q4_0"]])
def test_greedy_answers_of_both_files_and_of_the_base_are_in_the_card(kinds: list[str]) -> None:
    row = {"difference": 1e-3, "tolerance": 2e-2, "agreement": 1.0}
    comparisons = [{"what": kind, **row} for kind in kinds]
    notes: dict[str, Any] = {"llama_cpp_python": "0", "comparisons": comparisons, "greedy": [None]}
    expected = "Greedy answers of up to 64 tokens: 1 of 1 equal."
    if len(kinds) > 1:
        parting = {"token": 3, "gap": 0.25}
        base = {"difference": 1e-3, "agreement": 1.0, "greedy": [None, parting]}
        notes |= {"greedy_quantised": [parting], "base_quantised_alike": base}
        expected = (
            "Greedy answers of up to 64 tokens: 0 of 1 equal; answer 1 parts at token 4, where the first choice leads by "
            "2.5e-01. Before quantising: 1 of 1 equal. The base, quantised alike, is 1.0e-03 from itself, and 1 of 2 of its "
            "greedy answers are equal."
        )
    assert expected in gguf_words.proof_by_llama_cpp({"proof": notes})


@pytest.mark.parametrize(
    ("moved", "rounding", "faults"),
    [(0.01, 9.0, 0), (0.06, 0.04, 0), (0.06, 0.02, 1), (0.06, float("nan"), 1), (5.0, 0.04, 2)],
)
def test_more_is_allowed_where_sixteen_bits_cost_transformers_more(
    monkeypatch: pytest.MonkeyPatch, moved: float, rounding: float, faults: int
) -> None:
    """Two tokens are equally likely in transformers but for a little; llama.cpp prefers the other by `moved`."""
    logits = torch.tensor([[moved, 0.0]])
    lost = [logits.log_softmax(1)]
    answer = llama_cpp.LlamaAnswer("0", [torch.tensor([[-moved, 0.0]])], [[1]], [], [], [], [])
    monkeypatch.setattr(llama_proof, "ask", lambda request: answer)
    checked = llama_proof.LlamaProof()
    asked: list[float] = []

    def ask_in_sixteen_bits() -> float:
        asked.append(rounding)
        return rounding

    request = llama_cpp.LlamaRequest("m.gguf", [])
    reference = llama_proof.Reference([logits], lost)
    llama_proof.check_plain(checked, "both", request, reference, 2e-2, ask_in_sixteen_bits)
    assert len(checked.faults) == faults
    assert len(asked) == (moved > 2e-2), "the model is loaded again only where it is needed"
