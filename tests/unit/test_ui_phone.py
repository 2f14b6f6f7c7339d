"""What a narrow window and a finger need of the pages, and runs that are chosen there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.rundir import checkpoints, metrics
from tests import browser
from tests.run.test_report_long import write_run
from tests.unit.test_sweep_page import MIXED, write_sweep
from tests.unit.test_ui import TOKEN, served

if TYPE_CHECKING:
    from playwright.sync_api import Page


def is_in_one_row(page: Page, selector: str) -> bool:
    """True if the middles of all that is shown of these are at one height."""
    boxes = [part.bounding_box() for part in page.locator(selector).all() if part.is_visible()]
    middles = [box["y"] + box["height"] / 2 for box in boxes if box]
    return len(middles) > 1 and max(middles) - min(middles) < 4


@browser.needed
def test_a_pair_is_offered_and_compare_says_what_it_waits_for(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "other", "newest")):
        run_dir = write_run(tmp_path / name, 60)
        settings = json.loads((run_dir / "resolved.json").read_text())
        settings["data"]["train"] = [{"path": "other.jsonl" if name == "other" else "train.jsonl"}]
        (run_dir / "resolved.json").write_text(json.dumps(settings))
        at = f"2026-11-2{number}T12:00:00Z"
        launch = {"schema_version": 1, "time": at, "node": 0, "event": "launch"}
        (run_dir / metrics.EVENTS).write_text(json.dumps(launch) + "\n")
        ended = {"code": 0, "reason": "", "step": 60, "error": None}
        (run_dir / "exit.json").write_text(json.dumps(ended))
    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/compare", 390)
        offered = page.locator("#pairs a")
        assert [link.get_attribute("href") for link in offered.all()] == [
            "/compare?dir=newest&dir=new",
            "/compare?dir=new&dir=old",
        ], "those of the same data, the newest first"
        compare = page.get_by_role("button", name="Compare")
        assert compare.is_disabled()
        assert page.locator("#chosen-count").inner_text() == "Tick two runs"
        assert not page.get_by_role("button", name="Clear").is_visible()
        page.get_by_label("Choose old").check()
        assert page.locator("#chosen-count").inner_text() == "1 chosen, tick another"
        page.get_by_label("Choose other").check()
        assert compare.is_enabled()
        # What is done with runs is in one row on a phone too, and asks back in words.
        browser.show(page, f"{address}/", 390)
        assert not page.locator("#of-chosen").is_visible()
        page.get_by_label("Choose old").check()
        page.get_by_label("Choose new", exact=True).check()
        assert is_in_one_row(page, "#of-chosen > *")
        page.get_by_role("button", name="Delete").click()
        question = page.get_by_role("button", name="Delete 2 runs for good?")
        assert question.evaluate("(button) => parseFloat(getComputedStyle(button).fontSize)") > 10
    assert not errors


@browser.needed
def test_what_there_is_to_a_chat_is_in_one_line_on_a_phone(tmp_path: Path) -> None:
    checkpoints.commit(
        write_run(tmp_path / "a", 60), checkpoints.State(step=60), lambda folder: None
    )
    with served(tmp_path) as address, browser.opened([]) as page:
        browser.enter(page, address, TOKEN)
        for width in (390, 1280):
            browser.show(page, f"{address}/chat", width)
            assert is_in_one_row(page, ".of-talk > .toolbar > *"), width
            page.get_by_text("Settings", exact=True).click()
            temperature = page.get_by_label("Temperature").bounding_box()
            assert temperature is not None
            assert 0 <= temperature["x"] <= width - temperature["width"]


# Has the page ask nobody: `say` and `done` are what the model answers.
ANSWERING = """() => {
  window.EventSource = class { addEventListener() {} close() {} };
  const encode = (piece) => new TextEncoder().encode(JSON.stringify({ piece }) + "\\n");
  window.fetch = async () => new Response(new ReadableStream({ start(stream) {
    window.say = (piece) => stream.enqueue(encode(piece));
    window.done = () => stream.close();
  } }));
}"""
# How far the end of the last answer is above what covers the bottom of the window.
ABOVE_FIELD = """() => {
  const { bottom } = [...document.querySelectorAll(".bubble.assistant")].at(-1).getBoundingClientRect();
  return document.querySelector(".say").getBoundingClientRect().top - bottom;
}"""


@browser.needed
def test_a_chat_follows_the_answer_until_somebody_scrolls_up(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_dir = write_run(tmp_path / name, 60)
        checkpoints.commit(run_dir, checkpoints.State(step=60), lambda folder: None)
    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        for width in (390, 1280):
            browser.show(page, f"{address}/chat?beside=base", width)
            page.evaluate(ANSWERING)
            page.fill("#text", "Tell me all.")
            page.press("#text", "Enter")
            page.locator(".bubble.assistant[aria-busy]").first.wait_for()
            for number in range(60):
                page.evaluate("(number) => say(`line ${number}\\n`)", number)
            page.get_by_text("line 59").wait_for()
            assert page.evaluate(ABOVE_FIELD) >= 0, width
            page.evaluate(
                "scrollTo({ top: 0, behavior: 'instant' }); document.querySelector('.turns').scrollTop = 0"
            )
            page.evaluate("say('the end'), done()")
            page.get_by_text("the end").wait_for()
            assert page.evaluate(ABOVE_FIELD) < -100, "whoever reads above stays there"
            assert page.locator(".bubble.user").count() == 1
    assert not errors


@browser.needed
def test_a_run_to_talk_to_is_chosen_in_the_page_of_a_phone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_dir = write_run(tmp_path / name, 60)
        checkpoints.commit(run_dir, checkpoints.State(step=60), lambda folder: None)
        lines = [
            {
                "prompt": "user\nWhat?\nassistant\n",
                "reference": "so",
                "before": "no",
                "answer": "yes",
            }
        ]
        verdict = {"turned": {"exact_match": {"gained": lines}}}
        (run_dir / metrics.VERDICT).write_text(json.dumps(verdict))
    with served(tmp_path) as address, browser.opened([]) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/chat?dir=a&beside=base", 390)
        # A question, and below it both answers, each under the name of its model.
        assert page.locator(".bubble").all_inner_texts()[1:] == ["What?", "no", "yes"]
        boxes = [bubble.bounding_box() for bubble in page.locator(".answer").all()]
        assert all(box and box["width"] > 300 for box in boxes)
        page.get_by_label("Run", exact=True).select_option("b")
        page.wait_for_url("**/chat?dir=b&beside=base")
        browser.show(page, f"{address}/chat?dir=a", 1280)
        assert not page.get_by_label("Run", exact=True).is_visible()


@browser.needed
def test_a_tab_that_an_address_names_is_in_sight_on_a_phone(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 60)
    with served(tmp_path) as address, browser.opened([]) as page:
        browser.enter(page, address, TOKEN)
        for name in ("Settings", "Curves"):
            page.goto("about:blank")
            browser.show(page, f"{address}/run?dir=a#{name.lower()}", 390)
            tab = page.get_by_role("tab", name=name)
            assert tab.get_attribute("aria-selected") == "true"
            box = tab.bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= 390 - box["width"], name
        # Its two buttons stay together.
        page.get_by_role("tab", name="Settings").click()
        assert is_in_one_row(page, "#settings > .verb :is(button, .button)")


@browser.needed
def test_what_is_damaged_is_below_the_tabs_of_a_phone_and_on_the_first_alone(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    with (run_dir / metrics.METRICS).open("a") as lines:
        lines.write("half a li\n")
    with served(tmp_path) as address, browser.opened([]) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/run?dir=a", 390)
        damage, tabs = (page.locator(part) for part in ("[aria-label=Damage]", "nav.tabs"))
        box, above = damage.bounding_box(), tabs.bounding_box()
        assert box is not None
        assert above is not None
        assert box["y"] - above["y"] - above["height"] > 8, "they do not touch"
        page.get_by_role("tab", name="Settings").click()
        assert not damage.is_visible()


@browser.needed
def test_what_is_wrong_in_a_form_stays_in_sight_on_a_phone(tmp_path: Path) -> None:
    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/new", 390)
        page.locator("#held-out", has_text="5 % of the rows").wait_for()
        page.fill("[name='name']", "a b")
        page.fill("[name='data.eval']", "1.7")
        chips = page.locator("#problems a")
        chips.nth(1).wait_for()
        for end in (0, 9999):
            page.evaluate("(end) => scrollTo(0, end)", end)
            boxes = [chip.bounding_box() for chip in chips.all()]
            assert all(box and 0 < box["y"] < 900 - box["height"] for box in boxes), (end, boxes)
        sentence = page.locator("[id='problem-data.eval']")
        assert sentence.inner_text().startswith("Expected a share of the rows below 1")
        page.get_by_role("button", name="Hold out 5 % of the rows").click()
        chips.nth(1).wait_for(state="detached")
        assert page.input_value("[name='data.eval']") == "0.05"
    assert not errors


@browser.needed
def test_no_table_of_a_classifier_is_cut_on_a_phone(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "verbs", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    (run_dir / "resolved.json").write_text(
        json.dumps({**settings, "task": "sequence_classification"})
    )
    names = ["get", "logs", "port-forward", "rollout", "scale", "set"]
    counts = [[11 if one == other else 0 for other in names] for one in names]
    evaluation = {"confusion": counts, "names": names, "checkpoint": "best"}
    (run_dir / metrics.EVALUATION).write_text(json.dumps(evaluation))
    scores = ("accuracy", "f1_macro", "precision", "recall", "matthews_correlation")
    measured = {f"eval_{name}": 0.9738123 for name in scores}
    with (run_dir / metrics.METRICS).open("a") as lines:
        for step in (0, 60):
            lines.write(json.dumps({"step": step, "epoch": 1.0, "eval_loss": 0.1, **measured}))
            lines.write("\n")
    with served(tmp_path) as address, browser.opened([]) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/run?dir=verbs#evaluation", 390)
        for box in page.locator("#evaluation .scroll").all():
            width, shown = box.evaluate("(box) => [box.scrollWidth, box.clientWidth]")
            assert width <= shown, box.get_attribute("aria-label")
        heights = [row.evaluate("(row) => row.offsetHeight") for row in page.locator(".matrix tbody tr").all()]  # fmt: skip
        assert len(heights) == len(names)
        assert max(heights) < 40, "a row of the matrix is one line"
        # The names of columns stand beside their numbers.
        cell = page.locator('.stacked [data-label="matthews correlation"]').first
        named = cell.evaluate("(cell) => getComputedStyle(cell, '::before').content")
        assert "matthews" in named


@browser.needed
def test_a_chosen_trial_stays_in_its_table(tmp_path: Path) -> None:
    write_sweep(tmp_path / "grid", MIXED)
    with served(tmp_path) as address, browser.opened([]) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/sweep?dir=grid")
        row = page.locator("#trial-1")
        before = row.bounding_box()
        row.hover()
        assert "chosen" in str(row.get_attribute("class"))
        after = row.bounding_box()
        assert before is not None
        assert after is not None
        assert (after["width"], after["height"]) == (before["width"], before["height"])
