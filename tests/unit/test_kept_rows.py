"""Rows and facts that a run keeps for later: read back as they were written, or refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.data.prepared import data_facts, kept_rows
from kubetune.data.prepared.data_facts import DataFacts
from kubetune.data.prepared.kept_rows import PROOF, KeptRow, KeptRows

IDS = np.array([5, 2**31, 7], np.uint32)
TRAINED = np.array([0, 1, 1], bool)
EMPTY = KeptRow(3, IDS[:0], TRAINED[:0])
LABELLED = [
    KeptRow(n, IDS, TRAINED, np.array([n, 0.5], np.float32), np.array([0, 1, 1], np.uint8))
    for n in (4, 9)
]
PICTURED = (
    KeptRow(0, IDS, TRAINED, images=(b"one", b"", b"three")),
    EMPTY,
    KeptRow(2, IDS, TRAINED, images=(b"x",)),
)


@pytest.mark.parametrize(
    "rows", [(), (EMPTY,), (KeptRow(1, IDS, TRAINED), EMPTY), tuple(LABELLED), PICTURED]
)
def test_rows_are_read_as_they_were_kept(rows: tuple[KeptRow, ...], tmp_path: Path) -> None:
    kept_rows.write(tmp_path, PROOF, KeptRows(rows, "held-out rows"))
    kept = kept_rows.read(tmp_path, PROOF)
    assert kept is not None
    assert kept.origin == "held-out rows"
    assert [(row.number, row.images) for row in kept.rows] == [
        (row.number, row.images) for row in rows
    ]
    for kept_row, other in zip(kept.rows, rows, strict=True):
        for name in ("ids", "trained", "target", "segments"):
            mine = getattr(kept_row, name)
            theirs = getattr(other, name)
            assert (mine is None) == (theirs is None), name
            assert theirs is None or (
                mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
            ), name


def test_too_many_images_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "MOST_IMAGE_BYTES", 8)
    kept_rows.write(tmp_path, PROOF, KeptRows(PICTURED, ""))
    assert kept_rows.read(tmp_path, PROOF) is None


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    kept_rows.write(tmp_path, PROOF, KeptRows(PICTURED, "rows"))
    whole = (tmp_path / PROOF).read_bytes()
    at = whole.index(np.array([3, 0, 5, 1], np.int64).tobytes())
    for damaged in (b"", whole[:-1], b"\0" * len(whole), whole[:at] + b"\xff" + whole[at + 1 :]):
        (tmp_path / PROOF).write_bytes(damaged)
        with pytest.raises(errors.EnvironmentFault, match="is damaged"):
            kept_rows.read(tmp_path, PROOF)


def test_arrays_of_other_types_or_sizes_are_refused_in_words(tmp_path: Path) -> None:
    """Each array of a file, of another type, with more axes, longer, shorter, negative, or left out."""
    path = tmp_path / PROOF
    for whole in (tuple(LABELLED), PICTURED):
        kept_rows.write(tmp_path, PROOF, KeptRows(whole, "rows"))
        arrays = load_file(path)
        for name, values in arrays.items():
            others = [
                values.astype(np.float64),
                values[None, None],
                np.append(values, values),
                values[1:],
                -values - 1,
            ]
            for other in [*others, None]:
                changed = {key: value for key, value in arrays.items() if key != name}
                if other is not None:
                    changed[name] = np.ascontiguousarray(other)
                save_file(changed, path, {"origin": "rows"})
                # Numbers may be others, and what is empty may be missing.
                with suppress(errors.EnvironmentFault):
                    kept = kept_rows.read(tmp_path, PROOF)
                    assert kept is not None
                    assert (
                        name in {"numbers", "ids", "targets", "segments", "images"}
                        or not values.size
                    )
                    assert all(len(row.ids) == len(row.trained) for row in kept.rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ids": np.zeros(9, np.float32)}, "ids: U32 of 1 axes expected, F32"),
        ({"trained": np.full(6, 2, np.uint8)}, "trained: 0 or 1 expected"),
        ({"lengths": np.array([9, -3, 0])}, "a length is -3"),
        ({"images_of_rows": np.array([-1, 2, 3])}, "a length is -1"),
        ({"image_lengths": np.array([2**62, 2**62, 2**62, 2**62 + 9])}, "values expected, 9 found"),
        ({"numbers": np.array([0])}, "3 rows expected"),
        ({"targets": np.zeros((2, 1), np.float32)}, "3 targets expected, 2 found"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, NDArray[Any]], reason: str, tmp_path: Path
) -> None:
    kept_rows.write(tmp_path, PROOF, KeptRows(PICTURED, "rows"))
    save_file(load_file(tmp_path / PROOF) | changes, tmp_path / PROOF, {"origin": "rows"})
    with pytest.raises(errors.EnvironmentFault, match=reason):
        kept_rows.read(tmp_path, PROOF)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "origin: Field required"),
        ({"origin": "a", "turns": "[]"}, "turns: Input should be a valid dict"),
        ({"origin": "a", "turns": '{"1": null}'}, "turns.1: Input should be a valid dict"),
        ({"origin": "a", "turns": '{"1": {"messages": [1]}}'}, "turns.1.messages.0"),
        ({"origin": "a", "turns": "{"}, "property name"),
        ({"origin": "a", "turns": "[" * 200_000}, "nested too deeply"),
    ],
)
def test_texts_of_other_shapes_are_refused(
    metadata: dict[str, str], reason: str, tmp_path: Path
) -> None:
    kept_rows.write(tmp_path, PROOF, KeptRows(PICTURED, "rows"))
    save_file(load_file(tmp_path / PROOF), tmp_path / PROOF, metadata)
    with pytest.raises(errors.EnvironmentFault, match=reason):
        kept_rows.read(tmp_path, PROOF)


def test_ids_beyond_the_tokenizer_are_refused(tmp_path: Path) -> None:
    kept_rows.require_vocabulary(tmp_path / PROOF, [[1, 8], []], 9)
    with pytest.raises(errors.EnvironmentFault, match="ids: 9 is beyond the 9 of the tokenizer"):
        kept_rows.require_vocabulary(tmp_path / PROOF, [[1, 9], []], 9)


@pytest.mark.parametrize(
    ("record", "task", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "causal_lm", DataFacts(is_chat=True)),
        ({"prompt": "a", "completion": "b"}, "causal_lm", DataFacts(is_chat=False)),
        ({"text": "a", "label": 1}, "sequence_classification", DataFacts(False, takes_pairs=False)),
        (
            {"premise": "a", "hypothesis": "b", "label": 1},
            "sequence_classification",
            DataFacts(False, takes_pairs=True),
        ),
        ({"nothing": 1}, "causal_lm", DataFacts()),
    ],
)
def test_the_first_record_says_what_is_trained(
    record: dict[str, object],
    task: str,
    expected: DataFacts,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    config = Config.model_validate(
        {"task": task, "model": "m", "data": {"train": str(tmp_path / "train.jsonl")}}
    )
    assert data_facts.learn(config.data.train[0], config.record_kind) == expected
    assert data_facts.known(tmp_path, config.data.train[0], config.record_kind) == expected
    assert "keeps no facts about its data" in caplog.text
    data_facts.write(tmp_path, data_facts.learn(config.data.train[0], config.record_kind))
    (tmp_path / "train.jsonl").unlink()
    assert data_facts.of_prepared(tmp_path) == expected
    for kept in ([], {"facts": []}, {"facts": {"is_chat": 1}}):
        (tmp_path / "data.json").write_text(json.dumps(kept))
        assert (
            data_facts.known(tmp_path, config.data.train[0], config.record_kind) == DataFacts()
        ), "damaged, or without facts; and the data have gone"
