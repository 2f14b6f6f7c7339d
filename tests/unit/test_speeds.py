"""What earlier runs say of the next: ranges by shape and by FLOPs, and a cache that nothing can end a run with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kubetune.plan import earlier_runs
from kubetune.plan.earlier_runs import RunShape, Speed, range_of

KIND = RunShape(
    parameters=10**6, hidden=64, layers=2, method="lora", dtype="float32", device="Some CPU, 2 cores", devices=1,
    world=1, length=100.0, batch=400.0, flops=4e6,
)  # fmt: skip


def run(rate: float, seconds: float = 60.0, **changes: object) -> Speed:
    return Speed(replace(KIND, **changes), rate, seconds, "2026-11-20T10:00:00.000Z")  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kubetune" / "speeds.jsonl"


def test_runs_of_one_shape_span_a_range() -> None:
    known = [run(900), run(1000), run(1200, length=120.0), run(50, seconds=5)]
    speeds = range_of(KIND, known)
    assert speeds is not None
    assert (speeds.low, speeds.middle, speeds.high) == pytest.approx((900 / 1.1, 1000, 1200 * 1.1))
    assert speeds.source == "3 earlier runs of this shape on this machine"


def test_runs_of_similar_shape_are_scaled_by_flops() -> None:
    other = run(300, parameters=2 * 10**6, flops=8e6)
    same = range_of(KIND, [run(1000), other])
    similar = range_of(KIND, [other])
    assert same is not None
    assert similar is not None
    assert same.source.startswith("1 earlier run of this shape")
    assert similar.middle == pytest.approx(600)
    assert (similar.low, similar.high) == pytest.approx((400, 900))
    assert similar.source == "1 earlier run of similar shape, scaled by FLOPs, on this machine"
    gpus = range_of(replace(KIND, devices=4, world=4), [run(1000)])
    assert gpus is not None
    assert gpus.middle == pytest.approx(4000)


@pytest.mark.parametrize(
    "changes",
    [{"device": "Another CPU, 2 cores"}, {"method": "full"}, {"dtype": "bfloat16"}, {"flops": 4e7}],
)
def test_runs_that_say_nothing_of_each_other(changes: dict[str, object]) -> None:
    assert range_of(KIND, [run(1000, parameters=1, **changes)]) is None


def test_where_the_run_itself_chooses_the_dtype_both_count() -> None:
    speeds = range_of(replace(KIND, dtype=None), [run(1000), run(2000, dtype="bfloat16")])
    assert speeds is not None
    assert speeds.source.startswith("2 earlier runs ")


def test_damage_costs_the_lines_it_hits(cache: Path) -> None:
    earlier_runs.keep(run(1000))
    good = cache.read_text()
    line = json.loads(good)
    wrong = [
        "", "\0\0\0", "[]", "{}", '{"kind": 3}', good[:40], '"' + "[" * 10_000,
        json.dumps(line | {"tokens_per_second": -1}), json.dumps(line | {"seconds": "x"}),
        json.dumps(line | {"kind": line["kind"] | {"flops": 0}}), json.dumps(line | {"tokens_per_second": 1e999}),
    ]  # fmt: skip
    cache.write_text("\n".join(wrong) + "\n" + good + good[:30])
    assert earlier_runs.read() == [run(1000)]
    earlier_runs.keep(run(2000))
    assert earlier_runs.read() == [run(1000), run(2000)]
    assert len(cache.read_text().splitlines()) == 2
    cache.write_bytes(b"\xff\xfe" * 1000)
    assert earlier_runs.read() == []


def test_a_cache_that_cannot_be_used_ends_nothing(cache: Path) -> None:
    cache.mkdir(parents=True)  # for root, too, a folder cannot be read or written as a file
    assert earlier_runs.read() == []
    earlier_runs.keep(run(1000))
    assert cache.is_dir()
    shutil.rmtree(cache.parent)
    cache.parent.write_text("a file where the folder should be")
    earlier_runs.keep(run(1000))
    assert earlier_runs.read() == []


def test_the_cache_stays_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_runs, "MOST_RUNS", 3)
    for rate in range(1, 6):
        earlier_runs.keep(run(float(rate)))
    assert [speed.tokens_per_second for speed in earlier_runs.read()] == [3.0, 4.0, 5.0]
