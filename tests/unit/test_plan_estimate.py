"""Rows and tokens as `kubetune plan` estimates them, held against what preparing the same data gives."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kubetune import cli
from kubetune.batching.feed import (
    Feed,
    evaluated,
    evaluation_batches,
    rows_per_epoch,
    tokens_per_epoch,
)
from kubetune.config.load import load_config
from kubetune.config.schema import Config, SourceConfig
from kubetune.config.schema.evaluation import EvaluationConfig
from kubetune.data.findings.checked import findings_of
from kubetune.data.inspect.estimate import estimate_lengths, estimate_rows, taken_by
from kubetune.data.inspect.lengths import Lengths
from kubetune.data.prepared.prepare import prepare
from kubetune.data.reading.sources import not_read
from kubetune.data.spec import DataSpec
from kubetune.distributed.process_group import World
from kubetune.errors import OK, USER, DataError
from kubetune.plan.cost import evaluation_hours
from kubetune.plan.plan import make_plan
from tests import reviews
from tests.tiny import pretend_weights, train_tokenizer

TEXTS = [f"one two three number {n} " * (1 + n % 4) for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimate")
    pretend_weights(train_tokenizer(folder / "model"))
    for name, texts in (("a", TEXTS), ("b", TEXTS[:10])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return folder


def lengths_of(config: Config) -> Lengths | None:
    return estimate_lengths(DataSpec.of(config), config.training, {})


def config(folder: Path, **data: Any) -> Config:
    flags = {
        "model.path": str(folder / "model"),
        "data.num_proc": 1,
        "data.cache": str(folder / "cache"),
    }
    return load_config(None, flags=flags | {f"data.{key}": value for key, value in data.items()})


def test_evaluations_are_planned_with_what_must_not_be_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    run = config(folder, train="a.jsonl", eval="b.jsonl").model_copy(
        update={"evaluation": EvaluationConfig.model_validate({"forget": "b.jsonl#7"})}
    )
    assert taken_by(run.sources["forget"][0]) == 7
    plan = make_plan(run, 40, 10, tokens=400)
    alone = evaluation_hours(run.evaluation, run.lora, plan, 100.0, needs_base=False)
    both = evaluation_hours(run.evaluation, run.lora, plan, 100.0, forget_rows=10, needs_base=False)
    assert alone
    assert both == pytest.approx(2 * alone)
    command = ["plan", "--model", "model", "--data", "a.jsonl", "data.eval=b.jsonl"]
    assert cli.main([*command, "evaluation.forget=absent.jsonl"]) == USER
    assert "absent.jsonl does not exist" in capsys.readouterr().err
    override = "evaluation.metrics={file: absent.py, functions: [f]}"
    assert cli.main([*command, "evaluation.generate={}", override]) == USER
    assert "evaluation.metrics.file: absent.py is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [
        {"train": "a.jsonl"},
        {"train": "a.jsonl#7"},
        {"train": "a.jsonl", "eval": 0.1},
        {"train": "b.jsonl", "eval": 0.01},
        {"train": "a.jsonl", "eval": "b.jsonl"},
        {
            "train": [
                {"path": "a.jsonl", "weight": 0.5, "range": [5, 25]},
                {"path": "b.jsonl", "weight": 2.5},
            ]
        },
    ],
    ids=str,
)
def test_rows_are_those_that_will_be_prepared(
    folder: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = config(folder, **data)
    prepared = prepare(run)
    evaluated = 0 if prepared.eval is None else len(prepared.eval)
    assert estimate_rows(run.data) == (rows_per_epoch(prepared.train), evaluated)


def test_tokens_are_those_that_will_be_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = config(folder, train="a.jsonl")
    lengths = lengths_of(run)
    assert lengths is not None
    assert (lengths.sampled, lengths.overlong_share, lengths.bad_share, lengths.kept_share) == (
        40,
        0,
        0,
        1,
    )
    assert lengths.tokens_per_row == pytest.approx(prepare(run).train.lengths.mean())


def test_tokens_of_labelled_texts_are_those_that_will_be_prepared(tmp_path: Path) -> None:
    run = reviews.make_config(reviews.make_inputs(tmp_path))
    lengths = lengths_of(run)
    assert lengths is not None
    assert (lengths.sampled, lengths.bad_share) == (96, 0)
    assert lengths.tokens_per_row == pytest.approx(prepare(run).train.lengths.mean())


def test_rows_that_will_be_lost_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    long = TEXTS[3] * 20
    rows = (
        [json.dumps({"text": TEXTS[0]})] * 6
        + [json.dumps({"text": long})] * 2
        + ['{"txt": 1}', "nonsense"]
    )
    (folder / "mixed.jsonl").write_text("\n".join(rows) + "\n")
    dropped = lengths_of(config(folder, train="mixed.jsonl", max_length=100))
    cut = lengths_of(config(folder, train="mixed.jsonl", max_length=100, overlong="truncate"))
    assert dropped is not None
    assert cut is not None
    # A line that is no JSON is no record: it is counted as a row, but cannot be sampled.
    assert (dropped.sampled, dropped.overlong_share) == (9, pytest.approx(2 / 9))
    assert (dropped.bad_share, dropped.kept_share) == (pytest.approx(1 / 9), pytest.approx(6 / 9))
    assert cut.kept_share == pytest.approx(8 / 9)
    assert cut.tokens_per_row > dropped.tokens_per_row


def test_records_without_an_answer_are_left_out_of_the_estimate(folder: Path) -> None:
    question = {"role": "user", "content": TEXTS[0]}
    answer = {"role": "assistant", "content": TEXTS[1]}
    rows = [{"messages": [question, answer]}, {"messages": [question]}]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = lengths_of(config(folder, train=str(folder / "chats.jsonl")))
    assert lengths is not None
    assert (lengths.sampled, lengths.bad_share, lengths.kept_share) == (2, 0, 0.5)


def plan_of(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: str, code: int = OK
) -> dict[str, str]:
    (folder / "run.yaml").write_text(
        "model: model\ndata: {train: a.jsonl, max_length: 256}\nlora: true\n"
    )
    assert cli.main(["plan", "run.yaml", *words]) == code
    lines = capsys.readouterr().out.splitlines()
    return {line[:17].strip(): line[18:] for line in lines if line[:1].strip()}


def test_rows_of_texts_that_are_split_are_told_as_a_guess(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "long.jsonl").write_text(
        "".join(json.dumps({"text": TEXTS[3] * n}) + "\n" for n in (1, 20, 40))
    )
    lines = plan_of(capsys, folder, "data.train=long.jsonl", "data.eval=0.4", "data.overlong=split")
    assert re.match(r"about \d+, about \d+ for evaluation", lines["rows"])
    assert "(from 3 records)" in lines["tokens"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "Why?", "completion": TEXTS[3] * 40},
            "data.overlong: split is only for plain texts",
        ),
        (
            {"prompt": "<image>Why?", "completion": "No.", "images": ["a.png"]},
            "which a language model cannot see",
        ),
    ],
)
def test_records_that_no_such_run_takes_are_refused_though_others_are_sound(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record: Any,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    rows = [{"prompt": "What?", "completion": "That."}, record]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        "model: model\ndata: {train: mixed.jsonl, max_length: 256, overlong: split}\n"
    )
    assert cli.main(["plan", "run.yaml"]) == USER
    assert f"mixed.jsonl:2: has {'images' if 'images' in record else ''}" in (
        stderr := capsys.readouterr().err
    )
    assert message in stderr
    assert "mixed.jsonl:1" not in stderr


def test_a_loss_of_routers_is_refused_for_a_model_that_has_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    dense = Path(cli.__file__).parent / "local/embedded/model"
    (folder / "run.yaml").write_text(f"model: {dense}\ndata: {{train: a.jsonl, max_length: 256}}\n")
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        assert cli.main(["plan", "run.yaml", f"training.{name}=0.01"]) == USER
        assert (
            f"training.{name}: found 0.01, but this model has no experts" in capsys.readouterr().err
        )
        assert cli.main(["plan", "run.yaml", f"training.{name}=0"]) == 0


def test_a_plan_says_how_many_micro_batches_short_rows_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    lines = plan_of(capsys, folder, "training.global_batch_size=4")
    tokens = lines["effective batch"].split("about ")[1].split(" ")[0]
    assert lines["effective batch"] == (
        f"4 samples, about {tokens} tokens; about 1 micro-batch of at most 256 tokens on each of 1 process"
    )
    assert lines["learning rate"].endswith("warm-up 1 step")
    # What is really trained: one micro-batch in most steps.
    run = config(folder, train="a.jsonl", max_length=256)
    run = run.model_copy(
        update={"training": run.training.model_copy(update={"global_batch_size": 4})}
    )
    prepared = prepare(run)
    plan = make_plan(
        run, rows_per_epoch(prepared.train), world_size=1, tokens=tokens_per_epoch(prepared.train)
    )
    feed = Feed(prepared.train, plan, 0, World())
    assert (
        {len(feed.step(step).batches) for step in range(feed.steps_per_epoch)}
        == {plan.accumulation}
        == {1}
    )


def test_rows_of_sets_that_are_not_here_are_bounds_or_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are they to be had, which is a problem; the plan is shown all the same."""
    monkeypatch.chdir(folder)
    lines = plan_of(capsys, folder, "data.train=[org/one#1000, org/two#1000]", code=USER)
    assert lines["rows"].startswith(
        "at most 2,000: data that are not on this machine count as at most #N rows"
    )
    assert lines["steps"] == "at most 2,000 (1 epoch)"
    assert lines["steps per epoch"] == "at most 2,000"
    assert lines["checkpoints"].startswith("every epoch")
    assert "at most 60 steps" in lines["learning rate"]
    lines = plan_of(capsys, folder, "data.train=[org/one#1000, org/two]", code=USER)
    assert lines["rows"].startswith("unknown")
    assert lines["tokens"] == "unknown, as the rows are"
    lines = plan_of(capsys, folder, "data.eval=org/one#7", code=USER)
    assert lines["rows"].startswith("40, at most 7 for evaluation")
    assert lines["steps"] == "40 (1 epoch)"
    lines = plan_of(capsys, folder, "data.train=org/one#1000", "data.eval=0.1", code=USER)
    assert lines["rows"].startswith("at most 900, at most 100 for evaluation")


