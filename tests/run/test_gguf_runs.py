"""Real runs of every kind as GGUF: llama.cpp proves each file, or the run is refused by name and nothing is written."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kubetune import errors
from kubetune.base import fault_injection, whole_folder
from kubetune.result.forms.wanted import PROVENANCE, WantedExport
from kubetune.result.publishing.exporting import export_run
from kubetune.result.publishing.written_export import Export
from tests import reviews, toy
from tests.architectures import COMMON, build_model
from tests.pictures import save_seeing_model, write_questions
from tests.preferences import write_pairs
from tests.tiny import train_tokenizer

pytest.importorskip("gguf")
# Not imported here: its files stay open.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="no llama-cpp-python"),
]

KINDS = ("bf16", "q8_0", "adapter")
SHORT = {"max_steps": 4, "eval_steps": 4, "save_steps": 4}
ADDED = ("<|tool|>", "<|done|>")


def make_inputs(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """Write data and a tiny model whose attention is sharp, else it matters little which rows are rotated."""
    toy.make_inputs(folder)
    train_tokenizer(folder / "model")
    settings = {**COMMON, "vocab_size": 512, **changes}
    build_model(name, settings, lora=False).save_pretrained(folder / "model")
    return folder


def run(inputs: Path, **sections: Any) -> Path:
    return toy.finished(inputs / "run", toy.make_config(inputs, SHORT, **sections))


def with_adapter(**lora: Any) -> Callable[[Path], Path]:
    return lambda folder: run(make_inputs(folder), lora={"r": 4, **lora})


def with_added_tokens(folder: Path) -> Path:
    """Train a model whose embedding got rows for two more tokens, and some that no token has."""
    inputs = make_inputs(folder)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    known = len(tokenizer)
    model = build_model("llama", {**COMMON, "vocab_size": known}, lora=False)
    tokenizer.add_tokens(list(ADDED), special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    assert known < len(tokenizer) < model.config.vocab_size
    model.save_pretrained(inputs / "model")
    tokenizer.save_pretrained(inputs / "model")
    for name in ("train", "eval"):
        path = inputs / f"{name}.jsonl"
        path.write_text(path.read_text().replace("the", ADDED[0]).replace("fox", ADDED[1]))
    return run(inputs)


def with_tied_head(folder: Path) -> Path:
    return run(make_inputs(folder, "qwen3", tie_word_embeddings=True))


def with_trained_head(folder: Path) -> Path:
    """Train a head that was the embedding, so that it is not any more."""
    inputs = make_inputs(folder, tie_word_embeddings=True)
    return run(inputs, lora={"r": 4, "modules_to_save": ["lm_head"]})


def with_head_that_is_never_read(folder: Path) -> Path:
    inputs = make_inputs(folder, "gemma", tie_word_embeddings=True)
    return run(inputs, lora={"r": 4, "modules_to_save": ["lm_head"]})


def full(folder: Path) -> Path:
    return run(make_inputs(folder), lora=None)


def in_four_bits(folder: Path) -> Path:
    return run(make_inputs(folder), quantization="4bit")


def on_experts(folder: Path) -> Path:
    return run(
        make_inputs(folder, "mixtral", num_local_experts=4),
        lora={"r": 4, "target_parameters": ["experts.down_proj"]},
    )


def by_reward(folder: Path) -> Path:
    """Train by GRPO."""
    return toy.finished(
        folder / "run",
        toy.make_config(
            make_inputs(folder),
            {"global_batch_size": 4, "max_steps": 2, "eval_steps": 2, "save_steps": 2},
            task="grpo",
            grpo={"num_generations": 4, "max_completion_length": 8, "generation_batch_size": 8},
            rewards=[{"name": "length", "settings": {"target": 8}}],
        ),
    )


def by_preference(folder: Path) -> Path:
    inputs = make_inputs(folder)
    return run(inputs, task="preference", preference={"loss": "dpo"}, data=write_pairs(inputs))


def reward_model(folder: Path) -> Path:
    inputs = make_inputs(folder)
    return run(inputs, task="reward_model", data=write_pairs(inputs))


def classifier(folder: Path) -> Path:
    inputs = reviews.make_inputs(folder)
    lora = {"r": 4, "target_modules": ["query", "value"]}
    return toy.finished(folder / "run", reviews.make_config(inputs, {"max_steps": 4}, lora=lora))


def that_sees(folder: Path) -> Path:
    save_seeing_model(folder / "model")
    write_questions(folder, "train", 32, 1)
    write_questions(folder, "eval", 8, 2)
    return run(folder, task="vision_language", data={"max_length": 128})


def text_of_one_that_sees(folder: Path) -> Path:
    toy.make_inputs(folder)
    save_seeing_model(folder / "model", "qwen3_5")
    return run(folder)


@dataclass(frozen=True)
class Case:
    """A kind of run, and of which types of files it is refused with which words."""

    make: Callable[[Path], Path]
    refused: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = KINDS


def never(reason: str) -> dict[str, str]:
    return dict.fromkeys(KINDS, reason)


# docs/export.md has this table.
CASES = {
    "LoRA": Case(with_adapter()),
    "rsLoRA": Case(with_adapter(use_rslora=True)),
    "DoRA": Case(with_adapter(use_dora=True), {"adapter": "weights of DoRA"}),
    "modules_to_save": Case(
        with_adapter(modules_to_save=["lm_head", "embed_tokens"]),
        {"adapter": r"modules trained whole \(lm_head, embed_tokens\)"},
    ),
    "every weight": Case(full, {"adapter": "trained every weight, so there is no adapter"}),
    "added tokens": Case(with_added_tokens),
    "tied head": Case(with_tied_head),
    "trained head, tied before": Case(with_trained_head, {"adapter": "modules trained whole"}),
    "trained head of Gemma": Case(
        with_head_that_is_never_read,
        {
            "bf16": "reads no head of gemma",
            "q8_0": "reads no head of gemma",
            "adapter": "modules trained whole",
        },
    ),
    # In 16 bits a tiny mixture chooses other experts, so that its merge is refused before.
    "experts": Case(
        on_experts, {"adapter": "adapters on experts of a mixture"}, kinds=("q8_0", "adapter")
    ),
    "base in 4 bits": Case(in_four_bits),
    "GRPO": Case(by_reward),
    "preference": Case(by_preference),
    "reward model": Case(reward_model, never("reward_model is not written as GGUF")),
    "classifier": Case(classifier, never("sequence_classification is not written as GGUF")),
    "vision": Case(that_sees, never("vision_language is not written as GGUF")),
    "text of a model that sees": Case(text_of_one_that_sees, never("qwen3_5 sees or hears")),
}  # fmt: skip


def export(run_dir: Path, out: Path, kind: str) -> Export:
    return export_run(run_dir, wanted=WantedExport(out=out, gguf=kind), tell=lambda _: None)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_proved_by_llama_cpp_or_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run_dir = case.make(tmp_path)
    folder = tmp_path / "exports"
    folder.mkdir()
    for kind in case.kinds:
        if kind in case.refused:
            with pytest.raises(errors.ModelError, match=case.refused[kind]):
                export(run_dir, folder / kind, kind)
            continue
        exported = export(run_dir, folder / kind, kind)
        proof = exported.facts["gguf"]["proof"]
        assert proof["comparisons"]
        assert all(c["difference"] <= c["tolerance"] for c in proof["comparisons"])
        # Models of random weights have many tokens that are as likely as the first.
        assert all(parting is None or parting["gap"] < 5e-2 for parting in proof["greedy"])
        if kind == "q8_0":
            assert len(proof["comparisons"]) == 2
        assert whole_folder.is_whole(exported.path, PROVENANCE, thorough=True)
    written = sorted(path.name for path in folder.iterdir())
    assert written == sorted(set(case.kinds) - case.refused.keys())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_adapter()(tmp_path_factory.mktemp("inputs"))


def command(run_dir: Path, out: Path) -> list[str]:
    words = ["export", str(run_dir), "--gguf", "q8_0", "-o", str(out)]
    return [sys.executable, "-m", "kubetune", *words]


@pytest.mark.parametrize(
    "tensor", [10, 50, 90, 120], ids=["plain file", "quantised file", "base", "base quantised"]
)
def test_a_kill_in_the_middle_leaves_nothing_half(
    finished: Path, tmp_path: Path, tensor: int
) -> None:
    """A file of the tiny model has 29 tensors or more, and the export writes four files."""
    out = tmp_path / "out"
    environ = {**os.environ, fault_injection.FAULT: f"signal 9:gguf.tensor:{tensor}"}
    ended = subprocess.run(
        command(finished, out), env=environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not out.exists()
    assert not (finished / "exports").exists()
    digests = []
    for _ in range(2):
        export(finished, out, "q8_0")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert whole_folder.is_whole(out, PROVENANCE, thorough=True)
        digests.append(hashlib.sha256((out / "model-q8_0.gguf").read_bytes()).hexdigest())
    assert digests[0] == digests[1], "the same run is the same file"


def test_a_damaged_base_is_no_export(tmp_path: Path) -> None:
    run_dir = with_adapter()(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1000])
    ended = subprocess.run(
        command(run_dir, tmp_path / "out"), capture_output=True, text=True, check=False
    )
    assert ended.returncode in (errors.USER, errors.ENVIRONMENT), ended.stderr
    assert not (tmp_path / "out").exists()
    weights.write_bytes(content)
    exported = export(run_dir, tmp_path / "out", "q8_0")
    assert json.loads((exported.path / PROVENANCE).read_text())["gguf"]["proof"]
