"""A run directory of schema version 1, as it was written, read in today's words by everything that shows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kubetune.cluster.runs import exit_status_in
from kubetune.config.load import read_config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.planning import actuals
from kubetune.reporting import page, reading
from kubetune.rundir import metrics, older_files
from kubetune.supervisor.local import check_run_dir

OLD = Path(__file__).parents[1] / "golden" / "run_of_version_1"


def test_an_old_report_reads_like_a_new_one() -> None:
    old, new = json.loads((OLD / metrics.REPORT).read_text()), metrics.read_report(OLD)
    memory, hours, price = (new["actuals"][part] for part in ("memory", "hours", "price"))
    was = old["hindsight"]
    assert memory == {
        "forecast_bytes": was["memory"]["foreseen_bytes"],
        "measured_bytes": was["memory"]["measured_bytes"],
        "relative_error": was["memory"]["off"],
    }
    assert [hours[key] for key in ("forecast", "step_hours", "total_hours", "relative_error")] == [
        was["hours"][key] for key in ("foreseen", "in_steps", "whole", "off")
    ]
    assert (hours["spans"], price["per_device_hour"]) == (was["hours"]["spans"], 2.0)
    assert new["preflight"]["forecast_bytes"] == old["probe"]["foreseen_bytes"]
    assert new["preflight"]["event"] == "preflight"
    kept = old.keys() - {"probe", "hindsight"}
    assert {key: new[key] for key in kept} == {key: old[key] for key in kept}
    assert new.keys() - kept == {"schema_version", "preflight", "actuals"}
    assert len(list(actuals.tell(new["actuals"]))) == 3
    assert metrics.is_reported(OLD, 4)


def test_an_old_preflight_is_found_among_the_events_of_a_run_that_goes_on() -> None:
    assert [event["event"] for event in metrics.read_events(OLD)] == ["start", "preflight"]
    assert metrics.read_events(OLD)[1]["forecast_bytes"] > 0


def test_the_config_of_an_old_run_is_read_in_new_words_and_moves_no_number(tmp_path: Path) -> None:
    """It names keys as they were then, and lacks one that came later: neither keeps the run from going on."""
    run_dir = tmp_path / "run"
    shutil.copytree(OLD, run_dir)
    values = json.loads((run_dir / "resolved.json").read_text())
    del values["training"]["loss_watchdog_patience"]
    values["training"]["lean"], values["logging"]["samples"] = False, 3
    (run_dir / "resolved.json").write_text(json.dumps(values))
    config = read_config(run_dir)
    assert (config.training.fused_forwards, config.training.preflight, config.logging.before_after) == (False, True, 3)
    check_run_dir(config, run_dir)
    changed = config.model_copy(update={"training": config.training.model_copy(update={"fused_forwards": True})})
    with pytest.raises(ConfigError, match=r"training\.fused_forwards was false, now is true"):
        check_run_dir(changed, run_dir)


def test_a_pod_of_an_earlier_version_tells_how_its_run_ended() -> None:
    ended = {"code": 0, "reason": "done", "step": 4}
    answers: list[dict[str, Any] | None] = [{"ending": ended}, {"exit_status": ended}, {}, None]
    assert [exit_status_in(told) for told in answers] == [ended, ended, None, None]


def test_the_page_of_an_old_run_shows_forecast_and_actuals(tmp_path: Path) -> None:
    page.write_report([OLD], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    shown = ("Peak memory, preflight", "Time in steps", "Time in all", "at 2 a device and hour", "+19 %", "-85 %")
    assert [word for word in shown if word not in text] == []


def test_a_report_of_a_later_version_is_refused_and_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(OLD, run_dir)
    (run_dir / metrics.REPORT).write_text(json.dumps({"schema_version": older_files.REPORT_VERSION + 1}))
    with pytest.raises(EnvironmentFault, match=r"report\.json: schema_version is 3, this version .* reads 1 to 2"):
        metrics.read_report(run_dir)
    assert any("schema_version is 3" in said for said in reading.read_run(run_dir).damage)
