"""Pages on real runs: one file that asks for nothing, with all that the run directory tells, however long the run."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.errors import ConfigError
from kubetune.reporting import write_report
from kubetune.reporting.compared.differences import differences
from kubetune.reporting.page import page_of
from kubetune.reporting.reading import read_run
from kubetune.reporting.series import shorten
from kubetune.rundir import metrics
from kubetune.rundir.machine import versions
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until


@pytest.fixture(scope="module")
def run_dir(inputs: Path) -> Path:
    """Return two ranks, stopped once and gone on with."""
    run_dir = toy.make_run(inputs / "run", toy.make_config(inputs), 2)
    with started(worker.main, 2, [str(run_dir)]) as processes:
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
        attributes = dict(attrs)
        self.links += [
            value for name, value in attrs if name in ("src", "href", "action") and value
        ]
        self.ids |= {str(attributes["id"])} if "id" in attributes else set()
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing that is open"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.startswith('{"charts"'):
            self.charts = json.loads(data)["charts"]
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def test_a_page_holds_all_that_the_run_tells(run_dir: Path, tmp_path: Path) -> None:
    page = Page(write_report([run_dir], tmp_path / "report.html"))
    assert not page.open
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "default-src 'none'" in page.html
    assert {chart["name"] for chart in page.charts} >= {
        "loss",
        "rate",
        "norm",
        "speed",
        "memory",
        "skew",
    }
    loss = next(chart for chart in page.charts if chart["name"] == "loss")
    assert loss["data"][0] == list(range(1, 15))
    assert loss["data"][1] == [float(f"{value:.5g}") for value in toy.losses(run_dir)]
    resumed = next(
        event["step"] for event in metrics.read_events(run_dir) if event["event"] == "resume"
    )
    assert [mark["step"] for mark in loss["markers"]] == [resumed]
    for text in (
        "went on",
        "step-000014",
        "eval",
        "train.jsonl",
        "MFU",
        "2 (1 × 2)",
        "fingerprint",
    ):
        assert text in page.text, text


def test_the_page_of_a_hundred_thousand_steps_is_small_and_hides_no_spike(
    run_dir: Path, tmp_path: Path
) -> None:
    long = shutil.copytree(run_dir, tmp_path / "long", symlinks=True)
    with (
        (long / metrics.METRICS).open("w") as numbers,
        (long / metrics.TIMINGS).open("w") as timings,
    ):
        for step in range(1, 100_001):
            loss = 1234.0 if step == 77_777 else 1 / step
            values = {
                "loss": loss,
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "tokens": 5,
                "trained_tokens": 3,
            }
            numbers.write(json.dumps({"step": step, "epoch": step / 9, **values}) + "\n")
            timing = {
                "seconds": 0.1,
                "tokens_per_second": 50.0,
                "peak_memory_bytes": 10**9,
                "rank_seconds": [0.1, 0.2],
            }
            timings.write(json.dumps({"step": step, **timing}) + "\n")
    output = write_report([long], tmp_path / "long.html")
    assert output.stat().st_size < 600_000
    loss = next(chart for chart in Page(output).charts if chart["name"] == "loss")
    assert (
        max(value for column in loss["data"][1:] for value in column if value is not None) == 1234
    )


def test_two_runs_are_compared(
    run_dir: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run_dir, tmp_path / "other", symlinks=True)
    settings = json.loads((other / "resolved.json").read_text())
    settings["training"]["weight_decay"] = 0.25
    (other / "resolved.json").write_text(json.dumps(settings))
    assert (
        cli.main(
            ["report", str(run_dir), "--compare", str(other), "-o", str(tmp_path / "both.html")]
        )
        == 0
    )
    page = Page(tmp_path / "both.html")
    assert not page.open
    assert "training.weight_decay" in page.text
    assert "training.learning_rate" not in page.text.split("that are the same in all")[0]
    assert "kB" in capsys.readouterr().out
    assert (
        cli.main(
            ["report", "--compare", str(run_dir), str(other), "-o", str(tmp_path / "same.html")]
        )
        == 0
    )
    assert Page(tmp_path / "same.html").charts == page.charts
    capsys.readouterr()
    assert cli.main(["report", str(run_dir), "-o", str(tmp_path / "one.html"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["bytes"]) == (
        str(tmp_path / "one.html"),
        (tmp_path / "one.html").stat().st_size,
    )
    assert cli.main(["report"]) == 2
    assert "report of which run?" in capsys.readouterr().err
    assert cli.main(["report", "--compare", str(run_dir)]) == 2
    assert "is the only one" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart_by_their_paths(run_dir: Path, tmp_path: Path) -> None:
    text = Page(write_report([run_dir, run_dir], tmp_path / "page.html")).text
    assert f"A {run_dir.name}" in text
    assert f"B {run_dir.name}" in text
    copies = [
        shutil.copytree(run_dir, tmp_path / name / "run", symlinks=True) for name in ("a", "b")
    ]
    assert "a/run · b/run" in Page(write_report(copies, tmp_path / "page.html")).text


def test_the_machine_and_how_busy_it_was_are_on_the_page(run_dir: Path, tmp_path: Path) -> None:
    machines = [
        event["machine"]
        for event in metrics.read_events(run_dir)
        if event["event"] in ("start", "resume")
    ]
    assert len(machines) == 2
    assert machines[-1]["versions"] == versions()
    assert {
        "host",
        "cpu",
        "cores",
        "memory_bytes",
        "gpus",
        "git_commit",
        "git_dirty",
        "command",
    } <= machines[-1].keys()
    copy = shutil.copytree(run_dir, tmp_path / "copy", symlinks=True)
    looks = [
        {
            "step": step,
            "cpu_percent": 50.0 + step,
            "memory_bytes": 2**30,
            "gpus": gpus,
        }
        for gpus in ([], [{"index": 0, "percent": 80, "memory_bytes": 2**31}])
        for step in (1, 1, 3, 14)
    ]
    for looked in (looks[:4], looks[4:], looks):  # the last: gone back behind, as a resume does
        (copy / metrics.LOAD).write_text("".join(json.dumps(line) + "\n" for line in looked))
        page = Page(write_report([copy], tmp_path / "page.html"))
        charts = {chart["name"]: chart for chart in page.charts}
        lines = [line["label"] for line in charts["busy"]["lines"]]
        assert lines == (
            ["CPU"] if looked is looks[:4] or not looked[-1]["gpus"] else ["CPU", "GPU 0"]
        )
        assert charts["busy"]["data"][:2] == [[1, 3, 14], [0.51, 0.53, 0.64]]
        assert "machine-memory" in charts
    for word in (machines[-1]["host"], machines[-1]["cpu"], "started by", "versions", "Machine"):
        assert word in page.text, word
    if not machines[-1]["gpus"]:
        assert page.text.count("this machine has only its CPU") == 1
    (copy / metrics.LOAD).unlink()  # as in runs of earlier versions
    assert "busy" not in {
        chart["name"] for chart in Page(write_report([copy], tmp_path / "page.html")).charts
    }


def test_a_page_tells_of_data_what_is_recorded_and_no_more(run_dir: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(run_dir, tmp_path / name, symlinks=True) for name in ("one", "two")]
    assert (
        "All have the same prepared data." in Page(write_report(runs, tmp_path / "page.html")).text
    )
    facts = json.loads((runs[0] / metrics.DATA).read_text())
    facts["findings"] = [{"severity": "note", "line": "train: files not read: .tmp × 2"}]
    (runs[0] / metrics.DATA).write_text(json.dumps(facts))
    assert (
        "train: files not read: .tmp × 2"
        in Page(write_report(runs[:1], tmp_path / "page.html")).text
    )
    for run in runs:  # as of a start that was cut off before its data were there
        (run / metrics.REPORT).unlink()
        (run / metrics.DATA).unlink()
        text = Page(write_report(runs, tmp_path / "page.html")).text
        assert "All have the same prepared data." not in text
        assert f"no fingerprint is recorded in {'one' if run is runs[0] else 'one, two'}." in text


def edited(run_dir: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a run whose settings are changed."""
    shutil.copytree(run_dir, folder, symlinks=True)
    settings = json.loads((folder / "resolved.json").read_text())
    change(settings)
    (folder / "resolved.json").write_text(json.dumps(settings))
    return folder


