"""Each slow case is there: a test that has another name by now would be run by default in silence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.slow_cases import SLOW_CASES

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("file", sorted({case.partition("::")[0] for case in SLOW_CASES}))
def test_slow_cases_are_of_tests_that_exist(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = set()
    for case in SLOW_CASES:
        if case.startswith(f"{file}::"):
            named.add(case.partition("::")[2].partition("[")[0])
    assert named <= known
