"""Pages on real runs: one file that asks for nothing, with all that the run directory tells, however long the run."""

from __future__ import annotations

import json
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, metrics, train_worker
from kubetune.errors import ConfigError
from kubetune.report import write_report
from kubetune.report.series import shorten, smooth
from tests import toy
from tests.ranks import started, wait_all, wait_until


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run_dir(inputs: Path) -> Path:
    """Two ranks, stopped once and gone on with."""
    run_dir = toy.make_run(inputs / "run", toy.make_config(inputs), 2)
    with started(train_worker.main, 2, [str(run_dir)]) as processes:
        wait_until(lambda: len(metrics.read_metrics(run_dir)) > 3)
        for process in processes:
            assert process.pid is not None
            process.terminate()
        assert wait_all(processes) == [-signal.SIGTERM if code < 0 else 143 for code in (143, 143)]
    assert toy.train(run_dir, 2) == [0, 0]
    return run_dir


class Page(HTMLParser):
    """What of a page tests look at: addresses, headings, text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.charts: list[dict[str, Any]] = []
        self.html = path.read_text("utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "action") and value]
        self.ids |= {str(given["id"])} if "id" in given else set()
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing that is open"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.startswith("["):
            self.charts = json.loads(data)
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def test_a_page_holds_all_that_the_run_tells(run_dir: Path, tmp_path: Path) -> None:
    page = Page(write_report([run_dir], tmp_path / "report.html"))
    assert not page.open
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "default-src 'none'" in page.html
    assert {chart["name"] for chart in page.charts} >= {"loss", "rate", "norm", "speed", "memory", "skew"}
    loss = next(chart for chart in page.charts if chart["name"] == "loss")
    assert loss["data"][0] == list(range(1, 15))
    assert loss["data"][1] == [float(f"{value:.5g}") for value in toy.losses(run_dir)]
    resumed = next(event["step"] for event in metrics.read_events(run_dir) if event["event"] == "resume")
    assert [mark["step"] for mark in loss["markers"]] == [resumed]
    for text in ("went on", "step-000014", "eval", "train.jsonl", "MFU", "2 (1 × 2)", "fingerprint"):
        assert text in page.text, text


def test_the_page_of_a_hundred_thousand_steps_is_small_and_hides_no_spike(run_dir: Path, tmp_path: Path) -> None:
    long = shutil.copytree(run_dir, tmp_path / "long", symlinks=True)
    with (long / metrics.METRICS).open("w") as numbers, (long / metrics.TIMINGS).open("w") as timings:
        for step in range(1, 100_001):
            loss = 1234.0 if step == 77_777 else 1 / step
            values = {"loss": loss, "learning_rate": 1e-4, "grad_norm": 1.0, "tokens": 5, "trained_tokens": 3}
            numbers.write(json.dumps({"step": step, "epoch": step / 9, **values}) + "\n")
            timing = {"seconds": 0.1, "tokens_per_second": 50.0, "peak_memory_bytes": 10**9, "rank_seconds": [0.1, 0.2]}
            timings.write(json.dumps({"step": step, **timing}) + "\n")
    output = write_report([long], tmp_path / "long.html")
    assert output.stat().st_size < 600_000
    loss = next(chart for chart in Page(output).charts if chart["name"] == "loss")
    assert max(value for column in loss["data"][1:] for value in column if value is not None) == 1234


def test_two_runs_are_compared(run_dir: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(run_dir, tmp_path / "other", symlinks=True)
    settings = json.loads((other / "resolved.json").read_text())
    settings["training"]["weight_decay"] = 0.25
    (other / "resolved.json").write_text(json.dumps(settings))
    assert cli.main(["report", str(run_dir), "--compare", str(other), "-o", str(tmp_path / "both.html")]) == 0
    page = Page(tmp_path / "both.html")
    assert not page.open
    assert "training.weight_decay" in page.text
    assert "training.learning_rate" not in page.text
    assert "kB" in capsys.readouterr().out
    assert cli.main(["report", "--compare", str(run_dir), str(other), "-o", str(tmp_path / "same.html")]) == 0
    assert Page(tmp_path / "same.html").charts == page.charts
    capsys.readouterr()
    assert cli.main(["report", str(run_dir), "-o", str(tmp_path / "one.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["bytes"]) == (str(tmp_path / "one.html"), (tmp_path / "one.html").stat().st_size)
    assert cli.main(["report"]) == 2
    assert "report of which run?" in capsys.readouterr().err


def test_a_run_that_has_just_begun_has_a_page(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(run_dir / "resolved.json", tmp_path / "new")
    page = Page(write_report([tmp_path / "new"], tmp_path / "report.html"))
    assert "has not completed a step" in page.text
    assert "unfinished" in page.text


def test_what_data_say_is_shown_and_not_run(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy", symlinks=True)
    evil = "</script><script>alert(1)</script>"
    sample = {"prompt": evil, "expected": "a", "before": "b", "after": " a "}
    (copy / metrics.SAMPLES).write_text(json.dumps(sample) + "\n")
    matrix = {"confusion": [[3, 1], [0, 4]], "names": ["<b>good", "bad"], "checkpoint": "best", "data": "dev.tsv"}
    (copy / metrics.EVALUATION).write_text(json.dumps(matrix))
    page = Page(write_report([copy], tmp_path / "report.html"))
    assert evil not in page.html
    assert evil in page.text
    assert len(re.findall("<script", page.html)) == 3
    assert "as expected" in page.text
    assert "7 of 8 rows right (87.5 %), checkpoint best, on dev.tsv." in page.text


def test_what_is_no_run_is_explained_and_what_is_damaged_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        write_report([tmp_path], tmp_path / "report.html")
    copy = shutil.copytree(run_dir, tmp_path / "copy", symlinks=True)
    (copy / metrics.METRICS).write_text("{broken}\n")
    page = write_report([copy], tmp_path / "report.html").read_text()
    assert "metrics.jsonl: line 1 is damaged and left out" in page


def test_buckets_keep_means_and_extremes() -> None:
    series = shorten(range(1, 8), [1.0, 2.0, None, 6.0, None, None, 3.0], 4)
    assert series.steps == [2, 4, 6, 7]
    assert series.values == [1.5, 6.0, None, 3.0]
    assert (series.low, series.high) == ([1.0, 6.0, None, 3.0], [2.0, 6.0, None, 3.0])
    assert smooth([4.0, None, 4.0, 4.0], 10) == pytest.approx([4.0] * 4)
    assert smooth([1.0, 3.0], 1) == pytest.approx([1.0, 3.0])
