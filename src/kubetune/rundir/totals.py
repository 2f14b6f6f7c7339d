"""Sums over all steps of a run, and whether its loss ran away.

The report of a run and its last lines are made from them. Not for the curves, which need each step (reporting/).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted, shell_word
from kubetune.config.metric_names import TELLING
from kubetune.rundir.metrics import METRICS, TIMINGS, is_evaluation, is_number, stream_lines

_ENDS = 10  # steps at each end of the run whose losses are compared

# A median far above another one is more than twice as high, and a tenth more, which is the noise of small losses.
_FAR = 2.0
_FAR_NOISE = 0.1
# The loss of the first step alone depends on the rows of one batch, so more is asked of it.
_FAR_FROM_ONE_STEP = 4.0
_ONE_STEP_NOISE = 1.0


@dataclass
class Totals:
    """Sums over the steps of a run, and the lines at its ends."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    waiting_seconds: float | None = None  # for drawn answers; None for a run that draws none
    first: Mapping[str, Any] = field(default_factory=dict)  # line of the first step
    last: Mapping[str, Any] = field(default_factory=dict)  # line of the last step
    evaluation: Mapping[str, Any] | None = None  # line of the last evaluation
    first_losses: list[float] = field(default_factory=list)  # at most _ENDS
    last_losses: list[float] = field(default_factory=list)  # at most _ENDS, in order
    # What tells how the run went, besides its loss: values of the first and of the last steps, by name.
    first_measures: dict[str, list[float]] = field(default_factory=dict)  # at most _ENDS each
    last_measures: dict[str, deque[float]] = field(default_factory=dict)  # at most _ENDS each
    # Steps of a run by reward from which nothing was learnt, as all answers to each prompt got the same reward.
    flat_steps: int = 0
    unjudged_steps: int = 0  # those in which no reward judged any answer
    lowest_reward: float = math.inf  # means of steps
    highest_reward: float = -math.inf

    @property
    def waiting_share(self) -> float | None:
        """Share of the seconds in which steps waited for drawn answers; None for a run that draws none."""
        if self.waiting_seconds is None or not self.seconds:
            return None
        return min(1.0, self.waiting_seconds / self.seconds)

    def add(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Add the lines of these steps, which follow those added before."""
        if not steps:
            return
        if not self.first:
            self.first = steps[0]
        self.last = steps[-1]
        self.steps += len(steps)

        # Only the losses at both ends are kept, however long the run is.
        missing = _ENDS - len(self.first_losses)
        self.first_losses += islice(_losses(steps), missing)
        newest = list(islice(_losses(reversed(steps)), _ENDS))
        newest.reverse()
        self.last_losses = [*self.last_losses, *newest][-_ENDS:]

        # The steps of a run are all of one task.
        if any(name in steps[0] for name in TELLING):
            for step in steps:
                self._add_measures(step)

        self.samples += _sum(steps, "samples")
        self.tokens += _sum(steps, "tokens")
        self.trained_tokens += _sum(steps, "trained_tokens")

    def _add_measures(self, step: Mapping[str, Any]) -> None:
        """Note what tells how a step went."""
        for name in TELLING:
            value: Any = step.get(name)
            if is_number(value):
                first = self.first_measures.setdefault(name, [])
                if len(first) < _ENDS:
                    first.append(value)
                self.last_measures.setdefault(name, deque(maxlen=_ENDS)).append(value)
        if step.get("zero_variance") == 1.0:
            self.flat_steps += 1
        if step.get("unjudged") == 1.0:
            self.unjudged_steps += 1
        reward: Any = step.get("reward")
        if is_number(reward):
            self.lowest_reward = min(self.lowest_reward, reward)
            self.highest_reward = max(self.highest_reward, reward)


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> int:
    # Nearly all lines have the key, and asking for it without a default is faster.
    try:
        return sum([step[key] for step in steps])
    except KeyError:
        return sum([step.get(key, 0) for step in steps])


def _losses(steps: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    return (line["loss"] for line in steps if is_number(line.get("loss")))


def read_totals(run_dir: Path) -> Totals:
    """Return the sums of what metrics.jsonl and timings.jsonl hold."""
    totals = Totals()
    seconds = []
    waiting = []
    for line in stream_lines(run_dir / TIMINGS):
        seconds.append(line["seconds"])
        if "answers_seconds" in line:
            waiting.append(line["answers_seconds"])
    totals.seconds = math.fsum(seconds)
    if waiting:
        totals.waiting_seconds = math.fsum(waiting)
    for line in stream_lines(run_dir / METRICS):
        if is_evaluation(line):
            totals.evaluation = line
        if "loss" in line:
            totals.add([line])
    return totals


def measured_ends(totals: Totals) -> dict[str, dict[str, float]]:
    """Return what tells how a run went at both ends, by name: `first` and `last`, means of `steps` steps.

    Ends as `runaway` has them, so that the two do not overlap: of a run of 8 steps the first 2 and the last 2.
    """
    count = max(1, min(_ENDS, totals.steps // 4))
    ends = {}
    for name, values in totals.first_measures.items():
        first = statistics.fmean(values[:count])
        last = statistics.fmean(list(totals.last_measures[name])[-count:])
        ends[name] = {"first": first, "last": last, "steps": count}
    return ends


def ends_line(ends: Mapping[str, Mapping[str, float]]) -> str:
    """Return what `measured_ends` returned in a line, "" if it is empty.

    reward 0.2 → 0.35, reward_std 0.4 → 0.3 in training (means of the first and the last 10 steps)
    """
    texts = []
    count = 1.0
    for name, end in ends.items():
        texts.append(f"{name} {end['first']:.3g} → {end['last']:.3g}")
        count = end["steps"]
    if not texts:
        return ""
    of = "first and last step"
    if count > 1:
        of = f"means of the first and the last {count:.0f} steps"
    return f"{', '.join(texts)} in training ({of})"


def nothing_learnt(totals: Totals, answers_of_prompt: int) -> dict[str, Any] | None:
    """Return the facts of a run by reward from which nothing was learnt, None for any other run.

    That is one in which no answer of any step was better than another one to the same prompt.
    """
    if not totals.steps or totals.flat_steps < totals.steps:
        return None
    facts: dict[str, Any] = {"answers": totals.samples * answers_of_prompt}
    # All answers judged, and all steps alike: then each answer got this reward.
    spread = totals.last_measures.get("reward_std", ())
    is_same = totals.lowest_reward == totals.highest_reward and not any(spread)
    facts["reward"] = totals.lowest_reward if is_same else None
    facts["unjudged"] = totals.unjudged_steps == totals.steps
    return facts


def nothing_learnt_line(facts: Mapping[str, Any], run_dir: Path | None = None) -> str:
    """Return what `nothing_learnt` returned as a sentence, with a command that can be pasted for a run at hand."""
    place = "RUN_DIR" if run_dir is None else shell_word(str(run_dir))
    if facts.get("unjudged"):
        return (
            f"nothing was learned: no reward judged any of {facts['answers']:,} answers, as all returned None or NaN. Look "
            f"at them with `kubetune rollouts {place}`, and at what the functions return"
        )
    answers = f"all {facts['answers']:,} answers"
    if facts["reward"] is None:
        same = (
            f"to each prompt, all of its answers got the same reward ({facts['answers']:,} answers)"
        )
    else:
        same = f"{answers} got reward {facts['reward']:g}"
    return (
        f"nothing was learned: {same}. Look at them with `kubetune rollouts {place}`; a reward that has more values, easier "
        "prompts, a higher grpo.temperature, or a model that was first trained on examples gives something to learn from"
    )


def runaway(totals: Totals) -> dict[str, Any] | None:
    """Return the median losses at both ends of a run whose loss ran away, None for any other run.

    Every one of the last losses must lie above every one of the first, so that single bad steps are not taken for a
    trend. A loss that ran away within the first steps is compared with that of the very first step, before which no
    weight had moved. `steps` of the result is the number of losses at each end.

    Example: losses 1.0 1.1 0.9 … 4.0 4.2 3.9 ran away (3.9 > 1.1, and 4.0 > 2 × 1.0 + 0.1).
    """
    # At most a quarter of the steps at each end, so that the two do not overlap in short runs.
    count = min(_ENDS, totals.steps // 4)
    first = totals.first_losses[:count]
    last = []
    if count:
        last = totals.last_losses[-count:]
    if not first or not last:
        return None
    # The median, since single batches are noisy.
    low = statistics.median(first)
    high = statistics.median(last)
    if min(last) > max(first) and high > _FAR * low + _FAR_NOISE:
        return {"steps": count, "first": low, "last": high}
    if min(last) > _FAR_FROM_ONE_STEP * first[0] + _ONE_STEP_NOISE:
        return {"steps": count, "first": first[0], "last": high}
    return None


def runaway_line(losses: Mapping[str, Any]) -> str:
    """Return what `runaway` returned as a sentence."""
    steps = counted(losses["steps"], "step")
    return (
        f"the loss ran away: {losses['last']:.4g} over the last {steps}, {losses['first']:.4g} at first; the result "
        "may be worse than the model it was made from. Lower training.learning_rate, or set "
        "training.loss_watchdog_threshold"
    )
