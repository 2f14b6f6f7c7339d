"""kill -9 at random moments of what writes a result for others: it is there as a whole, as it was, or not at all."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from kubetune.base.files import sha256_file
from kubetune.base.whole_folder import is_whole
from kubetune.cli import main
from kubetune.result.forms.wanted import PROVENANCE
from tests import toy
from tests.ranks import started, wait_all

KILLS = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(toy_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.finished(tmp_path_factory.mktemp("finished") / "run", toy.make_config(toy_inputs))


def seconds_of(argv: list[str]) -> float:
    """Return how long a verb takes that nobody disturbs."""
    began = time.monotonic()
    with started(main, 1, argv) as (process,):
        assert wait_all([process]) == [0]
    return time.monotonic() - began


def was_killed(argv: list[str], seconds: float) -> bool:
    """Start a verb and kill it after so long; False when it had ended well before."""
    with started(main, 1, argv) as (process,):
        process.join(seconds)
        process.kill()
        (code,) = wait_all([process])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("before", [False, True], ids=["nothing there", "one there"])
def test_exports(run_dir: Path, tmp_path: Path, before: bool) -> None:
    draw = random.Random(int(before))
    out = tmp_path / "exports" / "model"
    whole = tmp_path / "whole"
    seconds = seconds_of(["export", str(run_dir), "--merge", "--output", str(whole)])
    expected = sha256_file(whole / "model.safetensors")
    if before:
        assert not was_killed(
            ["export", str(run_dir), "--merge", "--dtype", "bf16", "--output", str(out)], 60
        )
    kills = 0
    for _ in range(KILLS):
        kills += was_killed(
            ["export", str(run_dir), "--merge", "--output", str(out)], draw.uniform(0, seconds)
        )
        assert is_whole(out, PROVENANCE) if before or out.exists() else not out.exists()
    assert kills > KILLS // 2
    seconds_of(["export", str(run_dir), "--merge", "--output", str(out)])
    assert is_whole(out, PROVENANCE)
    assert sha256_file(out / "model.safetensors") == expected
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_reports(run_dir: Path, tmp_path: Path) -> None:
    draw = random.Random(2)
    page = tmp_path / "page.html"
    whole = tmp_path / "whole.html"
    seconds = seconds_of(["report", str(run_dir), "-o", str(whole)])
    size = whole.stat().st_size
    kills = 0
    for number in range(KILLS):
        page.write_text(f"the page before, {number}")
        kills += was_killed(["report", str(run_dir), "-o", str(page)], draw.uniform(0, seconds))
        text = page.read_text()
        if text != f"the page before, {number}":
            assert text.rstrip().endswith("</html>")
            assert abs(len(text.encode()) - size) < 100  # the time it was made stands in it
    assert kills > KILLS // 2
