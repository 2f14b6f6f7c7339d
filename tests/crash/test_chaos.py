"""A few kills at random moments; `scripts/chaos` does as many as you like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.chaos import Chaos


@pytest.mark.slow
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    kills = list(Chaos(tmp_path, seed=7).kills(6))
    assert {kill.victim for kill in kills} == {"all ranks", "one rank", "launcher"}
    assert [kill for kill in kills if not kill.identical] == []
