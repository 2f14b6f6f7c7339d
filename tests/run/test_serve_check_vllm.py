"""`kubetune serve --check` beside a real vLLM, for ten families.

VLLM_PYTHON=… python -m pytest -m slow tests/run/test_serve_check_vllm.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import load_file, save_file

from kubetune.cli import main
from kubetune.result.forms.adapter import SETTINGS, WEIGHTS
from tests import toy
from tests.architectures import save_model
from tests.run.test_export_elsewhere import SIZE, export, needs_vllm, trained_run, vllm_server
from tests.run.test_serve_check import TEMPLATE, chat_run

pytestmark = [pytest.mark.slow, needs_vllm]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {}, "gemma": {}, "phi3": {}, "olmo2": {}, "granite": {}, "exaone4": {},
    "smollm3": {},
}  # fmt: skip


@pytest.fixture(scope="module", params=list(FAMILIES))
def address(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Yield the address of a vLLM with a base, and a run whose adapter is on it."""
    inputs = toy.make_inputs(tmp_path_factory.mktemp(request.param))
    save_model(inputs / "model", request.param, **SIZE, **FAMILIES[request.param])
    run_dir = trained_run(inputs, "bot", {"r": 4})
    export(run_dir, run_dir / "exports" / "bot")
    with vllm_server(inputs / "model", inputs / "server.log") as url:
        yield url, run_dir


