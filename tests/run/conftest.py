"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toy


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a toy model and its data, once for each file of tests."""
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))
