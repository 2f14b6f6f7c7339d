"""What a sweep asks of the place where its runs are: this machine (`local`) or a cluster (`remote`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kubetune.library.sweep.sweep_record import Trial, TrialRun
from kubetune.rundir.exit_status import ExitStatus


@dataclass(frozen=True)
class Observation:
    """A run as it is now. Numbers are None if unknown."""

    status: ExitStatus | None  # how its last start ended; None while it runs
    step: int | None = None
    steps: int | None = None
    value: float | None = None
    seconds: float | None = None  # for which it held its devices


class Runner(Protocol):
    """Starts, observes and stops runs, on this machine or on a cluster."""

    slots: int  # number of runs at once

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Start a run, or continue it, to its trial's rung. Raise a KubetuneError if it cannot.

        A driver that was killed may have started it already.
        """

    def observe(self, run: TrialRun) -> Observation:
        """Return the run as it is now."""

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save a checkpoint and end."""

    def kill(self) -> None:
        """End all runs at once; on a cluster, leave them alone."""

    def abandon(self) -> str:
        """Return a sentence on what happens to the runs if the driver ends without them."""

    def wait(self) -> None:
        """Wait until something may have changed."""
