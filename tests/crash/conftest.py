"""What the tests that break runs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kubetune.config.schema import Config
from tests import toy


@pytest.fixture(scope="session")
def toy_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a toy model and its data, prepared once."""
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def uninterrupted(
    toy_inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Config, int], dict[str, str]]:
    """Return what a run that nobody disturbs leaves, made once for each config."""
    made: dict[tuple[str, int], dict[str, str]] = {}

    def digests(config: Config, world_size: int) -> dict[str, str]:
        key = (config.model_dump_json(), world_size)
        if key not in made:
            made[key] = toy.digests(
                toy.finished(tmp_path_factory.mktemp("whole") / "run", config, world_size)
            )
        return made[key]

    return digests
