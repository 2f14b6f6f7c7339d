"""Where a line may end on a page: code at its spaces alone, and no number without its sign."""

from __future__ import annotations

import json
from pathlib import Path

from kubetune.reporting.look.line_breaks import code_lines, unbroken, whole_words
from kubetune.rundir import metrics
from tests import browser
from tests.run.test_report_long import write_run
from tests.unit.test_ui import TOKEN, served

COMMAND = "kubectl set resources deployment wallet --limits=memory=128Mi -n canary"
# For each word of an element: its text, where it is drawn on more than one line.
BROKEN = """(place) => {
  const broken = [];
  const texts = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const { index, 0: word } of texts.currentNode.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, index);
      range.setEnd(texts.currentNode, index + word.length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) broken.push(word);
    }
  }
  return broken;
}"""


def test_a_number_stays_with_its_sign_and_its_unit() -> None:
    text = "p ≤ 0.0001 by McNemar on 48 rows, 81–95 % in 3 min 2 s, at step 60"
    assert unbroken(text).split(" ") == [
        "p\u00a0≤\u00a00.0001", "by", "McNemar", "on", "48", "rows,", "81–95\u00a0%", "in", "3\u00a0min", "2\u00a0s,",
        "at", "step\u00a060",
    ]  # fmt: skip
    assert unbroken("a step = it, 3 hats") == "a step = it, 3 hats"


def test_words_of_code_are_marked_and_nothing_is_html() -> None:
    assert whole_words("a --b=<c>  d") == 'a <span class="whole">--b=&lt;c&gt;</span>  d'
    assert whole_words("no sign, no mark") == "no sign, no mark"
    assert code_lines("a: 1\n  b: x-y\n") == (
        '<span>a: 1\n</span><span>  b: <span class="whole">x-y</span>\n</span>'
    )


@browser.needed
def test_a_phone_breaks_code_at_spaces_and_indents_what_wraps(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "first", 60)
    sample = {"prompt": "Hold it.", "expected": COMMAND, "before": "Sure.", "after": COMMAND}
    (run_dir / metrics.BEFORE_AFTER).write_text(json.dumps(sample) + "\n")
    (run_dir / "logs").mkdir()
    written = [
        f"2026-11-29 21:02:50 [STEP] {COMMAND}",
        "2026-11-29 21:02:51 [EVAL] step 3",
        "a line of a library",
        "2026-11-30 00:00:00 [STEP] step 4",
    ]
    log_file = run_dir / "logs" / "rank-0.log"
    log_file.write_text("\n".join(written) + "\n")
    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/run?dir=first#answers", 390)
        answer = page.locator("#answers .answers").first
        assert COMMAND in answer.inner_text()
        assert answer.evaluate(BROKEN) == []
        browser.show(page, f"{address}/run?dir=first#log", 390)
        page.get_by_role("tab", name="Log").click()
        log = page.locator("#log-lines")
        assert log.evaluate(BROKEN) == []
        # What wraps stands right of where its line begins.
        starts = log.evaluate(
            """(log) => {
              const range = document.createRange();
              range.selectNodeContents(log.querySelector("span"));
              return [...range.getClientRects()].map((box) => [Math.round((box.top + box.bottom) / 20), box.left]);
            }"""
        )
        tops = {top: min(left for t, left in starts if t == top) for top, _ in starts}
        first, *others = [tops[top] for top in sorted(tops)]
        assert others
        assert all(left > first + 10 for left in others), (first, others)
        # A day stands where it begins, in no line again.
        days = "(log) => [...log.querySelectorAll('[data-day]')].map((line) => line.dataset.day)"
        assert log.evaluate(days) == ["2026-11-29", "2026-11-30"]
        widths = "(log) => [...log.querySelectorAll('.day')].map((day) => day.clientWidth)"
        assert log.evaluate(widths) == [1, 1, 1]
        # What is copied and what is saved are the lines as they were written.
        log.evaluate("(log) => getSelection().selectAllChildren(log)")
        assert page.evaluate("String(getSelection())").strip().split("\n") == written
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.locator("#log").get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == log_file.read_text()
        with page.expect_download() as saved:
            page.locator("#log").get_by_role("link", name="Download").click()
        assert saved.value.suggested_filename == "first-rank-0.log"
        assert saved.value.path().read_bytes() == log_file.read_bytes()
        # Lines that are looked for may be far from where their day begins.
        page.get_by_label("Lines with").fill("step 3")
        assert all(width > 40 for width in log.evaluate(widths)[1:2])
    assert not errors
