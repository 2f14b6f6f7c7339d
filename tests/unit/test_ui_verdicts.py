"""What the page shows of a text that a classifier or a reward model judges: bars, and where they stand."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kubetune.rundir import checkpoints
from kubetune.ui.chat.talkers import Talker
from kubetune.ui.chat.verdicts import shown_verdict, verdict_html
from tests import browser
from tests.run.test_report_long import write_run
from tests.unit.test_ui import TOKEN, served


def test_the_likeliest_class_is_the_first_bar() -> None:
    shown = shown_verdict({"predicted": "b", "probabilities": {"a": 0.2, "<b>": 0.001, "b": 0.799}})
    assert [(bar.name, bar.text, bar.is_chosen) for bar in shown.bars] == [
        ("b", "79.9 %", True),
        ("a", "20.0 %", False),
        ("<b>", "0.1 %", False),
    ]
    page = verdict_html({"predicted": "b", "probabilities": {"<b>": 0.2, "b": 0.8}})
    assert re.findall(r'class="bar part-(\d+)"', page) == ["80", "20"]
    assert page.count('class="said"') == page.count('class="i-check"') == 1
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_several_labels_are_chosen_and_many_classes_are_counted() -> None:
    several = shown_verdict(
        {"predicted": ["a", "c"], "probabilities": {"a": 0.9, "b": 0.1, "c": 0.6}}
    )
    assert [bar.name for bar in several.bars if bar.is_chosen] == ["a", "c"]
    many = shown_verdict(
        {"predicted": "c0", "probabilities": {f"c{n}": 1 / (n + 2) for n in range(30)}}
    )
    assert len(many.bars) == 11
    assert (many.bars[-1].name, many.bars[-1].text) == ("20 other classes", "≤ 8.3 %")


def test_a_model_without_classes_gives_a_number() -> None:
    assert (shown_verdict({"reward": 0.25}).number, shown_verdict({"reward": 0.25}).unit) == (
        "0.25",
        "reward",
    )
    assert shown_verdict({"predicted": 3.5}).number == "3.5"
    assert "<strong>0.25</strong> reward" in verdict_html({"reward": 0.25})


@browser.needed
def test_a_verdict_stands_below_its_text_and_the_field_above_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "verbs", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    (run_dir / "resolved.json").write_text(
        json.dumps({**settings, "task": "sequence_classification"})
    )
    checkpoints.commit(run_dir, checkpoints.State(step=60), lambda folder: None)

    async def load(self: Talker) -> dict[str, Any]:
        return {"ready": True, "chats": True, "checkpoint": "step-000060"}

    async def answer(self: Talker, question: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"verdict": {"predicted": "get", "probabilities": {"get": 0.7, "logs": 0.3}}}
        yield {"end": True, "left_out": []}

    monkeypatch.setattr(Talker, "load", load)
    monkeypatch.setattr(Talker, "answer", answer)
    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        for width in (390, 1280):
            browser.show(page, f"{address}/chat?dir=verbs", width)
            for text in ("the first", "the second"):
                page.fill("#text", text)
                page.press("#text", "Enter")
                page.locator(".judge article", has_text=text).locator("table").wait_for()
            texts = page.locator(".judge .bubble.user").all_inner_texts()
            assert texts == ["the second", "the first"]
            heights = []
            for part in ("#text", "article .bubble.user", "article table"):
                box = page.locator(f".judge {part}").first.bounding_box()
                assert box is not None
                heights.append(box["y"])
            assert heights == sorted(heights), width
            assert heights[-1] < 844, "all of it is on the first screen"
            assert page.locator("article .said").first.inner_text().split() == ["get", "70.0", "%"]
            page.get_by_role("button", name="Clear").click()
            assert page.locator(".judge article").count() == 0
    assert not errors
