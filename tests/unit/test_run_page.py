"""The page of one run: what it says of one that is not done, what its best checkpoint still gets wrong, honest curves."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kubetune.config.resolved import read_config
from kubetune.plan.plan import make_plan
from kubetune.reporting import write_report
from kubetune.reporting.hero import hero
from kubetune.reporting.point_details.classes import classes_of, f1_by_class
from kubetune.reporting.point_details.kept_answers import weakest
from kubetune.reporting.point_details.underway import underway
from kubetune.reporting.reading import read_run
from kubetune.rundir import checkpoints, metrics
from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests import browser
from tests.run.test_report_long import write_run

DONE = {"code": 0, "reason": "done", "step": 60, "error": None}


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


def keep_answers(run_dir: Path, step: int, answers: Mapping[str, tuple[str, float]]) -> None:
    """Write what an evaluation keeps: answers with their score, by what was asked."""
    folder = run_dir / metrics.ANSWERS
    folder.mkdir(exist_ok=True)
    asked, answered = list[str](), list[str]()
    for row, (question, (answer, score)) in enumerate(answers.items()):
        prompt = f"user\n{question}\nassistant\n"
        asked.append(json.dumps({"row": row, "prompt": prompt, "reference": "the right one"}))
        scores = {"exact_match": score}
        answered.append(json.dumps({"row": row, "answer": answer, "scores": scores}))
    (folder / "questions.jsonl").write_text("\n".join(asked) + "\n")
    (folder / f"step-{step:06d}.jsonl").write_text("\n".join(answered) + "\n")


def test_a_run_that_goes_on_says_what_is_next_and_what_is_safe(tmp_path: Path) -> None:
    run_dir = planned_run(tmp_path / "a", 400)
    (run_dir / "logs").mkdir()
    beat = {"rank": 0, "phase": "step", "waiting": False, "step": 60}
    times = {"time": time.time(), "since": time.time()}
    (run_dir / "logs" / "rank-0.beat.json").write_text(json.dumps({**beat, **times}))
    # A step takes half a second.
    assert underway(read_run(run_dir)) == [
        ("evaluated", "next at step 80, in about 10 s"),
        ("saved", "nothing yet; first at step 100, in about 20 s"),
        ("speed", "2 steps a second; done in about 3 min"),
    ]
    checkpoints.commit(run_dir, checkpoints.State(step=50), lambda folder: None)
    assert underway(read_run(run_dir))[1] == (
        "saved", "step 50, 10 steps ago; next at step 100, in about 20 s",
    )  # fmt: skip
    # What is known so far: how it answered before training, and after the last evaluation.
    keep_answers(run_dir, 0, {"What is 2?": ("a moon", 0.0), "What is 3?": ("so", 0.0)})
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert shown.underway == underway(read_run(run_dir))
    keep_answers(run_dir, 60, {"What is 2?": ("so", 0.0), "What is 3?": ("the right one", 1.0)})
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert shown.example == [
        ("asked", "What is 3?"), ("before", "so"), ("now", "the right one")
    ]  # fmt: skip


def test_a_run_that_was_cut_off_says_what_is_lost_and_what_a_start_does(tmp_path: Path) -> None:
    run_dir = planned_run(tmp_path / "a", 4000)
    ended = {"code": 145, "reason": "rank 0 was killed", "step": None, "error": "RankDied"}
    (run_dir / "exit.json").write_text(json.dumps(ended))
    assert underway(read_run(run_dir)) == [
        ("lost", "all 60 steps, 30 s of work: the first checkpoint comes at step 50"),
        ("Run again", "begins anew: 4,000 steps, about 33 min"),
    ]
    checkpoints.commit(run_dir, checkpoints.State(step=50), lambda folder: None)
    assert underway(read_run(run_dir)) == [
        ("lost", "10 steps, 5 s of work: those since the checkpoint of step 50"),
        ("Continue", "goes on after step 50: 3,950 steps are left, about 33 min"),
    ]
    checkpoints.commit(run_dir, checkpoints.State(step=60), lambda folder: None)
    assert underway(read_run(run_dir))[0] == ("lost", "nothing; step 60 is saved")
    page = write_report([run_dir], tmp_path / "page.html").read_text()
    assert re.search(
        r"<dt>Continue</dt><dd><span>goes on after step.60: 3,940 steps are left", page
    )
    # One that is done has lost nothing, and nothing before it.
    (run_dir / "exit.json").write_text(json.dumps({**ended, "code": 0, "reason": "done"}))
    assert underway(read_run(run_dir)) == []


def test_all_classes_are_told_the_worst_first(tmp_path: Path) -> None:
    evaluation = {"names": ["a", "b", "c"], "confusion": [[8, 2, 0], [1, 3, 0], [0, 0, 0]]}
    assert f1_by_class(evaluation) == {"a": 16 / 19, "b": 6 / 9}
    run_dir = planned_run(tmp_path / "a")
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings["task"] = "sequence_classification"
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    (run_dir / metrics.EVALUATION).write_text(json.dumps(evaluation))
    shown = classes_of(read_run(run_dir))
    assert shown is not None
    assert [(name, text, about) for name, _, text, about in shown.rows] == [
        ("b", "66.7 %", "4 rows"), ("a", "84.2 %", "10 rows"), ("c", "–", "no rows")
    ]  # fmt: skip
    page = write_report([run_dir], tmp_path / "page.html").read_text()
    bars = page[page.index('<table class="classes">') :].partition("</table>")[0]
    assert re.findall(r'<th scope="row">(.)</th><td>', bars) == ["b", "a", "c"]
    assert re.findall(r'class="bar part-(\d+)"', bars) == ["67", "84"]
    # The tab begins with what is taken for what; of a class without rows nothing is recalled.
    assert page.index("Still wrong (3): what is taken for what") < page.index(
        "What each evaluation"
    )
    assert re.findall(r">(. taken for .)<", page) == ["a taken for b", "b taken for a"]
    assert page.count("<td>–</td></tr>") >= 1
    # Without a confusion matrix it is known of what the rows are.
    (run_dir / metrics.EVALUATION).unlink()
    data = {"splits": {"train": {"rows": 10, "classes": {"a": 8, "b": 2}, "sources": []}}}
    (run_dir / metrics.DATA).write_text(json.dumps(data))
    shown = classes_of(read_run(run_dir))
    assert shown is not None
    assert shown.rows == [("b", 0.2, "20 %", "2 rows"), ("a", 0.8, "80 %", "8 rows")]


def test_a_teacher_stands_beside_its_pupil_if_both_were_asked_the_same(tmp_path: Path) -> None:
    teacher = planned_run(tmp_path / "teacher")
    pupil = planned_run(tmp_path / "pupil")
    settings = json.loads((pupil / "resolved.json").read_text())
    settings |= {"task": "distill", "distill": {"teacher": str(teacher), "lmbda": 0}}
    settings["evaluation"] = {"generate": {"metric": "exact_match"}}
    settings["training"]["metric_for_best_model"] = "eval_exact_match"
    (pupil / "resolved.json").write_text(json.dumps(settings))
    at = {"schema_version": 1, "time": "2026-01-01T00:00:00Z"}
    name = str(teacher / "checkpoints" / "step-000040")
    event = {**at, "event": "teacher", "name": name, "digest": "d", "probe": []}
    (pupil / metrics.EVENTS).write_text(json.dumps(event) + "\n")
    for run_dir, values in ((teacher, {40: 0.9, 60: 0.8}), (pupil, {40: 0.2, 60: 0.5})):
        with (run_dir / metrics.METRICS).open("a") as lines:
            for step, value in values.items():
                line = {"step": step, "epoch": 1.0, "eval_exact_match": value}
                lines.write(json.dumps(line) + "\n")
        keep_answers(run_dir, 60, {"What is 2?": ("so", 0.0)})
    (pupil / metrics.BASE).write_text('{"metrics": {"eval_exact_match": 0.0}}')
    shown = hero(read_run(pupil))
    assert shown is not None
    assert shown.guess == (90, "teacher 90 %"), "that of the checkpoint which taught"
    assert shown.curve is not None
    (level,) = (line for line in shown.curve.lines if line.label == "teacher")
    assert (level.series.steps, level.series.values) == ([0, 60], [0.9, 0.9])
    # Of other rows it would say nothing.
    keep_answers(teacher, 60, {"What is 3?": ("so", 0.0)})
    shown = hero(read_run(pupil))
    assert shown is not None
    assert shown.guess is None


def test_what_is_still_wrong_is_shown_first(tmp_path: Path) -> None:
    run_dir = planned_run(tmp_path / "a")
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings["training"]["metric_for_best_model"] = "eval_exact_match"
    settings["evaluation"] = {"generate": {"metric": "exact_match"}}
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    with (run_dir / metrics.METRICS).open("a") as lines:
        lines.write('{"step": 60, "epoch": 1.0, "eval_loss": 1.0, "eval_exact_match": 0.5}\n')
    assert weakest(read_run(run_dir)) is None
    answers = {f"What is {n}?": (f"no {n}", float(n > 6)) for n in range(14)}
    keep_answers(run_dir, 60, answers)
    shown = weakest(read_run(run_dir))
    assert shown is not None
    assert (shown.metric, shown.wrong, shown.rows, len(shown.lines)) == ("exact_match", 7, 14, 6)
    changed = {
        "prompt": "user\nWho?\nassistant\n",
        "reference": "you",
        "before": "I",
        "answer": "you",
    }
    turned = {"exact_match": {"gained": [changed] * 5, "lost": []}}
    line = {"metric": "exact_match", "before": 0.0, "after": 0.5, "gained": 9, "lost": 0}
    verdict = {"step": 60, "base": {}, "best": {}, "answers": [line], "turned": turned}
    (run_dir / metrics.VERDICT).write_text(json.dumps(verdict))
    page = write_report([run_dir], tmp_path / "page.html").read_text()
    wrong = page.index("Still wrong (7), by exact match <small>6 shown</small>")
    assert wrong < page.index("What each evaluation measured")
    # Where it is another answer is marked, and what was expected there.
    assert '<dd class="right"><pre><mark>the</mark> <mark>right</mark> <mark>one</mark>' in page
    assert "<dt>answer</dt><dd><pre><mark>no</mark> <mark>0</mark></pre></dd>" in page
    # Rows of two: none is left half empty.
    assert "Answers that got better (9), by exact match <small>4 shown</small>" in page
    assert page.count("<dt>before</dt>") == 1 + 4, "the point of the run has one too"
    # All is right.
    keep_answers(run_dir, 60, {"What is 2?": ("the right one", 1.0)})
    assert weakest(read_run(run_dir)) is None


def test_the_page_says_by_what_the_best_is_chosen(tmp_path: Path) -> None:
    run_dir = planned_run(tmp_path / "a")
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings["task"] = "sequence_classification"
    (run_dir / "resolved.json").write_text(json.dumps(settings))

    def sure(*f1: float) -> str:
        """Return what the page says of the numbers of evaluations whose loss was the lowest in the second."""
        losses = [0.14, 0.11, 0.13]
        lines = [
            {"step": 20 * n, "epoch": 1.0, "eval_loss": loss, "eval_f1_macro": value}
            for n, (loss, value) in enumerate(zip(losses, f1, strict=True), 1)
        ]
        (run_dir / metrics.METRICS).write_text("\n".join(map(json.dumps, lines)) + "\n")
        shown = hero(read_run(run_dir))
        assert shown is not None
        return shown.sure.partition(";")[0]

    # The curve is higher at another step than that which is shown, so that somebody would wonder.
    assert sure(0.98, 0.97, 0.97) == "of 48 held-out rows, at step 40, the best by held-out loss"
    assert sure(0.96, 0.97, 0.97) == "of 48 held-out rows, at step 40"
    page = write_report([run_dir], tmp_path / "page.html").read_text()
    assert "<h3>What each evaluation measured; the best by held-out loss</h3>" in page


def test_two_runs_that_were_asked_the_same_are_tested_in_pairs(tmp_path: Path) -> None:
    runs = [planned_run(tmp_path / name) for name in ("a", "b")]

    def compared(right: int, other: int) -> str:
        """Return the page of two runs, of which so many of 20 answers are right, those of the second among the first."""
        for run_dir, count in zip(runs, (right, other), strict=True):
            answers = {
                f"What is {n}?": ("the right one" if n < count else f"no {n}", float(n < count))
                for n in range(20)
            }
            keep_answers(run_dir, 60, answers)
            value = count / 20
            line = {"step": 60, "epoch": 1.0, "eval_loss": 0.5, "eval_exact_match": value}
            (run_dir / metrics.METRICS).write_text(json.dumps(line) + "\n")
            interval = {"after_interval": [value - 0.2, value + 0.2], "before": 0, "after": value}
            answered = [
                {"metric": "exact_match", "gained": 1, "lost": 0, "p_value": 0.5, **interval}
            ]
            verdict = {"step": 60, "base": {}, "best": {}, "answers": answered}
            (run_dir / metrics.VERDICT).write_text(json.dumps(verdict))
        page = write_report(runs, tmp_path / "page.html").read_text()
        return page.replace("\N{NO-BREAK SPACE}", " ")

    # 6 of 6 uneven rows for one run: p = 2 / 2⁶, though the intervals overlap.
    text = compared(16, 10)
    assert "50 %: p = 0.031 by McNemar on 20 rows that both answered.</p>" in text
    assert text.count('class="best"') == 1
    assert re.findall(r"<h3>(Right in . alone \(\d+\))", text) == ["Right in a alone (6)"]
    assert "<pre>the right one</pre> <span" in text.partition('id="answers"')[2]
    assert "<mark>no</mark> <mark>10</mark>" in text
    assert text.count('<dd class="right"><pre><mark>') == 6
    # 3 of 3: p = 2 / 2³.
    text = compared(16, 13)
    assert "may be chance: p = 0.25 by McNemar on 20 rows that both answered.</p>" in text
    assert 'class="best"' not in text


def test_sums_of_other_rewards_are_in_no_curve_and_no_test(tmp_path: Path) -> None:
    run_dir = planned_run(tmp_path / "a")
    settings = json.loads((run_dir / "resolved.json").read_text())
    rewards = [{"name": "exact_match"}, {"name": "json_valid"}]
    settings |= {"task": "grpo", "rewards": rewards}
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    before = {"eval_reward": 1.13, "eval_reward/exact_match": 0.37, "eval_reward/json_valid": 0.76}
    (run_dir / metrics.BASE).write_text(
        json.dumps({"metrics": {**before, "eval_exact_match": 0.37}})
    )
    after = {"eval_reward": 0.75, "eval_reward/exact_match": 0.75, "eval_exact_match": 0.75}
    (run_dir / metrics.METRICS).write_text(
        json.dumps({"step": 60, "epoch": 1.0, "eval_loss": 0.4, **after}) + "\n"
    )
    lines = []
    for metric, test in (("reward", "paired permutation"), ("exact_match", "McNemar")):
        values = {"before": 0.4, "after": 0.7, "p_value": 0.01, "gained": 3, "lost": 1}
        lines.append({"metric": metric, "test": test, **values})
    changed = {"prompt": "p", "reference": "r", "before": "b", "answer": "a"}
    turned = {name: {"gained": [changed], "lost": []} for name in ("reward", "exact_match")}
    best = {**after, "eval_reward/json_valid": None}
    verdict = {"step": 60, "base": before, "best": best, "answers": lines, "turned": turned}
    (run_dir / metrics.VERDICT).write_text(json.dumps(verdict))
    record = read_run(run_dir)
    assert "eval_reward" not in record.measurements[0]
    assert record.measurements[0]["eval_reward/exact_match"] == 0.37
    page = write_report([run_dir], tmp_path / "page.html").read_text()
    assert "paired permutation" not in page
    assert "Answers that got better (3), by exact match" in page


def test_rewards_of_other_functions_are_not_compared(tmp_path: Path) -> None:
    runs = []
    for name, weight, reward in (("a", 1, 1.2), ("b", 2, 1.9)):
        run_dir = planned_run(tmp_path / name)
        settings = json.loads((run_dir / "resolved.json").read_text())
        settings |= {"task": "grpo", "rewards": [{"name": "exact_match", "weight": weight}]}
        (run_dir / "resolved.json").write_text(json.dumps(settings))
        values = {"eval_reward": reward, "eval_exact_match": 0.5 + weight / 10}
        line = {"step": 60, "epoch": 1.0, **values, "eval_loss": 0.4}
        (run_dir / metrics.METRICS).write_text(json.dumps(line) + "\n")
        runs.append(run_dir)
        (run_dir / metrics.DATA).write_text('{"fingerprint": "same", "splits": {}}')
        (run_dir / "exit.json").write_text(json.dumps({**DONE, "time": "2026-01-01T00:00:00Z"}))
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "b has the highest exact match" in page
    assert re.search(r"reward\s*<small>of other functions in each</small>", page)

    def offered() -> list[str]:
        with TestClient(application(Site.of(tmp_path), "word"), base_url="http://localhost") as one:
            one.get("/", params={"token": "word"})
            return re.findall(r'href="/compare\?dir=(.)&amp;dir=(.)"', one.get("/compare").text)

    # Nor are they offered to be compared, as two of the same rewards are.
    assert offered() == []
    shutil.copy(runs[0] / "resolved.json", runs[1] / "resolved.json")
    assert [set(pair) for pair in offered()] == [{"a", "b"}]


# What a chart writes on its canvas, and the points of its lines.
WATCHED = """() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    const isThere = document.fonts.check("12px Inter");
    window.written.push([this.canvas.closest("[data-chart]")?.dataset.chart, text, isThere]);
    return write.call(this, text, ...rest);
  };
}"""


# True once all charts were written again with their typeface, false if they are not within a minute.
SETTLED = """() => new Promise((done) => {
  const end = Date.now() + 60000;
  const look = () => (window.written.at(-1)[2] || Date.now() > end ? done(window.written.at(-1)[2]) : setTimeout(look, 50));
  look();
})"""


def at_middle(page: Any, chart: int) -> str:
    """Return what a chart says of the step in its middle."""
    place = page.locator(f'[data-chart="{chart}"]')
    place.focus()
    place.press("Home")
    for _ in range(10):
        place.press("PageUp")
    return str(place.get_attribute("aria-valuetext"))


def report_of(run_dir: Path, losses: Sequence[float], evaluations: int = 5) -> Path:
    """Return the report of a run with these losses, so many evaluations, and memory that grows by a few bytes a step."""
    with (
        (run_dir / metrics.METRICS).open("w") as lines,
        (run_dir / metrics.TIMINGS).open("w") as timings,
    ):
        for step, loss in enumerate(losses, 1):
            lines.write(json.dumps({"step": step, "epoch": 1.0, "loss": loss}) + "\n")
            memory = {"peak_memory_bytes": 581_000_000 + 4000 * step}
            timings.write(json.dumps({"step": step, "seconds": 0.5, **memory}) + "\n")
        for step in range(len(losses), 0, -len(losses) // evaluations)[::-1]:
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
        # Once its typeface is there, all is written in it.
        assert page.evaluate(SETTLED)
        written = [line for line in page.evaluate("window.written") if line[2]]
        of_memory = [text for chart, text, _ in written if chart == memory and "iB" in text]
        assert len(of_memory) == len(set(of_memory)) > 1
        # What was held out is joined by a line: between its points is ink, as on the curve above.
        is_ink = """(index) => { const canvas = document.querySelector(`[data-chart="${index}"] canvas`);
          const [w, h] = [canvas.width, canvas.height];
          const column = canvas.getContext("2d").getImageData(Math.round(w * 0.8), 0, 1, h).data;
          const isBlue = [...Array(h).keys()].map((y) => column[4 * y + 2] > column[4 * y] + 60 && column[4 * y + 3] > 60);
          return isBlue.filter((now, y) => now && !isBlue[y - 1]).length; }"""
        assert page.evaluate(is_ink, names.index("Loss")) == 2
        # Few points are not: between them is nothing that was measured.
        few = report_of(run_dir, [200.0 - step for step in range(1, 101)], evaluations=2)
        browser.show(page, few)
        assert page.evaluate(is_ink, names.index("Loss")) == 1
        browser.show(page, report_of(run_dir, [200.0 - step for step in range(1, 41)]))
        said = at_middle(page, names.index("Loss"))
        assert "training loss 1" in said
        assert "raw" not in said
        assert not page.locator("#smoothing").is_visible(), "it would change nothing"
    assert not errors
