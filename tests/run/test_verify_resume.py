"""verify-resume finds exactness where it is, and names the first difference where it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.cli.local.verify_resume import describe
from kubetune.config.resolved import as_yaml
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.plugins.diagnostics import resume_proof
from kubetune.rundir import metrics
from kubetune.training import loop, worker
from kubetune.training.start import feeding
from tests import toy
from tests.ranks import started, wait_all, wait_until

STEPS, STOP_AT = 5, 2


@pytest.fixture
def config(inputs: Path) -> Config:
    """Return a config with dropout, so that the random state matters, and with an evaluation on the way."""
    return toy.make_config(inputs, lora={"r": 4, "dropout": 0.1})


def seed_by_chance(argv: Sequence[str]) -> int:
    """Be a rank that draws other dropout masks each time."""
    loop.mixed_seed = lambda *salt: int.from_bytes(os.urandom(7), "little")
    return worker.main(argv)


def forget_seed_on_resume(argv: Sequence[str]) -> int:
    """Be a rank that draws the right masks until it goes on from a checkpoint."""
    if any((Path(argv[0]) / "checkpoints").glob("step-*")):
        loop.mixed_seed = lambda *salt: 7
    return worker.main(argv)


def skip_a_batch_on_resume(argv: Sequence[str]) -> int:
    """Be a rank whose data moves on by a step while it is stopped."""
    if any((Path(argv[0]) / "checkpoints").glob("step-*")):

        class Hasty(feeding.Feed):
            def step(self, step: int) -> object:
                return super().step(step + 1)

        feeding.Feed = Hasty
    return worker.main(argv)


def verdict_of(
    config: Config,
    folder: Path,
    worker: Callable[[Sequence[str]], int] = worker.main,
    world_size: int = 1,
) -> resume_proof.Verdict:
    """Return the verdict on real ranks that run `worker`."""

    def start(run_dir: Path, environ: Mapping[str, str]) -> int:
        with started(worker, world_size, [str(run_dir)], environ=environ) as processes:
            return max(wait_all(processes))

    short = resume_proof.shortened(config, STEPS)
    return resume_proof.verify(
        short, make_plan(short, world_size=world_size), STOP_AT, folder, start
    )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sound_resume_is_exact(config: Config, tmp_path: Path, world_size: int) -> None:
    verdict = verdict_of(config, tmp_path, world_size=world_size)
    assert verdict.is_exact
    assert verdict.difference is None
    assert (verdict.steps, verdict.stopped_at, verdict.world_size) == (STEPS, STOP_AT, world_size)
    # The comparison saw every step of every rank, the evaluations and the last checkpoint.
    facts = resume_proof.facts_of(tmp_path / "resumed")
    assert len(facts) == verdict.facts
    for what in (
        "batch ids",
        "random state of cpu",
        "losses of the micro-batches",
        "master of the optimizer before",
    ):
        seen = {(fact.step, fact.rank) for fact in facts if fact.what.startswith(what)}
        assert seen == {(step, rank) for step in range(1, STEPS + 1) for rank in range(world_size)}
    assert {fact.step for fact in facts if fact.what == "learning_rate"} == set(range(1, STEPS + 1))
    assert {fact.step for fact in facts if fact.what == "eval_loss"} == {3, STEPS}
    assert any("adapter_model.safetensors" in fact.what for fact in facts)
    assert ("exact", "the resumed run is bit by bit the uninterrupted one") in describe(verdict)


@pytest.mark.slow
def test_a_resume_is_exact_where_steps_are_counted_in_tokens(inputs: Path, tmp_path: Path) -> None:
    """Five steps of three an epoch: the second epoch's cu_seqlens are others, and found again."""
    verdict = verdict_of(
        toy.make_config(inputs, {"global_batch_size": None, "global_batch_tokens": 320}), tmp_path
    )
    assert verdict.is_exact
    whole = [line for line in metrics.read_metrics(tmp_path / "uninterrupted") if "loss" in line]
    assert len({line["samples"] for line in whole}) > 1
    assert sum(line["samples"] for line in whole[:3]) == toy.ROWS
    assert max(line["tokens"] for line in whole) - min(line["tokens"] for line in whole) < 60


@pytest.mark.slow
def test_chance_is_found_and_not_blamed_on_the_resume(config: Config, tmp_path: Path) -> None:
    verdict = verdict_of(config, tmp_path, seed_by_chance)
    assert not verdict.is_exact
    for difference in (verdict.difference, verdict.repeat):
        assert difference is not None
        assert (difference.step, difference.what) == (1, "random state of cpu")
    text = dict(describe(verdict))
    assert "step 1, rank 0, random state of cpu" in text["not exact"]
    assert "does not repeat" in text["because"]


