"""Results of runs on a machine that has neither their data nor prepared rows: the run directory suffices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.config.schema import Config
from kubetune.data.prepared import kept_rows
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import metrics
from tests import reviews, toy
from tests.pictures import QUESTION, save_seeing_model, write_questions

ONE_STEP = {"max_steps": 1, "eval_steps": 1, "save_steps": 1}


@pytest.fixture
def finished(tmp_path: Path) -> Callable[[Config], Path]:
    return lambda config: toy.finished(tmp_path / "run", config)


def take_data_away(run_dir: Path, inputs: Path) -> Path:
    """Return a copy of the run, where nothing but the base is left of what it was made from."""
    copy = shutil.copytree(run_dir, run_dir.parent / "copied", symlinks=True)
    shutil.rmtree(run_dir)
    for path in inputs.iterdir():
        if path.is_file():
            path.unlink()
        elif path.name not in ("model", "run", "copied"):
            shutil.rmtree(path)
    return copy


def proof_of(run_dir: Path, out: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the proof of an export, and the files that do not tell the time."""
    facts = export_run(run_dir, wanted=WantedExport(out=out, **settings), tell=lambda _: None).facts
    return facts["proof"], {
        name: file for name, file in facts["files"].items() if name.endswith(".safetensors")
    }


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main([str(word) for word in words]) == errors.OK
    return capsys.readouterr().out


@pytest.mark.slow
def test_an_adapter_is_exported_measured_and_asked(
    tmp_path: Path, finished: Callable[[Config], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = toy.make_inputs(tmp_path / "inputs")
    other = tmp_path / "other.jsonl"
    other.write_text((inputs / "eval.jsonl").read_text())
    run_dir = finished(toy.make_config(inputs, {**ONE_STEP, "max_steps": 2}))
    verbs: list[Callable[[Path], object]] = [
        lambda run: proof_of(run, tmp_path / "out"),
        lambda run: printed(capsys, "evaluate", run, "--data", other),
        lambda run: printed(capsys, "generate", run, "3 what is", "--max-new-tokens", "8"),
    ]
    with_data = [verb(run_dir) for verb in verbs]
    copy = take_data_away(run_dir, inputs)
    assert [verb(copy) for verb in verbs] == with_data
    assert (
        json.loads((tmp_path / "out" / "provenance.json").read_text())["proof"]["origin"]
        == "held-out rows"
    )
    facts = json.loads((copy / metrics.DATA).read_text())["facts"]
    assert (facts["is_chat"], facts["takes_pairs"], facts["labels"]) == (False, None, None)

    (copy / kept_rows.PROOF).write_bytes(b"damaged")
    assert cli.main(["export", str(copy), "-o", str(tmp_path / "again")]) == errors.ENVIRONMENT
    assert f"{copy / kept_rows.PROOF} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_run_that_lost_its_facts_and_kept_rows_goes_by_its_data(
    tmp_path: Path, finished: Callable[[Config], Path], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = toy.make_inputs(tmp_path / "inputs")
    messages = list[str]()
    run_dir = finished(toy.make_config(inputs, ONE_STEP))
    kept = export_run(run_dir, wanted=WantedExport(out=tmp_path / "kept"), tell=messages.append)
    assert not [line for line in messages if "keeps no rows" in line]
    (run_dir / metrics.DATA).unlink()
    (run_dir / kept_rows.PROOF).unlink()
    exported = export_run(
        run_dir, wanted=WantedExport(out=tmp_path / "chosen"), tell=messages.append
    )
    assert [line for line in messages if "keeps no rows" in line]
    assert exported.facts["proof"] == kept.facts["proof"]
    assert cli.main(["generate", str(run_dir), "one", "--max-new-tokens", "1"]) == errors.OK
    assert "keeps no facts about its data" in caplog.text


@pytest.mark.slow
def test_a_classifier_of_pairs_knows_that_it_is_one(
    tmp_path: Path, finished: Callable[[Config], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = reviews.make_inputs(tmp_path / "inputs")
    for name in ("train", "eval"):
        rows = [line.split("\t") for line in (inputs / f"{name}.tsv").read_text().splitlines()[1:]]
        lines = (
            json.dumps({"premise": text, "hypothesis": "the plot", "label": label}) + "\n"
            for text, label in rows
        )
        (inputs / f"{name}.jsonl").write_text("".join(lines))
    run_dir = finished(toy.make_config(inputs, ONE_STEP, task="sequence_classification"))
    with_data = proof_of(run_dir, tmp_path / "out", merged=True)
    verdicts = printed(capsys, "generate", run_dir, "fine\tthe plot")
    copy = take_data_away(run_dir, inputs)
    assert proof_of(copy, tmp_path / "out", merged=True) == with_data
    assert cli.main(["generate", str(copy), "fine", "fine\tthe plot"]) == errors.OK
    output = capsys.readouterr()
    assert "1 of 2 texts have no tab; the run was trained on pairs" in output.err
    assert output.out.splitlines()[1] == verdicts.strip()
    facts = json.loads((copy / metrics.DATA).read_text())["facts"]
    assert facts["takes_pairs"] is True
    assert facts["labels"] == {"problem_type": "single_label_classification", "names": ["0", "1"]}


@pytest.mark.slow
def test_a_model_that_sees_keeps_the_images_of_its_proof(
    tmp_path: Path, finished: Callable[[Config], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tmp_path / "inputs"
    save_seeing_model(inputs / "model")
    write_questions(inputs, "train", 16, 1)
    write_questions(inputs, "eval", 12, 2)
    settings = {"data": {"max_length": 128}, "lora": {"r": 4}}
    run_dir = finished(toy.make_config(inputs, ONE_STEP, task="vision_language", **settings))
    with_data = proof_of(run_dir, tmp_path / "out")
    copy = take_data_away(run_dir, inputs)
    assert proof_of(copy, tmp_path / "out") == with_data
    assert printed(capsys, "generate", copy, QUESTION, "--max-new-tokens", "2")
    assert json.loads((copy / metrics.DATA).read_text())["facts"]["images"]["max_tokens"]
