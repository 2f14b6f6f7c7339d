"""What a mistaken command is answered with beyond what is wrong: what was probably meant, and what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kubetune import cli, errors
from kubetune.cli.local.demo import EMBEDDED

MODEL = str(EMBEDDED / "model")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with data and models that are not as they should be, and go there."""
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": "a", "completion": "b"})
    Path("train.jsonl").write_text(f"{row}\n" * 8)
    Path("empty.jsonl").touch()
    Path("semicolons.csv").write_text("question;answer\nwhat, please?;this\n")
    Path("latin.csv").write_bytes("question,answer\nWas?,Straße\n".encode("latin-1"))
    Path("labelled.csv").write_text("review,verdict\n" + "A fine film.,happy\n" * 8)
    Path("tabs.yaml").write_text("name: x\ndata:\n\ttrain: train.jsonl\n")
    Path("list.yaml").write_text("name: x\ndata: {train: [a, b\nmodel: m: y\n")
    for name in ("adapter", "damaged"):
        Path(name).mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    Path("damaged/config.json").write_text("{}")
    Path("damaged/model.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("plan --model MODEL --data trian.jsonl", "did you mean train.jsonl?"),
        ("plan --model MODEL --data empty.jsonl", "empty.jsonl holds no records"),
        ("plan --model model", "data.train: missing; give --data FILE"),
        ("plan --data train.jsonl", "model: missing; give --model FOLDER|ID"),
        ("plan train.jsonl", "`kubetune init train.jsonl -o run.yaml` makes one"),
        ("plan tabs.yaml", "indent with spaces, not with tabs"),
        ("plan list.yaml", "(in the list or section that begins in line 2)"),
        ("plan --model train.jsonl --data train.jsonl", "is a file; expected the folder"),
        ("plan --model ./adapter --data train.jsonl", "which would load another model"),
        ("plan --model ./damaged --data train.jsonl", "model.safetensors has 0 bytes"),
        ("init semicolons.csv", "semicolons.csv:1: has one column, and `;` in its name"),
        ("init latin.csv", "`iconv -f CP1252 -t UTF-8 FILE > NEW`"),
        (
            "plan --model MODEL --data train.jsonl task=sft",
            "did you mean causal_lm? Expected one of",
        ),
        ("plan --model MODEL --data train.jsonl task=DPO", "did you mean preference?"),
        (
            "plan --model MODEL --data train.jsonl evaluation.generate.metrics=bleu",
            "did you mean metric?",
        ),
        ("plan --model MODEL --data train.jsonl data.overlong=trunacte", "did you mean truncate?"),
        (
            "plan --model ./damagd --data train.jsonl",
            "model ./damagd: there is no such folder; did you mean ./damaged?",
        ),
        (
            "plan task=sequence_classification --model MODEL --data labelled.csv --columns text=review",
            "has the keys `verdict`, `review`; if `verdict` is the label, say so: `--columns text=review label=verdict`",
        ),
        (
            "plan task=sequence_classification --model MODEL --data labelled.csv",
            "if `review` is the text and `verdict` the label, say so: `--columns text=review label=verdict`",
        ),
        ("delete ./adapter", "rm -r adapter removes it"),
        (
            "ui adapter --port 99999",
            "--port is 99999; expected a number from 0 to 65535",
        ),
        ("evaluate outputs/none", "`kubetune runs` lists them"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.replace("MODEL", MODEL).split()) == errors.USER
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("status bot --context lab", "`kubectl config use-context NAME` changes it"),
        ("init train.jsonl --force", "nothing is ever overwritten"),
    ],
)
def test_an_option_of_another_tool_is_answered_with_ours(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert hint in capsys.readouterr().err


def test_the_model_of_the_demo_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "train.jsonl", "--model", "demo", "-o", "run.yaml"]) == errors.OK
    assert f"model: {MODEL}" in Path("run.yaml").read_text()
    assert cli.main(["plan", "run.yaml"]) == errors.OK
    assert "Next: " in capsys.readouterr().out
