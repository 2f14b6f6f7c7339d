"""A run that an earlier version began, before its modules had their rooms, goes on to the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kubetune.config.load import read_config
from kubetune.rundir import checkpoints, metrics
from kubetune.training.start import facts
from tests import toy

TESTS = Path(__file__).parents[1]
BEGUN = TESTS / "golden" / "interrupted_run_of_version_1"
"""Four steps on the demo's model without their last checkpoint: that of step 2, and what all of them told.

`EMBEDDED` and `FOLDER` stand for places, and the tokenizer beside the checkpoint is the model's own.
"""
EMBEDDED = TESTS.parent / "kubetune" / "cli" / "local" / "embedded"


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(BEGUN, run_dir)
    for path in run_dir.glob("*.*"):
        if path.is_file():
            path.write_text(path.read_text().replace("EMBEDDED", str(EMBEDDED)).replace("FOLDER", str(tmp_path)))
    checkpoint = checkpoints.folder_of(run_dir, 2)
    shutil.copy(EMBEDDED / "model" / "tokenizer.json", checkpoint)
    for link in ("best", "last"):
        checkpoints.link(run_dir, link, 2)
    assert checkpoints.verify(checkpoint) is None, "every byte is as the earlier version sealed it"
    expected = metrics.read_metrics(run_dir)
    toy.finished(run_dir, read_config(run_dir))
    resumed = [event["step"] for event in metrics.read_events(run_dir) if event["event"] == "resume"]
    assert resumed == [2]
    assert "is not the" not in (run_dir / "logs" / "rank-0.log").read_text(), "the base is known to be the same"
    for then, now in zip(expected, metrics.read_metrics(run_dir), strict=True):
        assert now == pytest.approx(then, rel=1e-5)


def test_ranks_that_get_other_rows_than_before_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(BEGUN / metrics.EVENTS, tmp_path)
    facts.log_other_shares(tmp_path)
    (told,) = caplog.messages
    assert "may have dealt rows to ranks otherwise" in told
    metrics.record_event(tmp_path, "resume", step=2, shares_of=facts.SHARES_OF)
    facts.log_other_shares(tmp_path)
    assert caplog.messages == [told]
    facts.log_other_shares(tmp_path / "new")
    assert caplog.messages == [told]
