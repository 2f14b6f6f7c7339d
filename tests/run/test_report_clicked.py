"""The pages in a real browser, clicked and typed in: axes, smoothing, legends, sorting, saved files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kubetune.reporting import write_report
from kubetune.rundir import metrics
from tests import browser
from tests.run.test_report_long import write_run
from tests.unit.test_sweep_page import MIXED, write_page, write_sweep

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, browser.needed]

SIZES = [(390, False), (390, True), (1280, False), (1280, True)]
DRAWN = "document.querySelector('[data-chart=\"{0}\"] canvas').toDataURL()"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two runs of 120 and 240 steps, with evaluations, a spike, and answers of long words."""
    folder = tmp_path_factory.mktemp("runs")
    directories = []
    for steps in (120, 240):
        run_dir = write_run(folder / f"of-{steps}-steps", steps)
        settings = json.loads((run_dir / "resolved.json").read_text())
        (run_dir / "resolved.json").write_text(
            json.dumps({**settings, "name": run_dir.name, "output": "x" * 200})
        )
        sample = {"prompt": "request " * 40, "expected": "e" * 150, "before": "b", "after": "a"}
        (run_dir / metrics.BEFORE_AFTER).write_text(json.dumps(sample) + "\n")
        looks = [
            {"step": s, "cpu_percent": 40.0, "memory_bytes": 2**30, "gpus": []}
            for s in range(1, steps, 9)
        ]
        (run_dir / metrics.LOAD).write_text("".join(json.dumps(look) + "\n" for look in looks))
        directories.append(run_dir)
    return directories


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs[:1], tmp_path_factory.mktemp("page") / "run.html")


@pytest.fixture(scope="module")
def compared(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "both.html")


def test_axes_smoothing_and_scales_redraw(tab: Page, errors: list[str], page: Path) -> None:
    browser.show(tab, page)
    assert tab.evaluate("document.querySelectorAll('.chart canvas').length") == tab.evaluate(
        "document.querySelectorAll('.chart').length"
    )
    pictures = [tab.evaluate(DRAWN.format(0))]
    for name in ("tokens", "epoch", "time", "share"):
        tab.select_option("#x-axis", name)
        pictures.append(tab.evaluate(DRAWN.format(0)))
        tab.focus(".chart")
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("document.querySelector('.values b').textContent").startswith(
            f"{name} "
        )
    tab.select_option("#x-axis", "step")
    for value in ("0", "6"):
        tab.fill("#smoothing", value)
        pictures.append(tab.evaluate(DRAWN.format(0)))
        amount = tab.inner_text("#smoothed")
        assert amount.split(";")[0] == tab.get_attribute("#smoothing", "aria-valuetext")
    assert amount == "over 10 % of the curve; pale: unsmoothed"
    tab.click('[data-scale="0"]')
    assert tab.get_attribute('[data-scale="0"]', "aria-pressed") == "true"
    pictures.append(tab.evaluate(DRAWN.format(0)))
    assert len(set(pictures)) == len(pictures) >= 7
    assert not errors


def test_legends_work_by_mouse_and_by_key(tab: Page, errors: list[str], page: Path) -> None:
    browser.show(tab, page)
    before = tab.evaluate(DRAWN.format(0))
    pressed = "document.querySelector('[data-legend=\"0\"] button').getAttribute('aria-pressed')"
    tab.click('[data-legend="0"] button')
    hidden = tab.evaluate(DRAWN.format(0))
    assert (tab.evaluate(pressed), hidden != before) == ("false", True)
    for key in (" ", "Enter"):
        assert tab.evaluate("document.activeElement.closest('[data-legend=\"0\"]') !== null"), (
            "the focus stays"
        )
        tab.keyboard.press(key)
    assert (tab.evaluate(pressed), tab.evaluate(DRAWN.format(0))) == ("false", hidden)
    assert not errors


def test_numbers_and_pictures_are_saved(
    tab: Page, errors: list[str], page: Path, runs: list[Path]
) -> None:
    browser.show(tab, page)
    with tab.expect_download() as saved:
        tab.click('[data-csv="0"]')
    assert saved.value.suggested_filename == "loss.csv"
    rows = list(csv.DictReader(saved.value.path().read_text().splitlines()))
    losses = {
        str(line["step"]): line["loss"] for line in metrics.read_metrics(runs[0]) if "loss" in line
    }
    assert {
        row["step"]: float(row["training loss"]) for row in rows if row["training loss"]
    } == pytest.approx(losses, rel=1e-4)
    with tab.expect_download() as saved:
        tab.click('[data-png="0"]')
    assert saved.value.suggested_filename == "loss.png"
    content = saved.value.path().read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 300
    assert height > 280
    assert not errors


def test_a_comparison_has_metrics_as_rows_and_its_folded_charts_open(
    tab: Page, errors: list[str], compared: Path
) -> None:
    browser.show(tab, compared, 390)
    assert tab.evaluate("[...document.querySelectorAll('#results > .scroll thead th')].length") == 3
    assert tab.is_visible(".verdict")
    fold = tab.locator(".more-charts").first
    assert not fold.locator("canvas").first.is_visible()
    fold.locator("summary").first.click()
    fold.locator("canvas").first.wait_for()
    assert fold.locator("canvas").first.bounding_box()["width"] > 200  # type: ignore[index]
    assert not errors


def test_trials_are_sorted_by_their_headings(tab: Page, errors: list[str], tmp_path: Path) -> None:
    browser.show(tab, write_page(write_sweep(tmp_path, MIXED)))
    shown = "[...document.querySelectorAll('.trials tbody tr')].map((row) => row.id).join()"
    first = tab.evaluate(shown)
    head = ".trials thead th:nth-child(1)"
    tab.click(f"{head} button")
    rising = tab.evaluate(shown)
    tab.keyboard.press("Enter")
    assert tab.evaluate(shown).split(",") == rising.split(",")[::-1] != first.split(",")
    assert tab.evaluate(f"document.querySelector('{head}').ariaSort") == "descending"
    assert not errors


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_no_page_is_wider_than_the_window(
    tab: Page, errors: list[str], page: Path, compared: Path, width: int, dark: bool
) -> None:
    for path in (page, compared):
        browser.show(tab, path, width, dark=dark)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, path.name
    assert not errors
