"""Proof that a stopped and resumed run ends exactly where an uninterrupted one does, with a config on this machine.

Both are really trained, in a folder of their own, and everything they leave is compared bit by bit: what each step
worked with (training/step_digest), metrics, and the tensors of the last checkpoint. Not for judging how good a run is.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kubetune import errors
from kubetune.base import fault_injection, processes
from kubetune.base.signals import Relay
from kubetune.config.schema import Config
from kubetune.config.schema.tracking import TrackingConfig
from kubetune.models import weight_files
from kubetune.plan.plan import Plan
from kubetune.rundir import exit_status, metrics
from kubetune.supervisor.run_folder import create_run_dir
from kubetune.training import step_digest
from kubetune.training.start import cpu_dtype

# start(run directory, variables to add to the environment) trains and returns the exit code.
Start = Callable[[Path, Mapping[str, str]], int]


class Fact(NamedTuple):
    """Where a value comes from. Facts sort in the order in which they come about."""

    step: int
    attempt: int  # of this step, from 0; some steps are tried again
    stage: int  # of the step, see below
    rank: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}: {self.what}"


# Each value as text that is equal only for equal bits.
Facts = dict[Fact, str]

# Stages of a step.
_STATE, _SAMPLES, _RANDOM, _LOSSES, _METRICS, _CHECKPOINT = range(6)


@dataclass(frozen=True)
class Difference:
    """The first fact that two runs do not share."""

    step: int
    rank: int
    what: str
    uninterrupted: str  # value in the uninterrupted run
    other: str  # value in the other run


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison."""

    steps: int
    stopped_at: int  # step after which the second run was stopped
    world_size: int
    device: str
    facts: int  # number of facts compared
    difference: Difference | None
    # between two uninterrupted runs; looked for only where there is a difference, since it would be the reason
    repeat: Difference | None = None

    @property
    def is_exact(self) -> bool:
        """True if both runs are equal to the last bit."""
        return self.difference is None


def shortened(config: Config, steps: int) -> Config:
    """Return the config for `steps` steps, without what would reach outside the run directory or end it early."""
    training = config.training.model_copy(
        update={
            "max_steps": steps,
            "save_steps": steps,
            "save_total_limit": 1,
            "resume": "auto",
            "early_stopping_patience": None,
        }
    )
    evaluation = config.evaluation.model_copy(update={"benchmarks": None, "gate": {}})
    logging = config.logging.model_copy(update={"report_json": None, "before_after": 0})
    return config.model_copy(
        update={
            "training": training,
            "tracking": TrackingConfig(),
            "evaluation": evaluation,
            "logging": logging,
            "kubernetes": None,
            "push": None,
            "mirror": None,
        }
    )


def by_agent(relay: Relay) -> Start:
    """Return a Start that trains as every run is trained: by an agent, which `relay` passes signals on to.

    It raises a KubetuneError when somebody asks to stop meanwhile.
    """

    def start(run_dir: Path, environ: Mapping[str, str]) -> int:
        heading = f"the {run_dir.name} run"
        if fault_injection.FAULT in environ:
            heading += ", which is stopped here: a checkpoint, and exit code 143"
        elif (run_dir / "checkpoints").exists():
            heading += " goes on"
        print(f"\nkubetune: {heading}", flush=True)
        status = relay.run(processes.module("kubetune.agent", run_dir), {**os.environ, **environ})
        # Else it would look like the stop that is tried here, or like a run that failed.
        if relay.stopping:
            stopped = errors.KubetuneError(
                f"{relay.stopping}: there is no verdict, and nothing is left of the runs"
            )
            stopped.exit_code = errors.PREEMPTED
            raise stopped
        return status

    return start