def load(url: str, name: str, folder: Path) -> None:
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    question = Request(f"{url}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    with urlopen(question, timeout=600) as reply:
        assert reply.status == 200


def changed(
    run_dir: Path, name: str, rename: Callable[[str], str | None] = str, **settings: Any
) -> Path:
    """Return a copy of the export with other settings, whose tensors have other names, or are left out."""
    folder = run_dir.parent / name
    shutil.copytree(run_dir / "exports" / "bot", folder)
    tensors = {}
    for key, tensor in load_file(folder / WEIGHTS).items():
        new = rename(key)
        if new is not None:
            tensors[new] = tensor * torch.nan if name == "NaN" else tensor
    save_file(tensors, folder / WEIGHTS)
    known = json.loads((folder / SETTINGS).read_text())
    if name == "half":
        known["lora_alpha"] /= 2
    (folder / SETTINGS).write_text(json.dumps(known | settings))
    return folder


def points(
    url: str, run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    words = ["--model", name, "--timeout", "1800", "--json"]
    code = main(["serve", "--check", url, str(run_dir), *words])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    (report,) = json.loads(printed.out)
    return code, report["points"]


def test_right_and_broken_adapters(
    address: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, run_dir = address
    load(url, "right", run_dir / "exports" / "bot")
    code, by_point = points(url, run_dir, "right", capsys)
    print(by_point)
    assert {point["state"] for point in by_point.values()} == {"right"}
    assert code == 0

    code, by_point = points(url, run_dir, str(run_dir.parent / "model"), capsys)
    assert (code, by_point["log-probabilities"]["numbers"]["missing"]) == (5, ["base"])

    # vLLM takes all of these without a word.
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]
    broken = {
        "attention only": changed(
            run_dir,
            "attention only",
            lambda key: key if "attn" in key else None,
            target_modules=attention,
        ),
        "wrong prefix": changed(
            run_dir,
            "wrong prefix",
            lambda key: key.replace("model.layers", "model.language_model.layers"),
        ),
        "disjoint": changed(
            run_dir,
            "disjoint",
            lambda key: key.replace("self_attn", "other_attn").replace("mlp", "other"),
            target_modules=["other_proj"],
        ),
        "half": changed(run_dir, "half"),
        "NaN": changed(run_dir, "NaN"),
    }
    for name, folder in broken.items():
        load(url, name, folder)
        code, by_point = points(url, run_dir, name, capsys)
        weights = by_point["log-probabilities"]
        print(name, weights)
        assert (code, weights["state"]) == (5, "wrong")
        if name in ("wrong prefix", "disjoint"):
            assert weights["numbers"]["missing"] == ["base"]
        elif name == "attention only":
            assert "base" not in weights["numbers"]["missing"]
        else:
            assert ("lora_alpha" if name == "half" else "are NaN or infinite") in weights["text"]

    # Above --max-lora-rank, so that it is refused when it is loaded.
    folder = changed(run_dir, "rank", r=64)
    with pytest.raises(HTTPError):
        load(url, "rank", folder)
    code, by_point = points(url, run_dir, "rank", capsys)
    assert (code, list(by_point)) == (5, ["names"])
    assert "which --max-lora-rank of vLLM must allow" in by_point["names"]["text"]


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Round to 4 bits, in blocks of 32 numbers."""
    blocks = tensor.view(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    return ((blocks / scale).round() * scale).view_as(tensor)


@pytest.mark.parametrize(
    ("change", "state"), [(rounded, "right"), (lambda tensor: tensor.roll(1, 0), "wrong")]
)
def test_an_adapter_on_another_base(
    change: Callable[[torch.Tensor], torch.Tensor],
    state: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = chat_run(tmp_path, "qwen3", **SIZE)
    base = Path(shutil.copytree(tmp_path / "model", tmp_path / "other"))
    file = base / "model.safetensors"
    tensors = {}
    for key, tensor in load_file(file).items():
        tensors[key] = (
            change(tensor).contiguous() if "layers" in key and tensor.dim() == 2 else tensor
        )
    save_file(tensors, file, {"format": "pt"})
    with vllm_server(base, tmp_path / "server.log", "--max-model-len=512") as url:
        load(url, "bot", next(run_dir.glob("exports/*-adapter")))
        _, by_point = points(url, run_dir, "bot", capsys)
    print(by_point["log-probabilities"])
    assert by_point["log-probabilities"]["state"] == state


def end_elsewhere(folder: Path) -> None:
    """Have a model end answers at another token than training did."""
    ends = {"generation_config.json": ("eos_token_id", 0), "config.json": ("eos_token_id", 0)}
    for name, (key, value) in {
        **ends,
        "tokenizer_config.json": ("eos_token", "<|endoftext|>"),
    }.items():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: value}))


THINKS_NOT = '{"enable_thinking": false}'
# vLLM's types sort a call's keys, which a template that writes a whole call as JSON shows.
NAMED = TEMPLATE.replace(
    "call.function | tojson", "call.function.name + call.function.arguments | tojson"
)


@pytest.mark.parametrize(
    ("template", "words", "point", "cause"),
    [
        (NAMED, (), "", ""),
        (TEMPLATE, (), "ids", "key order of calls"),
        (NAMED, ("--default-chat-template-kwargs", THINKS_NOT), "ids", "enable_thinking: "),
        (NAMED, ("--chat-template", "OTHER"), "ids", "template: "),
        (NAMED, ("--chat-template", "TWICE"), "ids", "a second BOS"),
        (NAMED, (), "end of answers", "goes on behind <|im_end|>"),
    ],
)
def test_conversations_with_tools_and_thoughts(
    template: str,
    words: tuple[str, ...],
    point: str,
    cause: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = chat_run(tmp_path, "qwen3", template=template, **SIZE)
    others = {
        "OTHER": template.replace("|>system", "|> system"),
        "TWICE": template.replace("bos_token", "bos_token + bos_token"),
    }
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    words = tuple(str(tmp_path / word) if word in others else word for word in words)
    folder = next(run_dir.glob("exports/*-merged"))
    if point == "end of answers":
        end_elsewhere(folder)
    with vllm_server(folder, tmp_path / "server.log", *words, "--max-model-len=512") as url:
        code, by_point = points(url, run_dir, str(folder), capsys)
    print(by_point)
    wrong = [name for name, finding in by_point.items() if finding["state"] == "wrong"]
    assert wrong == ([point] if point else [])
    assert code == (5 if point else 0)
    assert not point or by_point[point]["text"].count(cause)


def test_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = chat_run(tmp_path, "qwen3_moe", **SIZE, moe_intermediate_size=64)
    merged = next(run_dir.glob("exports/*-merged"))
    base = tmp_path / "model"
    words = ("--max-model-len=512", "--max-num-batched-tokens=512")
    for folder in (merged, base):
        log = tmp_path / f"{folder.name}.log"
        with vllm_server(folder, log, *words, adapters=()) as url:
            code, by_point = points(url, run_dir, str(folder), capsys)
        weights = by_point["log-probabilities"]
        print(weights)
        # The calls in this template are what vLLM writes in another order.
        assert "key order of calls" in by_point["ids"]["text"]
        assert code == 5
        assert weights["state"] == ("right" if folder == merged else "wrong")
        assert weights["numbers"]["missing"] == ([] if folder == merged else ["base"])
