"""Runs of a sweep on this machine: each a process of its own, with GPUs or cores of its own."""

from __future__ import annotations

import json
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kubetune import errors
from kubetune.base import processes
from kubetune.base.gpus import visible_gpus
from kubetune.base.locks import lock
from kubetune.config.resolved import resolved
from kubetune.config.schema.compute import ComputeConfig
from kubetune.errors import ConfigError
from kubetune.library.plans import plan_here
from kubetune.library.sweep.runner import Observation
from kubetune.library.sweep.sweep_record import TRIAL_RUNS, Trial, TrialRun
from kubetune.library.sweep.trial_configs import Recipe
from kubetune.library.training import start_child
from kubetune.plan.actuals import held_seconds
from kubetune.rundir import exit_status, metrics
from kubetune.rundir.exit_status import ExitStatus
from kubetune.rundir.status import progress

_WAIT_SECONDS = 2.0

# Environment variables that give a run its part of the machine.
Slot = Mapping[str, str]


def slots_of(
    compute: ComputeConfig, parallel: int | None, environ: Mapping[str, str]
) -> tuple[ComputeConfig, list[Slot]]:
    """Return the section with the devices of one run, and one part of the machine for each slot.

    Raise ConfigError if there are not enough devices. Example: with 4 GPUs and --parallel 2,
    the runs have 2 GPUs each, `CUDA_VISIBLE_DEVICES=0,1` and `CUDA_VISIBLE_DEVICES=2,3`.
    """
    if compute.nodes > 1:
        raise ConfigError(
            f"compute.nodes: found {compute.nodes}; expected 1 for trials on this machine, or "
            "--cluster. Nothing was written."
        )

    # 0 GPUs a node ask for the CPU, whatever there is.
    gpus = 0
    if compute.gpus_per_node != 0:
        gpus = visible_gpus(environ)
    if not gpus:
        return compute, _core_slots(parallel or 1, environ)

    # What the run file leaves open is shared out: the GPUs to `parallel` runs, or one to each run.
    gpus_each = compute.processes or compute.gpus_per_node or 0
    if not gpus_each and parallel:
        gpus_each = gpus // parallel
    gpus_each = max(1, gpus_each)

    # And with --parallel left out, as many runs as fit.
    count = parallel or max(1, gpus // gpus_each)
    if count * gpus_each > gpus:
        raise ConfigError(
            f"--parallel: found {count} trials of {gpus_each} GPUs, and {gpus} GPUs here; expected "
            f"at most {gpus // gpus_each}. Nothing was written."
        )

    # The user may have hidden some GPUs, or named them by their UUIDs.
    names = [str(index) for index in range(gpus)]
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    slots: list[Slot] = []
    for first in range(0, count * gpus_each, gpus_each):
        names_of_slot = names[first : first + gpus_each]
        slots.append({"CUDA_VISIBLE_DEVICES": ",".join(names_of_slot)})
    compute_of_run = compute.model_copy(update={"gpus_per_node": gpus_each})
    return compute_of_run, slots


def _core_slots(count: int, environ: Mapping[str, str]) -> list[Slot]:
    """Return the slots of a machine without GPUs, which share its cores."""
    if count == 1 or "OMP_NUM_THREADS" in environ:
        return [{}] * count
    # With all cores for each, the runs would get in each other's way.
    threads = max(1, processes.usable_cores() // count)
    return [{"OMP_NUM_THREADS": str(threads)}] * count


@dataclass
class _Child:
    """The process of a run."""

    process: subprocess.Popen[bytes]
    answer: IO[str]  # a pipe with how the run ended, which closes when the process ends
    slot: Slot
    is_stopping: bool = False


class LocalRunner:
    """Runs trials as processes of this machine."""

    def __init__(self, recipe: Recipe, slots: Sequence[Slot], gpus_per_node: int | None) -> None:
        self.slots = len(slots)
        self._recipe = recipe
        self._free = list(slots)
        self._gpus = gpus_per_node  # of each run
        self._children: dict[str, _Child] = {}  # by the run's name

    def _folder(self, run: TrialRun) -> Path:
        """Return the directory of a run."""
        return self._recipe.folder / TRIAL_RUNS / run.name

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Start a run, or continue it, in a process that saves and ends when this one dies."""
        config = self._recipe.config(trial, run)
        compute = config.compute.model_copy(update={"gpus_per_node": self._gpus})
        config = config.model_copy(update={"compute": compute, "kubernetes": None})

        # The plan says how many steps a run has, and that where its rung is.
        config, plan = plan_here(config)
        training = self._recipe.pausing(config.training, plan, trial)
        config = config.model_copy(update={"training": training})
        run.steps = plan.num_steps
        run.devices = plan.world_size

        run_dir = self._folder(run)
        # A run whose driver was killed saves a checkpoint first, and holds its directory until then.
        with lock(run_dir / "logs" / "node-0.lock", wait=True):
            pass

        request = {
            "config": resolved(config),
            "plan": plan.to_json(),
            "run_dir": str(run_dir),
            "source": None,
        }

        # What the run prints goes to a file of its own, since several print at once.
        logs = self._recipe.folder / "logs"
        logs.mkdir(exist_ok=True)
        slot = self._free[0]
        with (logs / f"{run.name}.log").open("a") as log:
            process, answer = start_child(request, log, subprocess.STDOUT, slot)
        self._free.remove(slot)
        self._children[run.name] = _Child(process, answer, slot)

    def observe(self, run: TrialRun) -> Observation:
        """Return the run as its process and its directory show it."""
        child = self._children[run.name]
        run_dir = self._folder(run)
        status: ExitStatus | None = None
        # The pipe can be read when the process has answered, or when it has ended without an answer.
        has_ended, _, _ = select.select([child.answer], [], [], 0)
        if has_ended:
            text = child.answer.read()
            code = child.process.wait()
            child.answer.close()
            self._free.append(child.slot)
            del self._children[run.name]
            status = _status(run_dir, text, code)

        # A run that failed before its first event has no numbers.
        if not (run_dir / metrics.EVENTS).is_file():
            return Observation(status)
        facts = progress(run_dir)
        best = facts["best"] or {}
        seconds = held_seconds(metrics.read_events(run_dir), metrics.now())
        return Observation(status, facts["step"], facts["steps"], best.get("value"), seconds)

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save and end, once."""
        child = self._children.get(run.name)
        if child is not None and not child.is_stopping:
            child.is_stopping = True
            child.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all runs at once."""
        for child in self._children.values():
            child.process.kill()

    def abandon(self) -> str:
        """Return a sentence on what happens to the runs if the driver ends without them."""
        if not self._children:
            return ""
        return "Running trials save a checkpoint and end"

    def wait(self) -> None:
        """Wait until a run ends, or for a moment."""
        answers = [child.answer for child in self._children.values()]
        select.select(answers, [], [], _WAIT_SECONDS)


def _status(run_dir: Path, text: str, code: int) -> ExitStatus:
    """Return how a run ended: by its exit.json, if that was written by this start.

    `text`: the answer of its process, which is empty if the process was killed. `code`: its exit code.
    """
    if not text:
        return ExitStatus(errors.LOST_PEER, f"its process ended with status {code} and no message")

    # A run that was refused has an error and no exit.json. Of others, the file may be an earlier start's.
    answer: dict[str, str | int] = json.loads(text)
    answer_code = int(answer["code"])
    if "error" in answer:
        return ExitStatus(answer_code, str(answer["reason"]))
    status = exit_status.read_exit_status(run_dir)
    if status is not None and status.code == answer_code:
        return status
    reason = f"ended with exit code {answer_code}, logs in {run_dir / 'logs'}"
    return ExitStatus(answer_code, reason)