def verify(config: Config, plan: Plan, stop_at: int, folder: Path, start: Start) -> Verdict:
    """Train twice in `folder`, the second time with a stop after `stop_at` steps, and compare.

    `config` and `plan` are for the few steps to be trained. Raise a KubetuneError with the exit code of a run that
    ended otherwise than it should.
    """
    # First run: from the beginning to the end, without a stop.
    whole = _make(folder / "uninterrupted", config, plan)
    _train(whole, start)
    expected = facts_of(whole)
    # Another machine might choose another dtype.
    dtype = cpu_dtype.as_trained(whole, config.model.dtype)
    model = config.model.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"model": model})

    # Second run: stopped in between, and started again.
    resumed = _make(folder / "resumed", config, plan)
    # The stop is the one that every run knows: SIGTERM while a step runs, a checkpoint after it, exit code 143.
    _train(resumed, start, expected=errors.PREEMPTED, fault=f"signal 15:step:{stop_at}")
    stopped = exit_status.read_exit_status(resumed)
    stopped_at = stop_at
    if stopped is not None and stopped.step is not None:
        stopped_at = stopped.step
    _train(resumed, start)
    difference = first_difference(expected, facts_of(resumed))

    # A third one, like the first: if these two differ as well, the machine is to blame, and not the stop.
    repeat = None
    if difference is not None:
        repeated = _make(folder / "repeated", config, plan)
        _train(repeated, start)
        repeat = first_difference(expected, facts_of(repeated))
    trained = Plan.read(whole / metrics.PLAN)
    return Verdict(
        steps=plan.num_steps,
        stopped_at=stopped_at,
        world_size=trained.world_size,
        device=trained.device,
        facts=len(expected),
        difference=difference,
        repeat=repeat,
    )


def _make(run_dir: Path, config: Config, plan: Plan) -> Path:
    """Create a run directory with a folder for the digests, and return it."""
    create_run_dir(config.model_copy(update={"output": str(run_dir)}), run_dir, plan)
    (run_dir / "step_digests").mkdir()
    return run_dir


def _train(
    run_dir: Path, start: Start, *, expected: int = errors.OK, fault: str | None = None
) -> None:
    """Train, and raise a KubetuneError where the exit code is not what is expected."""
    environ = {step_digest.FOLDER: str(run_dir / "step_digests")}
    if fault:
        environ[fault_injection.FAULT] = fault
    code = start(run_dir, environ)
    if code == expected:
        return
    failure = errors.KubetuneError(
        f"the {run_dir.name} run ended with exit code {code}, expected {expected}: its lines above say why. "
        "Its folder was a temporary one and is removed."
    )
    failure.exit_code = code if code > 0 else errors.BUG
    raise failure


def facts_of(run_dir: Path) -> Facts:
    """Return all that a repeat of a run must reproduce."""
    facts: Facts = {}
    for path in (run_dir / "step_digests").iterdir():
        rank = int(path.stem.removeprefix("rank-"))
        attempts: Counter[int] = Counter()
        for line in metrics.read_lines(path):
            # Digests count steps from 0, metrics and people from 1.
            step = line["step"] + 1
            facts.update(_facts_of_step(line, step, attempts[step], rank))
            attempts[step] += 1
    for line in metrics.read_metrics(run_dir):
        # The attempt that counted is the last one, but metrics do not know its number: they come after all of them.
        for name, value in line.items():
            facts[Fact(line["step"], sys.maxsize, _METRICS, 0, name)] = repr(value)
    last_step = max(fact.step for fact in facts)
    facts.update(_tensors(run_dir, last_step))
    return facts


def _facts_of_step(line: Mapping[str, Any], step: int, attempt: int, rank: int) -> Facts:
    """Return what a rank wrote of one attempt at a step."""
    facts: Facts = {}
    for name, digest in line["state"].items():
        what = f"{name} of the optimizer before the step"
        facts[Fact(step, attempt, _STATE, rank, what)] = digest
    facts[Fact(step, attempt, _SAMPLES, rank, "batch ids")] = str(line["samples"])
    for device, digest in line["random"].items():
        facts[Fact(step, attempt, _RANDOM, rank, f"random state of {device}")] = digest
    losses = str(line["losses"])
    facts[Fact(step, attempt, _LOSSES, rank, "losses of the micro-batches")] = losses
    return facts


def _tensors(run_dir: Path, step: int) -> Facts:
    """Return the digests of the tensors of the last checkpoint."""
    facts: Facts = {}
    for path in (run_dir / "checkpoints" / "last").glob("*.safetensors"):
        with weight_files.opened(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                place = Fact(step, sys.maxsize, _CHECKPOINT, 0, f"{name} in {path.name}")
                facts[place] = step_digest.digest(tensors.get_tensor(name))
    return facts


def first_difference(uninterrupted: Facts, other: Facts) -> Difference | None:
    """Return the earliest fact with another value, or that only one of them has; None if all are equal."""
    for fact in sorted(uninterrupted.keys() | other.keys()):
        value = uninterrupted.get(fact, "nothing")
        other_value = other.get(fact, "nothing")
        if value != other_value:
            return Difference(fact.step, fact.rank, fact.what, value, other_value)
    return None
