"""docs/models.md says of each family what the self-check of today says."""

from __future__ import annotations

import pytest

from tests.families import FAMILIES, IMAGES, SEEING, line, seeing_line, table

QUICK = ("gpt2", "lfm2", "doge")


def test_the_page_has_every_family() -> None:
    assert set(table()) == set(FAMILIES)
    assert set(table(IMAGES)) == set(SEEING)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES])
def test_the_page_says_how_a_family_runs(name: str) -> None:
    assert line(name) == table()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEING)
def test_the_page_says_how_a_family_that_sees_runs(name: str) -> None:
    assert seeing_line(name) == table(IMAGES)[name]
