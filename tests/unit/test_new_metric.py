"""A metric of answers is one function and a line in each of three lists: here one is added to a copy of the package."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from kubetune.config.schema.evaluation import METRICS, AnswerMetric
from kubetune.scoring.metrics import MAKERS
from tests.package_copy import copy_package, put_before, run_script

FUNCTION = """
def same_length(answer: str, reference: str) -> float:
    return float(len(answer) == len(reference))


"""

SCRIPT = """
from kubetune.config.schema.evaluation import GenerateConfig
from kubetune.scoring.metrics import measures_of

wanted = GenerateConfig(metric=("same_length",), samples=4)
measure = measures_of(wanted)["same_length"]
print(measure("abc", "xyz"), measure("abc", "x"), wanted.sampled_metrics)
"""


def test_every_metric_has_a_name_traits_and_a_maker() -> None:
    assert list(METRICS) == list(get_args(AnswerMetric))
    assert ["reward", *MAKERS] == list(METRICS)


def test_a_new_metric_is_one_function_and_its_lines(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    schema = package / "config/schema/evaluation.py"
    put_before(schema, '    "token_f1",\n', '    "same_length",\n')
    put_before(schema, '    "token_f1": MetricTraits', '    "same_length": _RIGHT_OR_WRONG,\n')
    functions = package / "scoring/metrics.py"
    put_before(functions, "def numeric(", FUNCTION)
    put_before(functions, '    "token_f1": _plain', '    "same_length": _plain(same_length),\n')

    printed = run_script(tmp_path, SCRIPT)
    assert printed.strip() == "1.0 0.0 ('same_length',)"
