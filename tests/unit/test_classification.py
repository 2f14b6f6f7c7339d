"""Labels, metrics, padded attention and the decision about quantisation."""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kubetune import cli, errors, extras
from kubetune.cli.result.evaluate import confusion_lines
from kubetune.config.schema import Config
from kubetune.config.schema.compute import ComputeConfig
from kubetune.data.prepared.pipeline import RecordBatch
from kubetune.data.prepared.row_maker import RowMaker
from kubetune.data.reading.examples import Labelled
from kubetune.data.reading.formats import convert
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.spec import Split
from kubetune.data.text import find_labels as find_labels_module
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.encode_labelled import LabelledEncoder
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.kernels.attention.blockwise import Rule
from kubetune.kernels.attention.padded import padded_attention
from kubetune.models import quantization
from kubetune.plan.plan import make_plan
from kubetune.tasks.classification_metrics import count_confusions, measure
from tests import reviews

SINGLE = Labels("single_label_classification", ("no", "yes"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reviews.save_model(tmp_path_factory.mktemp("model"))


def find_labels(config: Config) -> Labels:
    return find_labels_module.find_labels(config.classification, config.model, config.sources)


def labels_of(model: Path, tmp_path: Path, rows: list[Any], **classification: Any) -> Labels:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "x", "label": row}) + "\n" for row in rows)
    )
    data = {"train": str(tmp_path / "rows.jsonl"), "eval": None}
    config = reviews.make_config(
        tmp_path, model=str(model), data=data, classification=classification
    )
    return find_labels(config)


@pytest.mark.parametrize(
    ("rows", "classification", "kind", "names"),
    [
        ([0, 1, 1], {}, "single_label_classification", ("0", "1")),
        ([0, 3], {}, "single_label_classification", ("0", "1", "2", "3")),
        (["b", "a", "c"], {}, "single_label_classification", ("a", "b", "c")),
        (["neg"], {"labels": ["neg", "pos"]}, "single_label_classification", ("neg", "pos")),
        ([["a"], ["b", "a"], []], {}, "multi_label_classification", ("a", "b")),
        ([0.5, 2], {}, "regression", ("value",)),
        (["3.8", "4"], {}, "regression", ("value",)),
        ([1, 2], {"problem_type": "regression"}, "regression", ("value",)),
        ([0.0, 1.0, 2.0], {}, "single_label_classification", ("0", "1", "2")),
        (["1.0", "0.0"], {"labels": ["no", "yes"]}, "single_label_classification", ("no", "yes")),
        ([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], {}, "multi_label_classification", ("0", "1", "2")),
        ([[1.0, 0.0]], {"labels": ["joy", "fear"]}, "multi_label_classification", ("joy", "fear")),
        ([0.5, 2.5, 3, "n/a"], {}, "regression", ("value",)),
        (["v1.5", "2.5"], {}, "single_label_classification", ("2.5", "v1.5")),
        ([1, 5, 3], {}, "single_label_classification", ("1", "2", "3", "4", "5")),
        ([1, 1], {}, "single_label_classification", ("0", "1")),
        ([True, False], {}, "single_label_classification", ("False", "True")),
        ([True, False], {"labels": ["no", "yes"]}, "single_label_classification", ("no", "yes")),
        (["pos", "neg", "pos "], {}, "single_label_classification", ("neg", "pos")),
        ([["a "], ["b", "a"]], {}, "multi_label_classification", ("a", "b")),
        ([[True, False, True]], {}, "multi_label_classification", ("0", "1", "2")),
        ([[0, 1], [1]], {}, "multi_label_classification", ("0", "1")),
        ([[0, 1], []], {}, "multi_label_classification", ("0", "1")),
        (["1_2", "1_3"], {}, "single_label_classification", ("1_2", "1_3")),
        (["1_000", "2_000"], {}, "single_label_classification", ("1_000", "2_000")),
        (["01", "10"], {}, "single_label_classification", ("01", "10")),
        (["01", "02"], {}, "single_label_classification", ("01", "02")),
        (["１", "２"], {}, "single_label_classification", ("１", "２")),
        (["1e3", "2e3"], {}, "single_label_classification", ("1e3", "2e3")),
        (["-inf", "inf"], {}, "single_label_classification", ("-inf", "inf")),
        ([" 1", "2 ", "3.0"], {}, "single_label_classification", ("1", "2", "3")),
        ([-1, 0, 1], {}, "single_label_classification", ("-1", "0", "1")),
        (["-1", "1"], {}, "single_label_classification", ("-1", "1")),
        ([-2, 0, 2.0], {}, "single_label_classification", ("-2", "-1", "0", "1", "2")),
        ([-1, 0], {"labels": ["-1", "0"]}, "single_label_classification", ("-1", "0")),
        (["1e-05", "+0.5", ".25"], {}, "regression", ("value",)),
        (["+", "-"], {}, "single_label_classification", ("+", "-")),
        ([".", "?", ","], {}, "single_label_classification", (",", ".", "?")),
        (["a", "-"], {"labels": ["a", "-"]}, "single_label_classification", ("a", "-")),
        (["none", "for"], {}, "single_label_classification", ("for", "none")),
        (["😀", "😡", "ok"], {}, "single_label_classification", ("ok", "😀", "😡")),
        (["c", "c++", "c#"], {}, "single_label_classification", ("c", "c#", "c++")),
        (["x", "1" * 400], {"labels": ["x", "y"]}, "single_label_classification", ("x", "y")),
    ],
)
def test_labels_are_found(
    model: Path,
    tmp_path: Path,
    rows: list[Any],
    classification: Any,
    kind: Any,
    names: tuple[str, ...],
) -> None:
    assert labels_of(model, tmp_path, rows, **classification) == Labels(kind, names)


