"""What the tests that break runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import toy


@pytest.fixture(scope="session")
def toy_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model and its data, prepared once."""
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))
