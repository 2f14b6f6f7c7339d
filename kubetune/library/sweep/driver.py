"""The driver of a sweep: begins runs where there is room, looks how they do, and asks Optuna what becomes of trials.

It keeps nothing in memory that is not in the sweep's folder: killed at any moment, the next one goes on. Where runs
are is a `Place`'s business, which values are tried the study's.
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
from kubetune.library.sweep.ranges import told
from kubetune.library.sweep.record import (
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

_MOST_STARTS = 4
"""Of a run that comes no step further."""
_SAME_FAULTS = {errors.USER: 2}
_MOST_SAME_FAULTS = 3


@dataclass(frozen=True)
class Seen:
    """A run as it is now. `status`: how its last start ended; None while it goes on. Numbers are None where unknown."""

    status: ExitStatus | None
    step: int | None = None
    steps: int | None = None
    value: float | None = None
    seconds: float | None = None


class Place(Protocol):
    """A place where runs are: this machine, or a cluster."""

    slots: int
    """Runs that it can have at once."""

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Begin a run, or let it go on, to its trial's rung. Raises a KubetuneError for what cannot begin.

        It may be there or on its way already, begun by a driver that was killed.
        """

    def look(self, run: TrialRun) -> Seen:
        """The run as it is now."""

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save a checkpoint and end."""

    def kill(self) -> None:
        """End all runs at once, or let go of them where that is not for this process to do."""

    def abandon(self) -> str:
        """Words for what becomes of the runs when the driver ends without them."""

    def wait(self) -> None:
        """Wait until something may have changed."""


class Driver:
    """One sweep. `total`: trials at most; `asked_to_stop`: the reason in words, where there is one.

    `crown` is called when another trial has become the best of those that are done.
    """

    def __init__(
        self,
        folder: Path,
        search: Search,
        record: Record,
        study: Study,
        place: Place,
        *,
        total: int,
        budgets: Sequence[Budget] = (),
        say: Callable[[str], None] = print,
        asked_to_stop: Callable[[], str | None] = lambda: None,
        crown: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder, self.search, self.record = folder, search, record
        self._study, self._place, self._budgets, self._total = study, place, budgets, total
        self._say, self._asked_to_stop = say, asked_to_stop
        self._stopping, self._too_much = "", ""
        self._fault = ""
        self._asked: str | None = None
        self._crown = crown
        self._clock = time.monotonic()

    def drive(self) -> str:
        """Drive to the end, or a stop; returns why it ended: empty where all trials have. Raises an error all share."""
        self._take_up()
        while True:
            for run in self.record.running:
                self._look(run)
            for trial in self._open():
                self._judge(trial)
            if fault := self._shared_fault():
                self._stopping = f"trials fail with the same error: {fault.reason}"
            self._stopping = self._stopping or self._fault
            self._stop_where_due()
            began = self._begin() if not self._stopping else 0
            self._note()
            if not began and not any(self.record.running):
                break
            self._place.wait()
        self.record.reason = self._stopping or (
            self._too_much if any(self._open()) or self._is_short() else ""
        )
        self.record.importances = self._study.importances()
        write_record(self.folder, self.record)
        if fault := self._shared_fault():
            raise _as_error(
                fault.code,
                f"every trial so far ended in this way, so the sweep did too: {fault.reason}",
            )
        if self._fault:
            raise errors.EnvironmentFault(
                f"{self._fault}\nOther trials would meet the same whatever their values, so the sweep stopped; mend it"
                ", and the same command goes on"
            )
        failed = [run for run in self.record.runs if run.state == "failed"]
        if (
            failed
            and not self.record.reason
            and not self.record.ranked(greater=self.search.greater)
        ):
            last = failed[-1]
            raise _as_error(
                last.code,
                f"no trial is done, so there is no best one; the last to fail: {last.reason}",
            )
        return self.record.reason

    def _open(self) -> list[Trial]:
        return [trial for trial in self.record.trials if trial.state == "open"]

    def _is_short(self) -> bool:
        return len(self.record.trials) < self._total

    def _take_up(self) -> None:
        """Bring record and study together: a driver may have been killed between writing one and the other."""
        known = {trial.number for trial in self.record.trials}
        self._study.require_trials(known)
        for number, values in self._study.open_trials().items():
            if number not in known:
                self.record.trials.append(Trial(number, values, self._runs_of(number)))
        for trial in self._open():
            if outcome := self._study.outcome(trial.number):
                self._end(trial, outcome, trial.reason)
        # To start again what its driver left running costs little: places leave alone what goes on, or is done.
        for run in at_rest(self.record).runs:
            run.starts = 0
        self.record.trials.sort(key=lambda trial: trial.number)
        self.record.reason = ""

    def _runs_of(self, number: int) -> list[TrialRun]:
        first, devices = (
            int(self.search.config["training"]["seed"]),
            max((r.devices for r in self.record.runs), default=1),
        )
        if self.search.repeat == 1:
            return [TrialRun(f"{number:03d}", first, devices=devices)]
        seeds = range(first, first + self.search.repeat)
        return [TrialRun(f"{number:03d}-s{seed}", seed, devices=devices) for seed in seeds]

    def _look(self, run: TrialRun) -> None:
        seen = self._place.look(run)
        if (seen.step or 0) > run.step:
            run.starts = 0
        run.step, run.steps = seen.step or run.step, seen.steps or run.steps
        run.value = seen.value if seen.value is not None else run.value
        run.seconds = max(run.seconds, seen.seconds or 0.0)
        if seen.status is None:
            return
        run.code, run.reason = seen.status.code, seen.status.reason
        if seen.status.error == "Paused":
            run.state = "paused"
        elif run.code in (errors.OK, errors.GATE):
            run.state = "done"
        elif run.code >= errors.PREEMPTED and (self._stopping or run.starts < _MOST_STARTS):
            run.state = "waiting"  # it goes on from its newest checkpoint
        elif run.code == errors.ENVIRONMENT and seen.status.error != errors.OutOfMemory.__name__:
            self._meet_fault(run)
        else:
            run.state = "failed"

    def _meet_fault(self, run: TrialRun) -> None:
        """Let a run wait that a disk, a device or a network ended: that says nothing of its values.

        Once more, where it had come farther by this start; else the sweep stops.
        """
        run.state = "waiting"
        if run.starts:
            self._fault = self._fault or f"run {run.name}: {run.reason}"

    def _judge(self, trial: Trial) -> None:
        """End a trial, or send it on to its next rung, where all its runs have come to this one."""
        states = {run.state for run in trial.runs}
        if "running" in states:
            return
        if "failed" in states:
            failed = next(run for run in trial.runs if run.state == "failed")
            # What diverged or had no memory tells samplers to keep away; what else went wrong tells them nothing.
            self._finish(trial, "failed", failed.reason)
        elif "waiting" not in states:
            trial.value = mean([run.value for run in trial.runs])
            if trial.value is None:
                self._finish(trial, "failed", f"no evaluation gave a finite {self.search.metric}")
            elif states == {"done"}:
                self._finish(trial, "done", "")
            elif self._study.is_given_up(trial.number, self.search.rungs[trial.rung], trial.value):
                self._finish(trial, "pruned", "")
            else:
                trial.rung += 1
                self._say(f"trial {trial.number:<4} {self._measured(trial)}, goes on")
                for run in trial.runs:
                    run.state = "waiting" if run.state == "paused" else run.state

    def _finish(self, trial: Trial, outcome: Outcome, reason: str) -> None:
        code = next((run.code for run in trial.runs if run.state == "failed"), None)
        known: Outcome = (
            "pruned"
            if code in (errors.DIVERGED, errors.ENVIRONMENT, errors.OUT_OF_MEMORY)
            else outcome
        )  # no other of the latter
        self._study.tell(trial.number, known, trial.value if outcome == "done" else None, reason)
        self._end(trial, outcome, reason)
        if outcome == "failed":
            said = f"failed (exit code {code}): {reason}"
        else:
            said = f"{self._measured(trial)}, {'done' if outcome == 'done' else 'given up'}"
        self._say(f"trial {trial.number:<4} {said}")

    def _end(self, trial: Trial, outcome: Outcome, reason: str) -> None:
        trial.state, trial.reason = outcome, reason
        trial.value = mean([run.value for run in trial.runs])
        if self.record.ranked(greater=self.search.greater)[:1] == [trial]:
            self._crown()

    def _measured(self, trial: Trial) -> str:
        spread = f" ± {trial.spread:.3g}" if trial.spread is not None else ""
        steps = max(run.step for run in trial.runs)
        return f"{self.search.metric} {trial.value:.5g}{spread} at step {steps:,}"

    def _shared_fault(self) -> ExitStatus | None:
        """The end that the first trials all came to, where none came to another."""
        ended = [trial for trial in self.record.trials if trial.state != "open" or trial.rung]
        failures = [run for trial in ended for run in trial.runs if run.state == "failed"]
        faults = [(run.code, run.reason.replace(run.name, "…")) for run in failures]
        if not faults or any(trial.state != "failed" for trial in ended) or len(set(faults)) > 1:
            return None
        code = failures[0].code or errors.BUG
        most = min(_SAME_FAULTS.get(code, _MOST_SAME_FAULTS), self._total)
        return ExitStatus(code, failures[0].reason) if len(ended) >= most else None

    def _stop_where_due(self) -> None:
        asked = self._asked_to_stop()
        if not self._stopping:
            spent = next(
                (one for one in self._budgets if one.spent(self.record) >= one.amount), None
            )
            said = f"the budget is spent: {spent.told(spent.spent(self.record))}" if spent else ""
            self._stopping = asked or said
        elif (
            self._asked and asked != self._asked
        ):  # a second Ctrl-C, or no end within the grace time
            self._place.kill()
        self._asked = asked
        if self._stopping:
            for run in self.record.running:
                self._place.stop(run)

    def _begin(self) -> int:
        """Begin what there is room and budget for; how many runs that are."""
        began, self._too_much = 0, ""
        while sum(1 for _ in self.record.running) < self._place.slots and not self._shared_fault():
            waiting = [
                (trial, run)
                for trial in self._open()
                for run in trial.runs
                if run.state == "waiting"
            ]
            # Who has come furthest goes first, so that losers are known early.
            waiting.sort(key=lambda pair: (-pair[0].rung, pair[0].number))
            chosen = next((pair for pair in waiting if self._fits(pair[0], pair[1:])), None)
            if chosen is None:
                if waiting or not self._is_short() or not self._fits_new():
                    break
                number, values = self._study.ask()
                self.record.trials.append(Trial(number, values, self._runs_of(number)))
                self._say(f"trial {number:<4} {told(values)}")
                continue
            self._start(*chosen)
            self._note()
            began += 1
            if chosen[1].state == "waiting":
                break
        return began

    def _start(self, trial: Trial, run: TrialRun) -> None:
        run.state, run.starts = "running", run.starts + 1
        self._note()  # before it begins: a driver that dies here finds it later
        try:
            self._place.start(trial, run)
        except errors.KubetuneError as error:
            run.state, run.code, run.reason = "failed", error.exit_code, str(error)
            if isinstance(error, errors.EnvironmentFault):
                run.state = (
                    "waiting"  # a full quota, a server that is away: it may be there in a moment
                )
                if any(self.record.running):
                    run.starts -= 1  # or when another run has ended
                elif run.starts >= _MOST_STARTS:
                    self._meet_fault(run)
                return
            self._judge(trial)

    def _fits(self, trial: Trial, runs: Sequence[TrialRun]) -> bool:
        """No budget is passed by what these runs will take, as far as earlier ones tell."""
        expected = [self._expected(trial, run) for run in runs]
        seconds = sum(each or 0.0 for each in expected) / min(len(runs), self._place.slots)
        for budget in self._budgets if None not in expected else ():
            running = [(t, r) for t in self._open() for r in t.runs if r.state == "running"]
            promised, more = 0.0, budget.of(seconds, 1)
            if budget.unit != "hours":
                promised = sum(
                    budget.of(self._expected(*pair) or 0.0, pair[1].devices) for pair in running
                )
                more = sum(
                    budget.of(each or 0.0, run.devices)
                    for each, run in zip(expected, runs, strict=True)
                )
            spent = budget.spent(self.record) + promised
            if spent + more > budget.amount:
                next_ones = (
                    "the next run" if len(runs) == 1 else f"the {len(runs)} runs of the next trial"
                )
                need = "" if budget.unit == "hours" else f"{more:.3g}, "
                self._too_much = (
                    f"the budget: {budget.told(spent)} are spent, and {next_ones} would take about {need}"
                    f"{duration(seconds)}; not begun"
                )
                return False
        return True

    def _fits_new(self) -> bool:
        number = len(self.record.trials)
        runs = self._runs_of(number)  # all of them: without one the trial has no value
        return self._fits(Trial(number, {}, runs), runs)

    def _expected(self, trial: Trial, run: TrialRun) -> float | None:
        """Seconds to its rung, by the speed of all runs so far; None before there is any."""
        measured = [one for one in self.record.runs if one.step and one.seconds]
        if not measured:
            return None
        rate = sum(one.seconds for one in measured) / sum(one.step for one in measured)
        steps = run.steps or max(one.steps for one in measured)
        rungs = self.search.rungs
        share = rungs[min(trial.rung, len(rungs) - 1)] / rungs[-1] if rungs else 1.0
        return max(0.0, steps * share - run.step) * rate

    def _note(self) -> None:
        now = time.monotonic()
        if any(self.record.running):
            self.record.seconds += now - self._clock
        self._clock = now
        write_record(self.folder, self.record)


def _as_error(code: int | None, said: str) -> errors.KubetuneError:
    error = errors.KubetuneError(said)
    error.exit_code = code or errors.BUG
    return error