def test_settings_that_differ_stand_by_source_and_section(run_dir: Path, tmp_path: Path) -> None:
    def change(settings: dict[str, Any]) -> None:
        first = settings["data"]["train"][0]
        settings["data"]["train"] += [{**first, "path": "/far/away/more.jsonl", "weight": 2.5}]
        settings["lora"] = None

    other = edited(run_dir, tmp_path / "other", change)
    settings = [json.loads((folder / "resolved.json").read_text()) for folder in (run_dir, other)]
    different, common = differences(settings)
    rows = dict(different)
    assert rows.pop("data.train: /far/away/more.jsonl") == ["–", "weight 2.5"]
    assert rows.pop("lora") == [
        f"r 4, dropout {settings[0]['lora']['dropout']}, target_modules all-linear",
        "not set",
    ]
    assert not rows
    assert {key for key, _ in common} >= {
        f"data.train: {settings[0]['data']['train'][0]['path']}",
        "training.seed",
    }
    page = Page(write_report([run_dir, other], tmp_path / "both.html"))
    assert not page.open
    assert all(link[1:] in page.ids for link in page.links)


def test_what_a_run_has_not_written_yet_differs_under_no_empty_name() -> None:
    assert differences([{}, {"torch": "2"}]) == ([("torch", ["–", "2"])], [])


