"""llama.cpp, where its Python package is installed, says of GGUF files what transformers says of their models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kubetune import errors
from kubetune.config.schema import LoraConfig
from kubetune.data.text.turns import template as template_module
from kubetune.models.adapters.lora import add_lora
from tests import toy
from tests.architectures import (
    COMMON,
    GPT,
    GPT_TOKENS,
    MIXTURE,
    SLIDING,
    SMALL_EXPERTS,
    UNGROUPED,
    build_model,
    random_rows,
    randomize_lora,
)
from tests.chat_templates import FAMILIES, TOKENS
from tests.tiny import CHATML, CORPUS, train_tokenizer

pytest.importorskip("gguf")
# Not imported here: its files stay open.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="no llama-cpp-python"),
]

from kubetune.result.forms import llama_proof  # noqa: E402
from kubetune.result.forms.wanted import WantedExport  # noqa: E402
from kubetune.result.gguf_files import families, llama_cpp, vocabulary  # noqa: E402
from kubetune.result.gguf_files.lora_file import write_adapter  # noqa: E402
from kubetune.result.gguf_files.model_file import facts_of, write_model  # noqa: E402
from kubetune.result.gguf_files.weight_types import TYPES  # noqa: E402
from kubetune.result.publishing.exporting import export_run  # noqa: E402
from kubetune.result.publishing.written_export import Export  # noqa: E402

TOKENIZERS = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers"
WITHOUT_WINDOW = {**COMMON, "sliding_window": None}
GRANITE = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": WITHOUT_WINDOW,
    "mixtral": MIXTURE,
    "qwen2": COMMON,
    "qwen3": COMMON,
    "qwen2_moe": {
        **COMMON,
        **SMALL_EXPERTS,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {**COMMON, **SMALL_EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "gemma": COMMON,
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "phi": COMMON,
    "phi3": WITHOUT_WINDOW,
    "olmo": COMMON,
    "olmo2": COMMON,
    "olmo3": SLIDING,
    "olmoe": {**COMMON, **SMALL_EXPERTS, "num_key_value_heads": 4},
    "granite": {**COMMON, **GRANITE},
    "falcon": {**UNGROUPED},
    "gpt2": {**GPT, **GPT_TOKENS},
    "gpt_neox": UNGROUPED,
    "starcoder2": WITHOUT_WINDOW,
    "stablelm": COMMON,
    "cohere": {**COMMON, "logit_scale": 0.25},
    "cohere2": SLIDING,
    "glm4": COMMON,
    "smollm3": COMMON,
    "exaone4": {**WITHOUT_WINDOW, "layer_types": ["full_attention"] * 3},
    "seed_oss": COMMON,
    "nemotron": COMMON,
}
LINEAR = sorted(SETTINGS.keys() - {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"})
CHATS = [list(chat) for chat in llama_proof.CHATS]
PROMPTS = [[5, 9, 200, 31], [77, 8, 300, 12, 41, 7], [11] * 9]


def save(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a tiny model with tokenizer, and return it."""
    train_tokenizer(folder)
    settings = {**SETTINGS[name], "vocab_size": 512, **changes}
    model = build_model(name, settings, lora=False, dtype=dtype).eval()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def ask(model: Any, rows: list[llama_cpp.AskedRow]) -> list[Tensor]:
    return [model(torch.tensor([row.ids])).logits[0] for row in rows]


def rows() -> list[llama_cpp.AskedRow]:
    """Return rows that are longer than the windows of the tiny models."""
    return [
        llama_cpp.AskedRow(ids.astype(int).tolist(), list(range(len(ids))))
        for ids, _ in random_rows((5, 37, 90))
    ]


