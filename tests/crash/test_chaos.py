"""A few kills at random moments; `scripts/chaos` does as many as you like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.chaos import Chaos, Kind, main


@pytest.mark.slow
def test_a_random_kill_changes_nothing(tmp_path: Path) -> None:
    """Of the cheapest kind; test_kill.py has more, at named points."""
    (kill,) = Chaos(tmp_path, seed=3).kills(1, [Kind("ddp", 1, "lora", False, "all ranks")])
    assert kill.identical


@pytest.mark.slow
def test_a_launcher_is_killed_while_it_trains(tmp_path: Path) -> None:
    """Not only while it still imports."""
    kills = list(Chaos(tmp_path, seed=5).kills(3, [Kind("ddp", 2, "lora", False, "launcher")]))
    assert [kill for kill in kills if not kill.identical] == []
    assert any(kill.safe_step for kill in kills)


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--kills", "0"])
    assert left.value.code == 2
    assert "--kills: found '0'; expected a number from 1 on" in capsys.readouterr().err


@pytest.mark.slow
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    kills = list(Chaos(tmp_path, seed=7).kills(6))
    assert len({kill.kind for kill in kills}) == 6
    assert [kill for kill in kills if not kill.identical] == []
