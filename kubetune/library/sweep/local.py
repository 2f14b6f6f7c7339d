"""Runs of a sweep on this machine: each a process of its own, on GPUs or cores that no other of them has."""

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
from kubetune.base.files import lock
from kubetune.base.gpus import visible_gpus
from kubetune.config.load import resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.plans import plan_here
from kubetune.library.sweep.driver import Seen
from kubetune.library.sweep.recipe import Recipe
from kubetune.library.sweep.record import Trial, TrialRun
from kubetune.library.training import start_child
from kubetune.plan.actuals import held_seconds
from kubetune.rundir import exit_status, metrics
from kubetune.rundir.exit_status import ExitStatus
from kubetune.rundir.status import progress
from kubetune.supervisor.local import check_run_dir

_LOOK_SECONDS = 2.0

Slot = Mapping[str, str]
"""Variables that give a run its part of the machine."""


def slots_of(
    config: Config, parallel: int | None, environ: Mapping[str, str]
) -> tuple[Config, list[Slot]]:
    """The config with the devices of one run, and a part of the machine for each that runs at once.

    Raises ConfigError where there are not so many.
    """
    compute = config.compute
    if compute.nodes > 1:
        raise ConfigError(
            f"compute.nodes: found {compute.nodes}; expected 1 for trials on this machine, or --cluster. Nothing was "
            "written."
        )
    there = visible_gpus(environ) if compute.gpus_per_node != 0 else 0
    if not there:
        number, cores = parallel or 1, processes.usable_cores()
        threads = {"OMP_NUM_THREADS": str(max(1, cores // number))} if number > 1 else {}
        return config, [{} if "OMP_NUM_THREADS" in environ else threads] * number
    each = (
        compute.processes or compute.gpus_per_node or max(1, there // parallel if parallel else 1)
    )
    number = parallel or max(1, there // each)
    if number * each > there:
        raise ConfigError(
            f"--parallel: found {number} trials of {each} GPUs, and {there} GPUs here; expected at most "
            f"{there // each}. Nothing was written."
        )
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(i) for i in range(there)]
        if chosen is None
        else [name.strip() for name in chosen.split(",")]
    )
    parts = [names[i * each : (i + 1) * each] for i in range(number)]
    config = config.model_copy(
        update={"compute": compute.model_copy(update={"gpus_per_node": each})}
    )
    return config, [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    told: IO[str]
    slot: Slot
    is_asked: bool = False


class Local:
    """This machine as a place of runs. `gpus_per_node`: what each gets, as `slots_of` says."""

    def __init__(self, recipe: Recipe, slots: Sequence[Slot], gpus_per_node: int | None) -> None:
        self.slots = len(slots)
        self._recipe, self._free, self._gpus = recipe, list(slots), gpus_per_node
        self._children: dict[str, _Child] = {}

    def folder(self, run: TrialRun) -> Path:
        """The run directory."""
        return self._recipe.folder / "trials" / run.name

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Begin a run, or let it go on, in a process that saves and ends when this one dies."""
        config = self._recipe.config(trial, run)
        config = config.model_copy(
            update={
                "compute": config.compute.model_copy(update={"gpus_per_node": self._gpus}),
                "kubernetes": None,
            }
        )
        config, plan = plan_here(config)
        config = self._recipe.pausing(config, plan, trial)
        run.steps, run.devices = plan.num_steps, plan.world_size
        run_dir = self.folder(run)
        check_run_dir(config, run_dir, plan)
        with lock(run_dir / "logs" / "node-0.lock", wait=True):
            pass  # one whose driver was killed saves a checkpoint first
        request = {
            "config": resolved(config),
            "plan": plan.to_json(),
            "run_dir": str(run_dir),
            "source": None,
        }
        logs = self._recipe.folder / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{run.name}.log").open("a") as log:
            child, told = start_child(request, log, subprocess.STDOUT, self._free[0])
        self._children[run.name] = _Child(child, told, self._free.pop(0))

    def look(self, run: TrialRun) -> Seen:
        """The run by its process and its directory."""
        child, run_dir = self._children[run.name], self.folder(run)
        status: ExitStatus | None = None
        if select.select([child.told], [], [], 0)[
            0
        ]:  # it ended: nothing else writes, and its end closes the pipe
            answer, code = child.told.read(), child.process.wait()
            child.told.close()
            self._free.append(child.slot)
            del self._children[run.name]
            status = _status(run_dir, json.loads(answer) if answer else None, code)
        if not (run_dir / metrics.EVENTS).is_file():
            return Seen(status)
        found = progress(run_dir)
        seconds = held_seconds(metrics.read_events(run_dir), metrics.now())
        best = found["best"] or {}
        return Seen(status, found["step"], found["steps"], best.get("value"), seconds)

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save and end, once."""
        child = self._children.get(run.name)
        if child is not None and not child.is_asked:
            child.is_asked = True
            child.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all runs at once."""
        for child in self._children.values():
            child.process.kill()

    def abandon(self) -> str:
        """Words for what becomes of the runs when the driver ends without them."""
        return "Runs that were under way save a checkpoint and end" if self._children else ""

    def wait(self) -> None:
        """Wait until a run ends, or for a moment."""
        select.select([child.told for child in self._children.values()], [], [], _LOOK_SECONDS)


def _status(run_dir: Path, answer: Mapping[str, str | int] | None, code: int) -> ExitStatus:
    """The end of a run: by its own exit.json, where that is of this start."""
    if answer is None:
        return ExitStatus(errors.LOST_PEER, f"its process ended with status {code} and no word")
    if "error" in answer:
        return ExitStatus(int(answer["code"]), str(answer["reason"]))
    found = exit_status.read_exit_status(run_dir)
    if found is None or found.code != answer["code"]:
        return ExitStatus(
            int(answer["code"]),
            f"ended with exit code {answer['code']}, logs in {run_dir / 'logs'}",
        )
    return found