def test_every_family_that_is_written_is_compared() -> None:
    assert SETTINGS.keys() == families.FAMILIES.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_family_answers_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Both compute with the same weights, which bf16 holds exactly; llama.cpp rounds what goes through them then."""
    model = save(tmp_path / "model", name, dtype=torch.bfloat16).float()
    asked = rows()
    expected = ask(model, asked)
    greedy = [llama_proof.follow_greedily(model, prompt) for prompt in PROMPTS]
    for kind, most in (("f32", 1e-3), ("bf16", 1e-2)):
        path = write_model(tmp_path / "model", tmp_path / f"{kind}.gguf", kind, {"name": name}).path
        request = llama_cpp.LlamaRequest(
            str(path), asked, prompts=PROMPTS, length=llama_proof.LENGTH
        )
        answer = llama_cpp.ask(request)
        assert llama_proof.compare(name, expected, answer.logits, most).holds
        for parting in llama_proof.partings(greedy, answer.continuations):
            # Random models have many tokens that are as likely as the first.
            assert parting is None or parting.gap < (1e-4 if kind == "f32" else 1e-2)


@pytest.mark.parametrize("name", LINEAR)
def test_eight_bits_cost_a_trained_model_what_they_cost_its_base(name: str, tmp_path: Path) -> None:
    base = save(tmp_path / "base", name)
    lost = [lost_in_eight_bits(base, tmp_path / "base", tmp_path)]
    tuned = add_lora(base, LoraConfig(r=4, alpha=8), task_type="CAUSAL_LM", seed=0)
    randomize_lora(tuned)
    merged = tuned.merge_and_unload().eval()
    train_tokenizer(tmp_path / "merged")
    merged.save_pretrained(tmp_path / "merged")
    lost.append(lost_in_eight_bits(merged, tmp_path / "merged", tmp_path))
    assert 0 < lost[1] <= max(llama_proof.LEAST_ALLOWED, 1.5 * lost[0]), lost


def lost_in_eight_bits(model: Any, folder: Path, scratch: Path) -> float:
    path = write_model(folder, scratch / "q8_0.gguf", "q8_0", {}).path
    answer = llama_cpp.ask(llama_cpp.LlamaRequest(str(path), rows()))
    return llama_proof.compare("", ask(model, rows()), answer.logits, 0.0).difference


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "gemma3_text", "falcon"])
def test_heads_that_are_the_embedding_and_heads_that_are_not(
    name: str, tied: bool, tmp_path: Path
) -> None:
    model = save(tmp_path / "model", name, tie_word_embeddings=tied)
    path = write_model(tmp_path / "model", tmp_path / "m.gguf", "f32", {}).path
    answer = llama_cpp.ask(llama_cpp.LlamaRequest(str(path), rows()))
    assert llama_proof.compare(name, ask(model, rows()), answer.logits, 1e-3).holds


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_embeddings_that_are_stretched(rope: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path / "model", "llama", rope_parameters={"rope_theta": 10_000.0, **rope})
    path = write_model(tmp_path / "model", tmp_path / "m.gguf", "f32", {}).path
    answer = llama_cpp.ask(llama_cpp.LlamaRequest(str(path), rows()))
    assert llama_proof.compare("llama", ask(model, rows()), answer.logits, 1e-3).holds


def by_transformers(template: str, chat: Sequence[tuple[str, str]]) -> str | None:
    """Return the prompt of a conversation; None where the template refuses it."""
    messages = [{"role": role, "content": text} for role, text in chat]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    try:
        prompt: str = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TemplateError:
        return None
    return prompt


def likeness(template: str, prompts: Sequence[str | None]) -> str:
    """Return what llama.cpp's own code, which runs no Jinja, makes of a template: alike, unknown or unlike."""
    notes = set()
    for chat, prompt in zip(llama_proof.CHATS, prompts, strict=True):
        expected = by_transformers(template, chat)
        if prompt is None:
            notes.add("unknown")
        elif expected is not None:
            alike = prompt in (expected, expected.removeprefix(TOKENS["bos_token"]))
            notes.add("alike" if alike else "unlike")
    return " and ".join(sorted(notes))


# docs/export.md tells of these.
LIKENESS = {
    "qwen2.5": "alike and unlike",  # its template adds a system text where there is none
    "qwen3": "alike",
}


@pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="no shared tokenizers")
@pytest.mark.parametrize("name", LIKENESS)
def test_shared_tokenizers_make_the_same_tokens_and_prompts(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(TOKENIZERS / name, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {**COMMON, "vocab_size": len(tokenizer)}
    build_model("qwen2", settings, lora=False).save_pretrained(folder)
    path = write_model(folder, tmp_path / "m.gguf", "q8_0", {}).path
    texts = [
        llama_proof.PROBE,
        "<|im_start|>user\nHi<|im_end|>\n",
        "def f(x):\n    return x  # 1234\n",
    ]
    template = tokenizer.chat_template
    answer = llama_cpp.ask(
        llama_cpp.LlamaRequest(str(path), [], texts=texts, template=template, chats=CHATS)
    )
    assert answer.tokens == [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert likeness(template, answer.chats) == LIKENESS[name]


# By llama-cpp-python 0.3.36. Templates here have traits of families, often with other tokens, by which llama.cpp knows them.
LIKENESS_OF_FAMILIES = {
    "chatml": "alike",
    "built in": "alike",
    "phi": "alike",
    "llama2": "alike and unlike",
    "mistral": "unlike",
    "gemma": "alike",
    "r1": "unknown",
    "prompted": "unlike",
    "glm": "unlike",
    "channels": "alike and unlike",
    "marked": "alike",
    "modes": "unlike",
    "complete": "alike",
    "wordless": "alike and unlike",
    "shouting": "unlike",
}


def test_templates_of_llama_cpp_beside_those_of_families(tmp_path: Path) -> None:
    """Where they are unlike, the card of an export shows the difference."""
    save(tmp_path / "model", "llama")
    path = write_model(tmp_path / "model", tmp_path / "m.gguf", "q8_0", {}).path
    notes = {}
    for name, template in {
        "chatml": CHATML,
        "built in": template_module.CHATML,
        **FAMILIES,
    }.items():
        request = llama_cpp.LlamaRequest(str(path), [], template=template, chats=CHATS)
        notes[name] = likeness(template, llama_cpp.ask(request).chats)
    assert notes == LIKENESS_OF_FAMILIES


def save_sentencepiece(folder: Path, prepend: bool, kind: str) -> int:
    """Save a tokenizer in the form of Llama 2's (`prepend`) or Gemma's, and return the size of its vocabulary."""
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    scheme: Any = "always" if prepend else "never"
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    normalizer = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    if prepend:
        normalizer.insert(0, {"type": "Prepend", "prepend": "\u2581"})
    described = json.loads(trained.to_str())
    pieces = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    pieces[4:4] = [f"<0x{byte:02X}>" for byte in range(256)]
    described["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
    described |= {
        "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": normalizer},
        "decoder": {"type": "ByteFallback"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(described))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **names}))
    return len(pieces)


@pytest.mark.parametrize(
    ("prepend", "kind"),
    [
        (True, "PreTrainedTokenizerFast"),
        (False, "PreTrainedTokenizerFast"),
        (True, "LlamaTokenizerFast"),
        (False, "GemmaTokenizerFast"),
    ],
)
def test_tokenizers_of_sentencepiece(prepend: bool, kind: str, tmp_path: Path) -> None:
    size = save_sentencepiece(tmp_path / "model", prepend, kind)
    settings = {**COMMON, "vocab_size": size + 8}
    build_model("llama", settings, lora=False).save_pretrained(tmp_path / "model")
    path = write_model(tmp_path / "model", tmp_path / "m.gguf", "f32", {}).path
    texts = [llama_proof.PROBE, "the quick brown fox", "Hello\nWorld", "two  spaces   three"]
    answer = llama_cpp.ask(llama_cpp.LlamaRequest(str(path), [], texts=texts))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert answer.tokens == [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    # Its attention is sharp, else it matters little which rows are rotated.
    save(folder / "model", "llama")
    training = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}
    return toy.finished(
        folder / "lora", toy.make_config(folder, training, lora={"r": 4, "use_rslora": True})
    )


def export(run_dir: Path, out: Path, kind: str) -> Export:
    return export_run(run_dir, wanted=WantedExport(out=out, gguf=kind), tell=lambda _: None)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2", "phi3", "gpt2", "falcon", "gpt_neox", "granite"]
)
def test_an_adapter_of_a_family_is_that_of_peft(name: str, tmp_path: Path) -> None:
    base = save(tmp_path / "model", name)
    tuned = add_lora(base, LoraConfig(r=4, alpha=8), task_type="CAUSAL_LM", seed=0)
    randomize_lora(tuned)
    tuned.eval().save_pretrained(tmp_path / "adapter")
    path = write_model(tmp_path / "model", tmp_path / "m.gguf", "f32", {}).path
    described = facts_of(tmp_path / "model")
    write_adapter(tmp_path / "adapter", described, tmp_path / "a.gguf", {})
    adapter = str(tmp_path / "a.gguf")
    answer = llama_cpp.ask(llama_cpp.LlamaRequest(str(path), rows(), adapter=adapter))
    expected = ask(tuned, rows())
    assert llama_proof.compare(name, expected, answer.logits, 1e-3).holds
    with tuned.disable_adapter():
        assert not llama_proof.compare(name, expected, ask(tuned, rows()), 2e-2).holds


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_is_exported_in_every_type(run: Path, tmp_path: Path, kind: str) -> None:
    exported = export(run, tmp_path / "out", kind)
    made = exported.facts["gguf"]
    assert set(exported.files) == {made["file"], "Modelfile", "README.md", "curves.svg"}
    comparisons = made["proof"]["comparisons"]
    assert len(comparisons) == (1 if kind in ("f32", "f16", "bf16", "adapter") else 2)
    assert all(comparison["difference"] <= comparison["tolerance"] for comparison in comparisons)
    if len(comparisons) == 2:
        lost = made["proof"]["base_quantised_alike"]["difference"]
        share = 1.5 if kind == "q8_0" else 4.0
        assert comparisons[1]["difference"] <= max(2e-2, share * lost)
        asked = len(made["proof"]["greedy"])
        assert len(made["proof"]["greedy_quantised"]) == asked > 0
        assert len(made["proof"]["base_quantised_alike"]["greedy"]) == asked
    card = (tmp_path / "out" / "README.md").read_text()
    assert made["file"] in card
    assert "llama.cpp (llama-cpp-python" in card
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert f"{'ADAPTER' if kind == 'adapter' else 'FROM'} ./{made['file']}" in modelfile


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data, and a model whose logits are so wide that 16 bits cost it more than they cost others."""
    folder = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    save(folder / "model", "llama", num_hidden_layers=8, initializer_range=0.09)
    return folder


@pytest.mark.parametrize("kind", ["bf16", "adapter"])
def test_what_sixteen_bits_cost_transformers_is_no_fault(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # At the usual rate the first steps make the logits narrow.
    training = {"max_steps": 4, "eval_steps": 4, "save_steps": 4, "learning_rate": 1e-4}
    # Of a model that was trained whole nothing is merged, which in 16 bits would move it before llama.cpp is asked.
    lora = {"r": 4} if kind == "adapter" else None
    dtype = "bfloat16" if kind == "adapter" else None
    model = {"path": str(wide_model / "model"), "dtype": "bfloat16"}
    config = toy.make_config(wide_model, training, lora=lora, model=model)
    run_dir = toy.finished(wide_model / kind, config)
    lines: list[str] = []
    exported = export_run(
        run_dir,
        wanted=WantedExport(out=tmp_path / "out", gguf=kind, dtype=dtype),
        tell=lines.append,
    )
    made = exported.facts["gguf"]["proof"]
    (comparison,) = made["comparisons"]
    least = llama_proof.ALLOWED_ROUNDED if kind == "adapter" else llama_proof.ALLOWED["bf16"]
    assert least < comparison["difference"] <= comparison["tolerance"] == 2 * made["rounding"]
    assert "asking what bfloat16 costs without llama.cpp" in lines
    # Keys of rows in another order move them much further.
    swapped = families.Family("llama", families._llama_keys)
    monkeypatch.setitem(families.FAMILIES, "llama", swapped)
    with pytest.raises(errors.ModelError, match="log-probabilities differ"):
        export_run(
            run_dir,
            wanted=WantedExport(out=tmp_path / "wrong", gguf=kind, dtype=dtype),
            tell=lines.append,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


FAULTS = {
    "rows": "log-probabilities differ",
    "start": "before a text, and training",
    "merges": "makes other tokens",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["bf16", "q4_0"])
def test_a_fault_is_no_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, kind: str
) -> None:
    if fault == "rows":
        monkeypatch.setitem(
            families.FAMILIES, "llama", families.Family("llama", families._llama_keys)
        )
    elif fault == "merges":
        byte_level = vocabulary._byte_level

        def backwards(*parts: Any) -> vocabulary.Vocabulary:
            read = byte_level(*parts)
            return replace(read, merges=read.merges[::-1])

        monkeypatch.setattr(vocabulary, "_byte_level", backwards)
    else:
        monkeypatch.setattr(vocabulary, "_adds", lambda loaded: {"bos": True, "eos": False})
    with pytest.raises(errors.ModelError, match=FAULTS[fault]):
        export(run, tmp_path / "out", kind)
    assert list(tmp_path.iterdir()) == []
    assert list((run / "exports").glob("*")) + list((run / "exports").glob(".*")) == []


def test_a_run_with_modules_trained_whole_is_merged(tmp_path: Path) -> None:
    folder = toy.make_inputs(tmp_path)
    training = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}
    lora = {"r": 4, "use_dora": True, "modules_to_save": ["lm_head", "embed_tokens"]}
    run_dir = toy.finished(folder / "run", toy.make_config(folder, training, lora=lora))
    exported = export(run_dir, tmp_path / "out", "q8_0")
    assert len(exported.facts["gguf"]["proof"]["comparisons"]) == 2
    with pytest.raises(errors.ModelError, match="DoRA"):
        export(run_dir, tmp_path / "adapter", "adapter")
