"""A reward function whose parameters nothing can be given to is refused before a run, as its process would refuse it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kubetune.config.schema import RewardConfig
from kubetune.data.reward_forms import columns_of
from kubetune.errors import ConfigError
from kubetune.library.verdict.judges import require_rewards
from kubetune.scoring.rewards import functions

REFUSED = {
    "def f(completions, /, **columns): return [1.0]": "f takes completions by position alone",
    "def f(data_source, solution_str, ground_truth, /): return 1.0": "leave out the `/` behind ground_truth",
    "class f:\n    def __call__(self, completions, /): return [1.0]": "f takes completions by position alone",
    "def f(*completions): return [1.0]": r"f\(\) is no reward function; expected f\(prompts, completions",
    "def f(**completions): return [1.0]": r"f\(\) is no reward function; expected f\(prompts, completions",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_called_by_names_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=REFUSED[text]):
        require_rewards([RewardConfig(file=str(file), function="f")])
    with pytest.raises(ValueError, match=REFUSED[text]):
        functions.load(file, "f")


def test_arguments_by_name_alone_are_given() -> None:
    def named(*, completions: list[str], level: int, **columns: object) -> list[float]:
        return [float(level)] * len(completions)

    assert columns_of(inspect.signature(named), "named") == ("level",)
