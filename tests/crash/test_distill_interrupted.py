"""kill -9 and SIGTERM at random moments of distillation: the same end, bit for bit."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config
from tests import toy
from tests.architectures import save_model
from tests.run.test_distill import DRAWING, config_of

pytestmark = pytest.mark.slow

SAVING = ("save", "commit.weights", "commit.sealed", "commit.renamed", "link")
TRAINING = ("step", "micro-batch", "evaluation", *SAVING)


@dataclass(frozen=True)
class Way:
    """Settings of a run, and how often runs of it are interrupted."""

    settings: dict[str, Any]
    points: tuple[str, ...]
    kills: int
    stops: int
    world_size: int = 1


WAYS = {
    "given": Way({}, ("loading", *TRAINING), 10, 3),
    "kept": Way({"support": "teacher_k", "top_k": 8}, ("reference", *TRAINING), 10, 3),
    "drawn": Way({**DRAWING, "lmbda": 0.7}, ("generation", *TRAINING), 10, 4, world_size=2),
}


@pytest.fixture(scope="module", params=WAYS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Way, Path, Path]:
    """Return a way, its inputs, and a run of it that nobody disturbed."""
    way = WAYS[request.param]
    folder = tmp_path_factory.mktemp("interrupted")
    inputs = toy.make_inputs(folder / "inputs")
    save_model(inputs / "teacher", hidden_size=96, intermediate_size=128)
    whole = toy.finished(folder / "whole", config_for(way, inputs, folder / "c"), way.world_size)
    return way, inputs, whole


def config_for(way: Way, inputs: Path, cache: Path) -> Config:
    """Return the config of a run, with a cache of its own so that the teacher is asked anew."""
    training = {"max_steps": 6, "save_steps": 2, "eval_steps": 3}
    return config_of(inputs, training, distill=way.settings, data={"cache": str(cache)})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interruption_at_a_random_moment_changes_no_bit(
    case: tuple[Way, Path, Path], number: signal.Signals, tmp_path: Path
) -> None:
    way, inputs, whole = case
    draw = random.Random(number.value)
    visits = dict.fromkeys(way.points, 40)
    interrupted = 0
    attempt = 0
    while interrupted < (way.kills if number == signal.SIGKILL else way.stops):
        attempt += 1
        config = config_for(way, inputs, tmp_path / f"cache-{attempt}")
        run_dir = toy.make_run(tmp_path / f"run-{attempt}", config, way.world_size)
        point = draw.choice(way.points)
        nth = draw.randint(1, visits[point])
        moment = f"{number.name} at visit {nth} of {point}"
        environ = {
            "KUBETUNE_FAULT": f"signal {number.value}:{point}:{nth}:{draw.randrange(way.world_size)}"
        }
        codes = toy.train(run_dir, way.world_size, environ)
        if codes == [0] * way.world_size:
            # It came by less often than that.
            visits[point] = max(1, nth - 1)
        else:
            allowed = {-signal.SIGKILL, errors.LOST_PEER, 0}
            if number == signal.SIGTERM:
                allowed = {errors.PREEMPTED, 0}
            assert set(codes) <= allowed, (moment, codes, toy.log_of(run_dir))
            interrupted += 1
            codes = toy.train(run_dir, way.world_size)
            assert codes == [0] * way.world_size, (moment, toy.log_of(run_dir))
        assert toy.digests(run_dir) == toy.digests(whole), moment