@pytest.mark.parametrize(
    ("worker", "what"),
    [
        pytest.param(forget_seed_on_resume, "random state of cpu", marks=pytest.mark.slow),
        (skip_a_batch_on_resume, "batch ids"),
    ],
)
def test_a_bad_resume_is_named(
    config: Config, tmp_path: Path, worker: Callable[..., int], what: str
) -> None:
    verdict = verdict_of(config, tmp_path, worker)
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.difference.what) == (STOP_AT + 1, what)
    assert verdict.repeat is None
    assert "of the resume" in dict(describe(verdict))["because"]


def test_a_run_that_fails_is_no_verdict(inputs: Path, tmp_path: Path) -> None:
    config = toy.make_config(inputs, lora={"r": 4, "target_modules": ["absent"]})
    with pytest.raises(
        errors.KubetuneError, match="the uninterrupted run ended with exit code 2"
    ) as caught:
        verdict_of(config, tmp_path)
    assert caught.value.exit_code == errors.USER


def test_nothing_leaves_this_machine(inputs: Path) -> None:
    outlets = {
        "push": "org/model",
        "mirror": "s3://bucket/run",
        "tracking": {"mlflow": {}},
        "logging": {"before_after": 4},
    }
    short = resume_proof.shortened(toy.make_config(inputs, **outlets), STEPS)
    assert (short.push, short.mirror, short.tracking.mlflow, short.logging.before_after) == (
        None,
        None,
        None,
        0,
    )


def run_verb(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kubetune", "verify-resume", *args],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_verb_by_the_agent(config: Config, tmp_path: Path, processes: int) -> None:
    run_file = tmp_path / "run.yaml"
    output = tmp_path / "output"
    run_file.write_text(as_yaml(config))
    shape = (f"output={output}", f"compute.processes={processes}", "compute.gpus_per_node=0")
    ended = run_verb(str(run_file), *shape, "--steps", "3", "--stop-at", "2", "--json")
    assert ended.returncode == errors.OK, ended.stderr
    verdict = json.loads(ended.stdout)
    assert verdict["exact"]
    assert (verdict["steps"], verdict["stopped_at"], verdict["world_size"]) == (3, 2, processes)
    assert "resumed from step-000002" in ended.stderr
    assert not output.exists()


@pytest.mark.slow
def test_a_run_that_fails_is_told_once(config: Config, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(as_yaml(config))
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    ended = run_verb(
        str(run_file), f"data.train={tmp_path / 'bad.jsonl'}", f"data.cache={tmp_path / 'cache'}"
    )
    assert ended.returncode == errors.USER
    assert (ended.stdout + ended.stderr).count("bad.jsonl:1: ") == 1
    assert ended.stderr.endswith(
        "its lines above say why. Its folder was a temporary one and is removed.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("run", ["uninterrupted", "resumed"])
def test_ctrl_c_is_no_verdict_and_leaves_nothing(config: Config, tmp_path: Path, run: str) -> None:
    """Also while the run that is to be stopped is stopped, whose exit code is the same."""
    run_file = tmp_path / "run.yaml"
    temporary = tmp_path / "tmp"
    run_file.write_text(as_yaml(config))
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "kubetune",
        "verify-resume",
        str(run_file),
        "--steps",
        "40",
        "compute.processes=1",
    ]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: any(temporary.glob(f"*/{run}/metrics.jsonl")))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == errors.PREEMPTED
    assert stderr.endswith(
        "asked to stop by SIGINT: there is no verdict, and nothing is left of the runs\n"
    )
    assert list(temporary.iterdir()) == []


def test_wrong_arguments_are_refused(config: Config, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(as_yaml(config))
    ended = run_verb(str(run_file), "--steps", "1")
    assert (ended.returncode, ended.stdout) == (errors.USER, "")
    assert "found --steps 1; expected at least 2" in ended.stderr
    ended = run_verb(str(run_file), "--steps", "3", "--stop-at", "3")
    assert (ended.returncode, ended.stdout) == (errors.USER, "")
    assert "--steps 3 and --stop-at 3; expected 1 ≤ K < N" in ended.stderr
    ended = run_verb(str(run_file), "compute.nodes=2")
    assert ended.returncode == errors.USER
    assert "compute.nodes: found 2; expected 1" in ended.stderr
