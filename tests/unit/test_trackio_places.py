"""Trackio sends to the place that the run file names and to no other, whatever variables of its own say."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kubetune.config.consent import effects_of
from kubetune.config.load import load_config
from kubetune.config.schema.tracking import TrackioConfig
from kubetune.rundir.tracking.tracker_queue import TrackedRun
from kubetune.rundir.tracking.trackio_tracker import TrackioSink

PLACES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


@pytest.mark.parametrize(
    ("section", "private"),
    [
        ({}, True), ({"server_url": "http://ours.example"}, True), ({"space_id": "we/board"}, True),
        ({"space_id": "we/board", "private": False}, False),
    ],
)  # fmt: skip
def test_only_the_run_file_names_a_place(
    section: dict[str, Any],
    private: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[dict[str, Any]] = []
    seen: list[str] = []

    def init(**settings: Any) -> SimpleNamespace:
        calls.append(settings)
        # Trackio reads them here.
        seen.extend(name for name in PLACES if name in os.environ)
        return SimpleNamespace()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    module = SimpleNamespace(_get_default_namespace=lambda: "somebody")
    monkeypatch.setitem(sys.modules, "trackio.run", module)
    for name in PLACES:
        monkeypatch.setenv(name, "https://elsewhere.example")
    run = TrackedRun("bot", tmp_path, "causal_lm", "LoRA", "any", {})
    with caplog.at_level(logging.WARNING):
        TrackioSink(TrackioConfig.model_validate(section), run).begin()
    assert seen == []
    assert all(f"{name} is not used" in caplog.text for name in PLACES)
    # Only a place on the hub needs the name of an account.
    assert module._get_default_namespace() == ("somebody" if "space_id" in section else None)
    [settings] = calls
    assert settings["space_id"] == section.get("space_id")
    assert settings["server_url"] == section.get("server_url")
    assert settings["private"] is private


def test_who_sees_a_space_is_part_of_what_is_allowed() -> None:
    run = {"model": "any/model", "data": {"train": "a.jsonl"}}
    effects = []
    for private in (True, False):
        space = {"space_id": "we/board", "private": private}
        config = load_config({**run, "tracking": {"trackio": space}})
        effects += effects_of(config, ["tracking.trackio"])
    assert [effect.what for effect in effects] == [
        "to the hub's we/board, private",
        "to the hub's we/board, public",
    ]
    assert effects[0].digest != effects[1].digest
