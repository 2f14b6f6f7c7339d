"""Exports of real runs: what plain transformers and PEFT load says what was trained, or nothing is written at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from kubetune import errors
from kubetune.base import fault_injection, whole_folder
from kubetune.cli import main
from kubetune.config.resolved import read_config
from kubetune.data.prepared import kept_rows
from kubetune.reporting import picture
from kubetune.result.forms import merge
from kubetune.result.forms.draft import dtype_to_write
from kubetune.result.forms.programs import served_by
from kubetune.result.forms.wanted import PROVENANCE, WantedExport
from kubetune.result.gguf_files import llama_cpp
from kubetune.result.inference.answering import load_run
from kubetune.result.inference.result import open_result
from kubetune.result.publishing import modelfile
from kubetune.result.publishing.description import describe
from kubetune.result.publishing.exporting import export_run
from kubetune.result.publishing.modelfile import MODELFILE
from kubetune.result.publishing.written_export import Export
from kubetune.rundir import checkpoints
from tests import reviews, toy
from tests.architectures import save_model
from tests.pictures import save_seeing_model
from tests.tiny import CHATML

ONE_EPOCH = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}
# What the base has besides model and tokenizer.
BESIDE = {
    "LICENSE": "Ours", "USE_POLICY.md": "Be good", "chat_template.jinja": CHATML,
    "additional_chat_templates/rag.jinja": "{{ 'x' }}",
}  # fmt: skip
IDS = torch.tensor([[5, 9, 200, 31, 77, 8, 300, 12]])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    for name, text in BESIDE.items():
        (folder / "model" / name).parent.mkdir(exist_ok=True)
        (folder / "model" / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def lora_run(inputs: Path) -> Path:
    return toy.finished(inputs / "lora", toy.make_config(inputs, ONE_EPOCH))


def export(run_dir: Path, out: Path, **settings: Any) -> Export:
    return export_run(run_dir, wanted=WantedExport(out=out, **settings), tell=lambda _: None)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
    return result


def trained_logits(run_dir: Path, inputs: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what PEFT and transformers alone make of the checkpoint."""
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=dtype)
    return logits(PeftModel.from_pretrained(base, checkpoints.choose(run_dir)))


def distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    return float((tensor - other).norm() / tensor.norm())


def differences(exported: Export) -> list[float]:
    return [comparison["difference"] for comparison in exported.facts["proof"]["comparisons"]]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_an_adapter_loads_with_peft_alone(lora_run: Path, inputs: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    exported = export_run(lora_run, wanted=WantedExport(out=tmp_path / "out"), tell=messages.append)
    assert any("a folder of this machine" in line for line in messages), "nobody else could load it"
    modelfile = (tmp_path / "out" / MODELFILE).read_text().replace("~", str(Path.home()))
    assert f"\nFROM {inputs / 'model'}\nADAPTER ./adapter.gguf\n" in modelfile
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(model), trained_logits(lora_run, inputs))
    assert exported.kind == "adapter"
    assert differences(exported) == [0.0]
    assert exported.facts["proof"]["effect_of_adapter"] > 0.1
    assert exported.facts["proof"]["origin"] == "held-out rows"