def test_a_run_of_few_evaluations_is_compared_and_no_line_is_cut(
    run_dir: Path, tmp_path: Path
) -> None:
    runs = [shutil.copytree(run_dir, tmp_path / f"run-{i}", symlinks=True) for i in range(4)]
    for i, run in enumerate(runs):
        lines = [json.loads(line) for line in (run / metrics.METRICS).read_text().splitlines()]
        steps = [line for line in lines if "eval_loss" not in line]
        scores = {"eval_accuracy": 0.5, "eval_f1": 0.4, "eval_mcc": -0.1}
        evaluations = []
        if i:
            evaluations = [
                {"step": step, "epoch": 1, "eval_loss": 1.0, **scores} for step in (3, 4)
            ]
        text = "".join(json.dumps(line) + "\n" for line in [*steps, *evaluations])
        (run / metrics.METRICS).write_text(text)
    charts = {
        chart["title"]: chart for chart in Page(write_report(runs, tmp_path / "page.html")).charts
    }
    page = (tmp_path / "page.html").read_text()
    assert page.count("Not recorded: run-0.") == 3, "once a metric"
    # One metric a chart, so that three runs are three lines.
    for title in ("Accuracy", "F1", "Mcc"):
        assert [line["run"] for line in charts[title]["lines"]] == [1, 2, 3]
    for chart in charts.values():
        lines = [line for line in chart["lines"] if line["kind"] != "edge"]
        assert all(
            (line["colour"], line["mark"]) == (line["run"], "ABCD"[line["run"]]) for line in lines
        )
        assert len({(line["run"], line["dash"]) for line in lines}) == len(lines)


def test_what_runs_of_two_tasks_learn_is_on_no_common_chart(run_dir: Path) -> None:
    record = read_run(run_dir)
    other = replace(record, config=record.config.model_copy(update={"task": "reward_model"}))
    _, facts = page_of([record, other])
    assert "losses and scores measure different things" in facts["cautions"][0]
    sentences = [run["sentence"] for run in facts["runs"]]
    assert sentences[0].startswith("Supervised fine-tuning (SFT) of ")
    assert sentences[1].startswith("Reward model, from ")
    chosen = {"logp_chosen": record.numbers.curves["loss"]}
    pairs = replace(
        record,
        config=record.config.model_copy(update={"task": "preference"}),
        numbers=replace(record.numbers, curves={**record.numbers.curves, **chosen}),
    )
    _, facts = page_of([record, pairs])
    names = {chart["name"] for chart in facts["charts"]}
    assert "logp" not in names, "only one of the tasks has them"
    assert "loss" not in names
    assert "speed" in names, "speeds can be compared"
    _, alike = page_of([record, record])
    assert not alike["cautions"]
    assert "loss" in {chart["name"] for chart in alike["charts"]}