def test_names_of_the_model_are_taken_where_they_fit(tmp_path: Path) -> None:
    model = reviews.save_model(tmp_path / "model", id2label={0: "negative", 1: "positive"})
    for rows, names in (
        ([0, 1], ("negative", "positive")),
        (["positive"], ("negative", "positive")),
    ):
        labels = labels_of(model, tmp_path, rows)
        assert labels is not None
        assert labels.names == names
    other = labels_of(model, tmp_path, ["up", "down"])
    assert other is not None
    assert other.names == ("down", "up")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a"], "only the label 'a'"),
        ([-1, -1], "label -1 stands in each record.*without a label"),
        (
            [0, -1],
            r"label -1 stands in the data of training beside 0\. Leave these records out if it marks such as have",
        ),
        (
            [0, 1, 2, -1],
            "beside 0, 1, 2.* if it is a class, list all classes in `classification.labels`",
        ),
        ([-100, 0, 1], "label -100 stands in the data of training beside 0, 1"),
        (
            [1, "pos", 0, "neg"],
            r"numbers \(0, 1\) and labels that are names \(neg, pos\).*List all classes in",
        ),
        (["01", "1", "2"], r"numbers \(1, 2\) and labels that are names \(01\)"),
        ([["x", 0], ["1"], [1]], r"numbers \(0, 1\) and labels that are names \(x\)"),
        (
            ["yes", "no", "-"],
            r"label - stands in the data of training beside no, yes\. Leave these",
        ),
        (
            ["a", "?"],
            r"label \? stands .* if it is a class, list all classes in `classification.labels`",
        ),
        (["a", "b", "N/A", "unlabelled"], "label N/A, unlabelled stands .* beside a, b"),
        (["a", "b", "Not_Labeled"], "label Not_Labeled stands"),
        ([0, 1, "NaN"], "label NaN stands .* beside 0, 1"),
        ([["joy"], ["fear", "--"]], "label -- stands .* beside fear, joy"),
        (["a", "b", "null"], "label null stands"),
        (
            [1, 3, "1,3", "3,1"],
            r"label '1,3' stands .* beside 1, 3, and seems to join several .* \[\"1\", \"3\"\]; in a table",
        ),
        (
            [1, 2, 5, "1,5", "2,5", "3,5", "4,5"],
            r"'1,5' stands .* beside 1, 2, 5, and is a number in another spelling.* such as 4\.5; or as the list",
        ),
        (
            [1, 2, "31%", "5.5%", "6%", "$3.50"],
            r"label '\$3.50' stands .* is a number in another spelling",
        ),
        (
            [3, 20261121],
            r"label 20261121 .* of 20,261,119 from 3 on only 2 occur. List .*: regression`; or name",
        ),
    ],
)
def test_data_that_make_no_problem_are_refused(
    model: Path, tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(errors.DataError, match=message):
        labels_of(model, tmp_path, rows)


ONE_HOT = [
    [[1, 0], [0, 1], [0, 1]],
    ["[1, 0]", "[0, 1]"],
    [[0, 1]],
    [[1, 0], [1.0, 1.0], [0, 1]],
    [[0, 1], [1.0, 0.0]],
]


@pytest.mark.parametrize("rows", ONE_HOT, ids=str)
@pytest.mark.parametrize(
    "classification",
    [{}, {"labels": ["neg", "pos"], "problem_type": "multi_label_classification"}],
    ids=["auto", "named"],
)
def test_zeros_and_ones_of_two_classes_have_two_readings_and_are_refused(
    model: Path, tmp_path: Path, rows: list[Any], classification: Any
) -> None:
    """Read as numbers of classes, they would train every row to have both."""
    with pytest.raises(
        errors.DataError,
        match=r"rows.jsonl:1: label is \[0, 1\] or \[1, 0\], as in every list .* Write names for the first, such "
        r'as \["\w+", "\w+"\], and \[0\.0, 1\.0\] for the second',
    ):
        labels_of(model, tmp_path, rows, **classification)


def test_labels_of_an_evaluation_have_one_reading_too(model: Path, tmp_path: Path) -> None:
    for name, rows in (("train", [[1.0, 0.0], [0.0, 1.0]]), ("eval", [[1, 0], [0, 1]])):
        lines = [json.dumps({"text": "x", "label": row}) + "\n" for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")}
    with pytest.raises(errors.DataError, match=r"eval.jsonl:1: label is"):
        find_labels(reviews.make_config(tmp_path, model=str(model), data=data))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("", "a"), ("x", "b")],
            r"rows.jsonl:1: text is empty.*Without the .* only the label 'b'",
        ),
        ([("", "a")], r"no record that can be read. .*rows.jsonl:1: text is empty"),
        ([("x", None)], r"no record that can be read. .*`label` is null"),
        ([("x", [1, 0, 1])], r"no record that can be read. .*each class that applies once"),
    ],
)
def test_a_record_that_is_refused_is_named_before_what_follows_from_it(
    rows: list[tuple[str, Any]], message: str, model: Path, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    data = {"train": str(tmp_path / "rows.jsonl"), "eval": None}
    with pytest.raises(errors.DataError, match=message):
        find_labels(reviews.make_config(tmp_path, model=str(model), data=data))


def test_truths_and_numbers_find_their_classes() -> None:
    single = partial(Labels, "single_label_classification")
    for label in (True, "True", " True "):
        read = convert({"text": "x", "label": label}, kind="labelled")
        assert isinstance(read, Labelled)
        assert single(("False", "True")).target(read.label) == (1.0,)
        assert single(("no", "yes")).target(read.label) == (1.0,)
        assert single(("true", "false")).target(read.label) == (0.0,)
        with pytest.raises(ValueError, match="expected one of a, b, c"):
            single(("a", "b", "c")).target(read.label)
    ratings = single(("1", "2", "3", "4", "5"))
    assert ratings.target(5) == ratings.target("5") == ratings.target(5.0) == (4.0,)
    for label in (0, 6):
        with pytest.raises(ValueError, match=r"expected one of 1, 2, 3, 4, 5\. If a class"):
            ratings.target(label)


def test_a_name_that_looks_like_a_number_is_not_the_place_of_another() -> None:
    single = partial(Labels, "single_label_classification")
    cases: list[tuple[tuple[str, ...], str | int]] = [
        (("01", "02"), 1),
        (("1", "2", "other"), 0),
        (("1e3", "2e3"), 1),
        (("no", "yes"), "1_0"),
        (("no", "yes"), "1" * 400),
    ]
    for names, label in cases:
        read = convert({"text": "x", "label": label}, kind="labelled")
        assert isinstance(read, Labelled)
        with pytest.raises(ValueError, match="expected one of"):
            single(names).target(read.label)
    assert single(("01", "02")).target("02") == (1.0,)
    regression = Labels("regression", ("value",))
    assert regression.target("1e-05") == (1e-05,)
    for text in ("1_0", "nan", "inf", "１", "1" * 400):
        with pytest.raises(ValueError, match="expected a finite number"):
            regression.target(text)


def test_means_over_classes_are_those_of_scikit_learn_and_can_reach_one() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(3)
    labels = Labels("single_label_classification", tuple("abcdef"))
    true = random.integers(1, 5, 40)  # neither the first class nor the last
    logits = random.normal(size=(40, 6))
    logits[:, [0, 5]] = -9.0
    values = measure(labels, logits, true[:, None].astype(float))
    predicted = logits.argmax(1)
    for name, score in (
        ("f1_macro", metrics.f1_score),
        ("precision", metrics.precision_score),
        ("recall", metrics.recall_score),
    ):
        assert values[f"eval_{name}"] == pytest.approx(score(true, predicted, average="macro"))
    perfect = measure(labels, np.eye(6)[true], true[:, None].astype(float))
    assert perfect["eval_f1_macro"] == perfect["eval_precision"] == perfect["eval_recall"] == 1.0
    several = Labels("multi_label_classification", ("a", "b", "c"))
    targets = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert measure(several, targets * 2 - 1, targets)["eval_f1_macro"] == 1.0
    assert measure(several, np.full((2, 3), -1.0), 0 * targets)["eval_f1_macro"] == 0.0


def test_records_without_labels_are_told_with_their_columns(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x", "score": 1.5}\n{"text": "y", "score": 2}\n')
    config = reviews.make_config(
        tmp_path, model=str(model), data={"train": str(tmp_path / "rows.jsonl"), "eval": None}
    )
    with pytest.raises(
        errors.DataError,
        match=r"rows.jsonl:1: `label` is missing; .*`score`.*columns: \{label: COL",
    ):
        find_labels(config)


@pytest.mark.parametrize("scores", [(5.0, 3.2), (5, 3), ("5.000", "3")])
def test_a_pair_with_a_score_is_regression(
    model: Path, tmp_path: Path, scores: tuple[Any, ...]
) -> None:
    rows = [{"sentence1": "good", "sentence2": "great", "score": score} for score in scores]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = reviews.make_config(
        tmp_path, model=str(model), data={"train": str(tmp_path / "rows.jsonl"), "eval": None}
    )
    labels = find_labels(config)
    assert labels == Labels("regression", ("value",))
    assert labels.target(convert(rows[0], kind="labelled").label) == (5.0,)  # type: ignore[union-attr]
    assert convert({**rows[0], "label": 1}, kind="labelled") == Labelled("good", "great", 1)


def test_zeros_and_ones_are_as_many_as_there_are_classes() -> None:
    labels = Labels("multi_label_classification", ("joy", "fear", "rage"))
    for vector in ([0.0, 1.0, 0.0], [0, 1.0, 0], "[0.0, 1.0, 0.0]"):
        example = convert({"text": "x", "labels": vector}, kind="labelled")
        assert isinstance(example, Labelled)
        assert example.label == (0.0, 1.0, 0.0)
        assert labels.target(example.label) == (0.0, 1.0, 0.0)
    with pytest.raises(
        ValueError, match="list of 2 zeros and ones; expected 3, one for each of joy, fear, rage"
    ):
        labels.target((0.0, 1.0))
    for wrong in ([0.0, 0.5], [1.0, 2.0], [0.0, "a"]):
        with pytest.raises(
            ValueError, match=r"expected a list of names or numbers of classes, or 0.0 or 1.0"
        ):
            convert({"text": "x", "label": wrong}, kind="labelled")


@pytest.mark.parametrize("label", [float("nan"), float("inf"), None, {}, ""])
def test_what_is_no_label_is_refused(label: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"`label` is null|expected a class by name or number, a list of them, or a",
    ):
        convert({"text": "x", "label": label}, kind="labelled")


def write_parquet(path: Path, names: list[str], *, listed: bool = False) -> Path:
    """Return a Parquet file as `datasets` writes one whose labels are numbers with names."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=names)
    features = {
        "text": datasets.Value("string"),
        "label": datasets.List(label) if listed else label,
    }
    rows = {"text": ["good", "bad"], "label": [[0], [0, 1]] if listed else [0, 1]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)
    return path


@pytest.mark.parametrize("listed", [False, True])
def test_a_data_set_names_its_numbers(model: Path, tmp_path: Path, listed: bool) -> None:
    file = write_parquet(tmp_path / "train.parquet", ["unacceptable", "acceptable"], listed=listed)
    data: dict[str, Any] = {"train": str(file), "eval": None}
    labels = find_labels(reviews.make_config(tmp_path, model=str(model), data=data))
    kind = "multi_label_classification" if listed else "single_label_classification"
    assert labels == Labels(kind, ("unacceptable", "acceptable"))  # type: ignore[arg-type]
    named = reviews.make_config(
        tmp_path, model=str(model), data=data, classification={"labels": ["bad", "good"]}
    )
    assert find_labels(named) == Labels(kind, ("bad", "good"))  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [None, ["1", "10", "2"], ["bad", "good", "fair"]])
def test_numbers_of_a_data_set_are_places_also_where_its_names_are_numbers(
    model: Path, tmp_path: Path, labels: list[str] | None
) -> None:
    """As `class_encode_column` makes them of ratings, sorted as texts; a table beside it has the ratings themselves."""
    datasets = pytest.importorskip("datasets")
    ratings = [1, 2, 10, 2]
    rows = datasets.Dataset.from_dict({"text": ["x"] * 4, "label": ratings})
    rows.class_encode_column("label").to_parquet(tmp_path / "train.parquet")
    lines = [f"x,{rating}\n" for rating in ratings]
    (tmp_path / "eval.csv").write_text("".join(["text,label\n", *lines]))
    data: dict[str, Any] = {"train": str(tmp_path / "train.parquet"), "eval": None}
    has_own_names = labels is not None and "1" not in labels
    if not has_own_names:
        data["eval"] = str(tmp_path / "eval.csv")
    config = reviews.make_config(
        tmp_path, model=str(model), data=data, classification={"labels": labels}
    )
    class_names = find_labels(config)
    expected = ["bad", "fair", "good", "fair"] if has_own_names else ["1", "2", "10", "2"]
    sources = config.sources
    worker = RowMaker(load_tokenizer(config.model), config.data, sources, class_names)
    splits: list[Split] = ["train"] if has_own_names else ["train", "eval"]
    for split in splits:
        records = list(enumerate(read_source(sources[split][0], Problems())))
        chunk = worker.encode(RecordBatch(0, split, records)).chunk
        assert [class_names.name([target]) for target in chunk.targets] == expected


def test_data_sets_that_number_their_classes_differently_are_refused(
    model: Path, tmp_path: Path
) -> None:
    first = write_parquet(tmp_path / "one.parquet", ["no", "yes"])
    other = write_parquet(tmp_path / "other.parquet", ["yes", "no"])
    three = write_parquet(tmp_path / "three_other.parquet", ["no", "maybe", "yes"])
    folder = tmp_path / "folder"
    folder.mkdir()
    write_parquet(folder / "a.parquet", ["no", "yes"])
    write_parquet(folder / "b_other.parquet", ["yes", "no"])
    datasets = pytest.importorskip("datasets")
    splits = {
        "train": datasets.Dataset.from_parquet(str(first), cache_dir=str(tmp_path)),
        "other": datasets.Dataset.from_parquet(str(other), cache_dir=str(tmp_path)),
    }
    saved = str(tmp_path / "saved")
    datasets.DatasetDict(splits).save_to_disk(saved)
    message = r"other(\.parquet)?( train)? numbers its classes [a-z, ]+, but .*: one number would mean two classes"
    for data, labels in (
        ({"train": str(first), "eval": str(other)}, None),
        ({"train": str(other)}, ["no", "yes"]),
        ({"train": str(first), "eval": str(other)}, ["bad", "good"]),
        ({"train": str(three)}, ["no", "yes"]),
        ({"train": str(folder)}, None),
        ({"train": {"path": saved}, "eval": {"path": saved, "split": "other"}}, None),
    ):
        config = reviews.make_config(
            tmp_path,
            model=str(model),
            data={"eval": None, **data},
            classification={"labels": labels},
        )
        with pytest.raises(errors.DataError, match=message):
            find_labels(config)


def test_long_texts_of_a_classifier_are_cut_unless_told_otherwise(tmp_path: Path) -> None:
    assert reviews.make_config(tmp_path).data.overlong == "truncate"
    assert reviews.make_config(tmp_path, data={"overlong": "drop"}).data.overlong == "drop"
    assert (
        reviews.make_config(
            tmp_path, {"metric_for_best_model": "loss"}, task="causal_lm"
        ).data.overlong
        == "drop"
    )


def test_several_labels_may_stand_in_labels_but_not_as_zeros_and_ones() -> None:
    assert convert({"text": "x", "labels": ["a", "b"]}, kind="labelled") == Labelled(
        "x", None, ("a", "b")
    )
    assert convert({"text": "x", "label": 1, "labels": ["a"]}, kind="labelled") == Labelled(
        "x", None, 1
    )
    for label in ([0, 1, 0], ["a", "a"], "[1, 1, 0]"):
        with pytest.raises(ValueError, match="expected each class that applies once"):
            convert({"text": "x", "label": label}, kind="labelled")


def test_labels_are_told_to_people() -> None:
    assert str(SINGLE) == "single label classification: no, yes"
    assert str(Labels("regression", ("value",))) == "regression"
    many = Labels("multi_label_classification", tuple(map(str, range(20))))
    assert (
        str(many) == "multi label classification: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more"
    )


def test_labels_become_numbers() -> None:
    assert SINGLE.target("yes") == SINGLE.target(1) == (1.0,)
    assert Labels("multi_label_classification", ("a", "b", "c")).target(("c", 0)) == (1.0, 0.0, 1.0)
    assert Labels("regression", ("value",)).target("2.5") == (2.5,)
    for labels, label in (
        (SINGLE, 2),
        (SINGLE, "maybe"),
        (SINGLE, ("no",)),
        (Labels("regression", ("value",)), "x"),
    ):
        with pytest.raises(ValueError, match="label is"):
            labels.target(label)  # type: ignore[arg-type]
    for label in (-1, "-1"):
        with pytest.raises(
            ValueError, match=r"label is -1: it marks a row without a label, as in the test splits"
        ):
            SINGLE.target(label)


@pytest.mark.parametrize(
    "keys",
    [
        ("premise", "hypothesis"),
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("question", "sentence"),
    ],
)
def test_pairs_are_recognised(keys: tuple[str, str]) -> None:
    record = {keys[0]: "one", keys[1]: "two", "label": 1, "idx": 7}
    assert convert(record, kind="labelled") == Labelled("one", "two", 1)


def test_texts_and_pairs_are_framed_and_shortened(model: Path) -> None:
    config = reviews.make_config(model, model=str(model))
    tokenizer = load_tokenizer(config.model)
    encoder = LabelledEncoder(tokenizer, SINGLE)
    pair = Labelled("good film " * 5, "bad plot", 1)
    single, both = encoder.encode_batch([Labelled("good film", None, "no"), pair])
    assert not isinstance(single, str)
    assert not isinstance(both, str)
    assert (single.ids[0], single.ids[-1], len(single.ids), single.target) == (2, 3, 4, (0.0,))
    assert both.segments == [0] * 12 + [1] * 3
    cut = encoder.cut(pair, both, 9)
    assert cut.ids == [*both.ids[:5], 3, *both.ids[-3:]]
    assert cut.segments == [0] * 6 + [1] * 3
    assert cut.target == both.target


def test_metrics_of_two_classes_counted_by_hand() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    targets = np.array([[0.0], [1.0], [0.0], [1.0]])
    measured = measure(SINGLE, logits, targets)
    assert (
        measured["eval_accuracy"]
        == measured["eval_f1"]
        == measured["eval_precision"]
        == measured["eval_recall"]
        == 0.5
    )
    assert measured["eval_matthews_correlation"] == 0.0
    wanted = F.cross_entropy(torch.tensor(logits), torch.tensor(targets[:, 0]).long())
    assert measured["eval_loss"] == pytest.approx(float(wanted))
    assert count_confusions(SINGLE, logits, targets) == [[1, 1], [1, 1]]


def test_metrics_of_numbers() -> None:
    predicted = np.array([[1.0], [2.0], [10.0]])
    true = np.array([[1.0], [2.0], [3.0]])
    measured = measure(Labels("regression", ("value",)), predicted, true)
    assert measured["eval_spearman"] == pytest.approx(1.0)
    assert measured["eval_pearson"] == pytest.approx(
        float(np.corrcoef(predicted[:, 0], true[:, 0])[0, 1])
    )
    assert measured["eval_loss"] == pytest.approx(49 / 3)
    assert measure(Labels("regression", ("value",)), np.ones((3, 1)), true)["eval_pearson"] == 0.0


@pytest.mark.parametrize(
    "kind", ["single_label_classification", "multi_label_classification", "regression"]
)
@pytest.mark.parametrize("classes", [2, 3])
def test_the_metrics_of_a_problem_are_known_before_they_are_measured(
    kind: Any, classes: int
) -> None:
    labels = Labels(kind, ("value",) if kind == "regression" else tuple("abc"[:classes]))
    outputs = np.arange(3.0 * len(labels.names)).reshape(3, -1)
    targets = (
        outputs > 2 if kind == "multi_label_classification" else np.array([[0.0], [1.0], [0.0]])
    )
    assert tuple(measure(labels, outputs, targets)) == labels.metrics


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "cu_seqlens",
    [(0, 3, 20, 21, 60, 77), tuple(range(0, 78, 7)), (0, 2, 70, 77)],
    ids=["mixed", "alike", "one long"],
)
def test_padded_attention_equals_attention_one_by_one(
    causal: bool, cu_seqlens: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(77, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = padded_attention(q, k, v, cu_seqlens, Rule(8**-0.5, causal))
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    parts = []
    for start, stop in pairwise(cu_seqlens):
        sequence = (t[start:stop].transpose(0, 1)[None] for t in (q, k, v))
        parts.append(
            F.scaled_dot_product_attention(*sequence, is_causal=causal, enable_gqa=True)[
                0
            ].transpose(0, 1)
        )
    wanted = torch.cat(parts)
    assert torch.allclose(out, wanted, atol=1e-6)
    for a, b in zip(ours, torch.autograd.grad(wanted.square().sum(), (q, k, v)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_padded_attention_takes_short_sequences_together_and_adds_up_no_gradient_of_padding() -> (
    None
):
    q, k, v = (torch.randn(40, 2, 8, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        padded_attention(q, k, v, (0, 3, 20, 40), Rule(1.0, False)).sum().backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert (
        calls["aten::bmm"] == 6
    )  # of all lengths at once: two products, and two for the gradient of each
    assert not calls.keys() & {"aten::index_add_", "aten::scatter_add_", "aten::masked_fill"}


def test_padded_attention_drops_the_share_asked_for() -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(2, 400, 1, 4)
    out = padded_attention(
        q, k, torch.ones(400, 1, 1), (0, 200, 400), Rule(1.0, False, dropout=0.25)
    )
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)  # kept probabilities are scaled up
    assert float(out.var()) == pytest.approx(0.25 / 0.75 / 200, rel=0.3)


@pytest.mark.parametrize(
    ("lora", "device", "size", "wanted", "reason"),
    [
        (True, "cuda", 1, "8bit", "single GPU"),
        (True, "cuda", 4, "none", "4 GPUs share"),
        (True, "cpu", 1, "none", "no GPU"),
        (False, "cuda", 1, "none", "every parameter is trained"),
    ],
)
def test_auto_quantisation(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lora: bool,
    device: str,
    size: int,
    wanted: str,
    reason: str,
) -> None:
    pytest.importorskip("bitsandbytes")
    config = reviews.make_config(tmp_path, lora=lora, quantization="auto")
    with caplog.at_level(logging.INFO, logger="kubetune"):
        world = World(0, 0, size, torch.device(device))
        decided = quantization.decide("auto", config.lora, world)
    assert decided == wanted
    assert reason in caplog.text


def test_auto_quantisation_without_bitsandbytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reviews.make_config(tmp_path, lora=True, quantization="auto")
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    world = World(device=torch.device("cuda"))
    assert quantization.decide("auto", config.lora, world) == "none"
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(
        errors.ConfigError,
        match=r"quantization: 8bit needs kubetune\[quantization\] .*: pip install",
    ):
        quantization.settings("8bit", config.lora, torch.float32)


def test_auto_quantisation_where_bitsandbytes_cannot_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text(
        "raise RuntimeError('built for\\nanother GPU')"
    )
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    config = reviews.make_config(tmp_path, lora=True, quantization="auto")
    reason = "bitsandbytes, which cannot run here: built for another GPU"
    with caplog.at_level(logging.INFO, logger="kubetune"):
        world = World(device=torch.device("cuda"))
        assert quantization.decide("auto", config.lora, world) == "none"
    assert f"quantization: auto -> none, because 8-bit needs {reason}" in caplog.text
    with pytest.raises(
        errors.ConfigError, match=f"quantization: 4bit needs {reason}. Nothing was written"
    ):
        quantization.settings("4bit", config.lora, torch.float32)


def test_what_was_decided_for_a_run_holds_where_its_result_is_asked(tmp_path: Path) -> None:
    config = reviews.make_config(tmp_path, lora=True, quantization="auto")
    for gpus, wanted in ((1, "8bit"), (4, "none")):
        plan = make_plan(
            config.model_copy(update={"compute": ComputeConfig(gpus_per_node=gpus)}), 64
        )
        (tmp_path / "plan.json").write_text(plan.to_json())
        pytest.importorskip("bitsandbytes")
        assert quantization.as_trained(tmp_path, "auto", config.lora) == wanted


def test_wide_confusion_matrices_fit_the_terminal() -> None:
    counts = [[9, 1, 0], [0, 9, 0], [2, 0, 9]]
    names = ["a class with a name", "another class", "yet another class"]
    wide, numbered, listed = (confusion_lines(counts, names, columns) for columns in (120, 40, 29))
    assert wide[0].split("  ")[0] == "true \\ predicted"
    assert wide[0].endswith("yet another class")
    assert numbered[0] == "true \\ predicted       0  1  2"
    assert numbered[1] == "0 a class with a name  9  1  0"
    assert all(len(line) <= 40 for line in numbered)
    assert listed[0].startswith(
        "Classes that are confused most often (--json prints the whole matrix of 3 classes)"
    )
    assert [line.split("  ")[0] for line in listed[2:]] == [
        "yet another class",
        "a class with a name",
    ]
    assert [line.split()[-1] for line in listed[2:]] == ["2", "1"]


def test_check_shows_the_labels_of_a_classifier(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("good", "up"), ("bad plot", "down"), ("great", "up")]
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    )
    run = {"task": "sequence_classification", "model": str(model)}
    (tmp_path / "run.yaml").write_text(
        json.dumps(run | {"data": {"train": str(tmp_path / "rows.csv")}})
    )
    assert cli.main(["data", "check", str(tmp_path / "run.yaml")]) == 0
    stdout = capsys.readouterr().out
    assert "train: 3 rows of 3 records, 10 tokens\n  labels: up × 2, down × 1\n" in stdout
    assert "[CLS] good [SEP] ⟦up⟧" in stdout
    assert cli.main(["data", "check", str(tmp_path / "run.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["classes"] == {"up": 2, "down": 1}


def test_labels_that_are_spelled_in_two_ways_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ("Spam", "spam", "not spam", "not_spam", "no_spam")
    rows = "".join(f"text {number},{label}\n" for number, label in enumerate(labels))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    run = {"task": "sequence_classification", "model": str(model)}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(run | {"data": {"train": str(tmp_path / "rows.csv")}}))
    assert cli.main(["data", "check", str(run_file)]) == 0
    stdout = capsys.readouterr().out
    sentence = (
        "labels that differ only in case or spaces: Spam and spam, not spam and not_spam; each"
    )
    assert f"warning: {sentence} is a class of its own. Write those that" in stdout


def test_a_page_on_the_data_of_a_classifier_names_each_rows_label(
    model: Path, tmp_path: Path
) -> None:
    file = write_parquet(tmp_path / "train.parquet", ["unacceptable", "acceptable"])
    run = {"task": "sequence_classification", "model": str(model), "data": {"train": str(file)}}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert (
        cli.main(
            ["data", "check", str(tmp_path / "run.yaml"), "--html", str(tmp_path / "page.html")]
        )
        == 0
    )
    page = (tmp_path / "page.html").read_text()
    rows = re.findall(r"record (\d) · 3 tokens · <span class=\"piece trained\">(\w+)</span>", page)
    assert rows[:2] == [("1", "unacceptable"), ("2", "acceptable")]
    assert ">trained</th>" not in page
    assert "2 labels" in page
