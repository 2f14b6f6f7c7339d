"""Object stores that refuse, break off, are silent or are not one: the copy's process ends in time and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.rundir.mirror import copier
from tests import s3
from tests.broken_store import WAYS, serving
from tests.ranks import started, wait_all
from tests.s3 import Store

SECONDS = 2.0
FILES = ("resolved.json", "metrics.jsonl", "logs/rank-0.log", "checkpoints/step-000003/model.safetensors")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in (*FILES, "checkpoints/step-000003/manifest.json"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    return tmp_path / "run"


def send_the_rest(run_dir: str, address: str, said: str) -> int:
    """What the copy's process does when a run has ended: its standard input is empty here."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    copier.FINISH_SECONDS = copier.MARGIN_SECONDS = SECONDS
    code = copier.main(["follow", run_dir, address])
    os._exit(code)  # not waiting for what s3fs still wants to say


QUICK = "500"


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == QUICK else pytest.mark.slow) for way in WAYS])
def test_a_store_that_fails_is_told_of_in_time(run_dir: Path, way: str) -> None:
    address, told = f"s3://{s3.BUCKET}/{way}", run_dir.with_suffix(".told")
    with serving(way=way) as server:
        environ = {**Store(port=0).environ, "AWS_ENDPOINT_URL": server.url}
        with started(send_the_rest, 1, str(run_dir), address, str(told), environ=environ) as ranks:
            assert wait_all(ranks) == [errors.ENVIRONMENT]  # within two minutes, on however crowded a machine
        assert server.asked > 0
    said = told.read_text()
    assert "Traceback" not in said
    assert sum(line.startswith("kubetune: ") and address in line for line in said.splitlines()) == 1, said
