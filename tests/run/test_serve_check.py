"""`kubetune serve --check`: right servers pass, and what is wrong with others is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from kubetune.cli import main
from kubetune.result.inference import proof_answers
from kubetune.result.publishing.exporting import export_run
from tests import toy
from tests.served_model import ServedModel, served
from tests.tiny import CHATML

ONE_EPOCH = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    run_dir = toy.finished(inputs / "bot", toy.make_config(inputs, ONE_EPOCH, name="bot"))
    export_run(run_dir, tell=lambda _: None)
    return run_dir


def exported(run_dir: Path) -> Path:
    return next(run_dir.glob("exports/*-adapter"))


def base_model(run_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(run_dir.parent / "model", dtype=dtype).eval()


def right_server(run_dir: Path, dtype: torch.dtype = torch.float32) -> ServedModel:
    """Return a server with base and adapter, as PEFT loads them."""
    model = PeftModel.from_pretrained(base_model(run_dir, dtype), exported(run_dir)).eval()
    return ServedModel(
        model, AutoTokenizer.from_pretrained(exported(run_dir)), names=("base", "bot")
    )


def without(run_dir: Path, pattern: str) -> ServedModel:
    """Return a server that passes over the adapter on modules with this in their names."""
    server = right_server(run_dir)
    for name, parameter in server.model.named_parameters():
        if "lora_B" in name and pattern in name:
            torch.nn.init.zeros_(parameter)
    return server


def base_in_its_place(run_dir: Path) -> ServedModel:
    server = right_server(run_dir)
    server.model = base_model(run_dir)
    return server


def another_template(run_dir: Path) -> ServedModel:
    server = right_server(run_dir)
    server.template = CHATML.replace("<|im_start|>' +", "<|im_start|> ' +")
    return server


def nan(run_dir: Path) -> ServedModel:
    server = right_server(run_dir)
    server.spoil = lambda values: values.where(torch.arange(len(values)) != 3, torch.nan)
    return server


def checked(
    server: ServedModel, run_dir: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the points by name, and what was printed for people."""
    with served(server) as url:
        code = main(["serve", "--check", url, str(run_dir), "--json", *options])
    printed = capsys.readouterr()
    (report,) = json.loads(printed.out)
    return code, {finding["point"]: finding for finding in report["findings"]}, printed.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trained_model_passes_in_any_dtype(
    dtype: torch.dtype, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, points, _ = checked(right_server(run_dir, dtype), run_dir, capsys)
    assert code == 0
    assert {name: point["state"] for name, point in points.items()} == dict.fromkeys(
        points, "right"
    )
    assert points["log-probabilities"]["numbers"]["share"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("wrong", "point", "words"),
    [
        (base_in_its_place, "log-probabilities", "those of the base"),
        (lambda run: without(run, "self_attn"), "log-probabilities", "passes over the adapter on attention"),
        (lambda run: without(run, "mlp"), "log-probabilities", "passes over the adapter on feed-forward"),
        (another_template, "ids", "template: "),
        (nan, "log-probabilities", "NaN"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    wrong: Callable[[Path], ServedModel],
    point: str,
    words: str,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, points, said = checked(wrong(run_dir), run_dir, capsys)
    assert code == 5
    assert [name for name, finding in points.items() if finding["state"] == "wrong"] == [point]
    assert words in points[point]["text"]
    assert words in said


def test_the_export_keeps_no_rows_of_the_data(run_dir: Path) -> None:
    answers = proof_answers.read(next((run_dir / "exports").glob("*.proof.safetensors")))
    assert set(answers.without) == {"attention", "feed-forward"}
    names = {path.name for path in exported(run_dir).iterdir()}
    assert not any("proof" in name for name in names)
