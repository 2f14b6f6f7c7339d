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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kubetune import errors
from kubetune.library.sweep.budget import Budget
from kubetune.library.sweep.failures import common_failure, raise_common_error
from kubetune.library.sweep.ranges import short_text
from kubetune.library.sweep.runner import Runner
from kubetune.library.sweep.spending import Spending
from kubetune.library.sweep.sweep_record import (
    LEAST_FOR_IMPORTANCE,
    Record,
    Search,
    Trial,
    TrialRun,
    at_rest,
    write_record,
)
from kubetune.library.sweep.trial_judge import MOST_STARTS, TrialJudge

if TYPE_CHECKING:
    from kubetune.library.sweep.study import Study

# So many times the trials must be done before importances are computed anew.
_MORE_TRIALS: Final = 1.1


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
        self._say = say
        self._asked_to_stop = asked_to_stop
        self._judge = TrialJudge(search, record, study, say, on_new_best)
        self._spending = Spending(record, budgets, search.rungs, runner.slots)
        self._asked: str | None = None  # what asked_to_stop returned last
        self._stopping = ""  # why no further run is started
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
                self._judge.note(run, self._runner.observe(run), stopping=bool(self._stopping))
            for trial in self._open_trials():
                self._judge.decide(trial)

            # Whether the sweep has to stop. It then still waits for runs to save and end.
            failure = common_failure(self.record.trials, self._total)
            if failure:
                self._stopping = f"every trial so far failed in the same way: {failure.reason}"
            self._stopping = self._stopping or self._judge.fault
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
            self.record.reason = self._spending.passed
        self.record.importance = self._study.weigh()
        write_record(self.folder, self.record)
        raise_common_error(self.record, self._total, self._judge.fault, greater=self.search.greater)
        return self.record.reason

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
                self.record.trials.append(
                    Trial(number, values, _runs_of(number, self.search, self.record))
                )
        for trial in self._open_trials():
            outcome = self._study.outcome(trial.number)
            if outcome:
                self._judge.end(trial, outcome, trial.reason)

        # Starting again what may still run costs little: runners leave alone what runs or is done.
        for run in at_rest(self.record).runs:
            run.starts = 0
        self.record.trials.sort(key=lambda trial: trial.number)
        self.record.reason = ""

    def _stop_if_due(self) -> None:
        """Stop all runs if somebody asked for that, or a budget is spent."""
        asked = self._asked_to_stop()
        if self._stopping:
            # Asked again: a second Ctrl-C, or runs did not end within the grace time.
            if self._asked and asked != self._asked:
                self._runner.kill()
        else:
            # The runs save a checkpoint, so that a larger budget goes on with them.
            self._stopping = asked or self._spending.spent()
        self._asked = asked
        if self._stopping:
            for run in self.record.running:
                self._runner.stop(run)

    def _start_runs(self) -> bool:
        """Start runs while there is room and budget for them. Return True if any was started."""
        has_started = False
        self._spending.passed = ""
        while self._has_room():
            waiting = self._waiting()
            if not waiting:
                if not self._has_more_trials() or not self._fits_new():
                    break
                # The next round of the loop starts its runs.
                number, values = self._study.ask()
                self.record.trials.append(
                    Trial(number, values, _runs_of(number, self.search, self.record))
                )
                self._say(f"trial {number:<4} {short_text(values)}")
                continue

            affordable = (pair for pair in waiting if self._spending.fits(pair[0], [pair[1]]))
            pair = next(affordable, None)
            if pair is None:
                break
            trial, run = pair
            self._start(trial, run)
            self._write()
            has_started = True
            if run.state == "waiting":
                break  # it could not start now, and others could not either
        return has_started

    def _has_room(self) -> bool:
        """True if another run may start, and trials do not all fail in the same way."""
        running = len(list(self.record.running))
        return running < self._runner.slots and not common_failure(self.record.trials, self._total)

    def _waiting(self) -> list[tuple[Trial, TrialRun]]:
        """Return the runs that wait, each with its trial: those of the highest rung first."""
        pairs = []
        for trial in self._open_trials():
            pairs += [(trial, run) for run in trial.runs if run.state == "waiting"]
        pairs.sort(key=lambda pair: (-pair[0].rung, pair[0].number))
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
            elif run.starts >= MOST_STARTS:
                self._judge.meet_fault(run)
        except errors.KubetuneError as error:
            run.state = "failed"
            run.code = error.exit_code
            run.reason = str(error)
            self._judge.decide(trial)

    def _fits_new(self) -> bool:
        """True if no budget is passed by a new trial: all its runs, since it needs them for a value."""
        number = len(self.record.trials)
        runs = _runs_of(number, self.search, self.record)
        return self._spending.fits(Trial(number, {}, runs), runs)

    def _write(self) -> None:
        """Write the record, with the time since it was written last if any run goes on."""
        now = time.monotonic()
        if any(self.record.running):
            self.record.seconds += now - self._clock
        self._clock = now
        write_record(self.folder, self.record)


def _runs_of(number: int, search: Search, record: Record) -> list[TrialRun]:
    """Return the runs of a new trial, one for each seed."""
    first = int(search.config["training"]["seed"])
    # How many devices a run takes is known when one was planned.
    devices = max((run.devices for run in record.runs), default=1)
    runs = []
    for seed in range(first, first + search.repeat):
        name = f"{number:03d}"
        if search.repeat > 1:
            name += f"-s{seed}"
        runs.append(TrialRun(name, seed, devices=devices))
    return runs
