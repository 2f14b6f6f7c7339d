"""A built-in reward is one function and a line in each of two tables: here one is added to a copy of the package."""

from __future__ import annotations

from pathlib import Path

from kubetune.config.schema.rewards import BUILT_IN
from kubetune.scoring.rewards.built_in import MAKERS
from tests.package_copy import copy_package, put_before, run_script

FUNCTION = """
def _ends_with(reward: RewardConfig) -> Reward:
    mark = str(reward.settings["pattern"])
    return partial(_of_texts, lambda text: float(text.endswith(mark)))


"""

SCRIPT = """
from types import SimpleNamespace
from kubetune.config.schema import RewardConfig
from kubetune.scoring.rewards.built_in import reward_of

reward = reward_of(RewardConfig(name="ends_with", settings={"pattern": "!"}))
print(reward(SimpleNamespace(texts=["yes!", "no"]), None))
"""


def test_every_reward_has_traits_and_a_maker() -> None:
    assert list(MAKERS) == list(BUILT_IN)


def test_a_new_reward_is_one_function_and_its_lines(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    put_before(
        package / "config/schema/rewards.py",
        '    "think_format_reward": RewardTraits(',
        '    "ends_with": RewardTraits(("pattern",), needs=("pattern",)),\n',
    )
    functions = package / "scoring/rewards/built_in.py"
    put_before(functions, "# Name of a reward → what makes it", FUNCTION)
    put_before(functions, '    "think_format_reward": _', '    "ends_with": _ends_with,\n')

    printed = run_script(tmp_path, SCRIPT)
    assert printed.strip() == "[1.0, 0.0]"
