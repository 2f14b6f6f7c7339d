"""What a run that is not done has before it, and what is lost if it was cut off: evaluations, checkpoints, another start."""

from __future__ import annotations

from kubetune.base.humanize import counted, duration, estimate, number
from kubetune.plan.plan import Plan
from kubetune.reporting import cards
from kubetune.reporting.reading import RunRecord
from kubetune.rundir.status import progress

# A name and what is said of it.
Fact = tuple[str, str]


def underway(run: RunRecord) -> list[Fact]:
    """Return what one asks of a run that is not done; nothing of one that is done, or has not come to a step."""
    state, _ = cards.status(run)
    step = cards.last_step(run)
    if state == "done" or run.plan is None or not 0 < step < run.plan.num_steps:
        return []
    saved = max((checkpoint.step for checkpoint in run.checkpoints), default=0)
    pace = _seconds_a_step(run)
    if state in ("running", "starting"):
        evaluated = _evaluated(run.plan, step, pace)
        return [*evaluated, _saved(run.plan, step, saved, pace), *_speed(run.plan, step, pace)]
    again = _again(run.plan, saved, pace)
    # Of one that was not heard of for a while nobody knows yet.
    return [again] if state == "waiting" else [_lost(run.plan, step, saved, pace), again]


def _seconds_a_step(run: RunRecord) -> float | None:
    """Return how long a step took lately, as the time that is left is told; None if no step was timed."""
    seen = progress(run.path, run.events)
    if not seen["seconds_left"] or not seen["step"]:
        return None
    return float(seen["seconds_left"] / (seen["steps"] - seen["step"]))


def _evaluated(plan: Plan, step: int, pace: float | None) -> list[Fact]:
    """Return when the held-out rows are measured next; nothing if there are none."""
    if not plan.eval_rows:
        return []
    at = _next(plan, plan.eval_steps, step)
    return [("evaluated", f"next {_when(plan, step, at, pace)}")]


def _saved(plan: Plan, step: int, saved: int, pace: float | None) -> Fact:
    """Return which step a crash would lead back to."""
    following = _when(plan, step, _next(plan, plan.save_steps, step), pace)
    if not saved:
        return "saved", f"nothing yet; first {following}"
    return "saved", f"step {saved:,}, {counted(step - saved, 'step')} ago; next {following}"


def _speed(plan: Plan, step: int, pace: float | None) -> list[Fact]:
    """Return how fast steps are, and when all are done; nothing if no step was timed."""
    if pace is None:
        return []
    a_second = float(f"{1 / pace:.2g}")
    if pace > 1:
        speed = f"{duration(pace)} a step"
    elif a_second == 1:
        speed = "1 step a second"
    else:
        speed = f"{number(a_second)} steps a second"
    return [("speed", f"{speed}; done in about {estimate((plan.num_steps - step) * pace)}")]


def _next(plan: Plan, interval: int, step: int) -> int:
    """Return the next step that ends an interval, or the last step of the run."""
    if not interval:
        return plan.num_steps
    return min(plan.num_steps, (step // interval + 1) * interval)


def _when(plan: Plan, step: int, at: int, pace: float | None) -> str:
    """Return where and when a step is reached: `at step 200, in about 32 s`."""
    text = f"at step {at:,}" if at < plan.num_steps else f"at the end, step {at:,}"
    return text if pace is None else f"{text}, in about {estimate((at - step) * pace)}"


def _lost(plan: Plan, step: int, saved: int, pace: float | None) -> Fact:
    """Return the steps that no checkpoint holds."""
    lost = step - saved
    if lost <= 0:
        return "lost", f"nothing; step {saved:,} is saved"
    text = f"{counted(lost, 'step')}" + (
        "" if pace is None else f", {estimate(lost * pace)} of work"
    )
    if saved:
        return "lost", f"{text}: those since the checkpoint of step {saved:,}"
    return (
        "lost",
        f"all {text}: the first checkpoint comes at step {_next(plan, plan.save_steps, 0):,}",
    )


def _again(plan: Plan, saved: int, pace: float | None) -> Fact:
    """Return what the same command does, by the name that its button has."""
    left = plan.num_steps - saved
    time = "" if pace is None else f", about {estimate(left * pace)}"
    if saved:
        return "Continue", f"goes on after step {saved:,}: {counted(left, 'step')} are left{time}"
    return "Run again", f"begins anew: {counted(left, 'step')}{time}"
