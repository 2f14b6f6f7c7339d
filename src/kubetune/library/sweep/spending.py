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
        """True if no budget is passed by what these runs will take; else `passed` says which is."""
        refusal = self._refusal(trial, runs)
        if refusal:
            self.passed = refusal
        return not refusal

    def _refusal(self, trial: Trial, runs: Sequence[TrialRun]) -> str:
        """Return which budget these runs would pass, judging by the speed of earlier ones; empty if none."""
        seconds_of_runs = []
        for run in runs:
            seconds = self._expected_seconds(trial, run)
            if seconds is None:
                return ""
            seconds_of_runs.append(seconds)
        # Runs of one trial share the slots: 3 runs of an hour in 2 slots take an hour and a half.
        elapsed = sum(seconds_of_runs) / min(len(runs), self.slots)

        what = "The next run"
        if len(runs) > 1:
            what = f"The {len(runs)} runs of the next trial"
        for budget in self.budgets:
            spent = budget.spent(self.record)
            need = ""
            if budget.unit == "hours":
                cost = budget.cost(elapsed, devices=1)
            else:
                # Devices are paid for each run, and those that run now will take their share too.
                spent += self._cost_of_running(budget)
                cost = 0.0
                for run, seconds in zip(runs, seconds_of_runs, strict=True):
                    cost += budget.cost(seconds, run.devices)
                need = f"{cost:.3g}, "
            if spent + cost > budget.amount:
                return (
                    f"the budget: {budget.share(spent)} are spent. {what} would take about "
                    f"{need}{duration(elapsed)}, so no more were started"
                )
        return ""

    def _cost_of_running(self, budget: Budget) -> float:
        """Return what the runs of now will still take of a budget of devices."""
        cost = 0.0
        for trial in self.record.trials:
            for run in trial.runs:
                if run.state == "running":
                    seconds = self._expected_seconds(trial, run) or 0.0
                    cost += budget.cost(seconds, run.devices)
        return cost

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
