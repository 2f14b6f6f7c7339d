"""When there is a progress bar, and that it is silent otherwise; what it shows is seen on a terminal in tests/run."""

from __future__ import annotations

import pytest

from kubetune.base.terminal.progress_bar import Progress, is_wanted


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks ask for colours, and are no terminal all the same."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not is_wanted(rank=0)


def test_only_rank_0_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_wanted(rank=0)
    assert not is_wanted(rank=1)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_wanted(rank=0)


def test_a_spread_without_its_reward_is_not_shown() -> None:
    """No reward judged any answer of the step: it has a spread of 0, and no mean."""
    with Progress(300, start=0, enabled=False) as bar:
        bar.update(1, measures={"reward_std": 0.0}, loss=1.5)
        assert bar.numbers == "loss 1.5000"
        bar.update(2, measures={"reward": 0.25, "reward_std": 0.5})
        assert bar.numbers == "reward 0.25 ± 0.50"


def test_a_disabled_bar_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(300, start=120, enabled=False) as bar:
        bar.update(121, loss=1.93, learning_rate=1.9e-4, tokens_per_second=5200)
    assert capsys.readouterr().out == ""
