"""What becomes of the runs and trials of a sweep, by how far its runs are and how they ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from kubetune import errors
from kubetune.library.sweep.runner import Observation
from kubetune.library.sweep.sweep_record import Outcome, Record, Search, Trial, TrialRun, mean

if TYPE_CHECKING:
    from kubetune.library.sweep.study import Study

MOST_STARTS: Final = 4  # of a run that makes no progress

# Exit codes that say something about a trial's values: they are bad.
_BAD_VALUES: Final = (errors.DIVERGED, errors.ENVIRONMENT, errors.OUT_OF_MEMORY)


@dataclass
class TrialJudge:
    """Ends trials in study and record, or sends them on to their next rung."""

    search: Search
    record: Record
    study: Study
    say: Callable[[str], None]
    on_new_best: Callable[[], object]
    fault: str = ""  # of the disk, a device or the network, which all trials would meet

    def note(self, run: TrialRun, seen: Observation, *, stopping: bool) -> None:
        """Note how far a run is and, if it has ended, how. `stopping`: no further run is started."""
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
        elif run.code >= errors.PREEMPTED and (stopping or run.starts < MOST_STARTS):
            run.state = "waiting"  # it continues from its newest checkpoint
        # A lack of memory comes from the trial's values, such as its batch size.
        elif run.code == errors.ENVIRONMENT and not lacks_memory:
            self.meet_fault(run)
        else:
            run.state = "failed"

    def meet_fault(self, run: TrialRun) -> None:
        """Let a run wait that a disk, a device or the network ended, which says nothing of its values.

        It is started once more if its last start made progress. If not, the sweep stops.
        """
        run.state = "waiting"
        if run.starts:
            self.fault = self.fault or f"run {run.name}: {run.reason}"

    def decide(self, trial: Trial) -> None:
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
        elif self.study.is_pruned(trial.number, self.search.rungs[trial.rung], trial.value):
            self._finish(trial, "pruned", "")
        else:
            trial.rung += 1
            self.say(f"trial {trial.number:<4} {self._result(trial)}, continues")
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
        # An ENVIRONMENT here is a lack of memory: `note` lets all others wait.
        outcome_for_sampler: Outcome = "pruned" if code in _BAD_VALUES else outcome
        value = trial.value if outcome == "done" else None
        self.study.tell(trial.number, outcome_for_sampler, value, reason)
        self.end(trial, outcome, reason)

        if outcome == "failed":
            result = f"failed (exit code {code}): {reason}"
        elif outcome == "done":
            result = f"{self._result(trial)}, done"
        elif outcome == "pruned":
            result = f"{self._result(trial)}, stopped early"
        else:
            assert_never(outcome)
        self.say(f"trial {trial.number:<4} {result}")

    def end(self, trial: Trial, outcome: Outcome, reason: str) -> None:
        """Note the outcome of a trial. If it is the best one now, its run file is written."""
        trial.state = outcome
        trial.reason = reason
        trial.value = mean([run.value for run in trial.runs])
        if self.record.ranked(greater=self.search.greater)[:1] == [trial]:
            self.on_new_best()

    def _result(self, trial: Trial) -> str:
        """Return the value of a trial in words: `eval_loss 1.234 ± 0.02 at step 90`."""
        text = f"{self.search.metric} {trial.value:.5g}"
        if trial.spread is not None:
            text += f" ± {trial.spread:.3g}"
        step = max(run.step for run in trial.runs)
        return f"{text} at step {step:,}"