def test_a_plan_in_tokens_is_the_run_in_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    lines = plan_of(capsys, folder, "training.global_batch_tokens=packed", "data.max_length=64")
    run = config(folder, train="a.jsonl", max_length=64)
    run = run.model_copy(
        update={"training": run.training.model_copy(update={"global_batch_tokens": "packed"})}
    )
    prepared = prepare(run)
    plan = make_plan(
        run, rows_per_epoch(prepared.train), world_size=1, tokens=tokens_per_epoch(prepared.train)
    )
    assert lines["steps"] == f"about {plan.num_steps} (1 epoch)"
    assert plan.num_steps == -(-int(prepared.train.lengths.sum()) // 64)


def test_what_is_not_on_this_machine_stays_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert estimate_rows(config(folder, train="org/data").data) == (None, 0)
    assert estimate_rows(config(folder, train="org/data", eval=0.1).data) == (None, None)
    assert estimate_rows(config(folder, train="org/data#500").data) == (500, 0)
    run = config(folder, train="a.jsonl")
    elsewhere = run.model_copy(update={"model": run.model.model_copy(update={"path": "org/model"})})
    assert (
        estimate_lengths(DataSpec.of(elsewhere), elsewhere.training, {"HF_HOME": str(folder)})
        is None
    )
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        estimate_rows(config(folder, train="none.jsonl").data)


@pytest.mark.parametrize("held_out", [0.25, "own"])
def test_an_evaluation_has_the_mix_of_training(held_out: float | str, folder: Path) -> None:
    weighted: list[dict[str, Any]] = [
        {"path": str(folder / "b.jsonl"), "weight": 2.0},
        {"path": str(folder / "a.jsonl"), "weight": 0.2},
    ]
    mixed = config(folder, train=weighted, eval=weighted if held_out == "own" else held_out)
    rows = prepare(mixed).eval
    assert rows is not None
    per_source = np.bincount(rows.source).tolist()
    taken = evaluated(rows)
    counts = np.bincount(rows.source[taken]).tolist()
    assert counts == [per_source[0], round(per_source[1] * 0.1)]
    plan = make_plan(mixed, rows_per_epoch(rows), len(taken))
    batches = [ids for rank in evaluation_batches(rows, plan, World()) for ids in rank]
    assert np.sort(np.concatenate(batches)).tolist() == taken.tolist()
    assert abs((estimate_rows(mixed.data)[1] or 0) - len(taken)) <= (1 if held_out != "own" else 0)
    even = [source | {"weight": 3.0} for source in weighted]
    alike = prepare(config(folder, train=even, eval=even if held_out == "own" else held_out))
    assert alike.eval is not None
    assert len(evaluated(alike.eval)) == len(alike.eval) == len(rows)
    assert alike.fingerprint == prepare(mixed).fingerprint  # so that runs from before go on


def test_the_check_counts_files_of_a_folder_that_it_does_not_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl.tmp", "notes.txt", "LICENSE", ".hidden"):
        (data / name).write_text((folder / "a.jsonl").read_text())
    message = "files not read: .tmp × 1, .txt × 1, LICENSE × 1"
    page = tmp_path / "page.html"
    for words in ([], ["--model", str(folder / "model"), "--samples", "0", "--html", str(page)]):
        assert cli.main(["data", "check", str(data), *words]) == 0
        assert message in capsys.readouterr().out
        assert cli.main(["data", "check", str(data), "--json", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        counts = report["splits"]["train"] if words else report
        assert counts["files_not_read"] == {".tmp": 1, ".txt": 1, "LICENSE": 1}
    assert message in page.read_text()
    assert (
        cli.main(["data", "convert", str(data), "-o", str(tmp_path / "all.jsonl"), "--to", "text"])
        == 0
    )
    assert message in capsys.readouterr().out
    prepared = prepare(config(folder, train=str(data), eval=0.5))
    sentences = [finding.sentence for finding in findings_of(prepared)]
    assert f"train: {message}" in sentences
    assert not any("eval: files not read" in sentence for sentence in sentences), (
        "its records are those of training"
    )
    (data / "seen.PNG").write_bytes(b"")
    assert not_read([SourceConfig(path=str(data))]).total() == 4
    for name in (".a.jsonl", ".seen.png", ".seen.png.1a2b.tmp", ".gitattributes"):
        (data / name).write_text("")
    hidden = not_read([SourceConfig(path=str(data))], images=True) - Counter(
        counts["files_not_read"]
    )
    assert hidden == {"hidden .jsonl": 1, "hidden .png": 1, "hidden .tmp": 1}
    for name in (".a.jsonl", ".seen.png", ".seen.png.1a2b.tmp"):
        (data / name).unlink()
    assert not_read([SourceConfig(path=str(data))], images=True).total() == 3, "records name images"


def test_the_check_says_how_many_rows_an_evaluation_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = f"[{{path: {folder}/b.jsonl}}, {{path: {folder}/a.jsonl, weight: 0.1}}]"
    (folder / "run.yaml").write_text(
        f"model: {folder}/model\ndata: {{train: {sources}, eval: 0.5}}\n"
    )
    command = ["data", "check", str(folder / "run.yaml"), "--html", str(folder / "page.html")]
    assert cli.main(command) == 0
    match = re.search(
        r"(\d+) of 25 rows of eval evaluated, in the mix that the weights of their sources make",
        capsys.readouterr().out,
    )
    assert match is not None
    assert int(match[1]) < 15
    assert f"{match[1]} of 25 rows of eval evaluated" in (folder / "page.html").read_text()
