"""What a sweep may still start: its budgets, and what runs will take by the speed of those before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kubetune.base.humanize import duration
from kubetune.library.sweep.budget import Budget
from kubetune.library.sweep.sweep_record import Record, Trial, TrialRun


@dataclass
class Spending:
    """The budgets of a sweep, and which of them the next runs would pass."""

    record: Record
    budgets: Sequence[Budget]
    rungs: Sequence[int]  # how far a run is when it is judged; the last is a whole run
    slots: int  # number of runs at once
    passed: str = ""  # what the budgets did not allow when they were asked last

    def spent(self) -> str:
        """Return which budget is spent, in words; empty if none is."""
        for budget in self.budgets:
            spent = budget.spent(self.record)
            if spent >= budget.amount:
                return f"the budget is spent: {budget.share(spent)}"
        return ""

    def fits(self, trial: Trial, runs: Sequence[TrialRun]) -> bool:
        """True if no budget is passed by what these runs will take, judging by earlier ones."""
        expected = []  # seconds of each run
        for run in runs:
            seconds = self._expected_seconds(trial, run)
            if seconds is None:
                return True
            expected.append(seconds)
        # Runs of one trial share the slots: 3 runs of an hour in 2 slots take an hour and a half.
        elapsed = sum(expected) / min(len(runs), self.slots)

        for budget in self.budgets:
            spent = budget.spent(self.record)
            if budget.unit == "hours":
                cost = budget.cost(elapsed, devices=1)
                need = ""
            else:
                # Devices are paid for each run, and those that run now will take their share too.
                for other in self.record.trials:
                    for run in other.runs:
                        if run.state == "running":
                            seconds = self._expected_seconds(other, run) or 0.0
                            spent += budget.cost(seconds, run.devices)
                cost = 0.0
                for run, seconds in zip(runs, expected, strict=True):
                    cost += budget.cost(seconds, run.devices)
                need = f"{cost:.3g}, "
            if spent + cost > budget.amount:
                what = "The next run"
                if len(runs) > 1:
                    what = f"The {len(runs)} runs of the next trial"
                self.passed = (
                    f"the budget: {budget.share(spent)} are spent. {what} would take about "
                    f"{need}{duration(elapsed)}, so no more were started"
                )
                return False
        return True

    def _expected_seconds(self, trial: Trial, run: TrialRun) -> float | None:
        """Return the seconds to a run's rung by the speed of all runs so far; None before any."""
        measured = [other for other in self.record.runs if other.step and other.seconds]
        if not measured:
            return None
        seconds = sum(other.seconds for other in measured)
        seconds_a_step = seconds / sum(other.step for other in measured)
        steps = run.steps or max(other.steps for other in measured)

        # The part of a run up to the trial's rung, less what the run has trained already.
        share = 1.0
        rungs = self.rungs
        if rungs:
            share = rungs[min(trial.rung, len(rungs) - 1)] / rungs[-1]
        return max(0.0, steps * share - run.step) * seconds_a_step
