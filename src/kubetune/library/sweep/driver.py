"""The driver of a sweep: starts runs while there is room, observes them, and ends or continues trials.

Example: asha with the rungs 1, 3, 9 and runs of 90 steps. Of the trials that come to a rung, the
best third continues from its checkpoint; the others stop early.

    rung   at step   trials   steps trained
    1      10        9        9 x 10 = 90
    3      30        3        3 x 20 = 60
    9      90        1        1 x 60 = 60      210 steps in all, where 9 whole runs take 810

Waiting runs are started in the order of their rungs, the highest first, so that losers are known
early; a new trial begins only when no run waits.

The driver keeps nothing in memory that is not in the sweep's folder: killed at any moment, the next
one continues. A `Runner` knows where runs are, and the study which values are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kubetune import errors
from kubetune.base.humanize import duration
from kubetune.library.sweep.budget import Budget
from kubetune.library.sweep.ranges import short_text
from kubetune.library.sweep.record import (
    LEAST_FOR_IMPORTANCE,
    Outcome,
    Record,
    Search,
    Trial,
    TrialRun,
    at_rest,
    mean,
    write_record,
)
from kubetune.rundir.exit_status import ExitStatus

if TYPE_CHECKING:
    from kubetune.library.sweep.study import Study

_MOST_STARTS = 4  # of a run that makes no progress

# So many times the trials must be done before importances are computed anew.
_MORE_TRIALS = 1.1

# Trials that fail in one way before the sweep ends. Mistakes in the run file are the same in all.
_SAME_FAILURES = 3
_SAME_USER_ERRORS = 2

# Exit codes that say something about a trial's values: they are bad.
_BAD_VALUES = (errors.DIVERGED, errors.ENVIRONMENT, errors.OUT_OF_MEMORY)


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


class Driver:
    """One sweep, from its first trial to its last."""

    def __init__(
        self,
        folder: Path,
        search: Search,
        record: Record,
        study: Study,
        runner: Runner,
        *,
        total: int,  # trials at most
        budgets: Sequence[Budget] = (),
        say: Callable[[str], None] = print,
        asked_to_stop: Callable[[], str | None] = lambda: None,  # returns who asked
        on_new_best: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self.search = search
        self.record = record
        self._study = study
        self._runner = runner
        self._total = total
        self._budgets = budgets
        self._say = say
        self._asked_to_stop = asked_to_stop
        self._on_new_best = on_new_best
        self._asked: str | None = None  # what asked_to_stop returned last
        self._stopping = ""  # why no further run is started
        self._fault = ""  # of the disk, a device or the network, which all trials would meet
        self._over_budget = ""  # what the budgets do not allow any more
        self._clock = time.monotonic()

    def drive(self) -> str:
        """Run trials until all are done, or the sweep has to stop. Return why it stopped, or "".

        Raise the error that all trials share.
        """
        self._recover()
        self.record.total = self._total
        while True:
            # What has happened since the last look.
            for run in self.record.running:
                self._observe(run)
            for trial in self._open_trials():
                self._judge(trial)

            # Whether the sweep has to stop. It then still waits for runs to save and end.
            failure = self._common_failure()
            if failure:
                self._stopping = f"every trial so far failed in the same way: {failure.reason}"
            self._stopping = self._stopping or self._fault
            self._stop_if_due()

            has_started = not self._stopping and self._start_runs()
            if has_started and self._has_more_done():
                self.record.importance = self._study.weigh()
            self._write()
            if not has_started and not any(self.record.running):
                break
            self._runner.wait()

        self.record.reason = self._stopping
        if not self._stopping and (self._open_trials() or self._has_more_trials()):
            self.record.reason = self._over_budget
        self.record.importance = self._study.weigh()
        write_record(self.folder, self.record)
        self._raise_common_error()
        return self.record.reason

    def _raise_common_error(self) -> None:
        """Raise the error that ended the sweep, or the last trial's if none succeeded."""
        failure = self._common_failure()
        if failure:
            reason = f"the sweep ended because every trial so far failed: {failure.reason}"
            raise _error(failure.code, reason)
        if self._fault:
            raise errors.EnvironmentFault(
                f"{self._fault}\nThe sweep stopped, since other trials would fail in the same way. "
                "Fix this, then repeat the command to continue."
            )
        failed = [run for run in self.record.runs if run.state == "failed"]
        has_best = bool(self.record.ranked(greater=self.search.greater))
        if failed and not has_best and not self.record.reason:
            last = failed[-1]
            reason = f"no trial succeeded, so there is no best one; the last failure: {last.reason}"
            raise _error(last.code, reason)

    def _has_more_done(self) -> bool:
        """True if so many more trials are done that importances may have changed."""
        # A forest over hundreds of trials takes a moment, so not after each.
        before = 0
        if self.record.importance is not None:
            before = self.record.importance.trials
        done = len(self.record.ranked(greater=self.search.greater))
        return done >= LEAST_FOR_IMPORTANCE and done >= _MORE_TRIALS * before

    def _open_trials(self) -> list[Trial]:
        """Return the trials that have no outcome yet."""
        return [trial for trial in self.record.trials if trial.state == "open"]

    def _has_more_trials(self) -> bool:
        """True if the sweep may begin another trial."""
        return len(self.record.trials) < self._total

    def _recover(self) -> None:
        """Make record and study agree: a driver may have been killed between writing the two."""
        # The study is written first, so it may know trials and outcomes that the record lacks.
        recorded = {trial.number for trial in self.record.trials}
        self._study.require_trials(recorded)
        for number, values in self._study.open_trials().items():
            if number not in recorded:
                self.record.trials.append(Trial(number, values, self._runs_of(number)))
        for trial in self._open_trials():
            outcome = self._study.outcome(trial.number)
            if outcome:
                self._end(trial, outcome, trial.reason)

        # Starting again what may still run costs little: runners leave alone what runs or is done.
        for run in at_rest(self.record).runs:
            run.starts = 0
        self.record.trials.sort(key=lambda trial: trial.number)
        self.record.reason = ""

    def _runs_of(self, number: int) -> list[TrialRun]:
        """Return the runs of a new trial, one for each seed."""
        first = int(self.search.config["training"]["seed"])
        # How many devices a run takes is known when one was planned.
        devices = max((run.devices for run in self.record.runs), default=1)
        runs = []
        for seed in range(first, first + self.search.repeat):
            name = f"{number:03d}"
            if self.search.repeat > 1:
                name += f"-s{seed}"
            runs.append(TrialRun(name, seed, devices=devices))
        return runs

    def _observe(self, run: TrialRun) -> None:
        """Note how far a run is and, if it has ended, how."""
        seen = self._runner.observe(run)
        if (seen.step or 0) > run.step:
            run.starts = 0  # it makes progress, so it may be started again as often
        # What is unknown now stays as it was seen last.
        run.step = seen.step or run.step
        run.steps = seen.steps or run.steps
        if seen.value is not None:
            run.value = seen.value
        run.seconds = max(run.seconds, seen.seconds or 0.0)
        if seen.status is None:
            return

        run.code = seen.status.code
        run.reason = seen.status.reason
        lacks_memory = seen.status.error == errors.OutOfMemory.__name__
        if seen.status.error == "Paused":
            run.state = "paused"
        # A failed gate is about the result, and says nothing against the run.
        elif run.code in (errors.OK, errors.GATE):
            run.state = "done"
        elif run.code >= errors.PREEMPTED and (self._stopping or run.starts < _MOST_STARTS):
            run.state = "waiting"  # it continues from its newest checkpoint
        # A lack of memory comes from the trial's values, such as its batch size.
        elif run.code == errors.ENVIRONMENT and not lacks_memory:
            self._meet_fault(run)
        else:
            run.state = "failed"

    def _meet_fault(self, run: TrialRun) -> None:
        """Let a run wait that a disk, a device or the network ended, which says nothing of its values.

        It is started once more if its last start made progress. If not, the sweep stops.
        """
        run.state = "waiting"
        if run.starts:
            self._fault = self._fault or f"run {run.name}: {run.reason}"

    def _judge(self, trial: Trial) -> None:
        """End a trial or send it on to its next rung, if all its runs have come to this one."""
        states = {run.state for run in trial.runs}
        if "running" in states:
            return
        if "failed" in states:
            failed = next(run for run in trial.runs if run.state == "failed")
            self._finish(trial, "failed", failed.reason)
            return
        if "waiting" in states:
            return

        # All runs are paused at the rung, or done. A trial's value is the mean over its seeds.
        trial.value = mean([run.value for run in trial.runs])
        if trial.value is None:
            self._finish(trial, "failed", f"no evaluation gave a finite {self.search.metric}")
        elif states == {"done"}:
            self._finish(trial, "done", "")
        elif self._study.is_pruned(trial.number, self.search.rungs[trial.rung], trial.value):
            self._finish(trial, "pruned", "")
        else:
            trial.rung += 1
            self._say(f"trial {trial.number:<4} {self._result(trial)}, continues")
            # One run may be done where another pauses, if they have different numbers of steps.
            for run in trial.runs:
                if run.state == "paused":
                    run.state = "waiting"

    def _finish(self, trial: Trial, outcome: Outcome, reason: str) -> None:
        """End a trial in study and record, and print how it ended."""
        code = None
        for run in trial.runs:
            if run.state == "failed":
                code = run.code
                break

        # Samplers keep away from the values of pruned trials, and learn nothing from failed ones.
        # An ENVIRONMENT here is a lack of memory: _observe lets all others wait.
        outcome_for_sampler: Outcome = "pruned" if code in _BAD_VALUES else outcome
        value = trial.value if outcome == "done" else None
        self._study.tell(trial.number, outcome_for_sampler, value, reason)
        self._end(trial, outcome, reason)

        if outcome == "failed":
            result = f"failed (exit code {code}): {reason}"
        elif outcome == "done":
            result = f"{self._result(trial)}, done"
        else:
            result = f"{self._result(trial)}, stopped early"
        self._say(f"trial {trial.number:<4} {result}")

    def _end(self, trial: Trial, outcome: Outcome, reason: str) -> None:
        """Note the outcome of a trial. If it is the best one now, its run file is written."""
        trial.state = outcome
        trial.reason = reason
        trial.value = mean([run.value for run in trial.runs])
        if self.record.ranked(greater=self.search.greater)[:1] == [trial]:
            self._on_new_best()

    def _result(self, trial: Trial) -> str:
        """Return the value of a trial in words: `eval_loss 1.234 ± 0.02 at step 90`."""
        text = f"{self.search.metric} {trial.value:.5g}"
        if trial.spread is not None:
            text += f" ± {trial.spread:.3g}"
        step = max(run.step for run in trial.runs)
        return f"{text} at step {step:,}"

    def _common_failure(self) -> ExitStatus | None:
        """Return how the first trials failed, if all so far failed in the same way, else None."""
        failed = []
        for trial in self.record.trials:
            if trial.state == "failed":
                failed.append(trial)
            elif trial.state != "open" or trial.rung > 0:
                return None  # this one has come to a rung

        # The name of a run in the reason, such as that of its folder, makes no difference.
        failures: dict[tuple[int | None, str], TrialRun] = {}
        for trial in failed:
            for run in trial.runs:
                if run.state == "failed":
                    reason = run.reason.replace(run.name, "…")
                    failures.setdefault((run.code, reason), run)
        if len(failures) != 1:
            return None

        (first,) = failures.values()
        code = first.code or errors.BUG
        enough = _SAME_USER_ERRORS if code == errors.USER else _SAME_FAILURES
        if len(failed) < min(enough, self._total):
            return None
        return ExitStatus(code, first.reason)

    def _stop_if_due(self) -> None:
        """Stop all runs if somebody asked for that, or a budget is spent."""
        asked = self._asked_to_stop()
        if self._stopping:
            # Asked again: a second Ctrl-C, or runs did not end within the grace time.
            if self._asked and asked != self._asked:
                self._runner.kill()
        elif asked:
            self._stopping = asked
        else:
            for budget in self._budgets:
                spent = budget.spent(self.record)
                if spent >= budget.amount:
                    # The runs save a checkpoint, so that a larger budget goes on with them.
                    self._stopping = f"the budget is spent: {budget.share(spent)}"
                    break
        self._asked = asked
        if self._stopping:
            for run in self.record.running:
                self._runner.stop(run)

    def _start_runs(self) -> bool:
        """Start runs while there is room and budget for them. Return True if any was started."""
        has_started = False
        self._over_budget = ""
        while len(list(self.record.running)) < self._runner.slots and not self._common_failure():
            waiting = self._runs_in("waiting")
            waiting.sort(key=lambda pair: (-pair[0].rung, pair[0].number))
            if not waiting:
                if not self._has_more_trials() or not self._fits_new():
                    break
                # The next round of the loop starts its runs.
                number, values = self._study.ask()
                self.record.trials.append(Trial(number, values, self._runs_of(number)))
                self._say(f"trial {number:<4} {short_text(values)}")
                continue

            affordable = self._first_affordable(waiting)
            if affordable is None:
                break
            trial, run = affordable
            self._start(trial, run)
            self._write()
            has_started = True
            if run.state == "waiting":
                break  # it could not start now, and others could not either
        return has_started

    def _first_affordable(
        self, pairs: Sequence[tuple[Trial, TrialRun]]
    ) -> tuple[Trial, TrialRun] | None:
        """Return the first of these runs that passes no budget, or None if all do."""
        for trial, run in pairs:
            if self._fits(trial, [run]):
                return trial, run
        return None

    def _runs_in(self, state: str) -> list[tuple[Trial, TrialRun]]:
        """Return the runs of open trials in a state, each with its trial."""
        pairs = []
        for trial in self._open_trials():
            pairs += [(trial, run) for run in trial.runs if run.state == state]
        return pairs

    def _start(self, trial: Trial, run: TrialRun) -> None:
        """Start or continue a run. If it cannot start now it waits; if it never can, its trial fails."""
        run.state = "running"
        run.starts += 1
        # Written before it starts: if this driver dies now, the next one finds the run.
        self._write()
        try:
            self._runner.start(trial, run)
        except errors.EnvironmentFault as error:
            # A full quota, or a server that is away. It may start in a moment, or when another
            # run has ended, so while others run this start is not counted.
            run.state = "waiting"
            run.code = error.exit_code
            run.reason = str(error)
            if any(self.record.running):
                run.starts -= 1
            elif run.starts >= _MOST_STARTS:
                self._meet_fault(run)
        except errors.KubetuneError as error:
            run.state = "failed"
            run.code = error.exit_code
            run.reason = str(error)
            self._judge(trial)

    def _fits(self, trial: Trial, runs: Sequence[TrialRun]) -> bool:
        """True if no budget is passed by what these runs will take, judging by earlier ones."""
        expected = []  # seconds of each run
        for run in runs:
            seconds = self._expected_seconds(trial, run)
            if seconds is None:
                return True
            expected.append(seconds)
        # Runs of one trial share the slots: 3 runs of an hour in 2 slots take an hour and a half.
        elapsed = sum(expected) / min(len(runs), self._runner.slots)

        for budget in self._budgets:
            spent = budget.spent(self.record)
            if budget.unit == "hours":
                cost = budget.cost(elapsed, devices=1)
                need = ""
            else:
                # Devices are paid for each run, and those that run now will take their share too.
                for other, run in self._runs_in("running"):
                    spent += budget.cost(self._expected_seconds(other, run) or 0.0, run.devices)
                cost = 0.0
                for run, seconds in zip(runs, expected, strict=True):
                    cost += budget.cost(seconds, run.devices)
                need = f"{cost:.3g}, "
            if spent + cost > budget.amount:
                what = "The next run"
                if len(runs) > 1:
                    what = f"The {len(runs)} runs of the next trial"
                self._over_budget = (
                    f"the budget: {budget.share(spent)} are spent. {what} would take about "
                    f"{need}{duration(elapsed)}, so no more were started"
                )
                return False
        return True

    def _fits_new(self) -> bool:
        """True if no budget is passed by a new trial: all its runs, since it needs them for a value."""
        number = len(self.record.trials)
        runs = self._runs_of(number)
        return self._fits(Trial(number, {}, runs), runs)

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
        rungs = self.search.rungs
        if rungs:
            share = rungs[min(trial.rung, len(rungs) - 1)] / rungs[-1]
        return max(0.0, steps * share - run.step) * seconds_a_step

    def _write(self) -> None:
        """Write the record, with the time since it was written last if any run goes on."""
        now = time.monotonic()
        if any(self.record.running):
            self.record.seconds += now - self._clock
        self._clock = now
        write_record(self.folder, self.record)


def _error(code: int | None, message: str) -> errors.KubetuneError:
    """Return an error that ends the sweep with the exit code of a run."""
    error = errors.KubetuneError(message)
    error.exit_code = code or errors.BUG
    return error
