"""A loss on pairs is one formula and a line in each of two tables: here one is added to a copy of the package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

from kubetune.config.schema.preference import LOSSES, Loss
from kubetune.tasks.preference_losses import FORMULAS
from tests.package_copy import copy_package, put_before, run_script

FORMULA = """
def _exponential(settings: PreferenceConfig, chosen: Tensor, rejected: Tensor) -> Tensor:
    return torch.exp(-settings.beta * (chosen - rejected))


"""

SCRIPT = """
import torch
from kubetune.config.schema import PreferenceConfig
from kubetune.tasks.preference_losses import BatchTotals, ScoredAnswers, losses

settings = PreferenceConfig(loss="exponential", beta=0.5)
answers = ScoredAnswers(torch.tensor([[-2.0, -4.0]]), torch.tensor([[-3.0, -3.0]]), torch.tensor([[5.0, 5.0]]))
print(settings.needs_reference, losses(settings, answers, BatchTotals(1.0)).item())
"""


def test_every_loss_has_traits_and_a_formula() -> None:
    assert list(LOSSES) == list(get_args(Loss))
    assert set(FORMULAS) == {name for name, traits in LOSSES.items() if not traits.judges}


def test_a_new_loss_is_one_formula_and_its_lines(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    schema = package / "config/schema/preference.py"
    put_before(schema, '"cpo", "kto"]', '"exponential", ')
    put_before(schema, '    "kto": LossTraits(', '    "exponential": LossTraits(compares=True),\n')
    formulas = package / "tasks/preference_losses.py"
    put_before(formulas, "# Loss → its formula on pairs.", FORMULA)
    put_before(formulas, '    "orpo": _orpo,\n', '    "exponential": _exponential,\n')

    printed = run_script(tmp_path, SCRIPT)
    reference, value = printed.split()
    assert reference == "True"
    # The chosen answer gained 1, the rejected one lost 1: exp(-0.5 · 2).
    assert math.isclose(float(value), math.exp(-1.0), rel_tol=1e-6)