def test_axes_count_tokens_and_epochs(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy", symlinks=True)
    with (copy / metrics.METRICS).open("w") as numbers:
        for step in range(1, 101):
            values = {"loss": 2 + step % 3, "learning_rate": 1e-4, "grad_norm": 1.0}
            numbers.write(
                json.dumps(
                    {"step": step, "epoch": step / 50, "tokens": 7, "trained_tokens": 3} | values
                )
                + "\n"
            )
    page = Page(write_report([copy], tmp_path / "page.html"))
    axes = json.loads(re.search(r'id="chart-data">(.*?)</script>', page.html)[1])["axes"][0]  # type: ignore[index]
    assert dict(zip(*axes["tokens"], strict=True))[100] == 700
    assert dict(zip(*axes["epoch"], strict=True))[50] == 1


def test_colours_have_contrast_and_controls_have_names(run_dir: Path, tmp_path: Path) -> None:
    """WCAG 2 AA: 4.5 for text, 3 for lines; in light and in dark."""
    page = Page(write_report([run_dir], tmp_path / "page.html"))
    light, dark = colour_schemes(page.html)
    assert "piece.special:not(.trained) { opacity" not in page.html
    for colours in (light, dark):
        for number in range(12):
            assert contrast(colours[f"c{number}"], colours["paper"]) >= 4.5, f"c{number}"
            assert contrast(colours[f"c{number}"], colours["panel"]) >= 3
        assert contrast(colours["mark"], colours["panel"]) >= 3
        texts = [
            ("soft", "paper"),
            ("soft", "panel"),
            ("ink", "paper"),
            ("link", "paper"),
            ("wait", "panel"),
        ]
        papers = [(name, f"{name}-paper") for name in ("good", "bad", "wait")]
        for ink, paper in (*texts, *papers, ("trained-ink", "trained")):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    summaries = re.findall(r"<summary>(.*?)</summary>", page.html)
    assert len(set(summaries)) == len(summaries) > 5
    assert 'role="img"' not in page.html
    assert page.html.count('role="slider"') == len(page.charts)


def colour_schemes(style: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the colours of both schemes by name, in hexadecimal: tokens name others, or are mixed of two."""
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for selector, block in re.findall(r"(:root[^{}]*)\{([^}]*--(?:c11|slate-12)[^}]*)\}", style):
        tokens = dict(re.findall(r"--([\w-]+): ([^;]+);", block))
        dark |= tokens
        if "on-paper" not in selector:
            light |= tokens

    def of(scheme: dict[str, str], value: str) -> str:
        if match := re.fullmatch(r"var\(--([\w-]+)\)", value):
            return of(scheme, scheme[match[1]])
        if match := re.fullmatch(r"color-mix\(in srgb, (.+), (.+) (\d+)%\)", value):
            parts = [of(scheme, part) for part in match.groups()[:2]]
            share = int(match[3]) / 100
            pairs = [[int(part[i : i + 2], 16) for i in (1, 3, 5)] for part in parts]
            mixed = [round(a + share * (b - a)) for a, b in zip(*pairs, strict=True)]
            return "#" + "".join(f"{channel:02x}" for channel in mixed)
        if re.fullmatch(r"#[0-9a-f]{3}", value):
            return "#" + "".join(2 * digit for digit in value[1:])
        return value

    schemes = [
        {name: of(scheme, value) for name, value in scheme.items()} for scheme in (light, dark)
    ]
    return schemes[0], schemes[1]


def contrast(colour_a: str, other: str) -> float:
    """Return the ratio of two colours as WCAG 2 defines it."""
    shares = [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in (colour_a, other)]
    linear = [
        [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        for colour in shares
    ]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (high + 0.05) / (low + 0.05)


def test_a_run_that_has_just_begun_has_a_page(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(run_dir / "resolved.json", tmp_path / "new")
    page = Page(write_report([tmp_path / "new"], tmp_path / "report.html"))
    assert "has not completed a step" in page.text
    assert "waiting" in page.text


def test_what_data_say_is_shown_and_not_run(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy", symlinks=True)
    evil = "</script><script>alert(1)</script>"
    sample = {"prompt": evil, "expected": "a", "before": "b", "after": " a "}
    (copy / metrics.BEFORE_AFTER).write_text(json.dumps(sample) + "\n")
    matrix = {
        "confusion": [[3, 1], [0, 4]],
        "names": ["<b>good", "bad"],
        "checkpoint": "best",
        "data": "dev.tsv",
    }
    (copy / metrics.EVALUATION).write_text(json.dumps(matrix))
    page = Page(write_report([copy], tmp_path / "report.html"))
    assert evil not in page.html
    assert evil in page.text
    assert len(re.findall("<script", page.html)) == 3
    assert "as expected" in page.text
    assert "7 of 8 rows right (87.5 %), checkpoint best, on dev.tsv." in page.text


def test_what_is_no_run_is_explained_and_what_is_damaged_is_named(
    run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        write_report([tmp_path], tmp_path / "report.html")
    copy = shutil.copytree(run_dir, tmp_path / "copy", symlinks=True)
    (copy / metrics.METRICS).write_text("{broken}\n")
    page = write_report([copy], tmp_path / "report.html").read_text()
    assert "metrics.jsonl: line 1 is damaged and left out" in page


def test_buckets_keep_means_and_extremes() -> None:
    series = shorten(range(1, 8), [1.0, 2.0, None, 6.0, None, None, 3.0], 4)
    assert series is not None
    assert series.steps == [2, 4, 6, 7]
    assert series.values == [1.5, 6.0, None, 3.0]
    assert (series.low, series.high) == ([1.0, 6.0, None, 3.0], [2.0, 6.0, None, 3.0])