@pytest.mark.parametrize(
    "targets", ["all-linear", pytest.param(r".*\.(q_proj|v_proj)", marks=pytest.mark.slow)]
)
def test_an_adapter_on_a_text_model_is_written_for_the_whole_model_that_sees_too(
    inputs: Path, tmp_path: Path, targets: str
) -> None:
    """vLLM loads the whole one, and leaves an adapter under the text model's names out without a word."""
    shutil.copytree(
        inputs, tmp_path, ignore=shutil.ignore_patterns("model", "lora"), dirs_exist_ok=True
    )
    save_seeing_model(tmp_path / "model", "qwen3_5")
    lora = {"r": 4, "target_modules": targets}
    run_dir = toy.finished(tmp_path / "run", toy.make_config(tmp_path, ONE_EPOCH, lora=lora))
    messages: list[str] = []
    exported = export_run(run_dir, wanted=WantedExport(out=tmp_path / "out"), tell=messages.append)
    assert any("so push --merge" in line for line in messages)
    assert (
        exported.facts["base"]["text_of"],
        "vllm/adapter_model.safetensors" in exported.files,
    ) == (
        "qwen3_5",
        True,
    )
    assert "--lora-modules tuned=./vllm" in (tmp_path / "out" / "README.md").read_text()
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = logits(whole)
    adapted = logits(PeftModel.from_pretrained(whole, tmp_path / "out" / "vllm"))
    assert distance(plain, adapted) > 1e-3
    assert distance(logits(PeftModel.from_pretrained(text, tmp_path / "out")), adapted) < 1e-6


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({"r": 4}, marks=pytest.mark.slow),
        {"r": 4, "use_dora": True, "use_rslora": True},
    ],
)
def test_a_merged_model_says_what_its_adapter_said(
    lora: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    run_dir = toy.finished(tmp_path / "run", toy.make_config(inputs, ONE_EPOCH, lora=lora))
    exported = export(run_dir, tmp_path / "out", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert distance(trained_logits(run_dir, inputs), logits(model)) < 1e-5
    adapter, reloaded = differences(exported)
    assert adapter < 1e-5
    assert reloaded == 0.0
    assert not {name for name in dict(model.named_modules()) if "lora" in name}
    assert (tmp_path / "out" / MODELFILE).read_text().count("\nFROM .\n") == 1
    assert next(
        text for label, text in describe(exported.path, exported.facts) if label == "next"
    ).endswith("serve it: vLLM, GGUF, Ollama")
    alone = Export(
        exported.path,
        "adapter",
        {
            **exported.facts,
            "served_by": served_by("causal_lm", open_result(run_dir).spec.lora, "adapter", {}),
        },
    )
    assert next(
        text for label, text in describe(alone.path, alone.facts) if label == "next"
    ).endswith("how to load it") is bool(lora.get("use_dora"))
    (exported.path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    source = SimpleNamespace(result=open_result(run_dir), kind="merged")
    draft: Any = SimpleNamespace(source=source, folder=exported.path, gguf_file=None)
    modelfile.write(draft)
    assert "FROM ./model-q8_0.gguf\n" in (exported.path / MODELFILE).read_text(), (
        "Ollama does not convert it"
    )


def test_the_dtype_is_that_of_the_base_and_not_what_a_cpu_computed_with(
    lora_run: Path, inputs: Path, tmp_path: Path
) -> None:
    config = json.loads((inputs / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    result = open_result(lora_run, model=str(tmp_path))
    assert result.trained.model.dtype == "float32"
    assert dtype_to_write(result, None) == torch.bfloat16


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "adapter_model.safetensors",
            b"torn",
            r"adapter_model\.safetensors has 4 bytes instead of \d+",
        ),
        ("adapter_model.safetensors", None, r"lacks adapter_model\.safetensors"),
        ("adapter_config.json", b"{", r"adapter_config\.json has 1 bytes instead of \d+"),
        (
            "adapter_model.safetensors",
            b"one bit",
            r"adapter_model\.safetensors is damaged \(checksum differs\)",
        ),
    ],
)
def test_a_damaged_checkpoint_is_said_to_be_one_by_whoever_asks_it(
    file: str, content: bytes | None, message: str, lora_run: Path, tmp_path: Path
) -> None:
    """And what is damaged without a word in a loss or an answer too: weights load, whatever bits they have."""
    run_dir = Path(shutil.copytree(lora_run, tmp_path / "run", symlinks=True))
    whole = (damaged := checkpoints.choose(run_dir) / file).read_bytes()
    (state := damaged.parent / "optimizer.safetensors").write_bytes(bytes(state.stat().st_size))
    load_run(run_dir)  # nothing asked of a result needs the optimizer's state
    damaged.unlink()
    if content is not None:
        damaged.write_bytes(
            whole[:-1] + bytes([whole[-1] ^ 1]) if content == b"one bit" else content
        )
    with pytest.raises(
        errors.EnvironmentFault, match=rf"step-\d+ {message}; choose another --checkpoint"
    ):
        load_run(run_dir)
    with pytest.raises(
        errors.EnvironmentFault, match=rf"step-\d+ {message}; choose another --checkpoint"
    ):
        export(run_dir, tmp_path / "out")


@pytest.mark.slow
def test_a_base_in_half_precision_is_rounded_once(inputs: Path, tmp_path: Path) -> None:
    half = toy.make_inputs(tmp_path)
    AutoModelForCausalLM.from_pretrained(inputs / "model").bfloat16().save_pretrained(
        half / "model"
    )
    run_dir = toy.finished(tmp_path / "run", toy.make_config(half, ONE_EPOCH))
    exported = export(run_dir, tmp_path / "out", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert distance(trained_logits(run_dir, half, torch.bfloat16), logits(model)) < 0.04
    exact = export(run_dir, tmp_path / "exact", merged=True, dtype="float32")
    with safe_open(exact.path / "model.safetensors", "pt") as wide, safe_open(
        exported.path / "model.safetensors", "pt"
    ) as narrow:  # fmt: skip
        for name in wide.keys():  # noqa: SIM118 - not a dict
            assert torch.equal(wide.get_tensor(name).bfloat16(), narrow.get_tensor(name)), name


@pytest.mark.slow
def test_a_model_trained_whole_is_the_checkpoint(inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.finished(tmp_path / "run", toy.make_config(inputs, ONE_EPOCH, lora=None))
    exported = export(run_dir, tmp_path / "out")
    mine, theirs = (
        logits(AutoModelForCausalLM.from_pretrained(f))
        for f in (exported.path, checkpoints.choose(run_dir))
    )
    assert torch.equal(mine, theirs)
    with pytest.raises(errors.ConfigError, match="no adapter to merge"):
        export(run_dir, tmp_path / "merged", merged=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_trained_head_that_was_tied_comes_untied(inputs: Path, tmp_path: Path) -> None:
    tied = toy.make_inputs(tmp_path)
    save_model(tied / "model", tie_word_embeddings=True)
    lora = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    run_dir = toy.finished(tmp_path / "run", toy.make_config(tied, ONE_EPOCH, lora=lora))
    export(run_dir, tmp_path / "out", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    assert distance(trained_logits(run_dir, tied), logits(model)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "allowed"), [("4bit", 1e-4), ("8bit", 5e-2)])
def test_a_quantised_base_is_dequantised_and_that_is_said(
    quantization: str, allowed: float, inputs: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    run_dir = toy.finished(
        tmp_path / "run", toy.make_config(inputs, ONE_EPOCH, quantization=quantization)
    )
    messages: list[str] = []
    exported = export_run(
        run_dir, wanted=WantedExport(merged=True, out=tmp_path / "out"), tell=messages.append
    )
    assert any(
        "dequantising" in line and "not those of the original model" in line for line in messages
    )
    assert "dequantised" in (exported.path / "README.md").read_text()
    config = json.loads((exported.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert differences(exported)[0] < allowed
    model = AutoModelForCausalLM.from_pretrained(exported.path)
    assert (
        distance(trained_logits(run_dir, inputs), logits(model)) > 1e-3
    )  # it is not the original base


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_classifiers(merged: bool, tmp_path: Path) -> None:
    review_inputs = reviews.make_inputs(tmp_path)
    lora = {"r": 4, "target_modules": ["query", "value"]}
    run_dir = toy.finished(
        tmp_path / "run", reviews.make_config(review_inputs, {"max_steps": 6}, lora=lora)
    )
    exported = export(run_dir, tmp_path / "out", merged=merged)
    assert max(differences(exported)) < 1e-5
    if merged:
        model = AutoModelForSequenceClassification.from_pretrained(exported.path)
        assert model.config.id2label == {0: "0", 1: "1"}
    with pytest.raises(errors.MissingExtra if find_spec("gguf") is None else errors.ModelError):
        export(run_dir, tmp_path / "gguf", gguf="bf16")
    assert "text-classification" in (exported.path / "README.md").read_text()


def test_shards_are_as_small_as_asked_and_load_as_one_model(
    lora_run: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "export",
        str(lora_run),
        "--merge",
        "--output",
        str(tmp_path / "out"),
        "--max-shard-size",
    ]
    assert main([*words, "200KB"]) == 0
    assert "files, " in capsys.readouterr().out
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    for shard in shards:
        with safe_open(shard, "pt") as shard_file:
            sizes = [shard_file.get_tensor(name).nbytes for name in shard_file.keys()]  # noqa: SIM118 - not a dict
        assert sum(sizes) <= 200_000 or len(sizes) == 1
    assert whole_folder.is_whole(tmp_path / "out", PROVENANCE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert distance(trained_logits(lora_run, inputs), logits(model)) < 1e-5
    for wrong in ("5", "0GB", "lots"):
        assert main([*words, wrong]) == errors.USER
        assert "expected a size such as 5GB" in capsys.readouterr().err
    assert main([*words, "1GB"]) == 0  # in the place of the one before, of which nothing stays
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_what_stands_beside_the_weights(lora_run: Path, inputs: Path, tmp_path: Path) -> None:
    exported = export(lora_run, tmp_path / "out", merged=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported.path / name).read_bytes() == (inputs / "model" / name).read_bytes()
    theirs = AutoTokenizer.from_pretrained(inputs / "model").chat_template
    assert (
        AutoTokenizer.from_pretrained(exported.path).chat_template
        == theirs
        == {"default": CHATML, "rag": "{{ 'x' }}"}
    )
    assert {name: (exported.path / name).read_text() for name in BESIDE} == BESIDE
    assert ("licence", "LICENSE, USE_POLICY.md, copied from the base") in describe(
        exported.path, exported.facts
    )
    assert GenerationConfig.from_pretrained(exported.path).eos_token_id == 2
    facts = json.loads((exported.path / "provenance.json").read_text())
    written = (*exported.path.rglob("*"), *checkpoints.choose(lora_run).rglob("*"))
    modes = {path.name: path.stat().st_mode for path in written if path.is_file()}
    (tmp_path / "usual").touch()
    assert set(modes.values()) == {(tmp_path / "usual").stat().st_mode}, (
        "who may read the folder may read the weights"
    )
    for name, file in facts["files"].items():
        assert hashlib.sha256((exported.path / name).read_bytes()).hexdigest() == file["sha256"]
    names = {
        str(path.relative_to(exported.path)) for path in exported.path.rglob("*") if path.is_file()
    }
    assert facts["files"].keys() == names - {"provenance.json"}
    assert facts["checkpoint"]["step"] == 7
    assert facts["run"]["config"]["lora"]["r"] == 4
    card = (exported.path / "README.md").read_text()
    assert "ollama create" in card
    assert "FROM .\n" in (exported.path / "Modelfile").read_text()
    assert "eval_loss" in card
    assert "training loss" in card
    assert "![Curves over steps](curves.svg)" in card
    drawn = ElementTree.parse(exported.path / "curves.svg")
    # A line of training losses, and a dot for the only evaluation.
    for shape in ("polyline", "circle"):
        assert len(drawn.findall(f".//{{http://www.w3.org/2000/svg}}{shape}")) == 1
    assert "Licence\n\nTo be filled in" in card
    assert "(copied from it: [LICENSE](<LICENSE>), [USE_POLICY.md](<USE_POLICY.md>))" in card
    assert whole_folder.is_whole(exported.path, PROVENANCE)


@pytest.mark.slow
def test_the_template_and_the_end_of_turn_that_were_trained(inputs: Path, tmp_path: Path) -> None:
    template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    (tmp_path / "mine.jinja").write_text(template)
    model = {"path": str(inputs / "model"), "chat_template": str(tmp_path / "mine.jinja")}
    run_dir = toy.finished(tmp_path / "run", toy.make_config(inputs, ONE_EPOCH, model=model))
    exported = export(run_dir, tmp_path / "out")
    assert (exported.path / "chat_template.jinja").read_text() == template
    assert AutoTokenizer.from_pretrained(exported.path).chat_template == template
    assert set(GenerationConfig.from_pretrained(exported.path).eos_token_id) == {0, 2}


def test_a_merge_that_goes_wrong_is_noticed(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = merge._merge_layer

    def wrong(name: str, layer: Any, dtype: torch.dtype) -> None:
        if "layers.1.mlp.up_proj" in name:
            layer.scaling["default"] *= 1.5
        right(name, layer, dtype)

    monkeypatch.setattr(merge, "_merge_layer", wrong)
    with pytest.raises(
        errors.ModelError,
        match=r"adapter and merged model: logits differ by .* Nothing was written",
    ):
        export(lora_run, tmp_path / "out", merged=True)
    assert leftovers(tmp_path) == []


def test_a_weight_beyond_half_precision_is_refused(
    lora_run: Path, inputs: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(model, checkpoints.choose(lora_run))
    with pytest.raises(
        errors.ModelError, match=r"up_proj would have weights beyond what float16 holds"
    ):
        merge.merge_adapters(adapted, torch.float16)


@pytest.mark.slow
def test_without_the_data_random_tokens_are_compared(inputs: Path, tmp_path: Path) -> None:
    config = toy.make_config(inputs, ONE_EPOCH, data={"cache": str(tmp_path / "cache")})
    mine = tmp_path / "train.jsonl"
    mine.write_bytes((inputs / "train.jsonl").read_bytes())
    data = config.data.model_copy(
        update={"train": (config.data.train[0].model_copy(update={"path": str(mine)}),)}
    )
    run_dir = toy.finished(tmp_path / "run", config.model_copy(update={"data": data}))
    mine.unlink()
    (run_dir / kept_rows.PROOF).unlink()
    exported = export(run_dir, tmp_path / "out", merged=True)
    assert "random tokens" in exported.facts["proof"]["origin"]
    assert max(differences(exported)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code"),
    [("signal 15:export.weights", errors.PREEMPTED), ("signal 9:export.sealed", -signal.SIGKILL)],
)
def test_a_stop_leaves_the_export_before_as_it_was(
    fault: str, code: int, lora_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before = export(lora_run, out, merged=True)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    command = [
        sys.executable,
        "-m",
        "kubetune",
        "export",
        str(lora_run),
        "--merge",
        "--dtype",
        "bf16",
        "--output",
        str(out),
    ]
    ended = subprocess.run(
        command, env={**os.environ, fault_injection.FAULT: fault}, capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert whole_folder.is_whole(out, PROVENANCE)
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() == digest
    assert len(leftovers(tmp_path)) == (1 if code > 0 else 2)
    again = export(lora_run, out, merged=True)  # clears away what the killed one left
    assert leftovers(tmp_path) == ["out"]
    assert again.files.keys() == before.files.keys()


def test_what_cannot_be_exported(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for words, message in (
        (["--output", str(tmp_path / "mine")], "holds other files"),
        (["--output", "/proc/mine"], "--output: /proc/mine cannot be made"),
        (["--output", str(tmp_path / "mine/notes.txt/x")], "notes.txt is no folder"),
        (["--step", "99"], "there are: best, last, step 7"),
        (["--dtype", "int3"], "expected one of bfloat16, float16, float32"),
    ):
        assert main(["export", str(lora_run), *words]) == errors.USER
        assert message in capsys.readouterr().err
    assert leftovers(tmp_path / "mine") == ["notes.txt"]


def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "missing", lambda: "it is not installed")
    monkeypatch.setenv("PATH", "")


def test_a_gguf_file_that_nothing_here_runs_is_not_proved_and_says_so(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    without_llama_cpp(monkeypatch)
    lines: list[str] = []
    card = Path(read_config(lora_run).model.path) / "README.md"
    card.write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    exported = export_run(
        lora_run, wanted=WantedExport(out=tmp_path / "out", gguf="q8_0"), tell=lines.append
    )
    card.unlink()
    assert b"apache-2.0" in (tmp_path / "out" / "model-q8_0.gguf").read_bytes()
    assert "not proved by running it: it is not installed" in lines
    assert ("llama.cpp", "not proved: it is not installed") in list(
        describe(exported.path, exported.facts)
    )
    assert (
        "not run by llama.cpp: it is not installed" in (tmp_path / "out" / "README.md").read_text()
    )
    beside = ["LICENSE", "Modelfile", "README.md", "USE_POLICY.md", "curves.svg", "provenance.json"]
    assert leftovers(tmp_path / "out") == sorted(["model-q8_0.gguf", *beside])
    assert "FROM ./model-q8_0.gguf" in (tmp_path / "out" / "Modelfile").read_text()


def test_what_cannot_be_gguf(
    lora_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gguf")
    without_llama_cpp(monkeypatch)
    for words, message in (
        (["--gguf", "q9"], "expected one of bf16, f16, f32"),
        (["--gguf", "q4_k_m"], "llama-quantize is not in the PATH"),
        (["--gguf", "bf16", "--dtype", "float32"], "leave --dtype out"),
        (["--gguf", "adapter", "--merge"], "leave --merge out"),
    ):
        command = ["export", str(lora_run), *words, "--output", str(tmp_path / "out")]
        assert main(command) == errors.USER
        assert message in capsys.readouterr().err
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["signal 9:gguf.tensor", "signal 15:gguf.tensor", "error 28:gguf.tensor"]
)
def test_a_stop_within_a_gguf_file_leaves_none(lora_run: Path, tmp_path: Path, fault: str) -> None:
    pytest.importorskip("gguf")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "kubetune",
        "export",
        str(lora_run),
        "--gguf",
        "f32",
        "-o",
        str(out),
    ]
    environ = {**os.environ, fault_injection.FAULT: fault}
    assert subprocess.run(command, env=environ, capture_output=True).returncode != 0
    assert not out.exists()
    export(lora_run, out, gguf="f32")  # clears away what the killed one left
    assert leftovers(tmp_path) == ["out"]
    export(lora_run, out, gguf="f32")
    assert leftovers(tmp_path) == ["out"]


def test_what_cannot_be_quantised(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--quantize", "int3"], "expected fp8"),
        (["--quantize", "fp8", "--gguf", "f32"], "ask for one"),
    ):
        command = ["export", str(lora_run), *words, "--output", str(tmp_path / "out")]
        assert main(command) == errors.USER
        assert message in capsys.readouterr().err
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_in_fp8(
    lora_run: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("compressed_tensors")
    exported = export(lora_run, tmp_path / "out", quantize="fp8", dtype="bfloat16")
    assert "ompressing model" not in capsys.readouterr().err, "compressed-tensors draws bars"
    notes = exported.facts["quantised"]
    assert notes["layers"] == 14
    assert exported.files["model.safetensors"] < 0.8 * notes["bytes_before"]
    assert differences(exported)[2] < 2 * notes["base_quantised_alike"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        name = "model.layers.0.mlp.up_proj.weight"
        rounded = file.get_tensor(name).float() * file.get_tensor(f"{name}_scale").float()
    export(lora_run, tmp_path / "merged", merged=True, dtype="bfloat16")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        weight = file.get_tensor(name).float()
    # e4m3 has three bits behind the first: a number moves by a sixteenth, a small one by half of the last bit.
    allowed = weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 / 1024
    assert bool(((rounded - weight).abs() <= allowed).all())
    assert (
        distance(
            trained_logits(lora_run, inputs),
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")),
        )
        < 0.2
    )
    assert "vllm serve ." in (tmp_path / "out" / "README.md").read_text()
    assert "llama.cpp" not in (tmp_path / "out" / "README.md").read_text()


def test_a_picture_of_curves() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 9 / step} for step in range(1, 1001)]
    lines[500]["loss"] = None
    lines += [{"step": step, "eval_loss": 9 / step, "eval_f1": 0.1} for step in (500, 1000)]
    drawn = ElementTree.fromstring(picture.draw(lines) or "")
    curves = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len((curve.get("points") or "").split()) for curve in curves] == [63, 2]
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss", "held-out loss", "1,000"} <= set(texts)
    assert picture.draw([{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 2.0}]) is None
    assert picture.draw([]) is None
