"""Names of files and folders that say a class, or which answers are good: refused or named, never silently passed over."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.schema import SourceConfig
from kubetune.data.findings.group_findings import of_names
from kubetune.data.findings.split_files import located_sources
from kubetune.data.inspect import known_findings
from kubetune.data.proposed.by_split import propose_by_split
from kubetune.data.proposed.proposing import propose
from kubetune.errors import DataError

MODEL = str(EMBEDDED / "model")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(*names: str, answers: bool) -> str:
    """Write a file for each name below `data`, of questions with answers or of plain texts, and return that folder."""
    for number, name in enumerate(names):
        path = Path("data", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in range(16):
            asked, answer = f"What is {number} and {row}?", f"It is {number + row}."
            value = (
                {"prompt": asked, "completion": answer}
                if answers
                else {"text": f"{asked} {answer}"}
            )
            rows.append(json.dumps(value))
        path.write_text(
            f"A long text, of number {number}." if name.endswith(".txt") else "\n".join(rows)
        )
    return "data"


def findings(*paths: str) -> list[tuple[str, str]]:
    named = of_names(located_sources([SourceConfig(path=path) for path in paths]))
    return [(finding.severity, finding.line) for finding in named]


@pytest.mark.parametrize(
    ("names", "bad"),
    [
        (("chosen.jsonl", "rejected.jsonl"), "rejected"),
        (("good/1.jsonl", "good/2.jsonl", "bad/1.jsonl"), "bad"),
        (("train/correct_answers.jsonl", "train/incorrect_answers.jsonl"), "incorrect_answers"),
        (("train.jsonl", "WrongResponses.jsonl"), "WrongResponses"),
        (("preferred.jsonl", "non-preferred.jsonl", "dispreferred.jsonl"), "dispreferred"),
    ],
)
def test_answers_that_are_called_bad_are_not_learned_as_good(
    names: Sequence[str],
    bad: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folder(*names, answers=True)
    [(severity, line)] = findings(path)
    assert severity == "error"
    assert f"`{bad}`" in line
    with pytest.raises(DataError, match="answers bad, and they would be learned"):
        propose(SourceConfig(path=path))
    # All say the same.
    Path("run.yaml").write_text(f"name: r\nmodel: {MODEL}\ndata: {{train: {path}}}\noutput: out\n")
    for words in (["data", "check", path], ["data", "check", "run.yaml"], ["plan", "run.yaml"]):
        assert cli.main(words) == 2
        assert line in " ".join("".join(capsys.readouterr()).split())
    # Names say it of more rows than `plan` looks at, too.
    monkeypatch.setattr(known_findings, "MOST_RECORDS", 3)
    assert cli.main(["plan", "run.yaml"]) == 2
    assert line in " ".join("".join(capsys.readouterr()).split())
    # A file of its own is meant.
    files = sorted(str(file) for file in Path("data").rglob("*.jsonl"))
    assert {severity for severity, _ in findings(*files)} == {"warning"}


def test_the_program_for_answers_makes_verdicts_that_are_read() -> None:
    path = folder("better.jsonl", "worse.jsonl", answers=True)
    [(_, line)] = findings(path)
    assert "`data.train: data/better.jsonl`" in line or "data.train: data/better.jsonl" in line
    program = line.partition("after `")[2].partition("`. ")[0]
    subprocess.run(program, shell=True, check=True)
    proposal = propose(SourceConfig(path="data-judged.jsonl"))
    assert proposal.task.value == "preference"
    verdicts = [record.value["label"] for record in proposal.records]
    assert verdicts == [True] * 16 + [False] * 16


@pytest.mark.parametrize(
    ("names", "severity"),
    [
        (("pos/1.txt", "pos/2.txt", "neg/1.txt", "neg/2.txt"), "warning"),
        (("train/positive/1.txt", "train/negative/1.txt"), "warning"),
        (("sports/1.txt", "sports/2.txt", "politics/1.txt"), "note"),
        (("spam.jsonl", "ham.jsonl"), "note"),
        (("train_sports.jsonl", "train_trade.jsonl", "train_arts.jsonl"), "note"),
        (("2019/billing/a.jsonl", "2020/login/b.jsonl", "2020/billing/c.jsonl"), "note"),
    ],
)
def test_classes_of_plain_texts_are_named_with_what_would_learn_them(
    names: Sequence[str], severity: str
) -> None:
    path = folder(*names, answers=False)
    [(found, line)] = findings(path)
    assert found == severity
    program = line.partition("after `")[2].partition("`")[0]
    subprocess.run(program, shell=True, check=True)
    made = line.partition("; give ")[2].partition(" after")[0]
    proposal = propose(SourceConfig(path=made))
    assert proposal.task.value == "sequence_classification"
    labels = {str(record.value["label"]) for record in proposal.records}
    assert all(f"`{label}`" in line for label in labels)
    assert len(labels) > 1
    # `init` says it where it proposes to learn the texts alone.
    assert line in propose(SourceConfig(path=path)).unused


def test_init_names_the_classes_within_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(
        "train/pos/1.txt", "train/neg/1.txt", "test/pos/1.txt", "test/neg/1.txt", answers=False
    )
    proposal = propose_by_split(SourceConfig(path=path))
    assert any("the texts of `neg`, `pos` are learned alike" in line for line in proposal.unused)
    assert cli.main(["init", path, "--model", MODEL, "-o", "run.yaml"]) == 0
    assert capsys.readouterr().out.count("are learned alike") == 1


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("en/a.jsonl", "de/a.jsonl", "pt-BR/a.jsonl"),
        ("english.jsonl", "german.jsonl"),
        ("2019/a.jsonl", "2020/a.jsonl"),
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
        ("part1/a.jsonl", "part2/b.jsonl"),
        ("wiki-1.jsonl", "wiki-2.jsonl"),
        ("train.jsonl", "train copy.jsonl", "train_old.jsonl"),
        ("3f/a.jsonl", "a0/a.jsonl"),
        ("train.jsonl", "extra.jsonl"),
        ("1.txt", "rivers.txt", "harbours.txt"),
        ("only.jsonl",),
    ],
)
def test_languages_years_and_shards_are_no_classes(names: Sequence[str], answers: bool) -> None:
    path = folder(*names, answers=answers and not names[0].endswith(".txt"))
    assert findings(path) == []


@pytest.mark.parametrize(
    "names",
    [
        ("sports.jsonl", "politics.jsonl"),
        ("sql.jsonl", "bad_gateway.jsonl", "errors.jsonl"),
        ("harmful.jsonl", "harmless.jsonl"),
    ],
)
def test_topics_of_questions_are_no_verdicts(names: Sequence[str]) -> None:
    assert findings(folder(*names, answers=True)) == []


def test_records_that_say_their_class_need_no_name_of_a_file() -> None:
    for name, label in (("pos", 1), ("neg", 0)):
        Path(f"{name}.jsonl").write_text(f'{{"text": "A walk by the river", "label": {label}}}\n')
    assert findings("*.jsonl") == []
