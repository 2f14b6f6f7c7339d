"""A few kills at random moments; `scripts/chaos` does as many as you like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.chaos import Chaos, Kind


def test_a_random_kill_changes_nothing(tmp_path: Path) -> None:
    """Of the cheapest kind; test_kill.py has more, at named points."""
    (kill,) = Chaos(tmp_path, seed=3).kills(1, [Kind("ddp", 1, "lora", False, "all ranks")])
    assert kill.identical


@pytest.mark.slow
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    kills = list(Chaos(tmp_path, seed=7).kills(6))
    assert len({kill.kind for kill in kills}) == 6
    assert [kill for kill in kills if not kill.identical] == []
