"""Headers of safetensors files that nobody's weights have: a plan knows less by them, and says so without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.plan import model_shapes
from tests.tiny import pretend_weights, train_tokenizer

CONFIG = {
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "num_attention_heads": 1,
    "intermediate_size": 4,
}


@pytest.mark.parametrize(
    "shape",
    [
        ["a"], "text", [1.5], [float("nan")], [-1], None, {"a": 1}, [True], [[1]], [10**30], [10**4000], [1] * 100,
        [1 << 40, 1 << 40],
    ],
    ids=lambda shape: str(shape)[:12],
)  # fmt: skip
def test_shapes_that_no_weight_has(tmp_path: Path, shape: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    _write(tmp_path, json.dumps({"weight": entry}).encode())
    assert model_shapes.read_weights(str(tmp_path), {}) is None


@pytest.mark.parametrize(
    "header",
    [b"", b"[1]", b"[" * 100_000, b"\xff" * 8, b'{"a": 3}', b'{"a": {}}', b"{"],
    ids=lambda header: str(header[:8]),
)
@pytest.mark.parametrize("size", [None, 0, 1 << 40, 1 << 63])
def test_headers_that_are_none(tmp_path: Path, header: bytes, size: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _write(tmp_path, header, size)
    weights = model_shapes.read_weights(str(tmp_path), {})
    assert weights is None or not weights.stated


def test_a_plan_reads_the_shapes_of_a_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_weights(train_tokenizer(tmp_path / "model"))
    (tmp_path / "train.jsonl").write_text('{"text": "one two three"}\n' * 40)
    run_file = tmp_path / "run.yaml"
    run_file.write_text("{model: model, data: {train: train.jsonl}, lora: {r: 4}, output: out}")
    read = []
    header = model_shapes._header
    monkeypatch.setattr(model_shapes, "_header", lambda file: read.append(file) or header(file))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", str(run_file)]) == 0
    assert [file.name for file in read] == ["model.safetensors"]


def _write(folder: Path, header: bytes, size: int | None = None) -> None:
    length = (len(header) if size is None else size).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + header + b"\0" * 4)
