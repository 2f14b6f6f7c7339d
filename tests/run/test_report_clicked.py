"""The pages in a real browser, clicked and typed in: axes, smoothing, legends, sorting, saved files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetune.reporting import write_report
from kubetune.rundir import metrics
from tests import browser
from tests.run.test_report_long import write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium"),
]

SIZES = [(390, False), (390, True), (1280, False), (1280, True)]
DRAWN = "document.querySelector('[data-chart=\"{0}\"] canvas').toDataURL()"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of 120 and 240 steps, with evaluations, a spike, and answers of long words."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for steps in (120, 240):
        run_dir = write_run(folder / f"of-{steps}-steps", steps)
        settings = json.loads((run_dir / "resolved.json").read_text())
        (run_dir / "resolved.json").write_text(json.dumps({**settings, "name": run_dir.name, "output": "x" * 200}))
        sample = {"prompt": "request " * 40, "expected": "e" * 150, "before": "b", "after": "a"}
        (run_dir / metrics.BEFORE_AFTER).write_text(json.dumps(sample) + "\n")
        looks = [{"step": s, "cpu_percent": 40.0, "memory_bytes": 2**30, "gpus": []} for s in range(1, steps, 9)]
        (run_dir / metrics.LOAD).write_text("".join(json.dumps(look) + "\n" for look in looks))
        found.append(run_dir)
    return found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    with browser.opened(tmp_path_factory.mktemp("downloads")) as tab:
        yield tab


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs[:1], tmp_path_factory.mktemp("page") / "run.html")


@pytest.fixture(scope="module")
def compared(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "both.html")


def choose(tab: browser.Tab, selector: str, value: str) -> None:
    """Choose an option as a keyboard does, with the event that follows."""
    tab.ask(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; "
        "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )


def test_axes_smoothing_and_scales_redraw(tab: browser.Tab, page: Path) -> None:
    tab.open(page)
    assert tab.ask("document.querySelectorAll('.chart canvas').length") == tab.ask(
        "document.querySelectorAll('.chart').length"
    )
    pictures = [tab.ask(DRAWN.format(0))]
    for name in ("tokens", "epoch", "hours"):
        choose(tab, "#x-axis", name)
        pictures.append(tab.ask(DRAWN.format(0)))
        tab.ask("document.querySelector('.chart').focus()")
        tab.press("ArrowRight")
        assert tab.ask("document.querySelector('.readout').textContent").startswith(f"{name} ")
    choose(tab, "#x-axis", "step")
    for value in ("0", "6"):
        choose(tab, "#smoothing", value)
        pictures.append(tab.ask(DRAWN.format(0)))
    assert tab.ask("document.querySelector('#smoothed').textContent") == "over 10 % of the curve"
    for value in tab.ask("[...document.querySelector('[data-scale=\"0\"]').options].map((o) => o.value)")[1:]:
        choose(tab, '[data-scale="0"]', value)
        pictures.append(tab.ask(DRAWN.format(0)))
    assert len(set(pictures)) == len(pictures) >= 8
    assert not tab.errors


def test_legends_work_by_mouse_and_by_key(tab: browser.Tab, page: Path) -> None:
    tab.open(page)
    before = tab.ask(DRAWN.format(0))
    pressed = "document.querySelector('[data-legend=\"0\"] button').getAttribute('aria-pressed')"
    tab.click('[data-legend="0"] button')
    hidden = tab.ask(DRAWN.format(0))
    assert (tab.ask(pressed), hidden != before) == ("false", True)
    for key in (" ", "Enter"):
        assert tab.ask("document.activeElement.closest('[data-legend=\"0\"]') !== null"), "the focus stays where it was"
        tab.press(key)
    assert (tab.ask(pressed), tab.ask(DRAWN.format(0))) == ("false", hidden)
    assert not tab.errors


def test_numbers_and_pictures_are_saved(tab: browser.Tab, page: Path, runs: list[Path]) -> None:
    tab.open(page)
    tab.click('[data-csv="0"]')
    rows = list(csv.DictReader(tab.saved("loss.csv").read_text().splitlines()))
    losses = {str(line["step"]): line["loss"] for line in metrics.read_metrics(runs[0]) if "loss" in line}
    assert {row["step"]: float(row["training loss"]) for row in rows if row["training loss"]} == pytest.approx(
        losses, rel=1e-4
    )
    tab.click('[data-png="0"]')
    content = tab.saved("loss.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 300
    assert height > 280
    assert not tab.errors


def test_runs_are_sorted_by_their_headings(tab: browser.Tab, compared: Path) -> None:
    tab.open(compared)
    shown = "[...document.querySelectorAll('.results tbody th')].map((cell) => cell.textContent.slice(0, 1)).join('')"
    assert tab.ask(shown) == "AB"
    tab.click(".results thead th:nth-child(2) button")
    assert tab.ask(shown) == "AB"
    tab.click(".results thead th:nth-child(2) button")
    assert tab.ask(shown) == "BA"
    assert tab.ask("document.querySelector('.results thead th:nth-child(2)').ariaSort") == "descending"
    tab.press("Enter")
    assert tab.ask(shown) == "AB"
    assert not tab.errors


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_no_page_is_wider_than_the_window(tab: browser.Tab, page: Path, compared: Path, width: int, dark: bool) -> None:
    for path in (page, compared):
        tab.open(path, width, dark=dark)
        assert tab.ask("document.documentElement.scrollWidth") <= width, path.name
    assert not tab.errors
