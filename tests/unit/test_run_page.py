"""The page of one run: what it says of one that is not done, what its best checkpoint still gets wrong, honest curves."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.resolved import read_config
from kubetune.plan.plan import make_plan
from kubetune.reporting import write_report
from kubetune.rundir import metrics
from tests import browser
from tests.run.test_report_long import write_run


def planned_run(run_dir: Path, steps: int = 60) -> Path:
    """Return a run that came to step 60 of so many: measured each 40 steps, saved each 50."""
    write_run(run_dir, 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings["data"]["eval"] = [{"path": "heldout.jsonl"}]
    settings["training"] = {"max_steps": steps, "eval_steps": 40, "save_steps": 50}
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    plan = make_plan(read_config(run_dir), 6000, 48, 0)
    (run_dir / metrics.PLAN).write_text(plan.model_dump_json())
    return run_dir


# What a chart writes on its canvas, and the points of its lines.
WATCHED = """() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push([this.canvas.closest("[data-chart]")?.dataset.chart, text]);
    return write.call(this, text, ...rest);
  };
}"""


def at_middle(page: Any, chart: int) -> str:
    """Return what a chart says of the step in its middle."""
    place = page.locator(f'[data-chart="{chart}"]')
    place.focus()
    place.press("Home")
    for _ in range(10):
        place.press("PageUp")
    return str(place.get_attribute("aria-valuetext"))


def report_of(run_dir: Path, losses: Sequence[float]) -> Path:
    """Return the report of a run with these losses, and memory that grows by a few bytes a step."""
    with (
        (run_dir / metrics.METRICS).open("w") as lines,
        (run_dir / metrics.TIMINGS).open("w") as timings,
    ):
        for step, loss in enumerate(losses, 1):
            lines.write(json.dumps({"step": step, "epoch": 1.0, "loss": loss}) + "\n")
            memory = {"peak_memory_bytes": 581_000_000 + 4000 * step}
            timings.write(json.dumps({"step": step, "seconds": 0.5, **memory}) + "\n")
        for step in (len(losses) // 2, len(losses)):
            lines.write(json.dumps({"step": step, "epoch": 1.0, "eval_loss": 9.0}) + "\n")
    return write_report([run_dir], run_dir / "page.html")


@browser.needed
def test_curves_are_smoothed_in_place_and_short_ones_not_at_all(tmp_path: Path) -> None:
    run_dir = planned_run(tmp_path / "a")
    errors = list[str]()
    with browser.opened(errors) as page:
        page.add_init_script(f"({WATCHED})()")
        # A straight line stays where it is: a mean of earlier steps alone would lag behind.
        browser.show(page, report_of(run_dir, [200.0 - step for step in range(1, 101)]))
        names = page.eval_on_selector_all("figure h3", "(all) => all.map((one) => one.textContent)")
        said = at_middle(page, names.index("Loss"))
        step, loss, raw = re.search(
            r"step (\d+) · training loss ([\d.]+) \(raw ([\d.]+)\)", said
        ).groups()  # type: ignore[union-attr]
        assert int(step) == 51
        assert float(loss) == pytest.approx(float(raw), abs=0.05) == pytest.approx(149, abs=0.05)
        assert page.locator("#smoothing").is_visible()
        # No two ticks of an axis have the same name.
        memory = str(names.index("Peak memory"))
        texts = [text for chart, text in page.evaluate("window.written") if chart == memory]
        of_memory = [text for text in texts if "iB" in text]
        assert len(of_memory) == len(set(of_memory)) > 1
        # What was held out is joined by a line: between its two points is ink, as on the curve above.
        is_ink = """(index) => { const canvas = document.querySelector(`[data-chart="${index}"] canvas`);
          const [w, h] = [canvas.width, canvas.height];
          const column = canvas.getContext("2d").getImageData(Math.round(w * 0.8), 0, 1, h).data;
          const isBlue = [...Array(h).keys()].map((y) => column[4 * y + 2] > column[4 * y] + 60 && column[4 * y + 3] > 60);
          return isBlue.filter((now, y) => now && !isBlue[y - 1]).length; }"""
        assert page.evaluate(is_ink, names.index("Loss")) == 2
        browser.show(page, report_of(run_dir, [200.0 - step for step in range(1, 41)]))
        said = at_middle(page, names.index("Loss"))
        assert "training loss 1" in said
        assert "raw" not in said
        assert not page.locator("#smoothing").is_visible(), "it would change nothing"
    assert not errors
